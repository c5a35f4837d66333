// A dropout mask of one bit an element.
#pragma once

#include "aclnn.h"

namespace npu_ops::emulator {

// The first `count` bits of `mask` as booleans, true where an element is kept.
at::Tensor unpack_mask(const at::Tensor& mask, int64_t count);

}  // namespace npu_ops::emulator
