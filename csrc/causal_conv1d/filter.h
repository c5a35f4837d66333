// The filter that causal_conv1d and causal_conv1d_update share, and one row of the convolution.
#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "common/check.h"
#include "common/math.h"

namespace npu_ops {

constexpr int64_t kChannels = 2048;  // per block: the rows that a filter needs stay in L1

// A row pointer per tap: to the inputs that the taps multiply, or to the taps.
template <class T, int W>
using Taps = std::array<T*, W>;

// Returns the convolution of channel i.
template <class T, int W>
NPU_OPS_INLINE float convolved(const Taps<const T, W>& x, const Taps<const float, W>& w,
                               const float* bias, int64_t i) {
  float z = bias[i];
#pragma GCC unroll 8
  for (int j = 0; j < W; ++j) z += load(x[j][i]) * w[j][i];
  return z;
}

// Computes y = act(convolution) + residual for a row of channels. ivdep is valid because `y`
// overlaps no input.
template <class T, int W, bool SILU, class Y>
NPU_OPS_CLONES void convolve_row(Taps<const T, W> x, Taps<const float, W> w, const float* bias,
                                 const T* residual, Y* y, int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    float z = convolved<T, W>(x, w, bias, i);
    if constexpr (SILU) z *= sigmoid(z);
    store(y + i, z + load(residual[i]));
  }
}

// The filter as fp32 rows: row j is the tap for the token j positions back, and the row after the
// last tap is the bias. Taps from `width` on are zeros.
class Filter {
 public:
  Filter(const Tensor& weight, const std::optional<Tensor>& bias)
      : channels(weight.size(0)),
        width(weight.size(1)),
        rows_((width + 1) * channels, 0.0f),
        zeros_(std::min(kChannels, channels), 0.0f) {
    for (int64_t j = 0; j < width; ++j)
      read(weight, (width - 1 - j) * weight.stride(1), rows_.data() + j * channels);
    if (bias) read(*bias, 0, rows_.data() + width * channels);
  }

  // Returns a pointer to tap j of channel c, or to zeros if the filter has no tap j.
  const float* tap(int64_t j, int64_t c) const {
    return 0 <= j && j < width ? rows_.data() + j * channels + c : zeros_.data();
  }
  template <int W>
  Taps<const float, W> taps(int64_t c) const {
    return each<W>([&](int64_t j) { return tap(j, c); });
  }
  const float* bias(int64_t c) const { return rows_.data() + width * channels + c; }
  int64_t blocks() const { return (channels + kChannels - 1) / kChannels; }
  int64_t count(int64_t c) const { return std::min(kChannels, channels - c); }

  // Returns the array f(0), ..., f(W - 1).
  template <int W, class F>
  static auto each(const F& f) {
    std::array<decltype(f(0)), W> all;
    for (int64_t j = 0; j < W; ++j) all[j] = f(j);
    return all;
  }

  const int64_t channels, width;

 private:
  void read(const Tensor& parameter, int64_t offset, float* out) const {
    dispatch(parameter.scalar_type(), "weight", [&]<class T>(T*) {
      const T* from = input<T>(parameter) + offset;
      for (int64_t i = 0; i < channels; ++i) out[i] = load(from[i * parameter.stride(0)]);
    });
  }

  std::vector<float> rows_, zeros_;
};

// Calls body<W, SILU>() for the filter's width and activation at run time; W: 4 or 8 taps, some of
// them zeros.
template <class Body>
void dispatch_filter(int64_t width, bool silu, const Body& body) {
  const auto with_width = [&]<int W>() {
    silu ? body.template operator()<W, true>() : body.template operator()<W, false>();
  };
  STD_TORCH_CHECK(width >= 2 && width <= 8, "weight: needs [D, W] with W 2 to 8");
  width > 4 ? with_width.template operator()<8>() : with_width.template operator()<4>();
}

}  // namespace npu_ops
