// l2norm on the CPU. Definition: npu_ops/ops/l2norm/reference.py
#include "common/rows.h"
#include "common/staged.h"
#include "l2norm/normalize.h"

namespace npu_ops {
namespace {

// Of two types, fp16 goes through rows of fp32.
template <class X, class O>
void normalize_rows(Strided<const X> from, Strided<O> to, int64_t count, int64_t width, float eps) {
  if constexpr (std::is_same_v<X, O>) {
    normalize(from, to, count, width, eps);
  } else {
    const int64_t most = staged_at_once<X, O>(count, width);
    Staged<X> of_x(most, width);
    Staged<O> of_out(most, width);
    in_blocks(0, count, most, [&](int64_t row, int64_t rows) {
      normalize(of_x.read(from.from(row), rows), of_out.to(to.from(row)), rows, width, eps);
      of_out.written(to.from(row), rows);
    });
  }
}

template <class G, class X>
void normalize_rows_backward(Strided<const G> grads, Strided<const X> from, Strided<X> to,
                             int64_t count, int64_t width, float eps) {
  if constexpr (std::is_same_v<G, X>) {
    normalize_backward(grads, from, to, count, width, eps);
  } else {
    const int64_t most = staged_at_once<G, X>(count, width);
    Staged<G> of_grad(most, width);
    Staged<X> of_x(most, width), of_grad_x(most, width);
    in_blocks(0, count, most, [&](int64_t row, int64_t rows) {
      normalize_backward(of_grad.read(grads.from(row), rows), of_x.read(from.from(row), rows),
                         of_grad_x.to(to.from(row)), rows, width, eps);
      of_grad_x.written(to.from(row), rows);
    });
  }
}

void forward(Tensor x, double eps, Tensor out) {
  const Rows from(x), to(out);
  const int64_t width = x.size(-1);
  prefer_huge_pages(out);
  dispatch(x.scalar_type(), "x", [&]<class X>(X*) {
    dispatch(out.scalar_type(), "out", [&]<class O>(O*) {
      const X* in = input<X>(x);
      O* result = output<O>(out);
      parallel_runs(from, width, [&](int64_t outer, int64_t first, int64_t count) {
        normalize_rows(Strided<const X>{in + from.at(outer, first), from.step},
                       Strided<O>{result + to.at(outer, first), to.step}, count, width,
                       static_cast<float>(eps));
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
        normalize_rows_backward(Strided<const G>{grads + given.at(outer, first), given.step},
                                Strided<const X>{in + from.at(outer, first), from.step},
                                Strided<X>{result + to.at(outer, first), to.step}, count, width,
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
