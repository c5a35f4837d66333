// Rows over their norm, eps inside the root, and the gradient: what l2norm and causal_conv1d_qkv
// share.
#pragma once

#include <cmath>

#include "common/sum.h"

namespace npu_ops {

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
NPU_OPS_CLONES void normalize_backward(const G* grad, int64_t grad_step, const X* x, int64_t x_step,
                                       X* grad_x, int64_t out_step, int64_t rows, int64_t width,
                                       float eps) {
  for (; rows > 0; --rows, grad += grad_step, x += x_step, grad_x += out_step) {
    const float rstd = reciprocal_norm(x, width, eps);
    const float dot = sum(width, [&](int64_t i) { return load(grad[i]) * load(x[i]); });
    const float along = rstd * (rstd * dot);
#pragma GCC ivdep
    for (int64_t i = 0; i < width; ++i)
      store(grad_x + i, rstd * (load(grad[i]) - load(x[i]) * along));
  }
}

}  // namespace npu_ops
