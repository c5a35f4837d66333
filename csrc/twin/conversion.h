// Conversions between types, vconv_<source>2<target><rounding>: CCE intrinsic guide, 6.3.10.
#pragma once

#include <limits>

#include "arithmetic.h"

namespace npu_ops::twin {

// Converts to an integer type. Values outside its range saturate; NaN becomes 0.
template <class D>
D integer(double value, Rounding rounding) {
  if (std::isnan(value)) return 0;
  value = rounded(value, rounding);
  if (value <= double(std::numeric_limits<D>::min())) return std::numeric_limits<D>::min();
  if (value >= double(std::numeric_limits<D>::max())) return std::numeric_limits<D>::max();
  return D(value);
}

template <class D, class S>
D converted(S value, Rounding rounding) {
  if constexpr (std::is_integral_v<D> && std::is_integral_v<S>) {
    return D(
        std::clamp<int64_t>(value, std::numeric_limits<D>::min(), std::numeric_limits<D>::max()));
  } else if constexpr (std::is_integral_v<D>) {
    return integer<D>(double(float(value)), rounding);
  } else if constexpr (std::is_integral_v<S>) {
    return narrowed<D>(static_cast<long double>(value), rounding);
  } else if constexpr (!std::is_same_v<D, float>) {
    return narrowed<D>(double(float(value)), rounding);
  } else if constexpr (std::is_same_v<S, float>) {
    return float(rounded(double(value), rounding));
  } else {
    return float(value);
  }
}

template <class D, class S>
void convert(const char* name, D* to, S* from, int repeats, int to_block, int from_block,
             int to_repeat, int from_repeat, Rounding rounding) {
  unary<D, S>(name, {to, to_block, to_repeat}, {from, from_block, from_repeat}, repeats,
              [rounding](S value, D) { return converted<D, S>(value, rounding); });
}

}  // namespace npu_ops::twin

#define NPU_OPS_TWIN_CONVERT(NAME, D, S, ROUNDING)                                          \
  inline void NAME(D* to, S* from, uint8_t repeats, uint16_t to_block, uint16_t from_block, \
                   uint16_t to_repeat, uint16_t from_repeat) {                              \
    npu_ops::twin::convert<D, S>(#NAME, to, from, repeats, to_block, from_block, to_repeat, \
                                 from_repeat, npu_ops::twin::Rounding::ROUNDING);           \
  }
#define NPU_OPS_TWIN_CONVERT_5(NAME, D, S)    \
  NPU_OPS_TWIN_CONVERT(NAME##r, D, S, kEven)  \
  NPU_OPS_TWIN_CONVERT(NAME##a, D, S, kAway)  \
  NPU_OPS_TWIN_CONVERT(NAME##f, D, S, kFloor) \
  NPU_OPS_TWIN_CONVERT(NAME##c, D, S, kCeil)  \
  NPU_OPS_TWIN_CONVERT(NAME##z, D, S, kZero)
#define NPU_OPS_TWIN_CONVERT_6(NAME, D, S) \
  NPU_OPS_TWIN_CONVERT(NAME, D, S, kEven)  \
  NPU_OPS_TWIN_CONVERT_5(NAME, D, S)
NPU_OPS_TWIN_CONVERT_5(vconv_f322f32, float, float)
NPU_OPS_TWIN_CONVERT_6(vconv_f322f16, half, float)
NPU_OPS_TWIN_CONVERT(vconv_f322f16o, half, float, kOdd)
NPU_OPS_TWIN_CONVERT_5(vconv_f322bf16, bfloat16_t, float)
NPU_OPS_TWIN_CONVERT_5(vconv_f322s64, int64_t, float)
NPU_OPS_TWIN_CONVERT_5(vconv_f322s32, int32_t, float)
NPU_OPS_TWIN_CONVERT_5(vconv_f322s16, int16_t, float)
NPU_OPS_TWIN_CONVERT_5(vconv_f162s32, int32_t, half)
NPU_OPS_TWIN_CONVERT_5(vconv_f162s16, int16_t, half)
NPU_OPS_TWIN_CONVERT_6(vconv_f162s8, int8_t, half)
NPU_OPS_TWIN_CONVERT_6(vconv_f162u8, uint8_t, half)
NPU_OPS_TWIN_CONVERT_5(vconv_bf162s32, int32_t, bfloat16_t)
NPU_OPS_TWIN_CONVERT_6(vconv_s162f16, half, int16_t)
NPU_OPS_TWIN_CONVERT_6(vconv_s322f32, float, int32_t)
NPU_OPS_TWIN_CONVERT_5(vconv_s642f32, float, int64_t)
NPU_OPS_TWIN_CONVERT(vconv_f162f32, float, half, kEven)
NPU_OPS_TWIN_CONVERT(vconv_bf162f32, float, bfloat16_t, kEven)
NPU_OPS_TWIN_CONVERT(vconv_u82f16, half, uint8_t, kEven)
NPU_OPS_TWIN_CONVERT(vconv_s82f16, half, int8_t, kEven)
NPU_OPS_TWIN_CONVERT(vconv_s162f32, float, int16_t, kEven)
NPU_OPS_TWIN_CONVERT(vconv_s322s64, int64_t, int32_t, kEven)
NPU_OPS_TWIN_CONVERT(vconv_s642s32, int32_t, int64_t, kEven)
NPU_OPS_TWIN_CONVERT(vconv_s322s16, int16_t, int32_t, kEven)
#undef NPU_OPS_TWIN_CONVERT_6
#undef NPU_OPS_TWIN_CONVERT_5
#undef NPU_OPS_TWIN_CONVERT

// Conversions of one scalar.
#define NPU_OPS_TWIN_CONVERT_SCALAR(NAME, D, ROUNDING)                                   \
  inline D NAME(float value) {                                                           \
    return npu_ops::twin::converted<D, float>(value, npu_ops::twin::Rounding::ROUNDING); \
  }
NPU_OPS_TWIN_CONVERT_SCALAR(conv_f322s32r, int32_t, kEven)
NPU_OPS_TWIN_CONVERT_SCALAR(conv_f322s32a, int32_t, kAway)
NPU_OPS_TWIN_CONVERT_SCALAR(conv_f322s32f, int32_t, kFloor)
NPU_OPS_TWIN_CONVERT_SCALAR(conv_f322s32c, int32_t, kCeil)
NPU_OPS_TWIN_CONVERT_SCALAR(conv_f322s32z, int32_t, kZero)
NPU_OPS_TWIN_CONVERT_SCALAR(conv_f322f16o, half, kOdd)
#undef NPU_OPS_TWIN_CONVERT_SCALAR
