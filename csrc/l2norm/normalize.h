// Rows over their norm, eps inside the root, and the gradient: what l2norm and causal_conv1d_qkv
// share.
#pragma once

#include <cmath>

#include "common/dot.h"
#include "common/halves.h"
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

// There is too little to do on a row of fp16 for going through rows of fp32.
NPU_OPS_WITHOUT inline void normalize(Strided<const fp16> from, Strided<fp16> to, int64_t rows,
                                      int64_t width, float eps) {
  normalize<fp16, fp16>(from, to, rows, width, eps);
}

NPU_OPS_WITHOUT inline void normalize_backward(Strided<const fp16> grads, Strided<const fp16> from,
                                               Strided<fp16> to, int64_t rows, int64_t width,
                                               float eps) {
  normalize_backward<fp16, fp16>(grads, from, to, rows, width, eps);
}

#ifdef NPU_OPS_X86_CLONES
// As `dot`, in the same order.
NPU_OPS_WITH_F16C NPU_OPS_INLINE float dot_of_eights(const fp16* a, const fp16* b, int64_t width) {
  if (width % kSumLanes) return dot(a, b, width);
  Lanes sums[kSumLanes / kFloats] = {};
  for (int64_t i = 0; i < width; i += kSumLanes)
    for (int64_t j = 0; j < kSumLanes; j += kFloats)
      sums[j / kFloats] += eight(a + i + j) * eight(b + i + j);
  return sum_of(sums);
}

NPU_OPS_WITH_F16C inline void normalize(Strided<const fp16> from, Strided<fp16> to, int64_t rows,
                                        int64_t width, float eps) {
  for (int64_t row = 0; row < rows; ++row) {
    const fp16* x = from.row(row);
    fp16* out = to.row(row);
    const float rstd = 1.0f / std::sqrt(dot_of_eights(x, x, width) + eps);
    int64_t i = 0;
    for (; i + 8 <= width; i += 8) put_eight(out + i, eight(x + i) * rstd);
    for (; i < width; ++i) store(out + i, load(x[i]) * rstd);
  }
}

NPU_OPS_WITH_F16C inline void normalize_backward(Strided<const fp16> grads,
                                                 Strided<const fp16> from, Strided<fp16> to,
                                                 int64_t rows, int64_t width, float eps) {
  for (int64_t row = 0; row < rows; ++row) {
    const fp16 *grad = grads.row(row), *x = from.row(row);
    fp16* grad_x = to.row(row);
    const float rstd = 1.0f / std::sqrt(dot_of_eights(x, x, width) + eps);
    const float along = rstd * (rstd * dot_of_eights(grad, x, width));
    int64_t i = 0;
    for (; i + 8 <= width; i += 8)
      put_eight(grad_x + i, rstd * (eight(grad + i) - eight(x + i) * along));
    for (; i < width; ++i) store(grad_x + i, rstd * (load(grad[i]) - load(x[i]) * along));
  }
}
#endif

}  // namespace npu_ops
