// bias_dropout_add on the CPU. Definition: npu_ops/ops/bias_dropout_add/reference.py
#include <algorithm>
#include <bit>
#include <memory>
#include <optional>
#include <type_traits>
#include <vector>

#include "common/check.h"
#include "common/memory.h"
#include "common/parallel.h"
#include "common/partials.h"
#include "common/philox.h"
#include "common/staged.h"
#include "common/widen.h"

namespace npu_ops {
namespace {

struct Dropout {
  Keys keys;
  uint64_t offset;
  uint16_t threshold;  // an element is kept if its draw is at least this; 0 keeps all
  float scale;
};

Dropout make_dropout(const std::optional<Tensor>& rng_state, double p) {
  if (!rng_state) return {Keys(0), 0, 0, 1.0f};
  const auto* words = input<int64_t>(*rng_state);
  const double threshold = std::clamp(__builtin_nearbyint(p * 65536), 1.0, 65535.0);
  return {Keys(static_cast<uint64_t>(words[0])), static_cast<uint64_t>(words[1]),
          static_cast<uint16_t>(threshold), static_cast<float>(65536 / (65536 - threshold))};
}

// Which elements of a row stay, for one thread. All do without dropout; where nobody reads it then,
// there is nothing.
class Keep {
 public:
  Keep(const Dropout& dropout, int64_t width, int64_t rows_at_once, bool read = true)
      : step(kDrawLanes * lane_width(width)),
        dropout_(dropout),
        columns_(dropout.threshold ? lane_width(width) : 0, dropout.offset, dropout.keys),
        values_(dropout.threshold || read ? rows_at_once * step : 0, kAll) {}

  // Of as many rows at once, `step` apart: draws the one at `place`, and returns it.
  const uint16_t* row(int64_t index, Upcoming upcoming, int64_t place = 0) {
    uint16_t* found = values_.data() + place * step;
    if (dropout_.threshold)
      keep_row(found, columns_, static_cast<uint32_t>(index), dropout_.threshold, upcoming);
    return found;
  }

  const int64_t step;

 private:
  static constexpr uint16_t kAll = 0xffff;
  const Dropout& dropout_;
  Columns columns_;
  Lines<uint16_t> values_;
};

NPU_OPS_INLINE float kept(uint16_t keep, float value) {
  const auto all = static_cast<uint32_t>(static_cast<int32_t>(static_cast<int16_t>(keep)));
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) & all);
}

// `out` may be `x` or `residual`: an element is read before it is written, hence ivdep.
template <class X, class R, class O, bool DROPS>
NPU_OPS_CLONES void add_row(const X* x, const float* bias, const R* residual, const uint16_t* keep,
                            O* out, int64_t width, float scale) {
#pragma GCC ivdep
  for (int64_t i = 0; i < width; ++i) {
    float sum = load(x[i]) + bias[i];
    if constexpr (DROPS) sum = kept(keep[i], sum * scale);
    store(out + i, load(residual[i]) + sum);
  }
}

// Without dropout there is so little to do that it counts what is read: a bias of the others' dtype
// is not widened before, and none is not read.
template <class T, bool BIAS>
NPU_OPS_CLONES void add_plainly(const T* x, const T* bias, const T* residual, T* out,
                                int64_t width) {
#pragma GCC ivdep
  for (int64_t i = 0; i < width; ++i) {
    const float sum = BIAS ? load(x[i]) + load(bias[i]) : load(x[i]);
    store(out + i, load(residual[i]) + sum);
  }
}

template <class T>
void add_row_of(const T* x, const T* bias, const T* residual, T* out, int64_t width) {
  const auto add = bias ? add_plainly<T, true> : add_plainly<T, false>;
  add(x, bias, residual, out, width);
}

// Too little, too, for going through rows of fp32.
NPU_OPS_WITHOUT void add_row_of(const fp16* x, const fp16* bias, const fp16* residual, fp16* out,
                                int64_t width) {
  add_row_of<fp16>(x, bias, residual, out, width);
}

#ifdef NPU_OPS_X86_CLONES
NPU_OPS_WITH_F16C void add_row_of(const fp16* x, const fp16* bias, const fp16* residual, fp16* out,
                                  int64_t width) {
  int64_t i = 0;
  for (; i + 8 <= width; i += 8) {
    const __m256 sum = bias ? eight(x + i) + eight(bias + i) : eight(x + i);
    put_eight(out + i, eight(residual + i) + sum);
  }
  add_row_of<fp16>(x + i, bias ? bias + i : bias, residual + i, out + i, width - i);
}
#endif

template <class G, class X, bool SUMS>
NPU_OPS_CLONES void gradient_row(const G* grad, const uint16_t* keep, X* grad_x, float* sum,
                                 int64_t width, float scale) {
#pragma GCC ivdep
  for (int64_t i = 0; i < width; ++i) {
    const float found = kept(keep[i], load(grad[i]) * scale);
    if constexpr (SUMS) sum[i] += found;
    store(grad_x + i, found);
  }
}

// Rows at once, so that sums are read and written once for all of them. A row's sum still comes
// after that of the row before.
constexpr int kAtOnce = 4;

// Columns from `first` on of rows behind each other; those of `keep` are a step apart.
void gradient_rows_from(int64_t first, int64_t rows, const fp16* grad, const uint16_t* keep,
                        int64_t keep_step, fp16* grad_x, float* sum, int64_t width, float scale) {
  const auto one = sum ? gradient_row<fp16, fp16, true> : gradient_row<fp16, fp16, false>;
  for (int64_t row = 0; row < rows; ++row)
    one(grad + row * width + first, keep + row * keep_step + first, grad_x + row * width + first,
        sum ? sum + first : sum, width - first, scale);
}

// rows: kAtOnce, or one.
NPU_OPS_WITHOUT void gradient_rows_of(int64_t rows, const fp16* grad, const uint16_t* keep,
                                      int64_t keep_step, fp16* grad_x, float* sum, int64_t width,
                                      float scale) {
  gradient_rows_from(0, rows, grad, keep, keep_step, grad_x, sum, width, scale);
}

#ifdef NPU_OPS_X86_CLONES
// Returns how many columns that were.
template <int ROWS>
NPU_OPS_WITH_F16C NPU_OPS_INLINE int64_t gradient_eights(const fp16* grad, const uint16_t* keep,
                                                         int64_t keep_step, fp16* grad_x,
                                                         float* sum, int64_t width, float scale) {
  int64_t i = 0;
  for (; i + 8 <= width; i += 8) {
    __m256 total = sum ? _mm256_loadu_ps(sum + i) : _mm256_setzero_ps();
#pragma GCC unroll 8
    for (int64_t row = 0; row < ROWS; ++row) {
      const auto* words = reinterpret_cast<const __m128i*>(keep + row * keep_step + i);
      const __m256 all = _mm256_castsi256_ps(_mm256_cvtepi16_epi32(_mm_loadu_si128(words)));
      const __m256 found = _mm256_and_ps(eight(grad + row * width + i) * scale, all);
      total += found;
      put_eight(grad_x + row * width + i, found);
    }
    if (sum) _mm256_storeu_ps(sum + i, total);
  }
  return i;
}

template <int ROWS>
NPU_OPS_WITH_F16C_LONG NPU_OPS_INLINE int64_t gradient_sixteens(const fp16* grad,
                                                                const uint16_t* keep,
                                                                int64_t keep_step, fp16* grad_x,
                                                                float* sum, int64_t width,
                                                                float scale) {
  int64_t i = 0;
  for (; i + 16 <= width; i += 16) {
    __m512 total = sum ? _mm512_loadu_ps(sum + i) : _mm512_setzero_ps();
#pragma GCC unroll 8
    for (int64_t row = 0; row < ROWS; ++row) {
      const auto* words = reinterpret_cast<const __m256i*>(keep + row * keep_step + i);
      const __mmask16 stay = _mm256_movepi16_mask(_mm256_loadu_si256(words));
      const __m512 value = sixteen(grad + row * width + i);
      const __m512 found = _mm512_maskz_mul_ps(stay, value, _mm512_set1_ps(scale));
      total += found;
      put_sixteen(grad_x + row * width + i, found);
    }
    if (sum) _mm512_storeu_ps(sum + i, total);
  }
  return i;
}

NPU_OPS_WITH_F16C void gradient_rows_of(int64_t rows, const fp16* grad, const uint16_t* keep,
                                        int64_t keep_step, fp16* grad_x, float* sum, int64_t width,
                                        float scale) {
  const int64_t done =
      rows == kAtOnce ? gradient_eights<kAtOnce>(grad, keep, keep_step, grad_x, sum, width, scale)
                      : gradient_eights<1>(grad, keep, keep_step, grad_x, sum, width, scale);
  gradient_rows_from(done, rows, grad, keep, keep_step, grad_x, sum, width, scale);
}

NPU_OPS_WITH_F16C_LONG void gradient_rows_of(int64_t rows, const fp16* grad, const uint16_t* keep,
                                             int64_t keep_step, fp16* grad_x, float* sum,
                                             int64_t width, float scale) {
  const int64_t done =
      rows == kAtOnce ? gradient_sixteens<kAtOnce>(grad, keep, keep_step, grad_x, sum, width, scale)
                      : gradient_sixteens<1>(grad, keep, keep_step, grad_x, sum, width, scale);
  gradient_rows_from(done, rows, grad, keep, keep_step, grad_x, sum, width, scale);
}
#endif

template <class T>
using Read = typename Staged<T>::Element;

// A row, by way of one of fp32 where one of both is fp16.
template <class G, class X>
class Gradient {
 public:
  explicit Gradient(int64_t width)
      : most_(staged_at_once<G, X>(width)), of_grad_(1, most_), of_grad_x_(1, most_) {}

  void operator()(const G* grad, const uint16_t* keep, X* grad_x, float* sum, int64_t width,
                  float scale) {
    const auto row =
        sum ? gradient_row<Read<G>, Read<X>, true> : gradient_row<Read<G>, Read<X>, false>;
    in_blocks(0, width, most_, [&](int64_t i, int64_t count) {
      row(of_grad_.read(grad + i, count), keep + i, of_grad_x_.to(grad_x + i), sum ? sum + i : sum,
          count, scale);
      of_grad_x_.written(grad_x + i, count);
    });
  }

 private:
  int64_t most_;
  Staged<G> of_grad_;
  Staged<X> of_grad_x_;
};

// Two bf16 of a row, the first in the low half: a vector of them needs no half moved to another
// lane to be one of floats.
using Pair = uint32_t __attribute__((aligned(2), may_alias));

// As `store` rounds, in place. A gradient times the scale that is a NaN has no bits to round.
NPU_OPS_INLINE uint32_t rounded(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return bits + (0x7fffu + ((bits >> 16) & 1u));
}

// Sums are first those of even columns, then those of odd ones.
template <int ROWS, bool SUMS>
NPU_OPS_CLONES void gradient_pairs(const Pair* grad, const Pair* keep, Pair* grad_x, float* sum,
                                   int64_t pairs, int64_t keep_step, float scale) {
#pragma GCC ivdep
  for (int64_t i = 0; i < pairs; ++i) {
    float sums[2] = {};
    if constexpr (SUMS) sums[0] = sum[i], sums[1] = sum[pairs + i];
#pragma GCC unroll 8
    for (int64_t row = 0; row < ROWS; ++row) {
      const uint32_t both = grad[row * pairs + i] & keep[row * keep_step + i];
      const float even = std::bit_cast<float>(both << 16) * scale;
      const float odd = std::bit_cast<float>(both & 0xffff0000u) * scale;
      grad_x[row * pairs + i] = (rounded(even) >> 16) | (rounded(odd) & 0xffff0000u);
      sums[0] += even;
      sums[1] += odd;
    }
    if constexpr (SUMS) sum[i] = sums[0], sum[pairs + i] = sums[1];
  }
}

// The bias as float rows: none is a row of zeros, [h] is one row, a full one is widened per row.
struct Bias {
  Bias(const std::optional<Tensor>& bias, int64_t width)
      : width(width), full(bias && bias->numel() > width ? &*bias : nullptr) {
    if (full) return;
    shared = new_row();
    if (bias)
      widen_row(*bias, 0, shared.get());
    else
      std::fill_n(shared.get(), width, 0.0f);
  }

  // A thread's memory for `row`, uninitialised: small calls notice zeros that nobody reads.
  std::unique_ptr<float[]> scratch() const { return full ? new_row() : nullptr; }

  const float* row(int64_t index, float* scratch) const {
    if (!full) return shared.get();
    widen_row(*full, index, scratch);
    return scratch;
  }

  std::unique_ptr<float[]> new_row() const { return std::unique_ptr<float[]>(new float[width]); }

  void widen_row(const Tensor& bias, int64_t index, float* out) const {
    dispatch(bias.scalar_type(), "bias",
             [&]<class T>(T*) { widen(input<T>(bias) + index * width, out, width); });
  }

  std::unique_ptr<float[]> shared;
  int64_t width;
  const Tensor* full;
};

template <class T>
void plain_rows(const Tensor& x, const std::optional<Tensor>& bias, const Tensor& residual,
                const Tensor& out, int64_t begin, int64_t end) {
  const int64_t width = x.size(-1), step = bias && bias->numel() > width ? width : 0;
  const T* biases = bias ? input<T>(*bias) : nullptr;
  for (int64_t row = begin; row < end; ++row)
    add_row_of(input<T>(x) + row * width, biases ? biases + row * step : nullptr,
               input<T>(residual) + row * width, output<T>(out) + row * width, width);
}

template <class X, class R, class O>
void forward_rows(const Tensor& x, const Bias& bias, const Tensor& residual, const Dropout& dropout,
                  const Tensor& out, int64_t begin, int64_t end) {
  const int64_t width = x.size(-1);
  Keep keep(dropout, width, 1, dropout.threshold);
  const auto bias_row = bias.scratch();
  const int64_t most = staged_at_once<X, R, O>(width);
  Staged<X> of_x(1, most);
  Staged<R> of_residual(1, most);
  Staged<O> of_out(1, most);
  const auto add = dropout.threshold ? add_row<Read<X>, Read<R>, Read<O>, true>
                                     : add_row<Read<X>, Read<R>, Read<O>, false>;
  for (int64_t row = begin; row < end; ++row) {
    const X* x_row = input<X>(x) + row * width;
    const R* residual_row = input<R>(residual) + row * width;
    const Upcoming upcoming{reinterpret_cast<const char*>(x_row),
                            reinterpret_cast<const char*>(residual_row),
                            width * static_cast<int64_t>(std::min(sizeof(X), sizeof(R)))};
    const uint16_t* kept = keep.row(row, upcoming);
    const float* biases = bias.row(row, bias_row.get());
    in_blocks(0, width, most, [&](int64_t i, int64_t count) {
      O* to = output<O>(out) + row * width + i;
      add(of_x.read(x_row + i, count), biases + i, of_residual.read(residual_row + i, count),
          kept + i, of_out.to(to), count, dropout.scale);
      of_out.written(to, count);
    });
  }
}

void forward(Tensor x, std::optional<Tensor> bias, Tensor residual, std::optional<Tensor> rng_state,
             double p, Tensor out) {
  const int64_t width = x.size(-1), rows = x.numel() / width;
  prefer_huge_pages(out);
  const bool alike = residual.scalar_type() == x.scalar_type() &&
                     out.scalar_type() == x.scalar_type() &&
                     (!bias || bias->scalar_type() == x.scalar_type());
  if (!rng_state && alike) {
    return dispatch(x.scalar_type(), "x", [&]<class T>(T*) {
      parallel(rows, width, [&](int64_t begin, int64_t end) {
        plain_rows<T>(x, bias, residual, out, begin, end);
      });
    });
  }
  const Dropout dropout = make_dropout(rng_state, p);
  const Bias bias_rows(bias, width);
  dispatch(x.scalar_type(), "x", [&]<class X>(X*) {
    dispatch(residual.scalar_type(), "residual", [&]<class R>(R*) {
      dispatch(out.scalar_type(), "out", [&]<class O>(O*) {
        parallel(rows, width, [&](int64_t begin, int64_t end) {
          forward_rows<X, R, O>(x, bias_rows, residual, dropout, out, begin, end);
        });
      });
    });
  });
}

template <class G>
Upcoming upcoming(const G* row, int64_t width) {
  return {reinterpret_cast<const char*>(row), nullptr, width * static_cast<int64_t>(sizeof(G))};
}

template <class G, class X>
void backward_rows(const Tensor& grad, Keep& keep, const Tensor& grad_x, float* sum, float scale,
                   int64_t begin, int64_t end) {
  const int64_t width = grad.size(-1);
  Gradient<G, X> gradient(width);
  for (int64_t row = begin; row < end; ++row) {
    const G* from = input<G>(grad) + row * width;
    const uint16_t* kept = keep.row(row, upcoming(from, width));
    gradient(from, kept, output<X>(grad_x) + row * width, sum, width, scale);
  }
}

void gradient_rows_of(int64_t rows, const bf16* grad, const uint16_t* keep, int64_t keep_step,
                      bf16* grad_x, float* sum, int64_t width, float scale) {
  const auto one = sum ? gradient_pairs<1, true> : gradient_pairs<1, false>;
  const auto some = sum ? gradient_pairs<kAtOnce, true> : gradient_pairs<kAtOnce, false>;
  (rows == kAtOnce ? some : one)(
      reinterpret_cast<const Pair*>(grad), reinterpret_cast<const Pair*>(keep),
      reinterpret_cast<Pair*>(grad_x), sum, width / 2, keep_step / 2, scale);
}

// Of fp16, and of bf16 in pairs.
template <class T>
void backward_rows_at_once(const Tensor& grad, Keep& keep, const Tensor& grad_x, float* sum,
                           float scale, int64_t begin, int64_t end) {
  const int64_t width = grad.size(-1);
  for (int64_t row = begin; row < end;) {
    const T* from = input<T>(grad) + row * width;
    T* to = output<T>(grad_x) + row * width;
    const int64_t count = end - row < kAtOnce ? 1 : kAtOnce;
    const uint16_t* kept = keep.row(row, upcoming(from, width));
    for (int64_t i = 1; i < count; ++i) keep.row(row + i, upcoming(from + i * width, width), i);
    gradient_rows_of(count, from, kept, keep.step, to, sum, width, scale);
    row += count;
  }
}

// From all even columns and then all odd ones to their order.
void put_in_order(float* row, int64_t width) {
  const std::vector<float> parts(row, row + width);
  const float *even = parts.data(), *odd = even + width / 2;
  for (int64_t i = 0; i < width / 2; ++i) row[2 * i] = even[i], row[2 * i + 1] = odd[i];
}

void backward(Tensor grad, std::optional<Tensor> rng_state, double p, Tensor grad_x,
              std::optional<Tensor> grad_bias) {
  const int64_t width = grad.size(-1), rows = grad.numel() / width;
  const Dropout dropout = make_dropout(rng_state, p);
  Partials partials(rows, width, width, grad_bias.has_value());
  prefer_huge_pages(grad_x);
  bool pairs = false;
  dispatch(grad.scalar_type(), "grad", [&]<class G>(G*) {
    dispatch(grad_x.scalar_type(), "grad_x", [&]<class X>(X*) {
      constexpr bool kBoth = std::is_same_v<G, bf16> && std::is_same_v<X, bf16>;
      pairs = kBoth && width % 2 == 0;
      constexpr bool kHalves = std::is_same_v<G, fp16> && std::is_same_v<X, fp16>;
      const auto some = [&] {
        if constexpr (kHalves)
          return backward_rows_at_once<fp16>;
        else
          return pairs ? backward_rows_at_once<bf16> : backward_rows<G, X>;
      }();
      const int64_t at_once = kHalves || pairs ? std::min<int64_t>(rows, kAtOnce) : 1;
      parallel(partials.blocks, partials.block_cost, [&](int64_t begin, int64_t end) {
        Keep keep(dropout, width, at_once);
        for (int64_t index = begin; index < end; ++index)
          some(grad, keep, grad_x, partials.start(index), dropout.scale,
               index * partials.block_rows, std::min(rows, (index + 1) * partials.block_rows));
      });
    });
  });
  if (!grad_bias) return;
  partials.total(output<float>(*grad_bias));
  if (pairs) put_in_order(output<float>(*grad_bias), width);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(npu_ops, CPU, m) {
  m.impl("bias_dropout_add_cpu", TORCH_BOX(&forward));
  m.impl("bias_dropout_add_backward_cpu", TORCH_BOX(&backward));
}

}  // namespace npu_ops
