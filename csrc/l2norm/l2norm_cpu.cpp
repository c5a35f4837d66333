// l2norm on the CPU. Definition: npu_ops/ops/l2norm/reference.py
#include <cmath>

#include "common/rows.h"
#include "common/sum.h"

namespace npu_ops {
namespace {

template <class X>
NPU_OPS_INLINE float reciprocal_norm(const X* x, int64_t width, float eps) {
  const float squares = sum(width, [&](int64_t i) { return load(x[i]) * load(x[i]); });
  return 1.0f / std::sqrt(squares + eps);
}

template <class X, class O>
NPU_OPS_CLONES void normalize(const X* x, int64_t x_step, O* out, int64_t out_step, int64_t rows,
                              int64_t width, float eps) {
  for (; rows > 0; --rows, x += x_step, out += out_step) {
    const float rstd = reciprocal_norm(x, width, eps);
#pragma GCC ivdep
    for (int64_t i = 0; i < width; ++i) store(out + i, load(x[i]) * rstd);
  }
}

template <class G, class X>
NPU_OPS_CLONES void gradient(const G* grad, int64_t grad_step, const X* x, int64_t x_step,
                             X* grad_x, int64_t out_step, int64_t rows, int64_t width, float eps) {
  for (; rows > 0; --rows, grad += grad_step, x += x_step, grad_x += out_step) {
    const float rstd = reciprocal_norm(x, width, eps);
    const float dot = sum(width, [&](int64_t i) { return load(grad[i]) * load(x[i]); });
    const float along = rstd * (rstd * dot);
#pragma GCC ivdep
    for (int64_t i = 0; i < width; ++i)
      store(grad_x + i, rstd * (load(grad[i]) - load(x[i]) * along));
  }
}

void forward(Tensor x, double eps, Tensor out) {
  const Rows from(x), to(out);
  const int64_t width = x.size(2);
  prefer_huge_pages(out);
  dispatch(x.scalar_type(), "x", [&]<class X>(X*) {
    dispatch(out.scalar_type(), "out", [&]<class O>(O*) {
      const X* in = input<X>(x);
      O* result = output<O>(out);
      parallel_runs(from, width, [&](int64_t outer, int64_t first, int64_t count) {
        normalize(in + from.at(outer, first), from.step, result + to.at(outer, first), to.step,
                  count, width, static_cast<float>(eps));
      });
    });
  });
}

void backward(Tensor grad, Tensor x, double eps, Tensor grad_x) {
  const Rows slope(grad), from(x), to(grad_x);
  const int64_t width = x.size(2);
  prefer_huge_pages(grad_x);
  dispatch(grad.scalar_type(), "grad", [&]<class G>(G*) {
    dispatch(x.scalar_type(), "x", [&]<class X>(X*) {
      const G* grads = input<G>(grad);
      const X* in = input<X>(x);
      X* result = output<X>(grad_x);
      parallel_runs(from, width, [&](int64_t outer, int64_t first, int64_t count) {
        gradient(grads + slope.at(outer, first), slope.step, in + from.at(outer, first), from.step,
                 result + to.at(outer, first), to.step, count, width, static_cast<float>(eps));
      });
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(npu_ops, CPU, m) {
  m.impl("l2norm_cpu", TORCH_BOX(&forward));
  m.impl("l2norm_backward_cpu", TORCH_BOX(&backward));
}

}  // namespace npu_ops
