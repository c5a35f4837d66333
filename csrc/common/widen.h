// A row of any type as one of fp32.
#pragma once

#include "common/halves.h"

namespace npu_ops {

template <class T>
NPU_OPS_CLONES void widen(const T* in, float* out, int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) out[i] = load(in[i]);
}

}  // namespace npu_ops
