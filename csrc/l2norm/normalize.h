// Rows over their norm, eps inside the root, and the gradient: what l2norm and causal_conv1d_qkv
// share.
#pragma once

#include <cmath>

#include "common/dot.h"
#include "common/staged.h"

namespace npu_ops {

template <class X>
NPU_OPS_INLINE float reciprocal_norm(const X* x, int64_t width, float eps) {
  return 1.0f / std::sqrt(dot(x, x, width) + eps);
}

template <class X, class O>
NPU_OPS_CLONES void normalize(Strided<const X> from, Strided<O> to, int64_t rows, int64_t width,
                              float eps) {
  for (int64_t row = 0; row < rows; ++row) {
    const X* x = from.row(row);
    O* out = to.row(row);
    const float rstd = reciprocal_norm(x, width, eps);
#pragma GCC ivdep
    for (int64_t i = 0; i < width; ++i) store(out + i, load(x[i]) * rstd);
  }
}

template <class G, class X>
NPU_OPS_CLONES void normalize_backward(Strided<const G> grads, Strided<const X> from, Strided<X> to,
                                       int64_t rows, int64_t width, float eps) {
  for (int64_t row = 0; row < rows; ++row) {
    const G* grad = grads.row(row);
    const X* x = from.row(row);
    X* grad_x = to.row(row);
    const float rstd = reciprocal_norm(x, width, eps);
    const float along = rstd * (rstd * dot(grad, x, width));
#pragma GCC ivdep
    for (int64_t i = 0; i < width; ++i)
      store(grad_x + i, rstd * (load(grad[i]) - load(x[i]) * along));
  }
}

}  // namespace npu_ops
