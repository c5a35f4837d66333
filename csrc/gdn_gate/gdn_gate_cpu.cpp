// gdn_gate on the CPU. Definition: npu_ops/ops/gdn_gate/reference.py
#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <optional>
#include <vector>

#include "common/check.h"
#include "common/math.h"
#include "common/parallel.h"
#include "common/partials.h"
#include "common/staged.h"

namespace npu_ops {
namespace {

// What softplus is: log(1 + exp(beta x)) / beta, or x where beta x is above the threshold.
//
// Neither exp(A_log) nor softplus need be in the range of floats where their product is. So it is
// computed as root^2 softplus(near): below -17 softplus is e^x, of which root takes all that is
// below e^-17.
struct Softplus {
  Softplus(double beta, double threshold)
      : beta(static_cast<float>(beta)), threshold(static_cast<float>(threshold)) {}
  static constexpr float kFar = -17.0f;
  // Of beta x and A_log.
  NPU_OPS_INLINE static float root(float x, float A_log) {
    return exp_within(0.5f * (A_log + (x < kFar ? x - kFar : 0.0f)));
  }
  NPU_OPS_INLINE static float near(float x) { return x < kFar ? kFar : x; }
  // Of `near`: softplus(x), and its derivative at x. Both, of one exp.
  NPU_OPS_INLINE float value(float x) const { return (x > threshold ? x : softplus(x)) / beta; }
  NPU_OPS_INLINE void both(float x, float& value, float& slope) const {
    const float e = exp_within(-std::fabs(x)), low = x < 0.0f ? e : 1.0f;
    value = (x > threshold ? x : softplus(x, e)) / beta;
    slope = x > threshold ? 1.0f : low / (1.0f + e);
  }
  float beta, threshold;
};

// A_log and beta dt_bias in fp32, `times` over.
struct Heads {
  Heads(const Tensor& A_log, const std::optional<Tensor>& dt_bias, float beta, int64_t times)
      : A_log(A_log.numel()), bias(A_log.numel(), 0.0f) {
    widen(A_log, this->A_log);
    if (dt_bias) widen(*dt_bias, bias);
    for (float& value : bias) value *= beta;
    for (auto* values : {&this->A_log, &bias}) {
      const std::vector<float> once = *values;
      for (int64_t i = 1; i < times; ++i) values->insert(values->end(), once.begin(), once.end());
    }
  }
  static void widen(const Tensor& tensor, std::vector<float>& out) {
    dispatch(tensor.scalar_type(), "A_log", [&]<class T>(T*) {
      const T* in = input<T>(tensor);
      for (size_t i = 0; i < out.size(); ++i) out[i] = load(in[i]);
    });
  }
  std::vector<float> A_log, bias;
};

// From row to row of a [rows, HV] tensor, or of a contiguous one with more or fewer dimensions.
int64_t step_of(const Tensor& tensor) {
  return tensor.dim() == 2 ? tensor.stride(0) : tensor.size(-1);
}
template <class T>
Strided<const T> rows_in(const Tensor& tensor) {
  return {input<T>(tensor), step_of(tensor)};
}
template <class T>
Strided<T> rows_out(const Tensor& tensor) {
  return {output<T>(tensor), step_of(tensor)};
}

// How many rows are computed as one, that has the heads as often: loops over a few heads are not
// vectorised. So where rows lie behind each other, or are brought there: of fewer heads than the
// longest vectors have floats, they are. Of fewer rows than that, each stays one.
struct AsOne {
  AsOne(int64_t heads, int64_t rows, std::initializer_list<int64_t> steps) : heads(heads) {
    constexpr int64_t kWide = 64, kFew = 16;
    const int64_t most = std::max<int64_t>(kWide / heads, 1);
    const bool dense = std::ranges::all_of(steps, [&](int64_t step) { return step == heads; });
    brings = !dense && heads < kFew && rows >= most;
    times = brings || (dense && rows >= most) ? most : 1;
  }
  bool brought(int64_t step) const { return brings && step != heads; }
  int64_t heads, times;
  bool brings;
};

// Runs body(first, count, times) over rows, `times` as one and what is left one by one.
template <class Body>
void in_wide_rows(int64_t rows, int64_t times, const Body& body) {
  const int64_t left = rows % times;
  if (rows > left) body(0, rows / times, times);
  if (left) body(rows - left, left, 1);
}

// `times` rows each, from row `first` on.
template <class T>
Strided<T> wide(Strided<T> rows, int64_t first, int64_t times) {
  return {rows.row(first), rows.step * times};
}

// Adds sums of A_log's gradient and dt_bias's, each of wide rows, to those of the heads.
void add_folded(const std::vector<float>& wide_sums, int64_t heads, float* sums) {
  const int64_t half = static_cast<int64_t>(wide_sums.size()) / 2;
  for (int64_t i = 0; i < half; ++i) {
    sums[i % heads] += wide_sums[i];
    sums[heads + i % heads] += wide_sums[half + i];
  }
}

template <class A>
NPU_OPS_CLONES void decay_rows(Strided<const A> a, const float* A_log, const float* bias,
                               Strided<float> g, Softplus plus, int64_t rows, int64_t heads) {
  for (int64_t row = 0; row < rows; ++row) {
    const A* from = a.row(row);
    float* to = g.row(row);
#pragma GCC ivdep
    for (int64_t i = 0; i < heads; ++i) {
      const float x = plus.beta * load(from[i]) + bias[i], root = plus.root(x, A_log[i]);
      to[i] = -(root * plus.value(plus.near(x))) * root;
    }
  }
}

template <class B>
NPU_OPS_CLONES void beta_rows(Strided<const B> b, Strided<B> beta, float scale, int64_t rows,
                              int64_t heads) {
  for (int64_t row = 0; row < rows; ++row) {
    const B* from = b.row(row);
    B* to = beta.row(row);
#pragma GCC ivdep
    for (int64_t i = 0; i < heads; ++i) store(to + i, scale * sigmoid(load(from[i])));
  }
}

// sums: of A_log's gradient, then of dt_bias's.
template <class A>
NPU_OPS_CLONES void decay_gradient_rows(Strided<const float> grad_g, Strided<const A> a,
                                        const float* A_log, const float* bias, Strided<A> grad_a,
                                        float* sums, Softplus plus, int64_t rows, int64_t heads) {
  for (int64_t row = 0; row < rows; ++row) {
    const float* grad = grad_g.row(row);
    const A* from = a.row(row);
    A* to = grad_a.row(row);
#pragma GCC ivdep
    for (int64_t i = 0; i < heads; ++i) {
      const float x = plus.beta * load(from[i]) + bias[i], root = plus.root(x, A_log[i]);
      float value, slope;
      plus.both(plus.near(x), value, slope);
      const float of_a = -(root * slope) * grad[i] * root;
      store(to + i, of_a);
      sums[i] -= root * value * grad[i] * root;
      sums[heads + i] += of_a;
    }
  }
}

template <class B>
NPU_OPS_CLONES void beta_gradient_rows(Strided<const B> grad_beta, Strided<const B> b,
                                       Strided<B> grad_b, float scale, int64_t rows,
                                       int64_t heads) {
  for (int64_t row = 0; row < rows; ++row) {
    const B *grad = grad_beta.row(row), *from = b.row(row);
    B* to = grad_b.row(row);
#pragma GCC ivdep
    for (int64_t i = 0; i < heads; ++i)
      store(to + i, load(grad[i]) * scale * sigmoid_slope(load(from[i])));
  }
}

// An element costs about ten times what it costs to copy one.
constexpr int64_t kCost = 10;

void forward(Tensor a, Tensor A_log, std::optional<Tensor> dt_bias, std::optional<Tensor> b,
             double scale, double softplus_beta, double softplus_threshold, Tensor g,
             std::optional<Tensor> beta) {
  const int64_t heads = a.size(-1), rows = a.numel() / heads;
  const Softplus plus(softplus_beta, softplus_threshold);
  const AsOne one(heads, rows, {step_of(a), step_of(g)});
  const Heads of(A_log, dt_bias, plus.beta, one.times);
  dispatch(a.scalar_type(), "a", [&]<class A>(A*) {
    const auto from = rows_in<A>(a);
    const auto to = rows_out<float>(g);
    parallel(rows, heads * kCost, [&](int64_t begin, int64_t end) {
      const int64_t most = staged_at_once<A>(end - begin, heads, one.brings);
      Staged<A> of_a(most, heads, one.brought(from.step));
      Staged<float> of_g(most, heads, one.brought(to.step));
      in_blocks(begin, end, most, [&](int64_t row, int64_t count) {
        const auto written = to.from(row);
        const auto read = of_a.read(from.from(row), count);
        in_wide_rows(count, one.times, [&](int64_t first, int64_t many, int64_t each) {
          decay_rows(wide(read, first, each), of.A_log.data(), of.bias.data(),
                     wide(of_g.to(written), first, each), plus, many, heads * each);
        });
        of_g.written(written, count);
      });
    });
  });
  if (!b) return;
  dispatch(b->scalar_type(), "b", [&]<class B>(B*) {
    const auto from = rows_in<B>(*b);
    const auto to = rows_out<B>(*beta);
    const AsOne one(heads, rows, {from.step, to.step});
    parallel(rows, heads * kCost, [&](int64_t begin, int64_t end) {
      const int64_t most = staged_at_once<B>(end - begin, heads, one.brings);
      Staged<B> of_b(most, heads, one.brought(from.step));
      Staged<B> of_beta(most, heads, one.brought(to.step));
      in_blocks(begin, end, most, [&](int64_t row, int64_t count) {
        const auto written = to.from(row);
        const auto read = of_b.read(from.from(row), count);
        in_wide_rows(count, one.times, [&](int64_t first, int64_t many, int64_t each) {
          beta_rows(wide(read, first, each), wide(of_beta.to(written), first, each),
                    static_cast<float>(scale), many, heads * each);
        });
        of_beta.written(written, count);
      });
    });
  });
}

void backward(Tensor grad_g, std::optional<Tensor> grad_beta, Tensor a, Tensor A_log,
              std::optional<Tensor> dt_bias, std::optional<Tensor> b, double scale,
              double softplus_beta, double softplus_threshold, Tensor grad_a, Tensor grad_A_log,
              Tensor grad_dt_bias, std::optional<Tensor> grad_b) {
  const int64_t heads = a.size(-1), rows = a.numel() / heads;
  const Softplus plus(softplus_beta, softplus_threshold);
  Partials sums(rows, 2 * heads, heads * kCost);
  // Half: of a block in which two are not computed as one, folding the sums is not worth it.
  const AsOne one(heads, sums.block_rows / 2, {step_of(grad_g), step_of(a), step_of(grad_a)});
  const Heads of(A_log, dt_bias, plus.beta, one.times);
  const int64_t block_rows = sums.block_rows;
  dispatch(a.scalar_type(), "a", [&]<class A>(A*) {
    const auto grads = rows_in<float>(grad_g);
    const auto from = rows_in<A>(a);
    const auto to = rows_out<A>(grad_a);
    parallel(sums.blocks, sums.block_cost, [&](int64_t begin, int64_t end) {
      const int64_t most = staged_at_once<A>(block_rows, heads, one.brings);
      Staged<float> of_grad(most, heads, one.brought(grads.step));
      Staged<A> of_a(most, heads, one.brought(from.step));
      Staged<A> of_grad_a(most, heads, one.brought(to.step));
      std::vector<float> wide_sums(2 * heads * one.times);
      for (int64_t block = begin; block < end; ++block) {
        const int64_t last = std::min(rows, (block + 1) * block_rows);
        std::ranges::fill(wide_sums, 0.0f);
        float* sum = sums.start(block);
        in_blocks(block * block_rows, last, most, [&](int64_t row, int64_t count) {
          const auto written = to.from(row);
          const auto grad = of_grad.read(grads.from(row), count);
          const auto read = of_a.read(from.from(row), count);
          in_wide_rows(count, one.times, [&](int64_t first, int64_t many, int64_t each) {
            decay_gradient_rows(wide(grad, first, each), wide(read, first, each), of.A_log.data(),
                                of.bias.data(), wide(of_grad_a.to(written), first, each),
                                each == one.times ? wide_sums.data() : sum, plus, many,
                                heads * each);
          });
          of_grad_a.written(written, count);
        });
        add_folded(wide_sums, heads, sum);
      }
    });
  });
  std::vector<float> total(2 * heads);
  sums.total(total.data());
  std::copy_n(total.data(), heads, output<float>(grad_A_log));
  std::copy_n(total.data() + heads, heads, output<float>(grad_dt_bias));
  if (!b) return;
  dispatch(b->scalar_type(), "b", [&]<class B>(B*) {
    const auto grads = rows_in<B>(*grad_beta), from = rows_in<B>(*b);
    const auto to = rows_out<B>(*grad_b);
    const AsOne one(heads, rows, {grads.step, from.step, to.step});
    parallel(rows, heads * kCost, [&](int64_t begin, int64_t end) {
      const int64_t most = staged_at_once<B>(end - begin, heads, one.brings);
      Staged<B> of_grad(most, heads, one.brought(grads.step));
      Staged<B> of_b(most, heads, one.brought(from.step));
      Staged<B> of_grad_b(most, heads, one.brought(to.step));
      in_blocks(begin, end, most, [&](int64_t row, int64_t count) {
        const auto written = to.from(row);
        const auto grad = of_grad.read(grads.from(row), count);
        const auto read = of_b.read(from.from(row), count);
        in_wide_rows(count, one.times, [&](int64_t first, int64_t many, int64_t each) {
          beta_gradient_rows(wide(grad, first, each), wide(read, first, each),
                             wide(of_grad_b.to(written), first, each), static_cast<float>(scale),
                             many, heads * each);
        });
        of_grad_b.written(written, count);
      });
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(npu_ops, CPU, m) {
  m.impl("gdn_gate_cpu", TORCH_BOX(&forward));
  m.impl("gdn_gate_backward_cpu", TORCH_BOX(&backward));
}

}  // namespace npu_ops
