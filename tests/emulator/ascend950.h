// Types that AscendC's headers use on Ascend950 beyond device_side.h: registers of the vector unit
// and narrow numbers (fp8, fp4). Instructions on them are not declared, so function bodies in the
// headers do not compile; device_side.py ignores these errors.
#pragma once

#define NPU_OPS_GLOBAL __attribute__((address_space(1)))
#define __simd_vf__
#define __simt_vf__
#define __simt__

#include "device_side.h"

struct float4_e2m1x2_t {};
struct float4_e1m2x2_t {};
struct float8_e5m2_t {};
struct float8_e4m3_t {};
struct float8_e8m0_t {};
struct hifloat8_t {};
struct vector_f32 {};
struct vector_f16 {};
struct vector_bf16 {};
struct vector_s64 {};
struct vector_s32 {};
struct vector_s16 {};
struct vector_s8 {};
struct vector_u64 {};
struct vector_u32 {};
struct vector_u16 {};
struct vector_u8 {};
struct float2 {};
struct half2 {};
struct bfloat16x2_t {};
