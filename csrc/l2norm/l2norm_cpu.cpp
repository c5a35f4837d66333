// l2norm on the CPU. Definition: npu_ops/ops/l2norm/reference.py
#include "common/rows.h"
#include "common/staged.h"
#include "l2norm/normalize.h"

namespace npu_ops {
namespace {

void forward(Tensor x, double eps, Tensor out) {
  const Rows from(x), to(out);
  const int64_t width = x.size(-1);
  prefer_huge_pages(out);
  dispatch(x.scalar_type(), "x", [&]<class X>(X*) {
    dispatch(out.scalar_type(), "out", [&]<class O>(O*) {
      const X* in = input<X>(x);
      O* result = output<O>(out);
      parallel_runs(from, width, [&](int64_t outer, int64_t first, int64_t count) {
        const int64_t most = staged_at_once<X, O>(count, width);
        Staged<X> of_x(most, width);
        Staged<O> of_out(most, width);
        in_blocks(first, first + count, most, [&](int64_t row, int64_t rows) {
          const Strided<O> written{result + to.at(outer, row), to.step};
          normalize(of_x.read({in + from.at(outer, row), from.step}, rows), of_out.to(written),
                    rows, width, static_cast<float>(eps));
          of_out.written(written, rows);
        });
      });
    });
  });
}

void backward(Tensor grad, Tensor x, double eps, Tensor grad_x) {
  const Rows given(grad), from(x), to(grad_x);
  const int64_t width = x.size(-1);
  prefer_huge_pages(grad_x);
  dispatch(grad.scalar_type(), "grad", [&]<class G>(G*) {
    dispatch(x.scalar_type(), "x", [&]<class X>(X*) {
      const G* grads = input<G>(grad);
      const X* in = input<X>(x);
      X* result = output<X>(grad_x);
      parallel_runs(from, width, [&](int64_t outer, int64_t first, int64_t count) {
        const int64_t most = staged_at_once<G, X>(count, width);
        Staged<G> of_grad(most, width);
        Staged<X> of_x(most, width), of_grad_x(most, width);
        in_blocks(first, first + count, most, [&](int64_t row, int64_t rows) {
          const Strided<X> written{result + to.at(outer, row), to.step};
          normalize_backward(of_grad.read({grads + given.at(outer, row), given.step}, rows),
                             of_x.read({in + from.at(outer, row), from.step}, rows),
                             of_grad_x.to(written), rows, width, static_cast<float>(eps));
          of_grad_x.written(written, rows);
        });
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
