// The rotation that rope, mrope and qk_norm_rope share: one token's coefficients applied to all its
// heads.
#pragma once

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "common/check.h"
#include "common/parallel.h"
#include "common/widen.h"
#include "rope/rotary_tiling.h"

namespace npu_ops {

// One token's coefficients: out1 = x1 * cos1 + x2 * sin1 and out2 = x2 * cos2 + x1 * sin2 for each
// pair. The sines include the sign of the direction, forward or inverse. A full-width table may
// hold different values for the two elements of a pair.
struct Coefficients {
  static constexpr int64_t kRows = 4;
  Coefficients(float* data, int64_t pairs)
      : cos1(data), cos2(data + pairs), sin1(data + 2 * pairs), sin2(data + 3 * pairs) {}
  float *cos1, *cos2, *sin1, *sin2;
};

// The table entries of the two elements of pair j: first(j) = j * step, second(j) = first(j) +
// shift.
struct PairLayout {
  PairLayout(const std::string& name, int64_t rotary_dim, int64_t table_width)
      : pairs(rotary_dim / 2), interleaved(name == "interleaved") {
    const bool full = table_width == rotary_dim;
    step = full && interleaved ? 2 : 1;
    shift = !full ? 0 : interleaved ? 1 : pairs;
  }
  int64_t row_size() const { return Coefficients::kRows * pairs; }
  int64_t pairs, step, shift;
  bool interleaved;
};

// Pairs begin, begin + by, ... below end.
struct Span {
  int64_t begin, end, by;
};

// Reads the coefficients of a span of pairs from one table row.
template <class C>
NPU_OPS_CLONES void take(const C* cos, const C* sin, Coefficients to, Span span, int64_t step,
                         int64_t shift, bool inverse) {
  for (int64_t j = span.begin; j < span.end; j += span.by) {
    const float s1 = load(sin[j * step]), s2 = load(sin[j * step + shift]);
    to.cos1[j] = load(cos[j * step]);
    to.cos2[j] = load(cos[j * step + shift]);
    to.sin1[j] = inverse ? s2 : -s1;
    to.sin2[j] = inverse ? -s1 : s2;
  }
}

// `out` may be `x`. ivdep is valid because each pair is read before it is written. apart: the
// distance between the two elements of a pair.
template <int STEP, class T>
NPU_OPS_CLONES void rotate_pairs(const T* x, T* out, const float* cos1, const float* cos2,
                                 const float* sin1, const float* sin2, int64_t pairs,
                                 int64_t apart) {
  const int64_t second = STEP == 2 ? 1 : apart;  // a variable step would compile to gathers
#pragma GCC ivdep
  for (int64_t j = 0; j < pairs; ++j) {
    const float x1 = load(x[STEP * j]), x2 = load(x[STEP * j + second]);
    store(out + STEP * j, x1 * cos1[j] + x2 * sin1[j]);
    store(out + STEP * j + second, x2 * cos2[j] + x1 * sin2[j]);
  }
}

inline int64_t length_of(const Tensor& tensor, const std::string& layout) {
  return tensor.size(static_cast<int>(layout.find_first_of("ST")));
}

// q or k as [B, S, N, D], whatever its layout.
struct Heads {
  Heads(const Tensor& tensor, const std::string& layout) : tensor(tensor), dim(tensor.size(-1)) {
    const int64_t rank = tensor.dim();  // TND has no batch
    const int b = static_cast<int>(layout.find('B')),
              s = static_cast<int>(layout.find_first_of("ST"));
    const int n = static_cast<int>(layout.find('N'));
    batch = rank == 4 ? tensor.size(b) : 1;
    batch_stride = rank == 4 ? tensor.stride(b) : 0;
    length = tensor.size(s), length_stride = tensor.stride(s);
    heads = tensor.size(n), head_stride = tensor.stride(n);
  }
  int64_t at(int64_t b, int64_t s, int64_t n) const {
    return b * batch_stride + s * length_stride + n * head_stride;
  }
  const Tensor& tensor;
  int64_t dim, batch, length, heads, batch_stride, length_stride, head_stride;
};

template <class T>
void rotate_head(const T* x, T* out, Coefficients c, const PairLayout& pair) {
  if (pair.interleaved)
    rotate_pairs<2>(x, out, c.cos1, c.cos2, c.sin1, c.sin2, pair.pairs, 1);
  else
    rotate_pairs<1>(x, out, c.cos1, c.cos2, c.sin1, c.sin2, pair.pairs, pair.pairs);
}

// Rotates tokens [s0, s1) of batch b, with the coefficients of each token.
template <class T>
void rotate_tokens(const Heads& x, const Heads& out, int64_t b, int64_t s0, int64_t s1,
                   float* coefficients, const PairLayout& pair) {
  const T* in = input<T>(x.tensor);
  T* to = output<T>(out.tensor);
  const int64_t rotated = 2 * pair.pairs;
  Row<T> of_x(rotated), of_out(rotated);
  const auto one = [&](int64_t s, int64_t n) {
    const Coefficients of_token(coefficients + (s - s0) * pair.row_size(), pair.pairs);
    const T* from = in + x.at(b, s, n);
    T* result = to + out.at(b, s, n);
    rotate_head(of_x.read(from, rotated), of_out.to(result), of_token, pair);
    of_out.written(result, rotated);
    if (from != result)
      std::memcpy(result + rotated, from + rotated, (x.dim - rotated) * sizeof(T));
  };
  if (x.head_stride > x.length_stride) {  // in memory order
    for (int64_t n = 0; n < x.heads; ++n)
      for (int64_t s = s0; s < s1; ++s) one(s, n);
  } else {
    for (int64_t s = s0; s < s1; ++s)
      for (int64_t n = 0; n < x.heads; ++n) one(s, n);
  }
}

// Rotates q and k. fill(b, s, coefficients) writes one token's coefficients.
template <class Fill>
void rotate_all(const Tensor& q, const Tensor& k, const Tensor& q_out, const Tensor& k_out,
                const std::string& layout, const PairLayout& pair, const Fill& fill) {
  constexpr int64_t kTokens = 16;  // 32 KiB of coefficients at most
  const Heads q_in(q, layout), k_in(k, layout), q_to(q_out, layout), k_to(k_out, layout);
  STD_TORCH_CHECK(k_in.batch == q_in.batch && k_in.length == q_in.length && k_in.dim == q_in.dim,
                  "k: needs q's shape except for the heads");
  STD_TORCH_CHECK(2 * pair.pairs <= q_in.dim, "rotary_dim: needs at most head_dim ", q_in.dim);
  const int64_t blocks = (q_in.length + kTokens - 1) / kTokens;
  const int64_t block_width = kTokens * (q_in.heads + k_in.heads) * q_in.dim;
  dispatch(q.scalar_type(), "q", [&]<class T>(T*) {
    parallel(q_in.batch * blocks, block_width, [&](int64_t begin, int64_t end) {
      std::vector<float> scratch(std::min(kTokens, q_in.length) * pair.row_size());
      for (int64_t index = begin; index < end; ++index) {
        const int64_t b = index / blocks, s0 = index % blocks * kTokens;
        const int64_t s1 = std::min(s0 + kTokens, q_in.length);
        for (int64_t s = s0; s < s1; ++s)
          fill(b, s, Coefficients(scratch.data() + (s - s0) * pair.row_size(), pair.pairs));
        rotate_tokens<T>(q_in, q_to, b, s0, s1, scratch.data(), pair);
        rotate_tokens<T>(k_in, k_to, b, s0, s1, scratch.data(), pair);
      }
    });
  });
}

// The table row of token (axis, b, s): from positions [A, Bp, S] or [Bp, S], or s itself without
// positions. The constructor checks all rows before any output is written; under torch.compile, no
// other check has run. With `packed`, a row may also be kNobody.
class Rows {
 public:
  Rows(const std::optional<Tensor>& positions, int64_t table_rows, int64_t length,
       bool packed = false)
      : positions_(positions) {
    if (!positions_) {
      STD_TORCH_CHECK(length <= table_rows, "cos: got ", table_rows, " rows, needs ", length);
      return;
    }
    const int64_t rank = positions_->dim();
    axis_stride_ = rank == 3 ? positions_->stride(0) : 0;
    batch_stride_ = positions_->size(rank - 2) == 1 ? 0 : positions_->stride(rank - 2);
    stride_ = positions_->stride(rank - 1);
    wide_ = positions_->scalar_type() == ScalarType::Long;
    for (int64_t axis = 0; axis < (rank == 3 ? positions_->size(0) : 1); ++axis)
      for (int64_t b = 0; b < positions_->size(rank - 2); ++b)
        for (int64_t s = 0; s < length; ++s) {
          const int64_t row = at(axis, b, s);
          if (packed && row == kNobody) continue;
          STD_TORCH_CHECK(row >= 0 && row < table_rows, "positions: got row ", row, ", needs 0 to ",
                          table_rows - 1);
        }
  }
  int64_t at(int64_t axis, int64_t b, int64_t s) const {
    if (!positions_) return s;
    const int64_t index = axis * axis_stride_ + b * batch_stride_ + s * stride_;
    return wide_ ? input<int64_t>(*positions_)[index] : input<int32_t>(*positions_)[index];
  }

 private:
  const std::optional<Tensor>& positions_;
  int64_t axis_stride_ = 0, batch_stride_ = 0, stride_ = 0;
  bool wide_ = false;
};

}  // namespace npu_ops
