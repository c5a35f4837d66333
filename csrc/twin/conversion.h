// Conversions between types: guide 6.3.10, vconv_<source>2<target><rounding>.
#pragma once

#include <cmath>
#include <limits>

#include "arithmetic.h"

namespace npu_ops::twin {

enum class Rounding { kEven, kAway, kFloor, kCeil, kZero, kOdd };  // suffixes r a f c z o

inline double rounded(double value, Rounding rounding) {
  const double down = std::trunc(value);
  switch (rounding) {
    case Rounding::kEven:
      return std::nearbyint(value);
    case Rounding::kAway:
      return std::round(value);
    case Rounding::kFloor:
      return std::floor(value);
    case Rounding::kCeil:
      return std::ceil(value);
    case Rounding::kZero:
      return down;
    case Rounding::kOdd:
      return down == value || std::fmod(down, 2) != 0 ? down : down + (value > 0 ? 1 : -1);
  }
  return value;
}

// A float format with `fraction` bits whose smallest step is 2^`least` and whose largest value is
// `greatest`.
template <class D>
struct Format;
template <>
struct Format<half> {
  static constexpr int kFraction = 10, kLeast = -24;
  static constexpr double kGreatest = 65504;
};
template <>
struct Format<bfloat16_t> {
  static constexpr int kFraction = 7, kLeast = -133;
  static constexpr double kGreatest = 0x1.FEp127;
};

// Infinite and NaN stay so, as on a device in its inf-nan mode, which is torch_npu's default there;
// the vendor's half would become the greatest number.
template <class D>
D special(float value) {
  D result;
  if constexpr (std::is_same_v<D, half>)
    result.val = std::isnan(value) ? 0x7E00 : value > 0 ? 0x7C00 : 0xFC00;
  else
    result = D(value);
  return result;
}

// What overflows becomes infinite where the rounding leads away from zero, else the greatest.
template <class D>
D narrowed(float value, Rounding rounding) {
  if (!std::isfinite(value)) return special<D>(value);
  using F = Format<D>;
  int exponent;
  std::frexp(value, &exponent);
  const int step = std::max(exponent - 1 - F::kFraction, F::kLeast);
  const double result = std::ldexp(rounded(std::ldexp(double{value}, -step), rounding), step);
  if (std::fabs(result) <= F::kGreatest) return D(float(result));
  const bool inward = rounding == Rounding::kZero || rounding == Rounding::kOdd ||
                      (rounding == Rounding::kFloor && value > 0) ||
                      (rounding == Rounding::kCeil && value < 0);
  return inward ? D(float(std::copysign(F::kGreatest, value))) : special<D>(value);
}

// Integers saturate; NaN becomes 0.
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
  } else if constexpr (!std::is_same_v<D, float>) {
    return narrowed<D>(float(value), rounding);
  } else if constexpr (std::is_same_v<S, float>) {
    return float(rounded(value, rounding));
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

// Of one scalar.
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
