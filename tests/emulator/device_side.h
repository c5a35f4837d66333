// Declares for clang what AscendC's headers expect of a device compiler: address spaces, types and
// instructions. Nothing here runs. device_side.py adds the instructions' names.
#pragma once

#include <math.h>
#include <stdlib.h>

#include <cstddef>
#include <cstdint>

#include "twin/types.h"

#define __global__ __attribute__((annotate("npu_ops_kernel")))
#define __aicore__ __attribute__((annotate("npu_ops_device")))
#define __host_aicore__ __aicore__
#define __gm__ NPU_OPS_GLOBAL
#define __ubuf__ __attribute__((address_space(6)))
#define __cbuf__ __attribute__((address_space(2)))
#define __ca__ __attribute__((address_space(3)))
#define __cb__ __attribute__((address_space(4)))
#define __cc__ __attribute__((address_space(5)))
#define __fbuf__ __attribute__((address_space(7)))
#define __biasbuf__ __attribute__((address_space(8)))
#define __ssbuf__
#define __BLOCK_LOCAL__
#define __WORKGROUP_LOCAL__
#define __disable_kernel_type_autoinfer__
#define __inline__ inline
#define __in_pipe__(...)
#define __out_pipe__(...)
#define __inout_pipe__(...)
#define __sync_alias__
#define __sync_noalias__
#define __check_sync_alias__
#define __sync_in__
#define __sync_out__
#define __cube__
#define __vector__
#define __host__
#define __simd_callee__
#define __simt_callee__
#define __callee__

using half = _Float16;
using bfloat16_t = __bf16;
// Register types of another architecture. The headers use their names, so they must exist.
struct vector_bool {};
struct vector_align {};
struct vector_address {};

extern const int64_t block_idx, block_num;
half conv_f322f16o(float);

// The staged headers report scalar accesses to the twin; here the reports are dropped.
namespace npu_ops::twin {
enum class Access { kRead, kWrite };
template <class... A>
__aicore__ inline void scalar(A...) {}
}  // namespace npu_ops::twin
namespace bisheng::cce {
void metrics_prof_start();
void metrics_prof_stop();
}  // namespace bisheng::cce
