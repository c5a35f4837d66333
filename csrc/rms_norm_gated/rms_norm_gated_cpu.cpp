// rms_norm_gated on the CPU. Reference: npu_ops/ops/rms_norm_gated/reference.py
#include <cmath>
#include <string>
#include <vector>

#include "common/math.h"
#include "common/partials.h"
#include "common/rows.h"
#include "common/sum.h"

namespace npu_ops {
namespace {

// Returns silu or sigmoid.
template <bool SILU>
NPU_OPS_INLINE float activate(float z) {
  return SILU ? z * sigmoid(z) : sigmoid(z);
}
// Returns silu or sigmoid, and its derivative, from one exponential.
template <bool SILU>
NPU_OPS_INLINE void activate_and_slope(float z, float* gate, float* slope) {
  const float e = exp_within(-std::fabs(z)), s = 1.0f / (1.0f + e);
  const float open = z < 0.0f ? e * s : s, steepness = e * s * s;
  *gate = SILU ? z * open : open;
  *slope = SILU ? open + z * steepness : steepness;
}

// A thread's memory for one row: the value to normalise, the gate, its derivative, and the gradient
// of the value to normalise.
struct Scratch {
  explicit Scratch(int64_t width) : values(4 * width), width(width) {}
  float* part(int64_t index) { return values.data() + index * width; }
  std::vector<float> values;
  int64_t width;
};

// `u`: scratch for the value to normalise. Unused if BEFORE, when x itself is normalised.
template <bool BEFORE, bool SILU, class X>
NPU_OPS_CLONES void forward_row(const X* x, const float* weight, const X* z, X* out, float* u,
                                int64_t width, float eps) {
  if constexpr (BEFORE) {
    const float r = reciprocal_rms(x, width, eps);
#pragma GCC ivdep
    for (int64_t i = 0; i < width; ++i)
      store(out + i, load(x[i]) * r * weight[i] * activate<SILU>(load(z[i])));
  } else {
#pragma GCC ivdep
    for (int64_t i = 0; i < width; ++i) u[i] = load(x[i]) * activate<SILU>(load(z[i]));
    const float r = reciprocal_rms(u, width, eps);
#pragma GCC ivdep
    for (int64_t i = 0; i < width; ++i) store(out + i, u[i] * r * weight[i]);
  }
}

template <bool BEFORE, bool SILU, class X>
NPU_OPS_CLONES void backward_row(const X* grad, const X* x, const float* weight, const X* z,
                                 X* grad_x, float* grad_weight, X* grad_z, float* u, float* gate,
                                 float* slope, float* grad_n, int64_t width, float eps) {
#pragma GCC ivdep
  for (int64_t i = 0; i < width; ++i) {
    const float value = load(z[i]), scaled = load(grad[i]) * weight[i];
    activate_and_slope<SILU>(value, gate + i, slope + i);
    u[i] = BEFORE ? load(x[i]) : load(x[i]) * gate[i];
    grad_n[i] = BEFORE ? scaled * gate[i] : scaled;
  }
  const float r = reciprocal_rms(u, width, eps);
  const float along = r * (r * (dot(grad_n, u, width) / static_cast<float>(width)));
#pragma GCC ivdep
  for (int64_t i = 0; i < width; ++i) {
    const float grad_u = r * (grad_n[i] - u[i] * along), grad_w = load(grad[i]) * (u[i] * r);
    store(grad_x + i, BEFORE ? grad_u : grad_u * gate[i]);
    store(grad_z + i, (BEFORE ? grad_w * weight[i] : grad_u * load(x[i])) * slope[i]);
    grad_weight[i] += BEFORE ? grad_w * gate[i] : grad_w;
  }
}

// Calls body<BEFORE, SILU>.
template <class Body>
void with_formula(bool norm_before_gate, const std::string& activation, const Body& body) {
  const bool silu = activation == "silu";
  if (norm_before_gate)
    return silu ? body.template operator()<true, true>() : body.template operator()<true, false>();
  return silu ? body.template operator()<false, true>() : body.template operator()<false, false>();
}

// weight in fp32: one row for all groups, [D] or [1, D], or a row for each group, [groups, D /
// groups].
struct Weight {
  explicit Weight(const Tensor& weight)
      : values(weight.numel()), step(weight.numel() == weight.size(-1) ? 0 : weight.size(-1)) {
    dispatch(weight.scalar_type(), "weight",
             [&]<class W>(W*) { widen(input<W>(weight), values.data(), weight.numel()); });
  }
  std::vector<float> values;
  int64_t step;
};

// An element costs about four times as much as copying one.
constexpr int64_t kCost = 4;

void forward(Tensor x, Tensor weight, Tensor z, double eps, bool norm_before_gate,
             std::string activation, Tensor out) {
  const Weight weights(weight);
  const int64_t width = x.size(-1), rows = x.numel() / width;
  dispatch(x.scalar_type(), "x", [&]<class X>(X*) {
    with_formula(norm_before_gate, activation, [&]<bool BEFORE, bool SILU>() {
      parallel(rows, kCost * width, [&](int64_t begin, int64_t end) {
        Scratch scratch(width);
        const auto row = [&](int64_t index, auto* in, auto* gate, auto* to) {
          forward_row<BEFORE, SILU>(in, weights.values.data() + index * weights.step, gate, to,
                                    scratch.part(0), width, static_cast<float>(eps));
        };
        each_row_of(begin, end, row, rows_in<X>(x), rows_in<X>(z), rows_out<X>(out));
      });
    });
  });
}

void backward(Tensor grad, Tensor x, Tensor weight, Tensor z, double eps, bool norm_before_gate,
              std::string activation, Tensor grad_x, Tensor grad_weight, Tensor grad_z) {
  const Weight weights(weight);
  const int64_t width = x.size(-1), rows = x.numel() / width;
  Partials sums(rows, weight.numel(), kCost * width);
  dispatch(x.scalar_type(), "x", [&]<class X>(X*) {
    with_formula(norm_before_gate, activation, [&]<bool BEFORE, bool SILU>() {
      sums.each_block([&](int64_t begin, int64_t end, float* sum) {
        Scratch scratch(width);
        const auto row = [&](int64_t index, auto* g, auto* in, auto* gate, auto* to_x, auto* to_z) {
          const int64_t of_weight = index * weights.step;
          backward_row<BEFORE, SILU>(g, in, weights.values.data() + of_weight, gate, to_x,
                                     sum + of_weight, to_z, scratch.part(0), scratch.part(1),
                                     scratch.part(2), scratch.part(3), width,
                                     static_cast<float>(eps));
        };
        each_row_of(begin, end, row, rows_in<X>(grad), rows_in<X>(x), rows_in<X>(z),
                    rows_out<X>(grad_x), rows_out<X>(grad_z));
      });
    });
  });
  sums.total(output<float>(grad_weight));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(npu_ops, CPU, m) {
  m.impl("rms_norm_gated_cpu", TORCH_BOX(&forward));
  m.impl("rms_norm_gated_backward_cpu", TORCH_BOX(&backward));
}

}  // namespace npu_ops
