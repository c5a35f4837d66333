// Heads of tensors [B, H, T, .] as rows of floats, and the softmax of rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <list>
#include <type_traits>
#include <vector>

#include "attention/tile.h"
#include "common/check.h"
#include "common/math.h"
#include "common/sum.h"
#include "common/widen.h"

namespace npu_ops {

// Rows in memory that begin `step` elements apart.
template <class T>
struct Strided {
  NPU_OPS_INLINE T* row(int64_t index) const { return data + index * step; }
  Strided from(int64_t first) const { return {row(first), step}; }
  T* data;
  int64_t step;
};

// Locates the rows of each head of a [B, H, T, .] tensor.
template <class T>
struct Heads {
  Heads(const Tensor& tensor, T* data)
      : data(data), batch(tensor.stride(0)), head(tensor.stride(1)), token(tensor.stride(2)) {}
  Strided<T> of(int64_t b, int64_t h) const { return {data + b * batch + h * head, token}; }
  T* data;
  int64_t batch, head, token;
};

template <class T>
Heads<const T> heads_in(const Tensor& tensor) {
  return {tensor, input<T>(tensor)};
}

template <class T>
Heads<T> heads_out(const Tensor& tensor) {
  return {tensor, output<T>(tensor)};
}

// Allocates the buffers of one thread.
class Pieces {
 public:
  Padded<float> take(int64_t rows, int64_t columns) {
    const int64_t step = padded(columns);
    return {pieces_.emplace_back(rows * step).data(), step};
  }

 private:
  std::list<std::vector<float>> pieces_;
};

// Reads rows as fp32 and pads them with zeros up to their step.
template <class T>
void read(Strided<const T> from, int64_t rows, int64_t width, Padded<float> to) {
  for (int64_t i = 0; i < rows; ++i) {
    widen(from.row(i), to.row(i), width);
    std::fill(to.row(i) + width, to.row(i) + to.step, 0.0f);
  }
}

// Writes row i of `from` times by[i] to row i of `to`. It scales `from` in place.
template <class T>
void write(Padded<float> from, int64_t rows, int64_t width, const float* by, Strided<T> to) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < width; ++j) from.row(i)[j] *= by[i];
    narrow(from.row(i), to.row(i), width);
  }
}

NPU_OPS_INLINE float largest_of(const Lanes (&parts)[kParts]) {
  Lanes most = parts[0];
  for (int part = 1; part < kParts; ++part) most = most < parts[part] ? parts[part] : most;
  float found = most[0];
  for (int64_t l = 1; l < kFloats; ++l) found = std::max(found, most[l]);
  return found;
}

// Turns the scores of `seen` keys into weights that are not yet divided by their sum, and sets the
// other columns to 0. Sets `sum` and returns the log-sum-exp of the scores; without keys, 1 and
// -inf.
NPU_OPS_INLINE float soften(float* scores, int64_t seen, int64_t columns, float* sum) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  *sum = 1.0f;
  if (!seen) std::fill_n(scores, columns, 0.0f);
  if (!seen) return kNone;
  std::fill(scores + seen, scores + columns, kNone);
  Lanes most[kParts], sums[kParts] = {};
  for (Lanes& part : most) part = Lanes{} + kNone;
  for (int64_t j = 0; j < columns; j += kLanes)
    for (int part = 0; part < kParts; ++part) {
      const Lanes& now = lanes(scores + j + part * kFloats);
      most[part] = most[part] < now ? now : most[part];
    }
  const float largest = largest_of(most);
  for (int64_t j = 0; j < columns; ++j) scores[j] = exp_within(scores[j] - largest);
  std::fill(scores + seen, scores + columns, 0.0f);
  for (int64_t j = 0; j < columns; j += kLanes)
    for (int part = 0; part < kParts; ++part) sums[part] += lanes(scores + j + part * kFloats);
  *sum = sum_of(sums);
  return largest + std::log(*sum);
}

}  // namespace npu_ops
