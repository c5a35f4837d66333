// gdn_gate on the CPU. Reference: npu_ops/ops/gdn_gate/reference.py
#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "common/check.h"
#include "common/math.h"
#include "common/parallel.h"
#include "common/partials.h"
#include "common/rows.h"

namespace npu_ops {
namespace {

// softplus is log(1 + exp(beta x)) / beta, or x where beta x is above the threshold.
//
// exp(A_log) and softplus may leave the range of floats even if their product does not. So the
// product is computed as root^2 softplus(near) with near = max(x, -17): below -17, softplus(x) is
// e^x, and root includes the factor e^(x + 17).
struct Softplus {
  Softplus(double beta, double threshold)
      : beta(static_cast<float>(beta)), threshold(static_cast<float>(threshold)) {}
  static constexpr float kFar = -17.0f;
  // Returns root. Here x is beta * (a + dt_bias).
  NPU_OPS_INLINE static float root(float x, float A_log) {
    return exp_within(0.5f * (A_log + (x < kFar ? x - kFar : 0.0f)));
  }
  NPU_OPS_INLINE static float near(float x) { return x < kFar ? kFar : x; }
  // For x = near(...), `value` returns softplus(x); `both` computes softplus(x) and its derivative
  // from one exp.
  NPU_OPS_INLINE float value(float x) const { return (x > threshold ? x : softplus(x)) / beta; }
  NPU_OPS_INLINE void both(float x, float& value, float& slope) const {
    const float e = exp_within(-std::fabs(x)), low = x < 0.0f ? e : 1.0f;
    value = (x > threshold ? x : softplus(x, e)) / beta;
    slope = x > threshold ? 1.0f : low / (1.0f + e);
  }
  float beta, threshold;
};

// A_log and beta * dt_bias of all heads, in fp32.
struct Heads {
  Heads(const Tensor& A_log, const std::optional<Tensor>& dt_bias, float beta)
      : A_log(A_log.numel()), bias(A_log.numel(), 0.0f) {
    read(A_log, this->A_log);
    if (dt_bias) read(*dt_bias, bias);
    for (float& value : bias) value *= beta;
  }
  static void read(const Tensor& tensor, std::vector<float>& out) {
    dispatch(tensor.scalar_type(), "A_log",
             [&]<class T>(T*) { widen(input<T>(tensor), out.data(), tensor.numel()); });
  }
  std::vector<float> A_log, bias;
};

template <class A>
NPU_OPS_CLONES void decay_row(const A* a, const float* A_log, const float* bias, float* g,
                              Softplus plus, int64_t heads) {
#pragma GCC ivdep
  for (int64_t i = 0; i < heads; ++i) {
    const float x = plus.beta * load(a[i]) + bias[i], root = plus.root(x, A_log[i]);
    g[i] = -(root * plus.value(plus.near(x))) * root;
  }
}

template <class B, class O>
NPU_OPS_CLONES void beta_row(const B* b, O* beta, float scale, int64_t heads) {
#pragma GCC ivdep
  for (int64_t i = 0; i < heads; ++i) store(beta + i, scale * sigmoid(load(b[i])));
}

// Adds to sums, [2, heads], the gradients of A_log and of dt_bias.
template <class A, class O>
NPU_OPS_CLONES void decay_gradient_row(const float* grad, const A* a, const float* A_log,
                                       const float* bias, O* grad_a, float* sums, Softplus plus,
                                       int64_t heads) {
#pragma GCC ivdep
  for (int64_t i = 0; i < heads; ++i) {
    const float x = plus.beta * load(a[i]) + bias[i], root = plus.root(x, A_log[i]);
    float value, slope;
    plus.both(plus.near(x), value, slope);
    const float of_a = -(root * slope) * grad[i] * root;
    store(grad_a + i, of_a);
    sums[i] -= root * value * grad[i] * root;
    sums[heads + i] += of_a;
  }
}

template <class G, class B, class O>
NPU_OPS_CLONES void beta_gradient_row(const G* grad, const B* b, O* grad_b, float scale,
                                      int64_t heads) {
#pragma GCC ivdep
  for (int64_t i = 0; i < heads; ++i)
    store(grad_b + i, load(grad[i]) * scale * sigmoid_slope(load(b[i])));
}

// An element costs about ten times as much as copying one.
constexpr int64_t kCost = 10;

void forward(Tensor a, Tensor A_log, std::optional<Tensor> dt_bias, std::optional<Tensor> b,
             double scale, double softplus_beta, double softplus_threshold, Tensor g,
             std::optional<Tensor> beta) {
  const int64_t heads = a.size(-1), rows = a.numel() / heads;
  const Softplus plus(softplus_beta, softplus_threshold);
  const Heads of(A_log, dt_bias, plus.beta);
  const auto decay = [&](int64_t, auto* in, float* out) {
    decay_row(in, of.A_log.data(), of.bias.data(), out, plus, heads);
  };
  const auto gate = [&](int64_t, auto* in, auto* out) {
    beta_row(in, out, static_cast<float>(scale), heads);
  };
  dispatch(a.scalar_type(), "a", [&]<class A>(A*) {
    parallel(rows, heads * kCost, [&](int64_t begin, int64_t end) {
      each_row_of(begin, end, decay, rows_in<A>(a), rows_out<float>(g));
    });
  });
  if (!b) return;
  dispatch(b->scalar_type(), "b", [&]<class B>(B*) {
    parallel(rows, heads * kCost, [&](int64_t begin, int64_t end) {
      each_row_of(begin, end, gate, rows_in<B>(*b), rows_out<B>(*beta));
    });
  });
}

void backward(Tensor grad_g, std::optional<Tensor> grad_beta, Tensor a, Tensor A_log,
              std::optional<Tensor> dt_bias, std::optional<Tensor> b, double scale,
              double softplus_beta, double softplus_threshold, Tensor grad_a, Tensor grad_A_log,
              Tensor grad_dt_bias, std::optional<Tensor> grad_b) {
  const int64_t heads = a.size(-1), rows = a.numel() / heads;
  const Softplus plus(softplus_beta, softplus_threshold);
  const Heads of(A_log, dt_bias, plus.beta);
  Partials sums(rows, 2 * heads, heads * kCost);
  dispatch(a.scalar_type(), "a", [&]<class A>(A*) {
    sums.each_block([&](int64_t begin, int64_t end, float* sum) {
      const auto row = [&](int64_t, const float* grad, auto* in, auto* out) {
        decay_gradient_row(grad, in, of.A_log.data(), of.bias.data(), out, sum, plus, heads);
      };
      each_row_of(begin, end, row, rows_in<float>(grad_g), rows_in<A>(a), rows_out<A>(grad_a));
    });
  });
  std::vector<float> total(2 * heads);
  sums.total(total.data());
  std::copy_n(total.data(), heads, output<float>(grad_A_log));
  std::copy_n(total.data() + heads, heads, output<float>(grad_dt_bias));
  if (!b) return;
  dispatch(b->scalar_type(), "b", [&]<class B>(B*) {
    const auto row = [&](int64_t, auto* grad, auto* in, auto* out) {
      beta_gradient_row(grad, in, out, static_cast<float>(scale), heads);
    };
    parallel(rows, heads * kCost, [&](int64_t begin, int64_t end) {
      each_row_of(begin, end, row, rows_in<B>(*grad_beta), rows_in<B>(*b), rows_out<B>(*grad_b));
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(npu_ops, CPU, m) {
  m.impl("gdn_gate_cpu", TORCH_BOX(&forward));
  m.impl("gdn_gate_backward_cpu", TORCH_BOX(&backward));
}

}  // namespace npu_ops
