// Dropout masks of one bit per element.
#pragma once

#include "aclnn.h"

namespace npu_ops::emulator {

// Returns the first `count` bits of `mask` as booleans, true for an element that is kept.
at::Tensor unpack_mask(const at::Tensor& mask, int64_t count);

}  // namespace npu_ops::emulator
