// Types that host and device code of AscendC kernels share.
#pragma once

#include <cstdint>

// Marks a function that host and device share: without it bisheng compiles it only for the host.
#ifdef __NPU_ARCH__
#define NPU_OPS_SHARED __aicore__ inline
#else
#define NPU_OPS_SHARED inline
#endif

namespace npu_ops {

enum ElementType : int32_t { kFloat32 = 0, kFloat16 = 1, kBfloat16 = 2 };

// Bytes at the end of the unified buffer that AscendC's own functions use.
constexpr int32_t kReservedBytes = 8 * 1024;

}  // namespace npu_ops
