// l2norm on the CPU. Reference: npu_ops/ops/l2norm/reference.py
#include "common/rows.h"
#include "l2norm/normalize.h"

namespace npu_ops {
namespace {

void forward(Tensor x, double eps, Tensor out) {
  const auto row = [&](auto* in, auto* to, int64_t n) {
    normalize(in, to, n, static_cast<float>(eps));
  };
  dispatch(x.scalar_type(), "x", [&]<class X>(X*) {
    dispatch(out.scalar_type(), "out",
             [&]<class O>(O*) { each_row(row, rows_in<X>(x), rows_out<O>(out)); });
  });
}

void backward(Tensor grad, Tensor x, double eps, Tensor grad_x) {
  const auto row = [&](auto* g, auto* in, auto* to, int64_t n) {
    normalize_backward(g, in, to, n, static_cast<float>(eps));
  };
  dispatch(grad.scalar_type(), "grad", [&]<class G>(G*) {
    dispatch(x.scalar_type(), "x", [&]<class X>(X*) {
      each_row(row, rows_in<G>(grad), rows_in<X>(x), rows_out<X>(grad_x));
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(npu_ops, CPU, m) {
  m.impl("l2norm_cpu", TORCH_BOX(&forward));
  m.impl("l2norm_backward_cpu", TORCH_BOX(&backward));
}

}  // namespace npu_ops
