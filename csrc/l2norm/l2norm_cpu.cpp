// l2norm on the CPU. Definition: npu_ops/ops/l2norm/reference.py
#include "common/rows.h"
#include "l2norm/normalize.h"

namespace npu_ops {
namespace {

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
  const Rows given(grad), from(x), to(grad_x);
  const int64_t width = x.size(2);
  prefer_huge_pages(grad_x);
  dispatch(grad.scalar_type(), "grad", [&]<class G>(G*) {
    dispatch(x.scalar_type(), "x", [&]<class X>(X*) {
      const G* grads = input<G>(grad);
      const X* in = input<X>(x);
      X* result = output<X>(grad_x);
      parallel_runs(from, width, [&](int64_t outer, int64_t first, int64_t count) {
        normalize_backward(grads + given.at(outer, first), given.step, in + from.at(outer, first),
                           from.step, result + to.at(outer, first), to.step, count, width,
                           static_cast<float>(eps));
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
