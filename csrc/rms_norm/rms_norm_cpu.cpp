// rms_norm and add_rms_norm on the CPU. Reference: npu_ops/ops/rms_norm/reference.py
#include <optional>
#include <vector>

#include "common/partials.h"
#include "common/rows.h"
#include "common/sum.h"

namespace npu_ops {
namespace {

// Returns weight, or 1 + weight, in fp32.
std::vector<float> widened(const Tensor& weight, bool zero_centered) {
  std::vector<float> values(weight.numel());
  dispatch(weight.scalar_type(), "weight",
           [&]<class W>(W*) { widen(input<W>(weight), values.data(), weight.numel()); });
  if (zero_centered)
    for (float& value : values) value += 1.0f;
  return values;
}

template <class X>
NPU_OPS_CLONES void forward_row(const X* x, const float* weight, X* out, int64_t width, float eps) {
  const float r = reciprocal_rms(x, width, eps);
#pragma GCC ivdep
  for (int64_t i = 0; i < width; ++i) store(out + i, load(x[i]) * r * weight[i]);
}

template <class X>
NPU_OPS_CLONES void add_row(const X* x, const X* residual, X* total, int64_t width) {
#pragma GCC ivdep
  for (int64_t i = 0; i < width; ++i) store(total + i, load(x[i]) + load(residual[i]));
}

// grad_n: scratch of `width` floats.
template <bool WITH_TOTAL, class X, class Y>
NPU_OPS_CLONES void backward_row(const X* grad, const X* grad_total, const X* x,
                                 const float* weight, Y* grad_x, float* grad_weight, float* grad_n,
                                 int64_t width, float eps) {
  const float r = reciprocal_rms(x, width, eps);
#pragma GCC ivdep
  for (int64_t i = 0; i < width; ++i) {
    grad_n[i] = load(grad[i]) * weight[i];
    grad_weight[i] += load(grad[i]) * (load(x[i]) * r);
  }
  const float along = r * (r * (dot(grad_n, x, width) / static_cast<float>(width)));
#pragma GCC ivdep
  for (int64_t i = 0; i < width; ++i)
    store(grad_x + i,
          r * (grad_n[i] - load(x[i]) * along) + (WITH_TOTAL ? load(grad_total[i]) : 0.0f));
}

// An element costs about three times as much as copying one.
constexpr int64_t kCost = 3;

void forward(Tensor x, Tensor weight, double eps, bool zero_centered, Tensor out) {
  const std::vector<float> w = widened(weight, zero_centered);
  dispatch(x.scalar_type(), "x", [&]<class X>(X*) {
    const auto row = [&](auto* in, auto* to, int64_t width) {
      forward_row(in, w.data(), to, width, static_cast<float>(eps));
    };
    each_row(row, rows_in<X>(x), rows_out<X>(out));
  });
}

void add_forward(Tensor x, Tensor residual, Tensor weight, double eps, bool zero_centered,
                 Tensor out, Tensor total) {
  const auto add = [](auto* in, auto* more, auto* to, int64_t width) {
    add_row(in, more, to, width);
  };
  dispatch(x.scalar_type(), "x", [&]<class X>(X*) {
    each_row(add, rows_in<X>(x), rows_in<X>(residual), rows_out<X>(total));
  });
  forward(total, weight, eps, zero_centered, out);
}

// grad_total: ignored unless WITH_TOTAL.
template <bool WITH_TOTAL>
void gradients(const Tensor& grad_out, const Tensor& grad_total, const Tensor& total,
               const Tensor& weight, double eps, bool zero_centered, const Tensor& grad_x,
               const Tensor& grad_weight) {
  const std::vector<float> w = widened(weight, zero_centered);
  const int64_t width = total.size(-1), rows = total.numel() / width;
  Partials sums(rows, width, kCost * width);
  dispatch(total.scalar_type(), "total", [&]<class X>(X*) {
    sums.each_block([&](int64_t begin, int64_t end, float* sum) {
      std::vector<float> grad_n(width);
      const auto row = [&](int64_t, auto* grad, auto* of_total, auto* x, auto* to) {
        backward_row<WITH_TOTAL>(grad, of_total, x, w.data(), to, sum, grad_n.data(), width,
                                 static_cast<float>(eps));
      };
      each_row_of(begin, end, row, rows_in<X>(grad_out), rows_in<X>(grad_total), rows_in<X>(total),
                  rows_out<X>(grad_x));
    });
  });
  sums.total(output<float>(grad_weight));
}

void backward(Tensor grad, Tensor x, Tensor weight, double eps, bool zero_centered, Tensor grad_x,
              Tensor grad_weight) {
  gradients<false>(grad, grad, x, weight, eps, zero_centered, grad_x, grad_weight);
}

void add_backward(Tensor grad_out, std::optional<Tensor> grad_total, Tensor total, Tensor weight,
                  double eps, bool zero_centered, Tensor grad_x, Tensor grad_weight) {
  const auto all = grad_total ? gradients<true> : gradients<false>;
  all(grad_out, grad_total ? *grad_total : grad_out, total, weight, eps, zero_centered, grad_x,
      grad_weight);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(npu_ops, CPU, m) {
  m.impl("rms_norm_cpu", TORCH_BOX(&forward));
  m.impl("rms_norm_backward_cpu", TORCH_BOX(&backward));
  m.impl("add_rms_norm_cpu", TORCH_BOX(&add_forward));
  m.impl("add_rms_norm_backward_cpu", TORCH_BOX(&add_backward));
}

}  // namespace npu_ops
