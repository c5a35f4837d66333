// The filter that causal_conv1d and causal_conv1d_update share, and one row of the convolution.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "common/check.h"
#include "common/math.h"

namespace npu_ops {

constexpr int64_t kChannels = 2048;  // of a block: the rows that a filter needs stay in L1

// y = act(convolution) + residual for a row of channels. `y` overlaps nothing, hence ivdep.
template <class T, int W, bool SILU, class Y>
NPU_OPS_CLONES void convolve_row(const T* x0, const T* x1, const T* x2, const T* x3,
                                 const float* w0, const float* w1, const float* w2, const float* w3,
                                 const float* bias, const T* residual, Y* y, int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    float z = bias[i] + load(x0[i]) * w0[i] + load(x1[i]) * w1[i];
    if constexpr (W > 2) z += load(x2[i]) * w2[i];
    if constexpr (W > 3) z += load(x3[i]) * w3[i];
    if constexpr (SILU) z *= sigmoid(z);
    store(y + i, z + load(residual[i]));
  }
}

// z += x * w for a row of channels.
template <class T>
NPU_OPS_CLONES void add_tap(const T* x, const float* w, float* z, int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) z[i] += load(x[i]) * w[i];
}

// y = act(z) + residual for a row of channels.
template <class T, bool SILU, class Y>
NPU_OPS_CLONES void finish_row(const float* z, const T* residual, Y* y, int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    const float value = SILU ? z[i] * sigmoid(z[i]) : z[i];
    store(y + i, value + load(residual[i]));
  }
}

// The filter as rows of float; row j is the tap that meets the token j back, row W is the bias.
class Filter {
 public:
  Filter(const Tensor& weight, const std::optional<Tensor>& bias)
      : channels(weight.size(0)), width(weight.size(1)), rows_(memory((width + 1) * channels)) {
    for (int64_t j = 0; j < width; ++j)
      widen(weight, (width - 1 - j) * weight.stride(1), rows_ + j * channels);
    float* last = rows_ + width * channels;
    bias ? widen(*bias, 0, last) : std::fill(last, last + channels, 0.0f);
  }

  // From channel c on. A filter with fewer taps has none that a loop reads.
  const float* tap(int64_t j, int64_t c) const {
    return j < width ? rows_ + j * channels + c : nullptr;
  }
  const float* bias(int64_t c) const { return rows_ + width * channels + c; }
  int64_t blocks() const { return (channels + kChannels - 1) / kChannels; }
  int64_t count(int64_t c) const { return std::min(kChannels, channels - c); }

  const int64_t channels, width;

 private:
  // Kept for the next call: fresh memory of this size costs more than one token's convolution.
  static float* memory(int64_t size) {
    thread_local std::vector<float> values;
    if (static_cast<int64_t>(values.size()) < size) values.resize(size);
    return values.data();
  }

  void widen(const Tensor& parameter, int64_t offset, float* out) const {
    dispatch(parameter.scalar_type(), "weight", [&]<class T>(T*) {
      const T* from = input<T>(parameter) + offset;
      const int64_t stride = parameter.stride(0);
      for (int64_t i = 0; i < channels; ++i) out[i] = load(from[i * stride]);
    });
  }

  float* rows_;
};

// The convolution of a row before its activation. back(j) is the row j before it.
template <class Rows>
void convolve_wide(const Filter& filter, int64_t c, const Rows& back, float* z, int64_t count) {
  std::copy_n(filter.bias(c), count, z);
  for (int64_t j = 0; j < filter.width; ++j) add_tap(back(j), filter.tap(j, c), z, count);
}

// y = act(convolution) + residual for a row. W is 0 for more than 4 taps, one after the other.
template <class T, int W, bool SILU, class Rows, class Y>
void convolve(const Filter& filter, int64_t c, const Rows& back, const T* residual, Y* y,
              int64_t count) {
  if constexpr (W) {
    convolve_row<T, W, SILU>(back(0), back(1), back(2), back(3), filter.tap(0, c), filter.tap(1, c),
                             filter.tap(2, c), filter.tap(3, c), filter.bias(c), residual, y,
                             count);
  } else {
    float z[kChannels];
    convolve_wide(filter, c, back, z, count);
    finish_row<T, SILU>(z, residual, y, count);
  }
}

// Calls body<W, SILU>() for what the filter is at run time; W is 0 for more than 4 taps.
template <class Body>
void dispatch_filter(int64_t width, bool silu, const Body& body) {
  const auto with_width = [&]<int W>() {
    silu ? body.template operator()<W, true>() : body.template operator()<W, false>();
  };
  STD_TORCH_CHECK(width >= 2 && width <= 8, "weight: needs [D, W] with W 2 to 8");
  if (width > 4) return with_width.template operator()<0>();
  if (width == 2) return with_width.template operator()<2>();
  if (width == 3) return with_width.template operator()<3>();
  with_width.template operator()<4>();
}

}  // namespace npu_ops
