// Divides rows by their norm, with eps inside the root, and computes the gradient; l2norm and
// causal_conv1d_qkv share it.
#pragma once

#include <cmath>

#include "common/sum.h"

namespace npu_ops {

template <class X, class O>
NPU_OPS_CLONES void normalize(const X* x, O* out, int64_t width, float eps) {
  const float rstd = 1.0f / std::sqrt(dot(x, x, width) + eps);
#pragma GCC ivdep
  for (int64_t i = 0; i < width; ++i) store(out + i, load(x[i]) * rstd);
}

template <class G, class X, class O>
NPU_OPS_CLONES void normalize_backward(const G* grad, const X* x, O* grad_x, int64_t width,
                                       float eps) {
  const float rstd = 1.0f / std::sqrt(dot(x, x, width) + eps);
  const float along = rstd * (rstd * dot(grad, x, width));
#pragma GCC ivdep
  for (int64_t i = 0; i < width; ++i)
    store(grad_x + i, rstd * (load(grad[i]) - load(x[i]) * along));
}

}  // namespace npu_ops
