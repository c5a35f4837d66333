// Rounding to narrower types, by the rounding modes of conversions: CCE intrinsic guide, 6.3.10.
#pragma once

#include <stub_def.h>  // the vendor's half and bfloat16_t

#include <algorithm>
#include <cmath>
#include <type_traits>

namespace npu_ops::twin {

enum class Rounding { kEven, kAway, kFloor, kCeil, kZero, kOdd };  // suffixes r a f c z o

template <class W>
W rounded(W value, Rounding rounding) {
  const W down = std::trunc(value);
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
template <>
struct Format<float> {
  static constexpr int kFraction = 23, kLeast = -149;
  static constexpr double kGreatest = 0x1.FFFFFEp127;
};

// Infinity and NaN stay, as on a device in inf-nan mode, torch_npu's default. (The vendor's class
// `half` turns them into the largest number.)
template <class D>
D special(float value) {
  D result;
  if constexpr (std::is_same_v<D, half>)
    result.val = std::isnan(value) ? 0x7E00 : value > 0 ? 0x7C00 : 0xFC00;
  else
    result = D(value);
  return result;
}

// `value` is exact: a double for a float, a long double for an int64. An overflow becomes the
// largest number if the mode rounds it towards zero (or to odd), else infinity.
template <class D, class W>
D narrowed(W value, Rounding rounding) {
  if (!std::isfinite(value)) return special<D>(static_cast<float>(value));
  using F = Format<D>;
  int exponent;
  std::frexp(value, &exponent);
  const int step = std::max(exponent - 1 - F::kFraction, F::kLeast);
  const W result = std::ldexp(rounded(std::ldexp(value, -step), rounding), step);
  if (std::fabs(result) <= F::kGreatest) return D(float(result));
  const bool inward = rounding == Rounding::kZero || rounding == Rounding::kOdd ||
                      (rounding == Rounding::kFloor && value > 0) ||
                      (rounding == Rounding::kCeil && value < 0);
  return inward ? D(float(std::copysign(F::kGreatest, value)))
                : special<D>(std::copysign(HUGE_VALF, static_cast<float>(value)));
}

// Rounds the result of float arithmetic to T; integers wrap.
template <class T, class W>
T narrow(W value) {
  if constexpr (std::is_same_v<T, half>)
    return narrowed<half>(double(value), Rounding::kEven);
  else
    return T(value);
}

}  // namespace npu_ops::twin
