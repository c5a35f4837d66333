// gdn_gate on the CPU. Definition: npu_ops/ops/gdn_gate/reference.py
#include <cmath>
#include <optional>

#include "common/check.h"
#include "common/math.h"
#include "common/parallel.h"
#include "common/partials.h"

namespace npu_ops {
namespace {

// What softplus is: log(1 + exp(beta x)) / beta, or x where beta x is above the threshold.
struct Softplus {
  Softplus(double beta, double threshold)
      : beta(static_cast<float>(beta)), threshold(static_cast<float>(threshold)) {}
  // Of beta x: softplus(x) times beta, and the derivative of softplus at x.
  NPU_OPS_INLINE float value(float x) const { return x > threshold ? x : softplus(x); }
  NPU_OPS_INLINE float slope(float x) const { return x > threshold ? 1.0f : sigmoid(x); }
  float beta, threshold;
};

// -exp(A_log) / beta and beta dt_bias in fp32.
struct Heads {
  Heads(const Tensor& A_log, const std::optional<Tensor>& dt_bias, float beta)
      : decay(A_log.numel()), bias(A_log.numel(), 0.0f) {
    widen(A_log, decay);
    for (float& value : decay) value = -std::exp(value) / beta;
    if (dt_bias) widen(*dt_bias, bias);
    for (float& value : bias) value *= beta;
  }
  static void widen(const Tensor& tensor, std::vector<float>& out) {
    dispatch(tensor.scalar_type(), "A_log", [&]<class T>(T*) {
      const T* in = input<T>(tensor);
      for (size_t i = 0; i < out.size(); ++i) out[i] = load(in[i]);
    });
  }
  std::vector<float> decay, bias;
};

// Rows of a [rows, HV] tensor.
template <class T>
struct Matrix {
  explicit Matrix(const Tensor& tensor)
      : data(const_cast<T*>(input<T>(tensor))), step(tensor.stride(0)) {}
  NPU_OPS_INLINE T* row(int64_t index) const { return data + index * step; }
  T* data;
  int64_t step;
};

struct Range {
  int64_t begin, end;
};

template <class A>
NPU_OPS_CLONES void decay_rows(Matrix<A> a, const float* decay, const float* bias, Matrix<float> g,
                               Softplus plus, Range rows, int64_t heads) {
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const A* from = a.row(row);
    float* to = g.row(row);
#pragma GCC ivdep
    for (int64_t i = 0; i < heads; ++i)
      to[i] = decay[i] * plus.value(plus.beta * load(from[i]) + bias[i]);
  }
}

template <class B>
NPU_OPS_CLONES void beta_rows(Matrix<B> b, Matrix<B> beta, float scale, Range rows, int64_t heads) {
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const B* from = b.row(row);
    B* to = beta.row(row);
#pragma GCC ivdep
    for (int64_t i = 0; i < heads; ++i) store(to + i, scale * sigmoid(load(from[i])));
  }
}

// sums: of A_log's gradient, then of dt_bias's.
template <class A>
NPU_OPS_CLONES void decay_gradient_rows(Matrix<float> grad_g, Matrix<A> a, const float* decay,
                                        const float* bias, Matrix<A> grad_a, float* sums,
                                        Softplus plus, Range rows, int64_t heads) {
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const float* grad = grad_g.row(row);
    const A* from = a.row(row);
    A* to = grad_a.row(row);
#pragma GCC ivdep
    for (int64_t i = 0; i < heads; ++i) {
      const float x = plus.beta * load(from[i]) + bias[i], of_decay = grad[i] * decay[i];
      const float of_a = of_decay * plus.beta * plus.slope(x);
      store(to + i, of_a);
      sums[i] += of_decay * plus.value(x);
      sums[heads + i] += of_a;
    }
  }
}

template <class B>
NPU_OPS_CLONES void beta_gradient_rows(Matrix<B> grad_beta, Matrix<B> b, Matrix<B> grad_b,
                                       float scale, Range rows, int64_t heads) {
  for (int64_t row = rows.begin; row < rows.end; ++row) {
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
  const int64_t rows = a.size(0), heads = a.size(1);
  const Softplus plus(softplus_beta, softplus_threshold);
  const Heads of(A_log, dt_bias, plus.beta);
  dispatch(a.scalar_type(), "a", [&]<class A>(A*) {
    const Matrix<A> from(a);
    const Matrix<float> to(g);
    parallel(rows, heads * kCost, [&](int64_t begin, int64_t end) {
      decay_rows(from, of.decay.data(), of.bias.data(), to, plus, {begin, end}, heads);
    });
  });
  if (!b) return;
  dispatch(b->scalar_type(), "b", [&]<class B>(B*) {
    const Matrix<B> from(*b), to(*beta);
    parallel(rows, heads * kCost, [&](int64_t begin, int64_t end) {
      beta_rows(from, to, static_cast<float>(scale), {begin, end}, heads);
    });
  });
}

void backward(Tensor grad_g, std::optional<Tensor> grad_beta, Tensor a, Tensor A_log,
              std::optional<Tensor> dt_bias, std::optional<Tensor> b, double scale,
              double softplus_beta, double softplus_threshold, Tensor grad_a, Tensor grad_A_log,
              Tensor grad_dt_bias, std::optional<Tensor> grad_b) {
  const int64_t rows = a.size(0), heads = a.size(1);
  const Softplus plus(softplus_beta, softplus_threshold);
  const Heads of(A_log, dt_bias, plus.beta);
  Partials sums(rows, 2 * heads, true);
  const int64_t block_rows = sums.block_rows, cost = block_rows * heads * kCost;
  dispatch(a.scalar_type(), "a", [&]<class A>(A*) {
    const Matrix<float> grads(grad_g);
    const Matrix<A> from(a), to(grad_a);
    parallel(sums.blocks, cost, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        const Range range{block * block_rows, std::min(rows, (block + 1) * block_rows)};
        decay_gradient_rows(grads, from, of.decay.data(), of.bias.data(), to, sums.block(block),
                            plus, range, heads);
      }
    });
  });
  std::vector<float> total(2 * heads);
  sums.total(total.data());
  std::copy_n(total.data(), heads, output<float>(grad_A_log));
  std::copy_n(total.data() + heads, heads, output<float>(grad_dt_bias));
  if (!b) return;
  dispatch(b->scalar_type(), "b", [&]<class B>(B*) {
    const Matrix<B> grads(*grad_beta), from(*b), to(*grad_b);
    parallel(rows, heads * kCost, [&](int64_t begin, int64_t end) {
      beta_gradient_rows(grads, from, to, static_cast<float>(scale), {begin, end}, heads);
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(npu_ops, CPU, m) {
  m.impl("gdn_gate_cpu", TORCH_BOX(&forward));
  m.impl("gdn_gate_backward_cpu", TORCH_BOX(&backward));
}

}  // namespace npu_ops
