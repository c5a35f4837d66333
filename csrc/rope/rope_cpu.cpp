// rope on the CPU. Definition: npu_ops/ops/rope/reference.py
#include "rope/rotate.h"

namespace npu_ops {
namespace {

void rope(Tensor q, Tensor k, Tensor cos, Tensor sin, std::optional<Tensor> positions,
          std::string layout, std::string pair_layout, bool inverse, int64_t rotary_dim,
          Tensor q_out, Tensor k_out) {
  const PairLayout pair(pair_layout, rotary_dim, cos.size(-1));
  const Rows rows(positions, cos.size(1), length_of(q, layout));
  const int64_t cos_batch = cos.size(0) == 1 ? 0 : cos.stride(0);
  const int64_t sin_batch = sin.size(0) == 1 ? 0 : sin.stride(0);
  dispatch(cos.scalar_type(), "cos", [&]<class C>(C*) {
    rotate_all(q, k, q_out, k_out, layout, pair, [&](int64_t b, int64_t s, Coefficients to) {
      const int64_t row = rows.at(0, b, s);
      take(input<C>(cos) + b * cos_batch + row * cos.stride(1),
           input<C>(sin) + b * sin_batch + row * sin.stride(1), to, {0, pair.pairs, 1}, pair.step,
           pair.shift, inverse);
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(npu_ops, CPU, m) { m.impl("rope_cpu", TORCH_BOX(&rope)); }

}  // namespace npu_ops
