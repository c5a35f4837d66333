// rope on the CPU. Reference: npu_ops/ops/rope/reference.py
#include "rope/rotate.h"

namespace npu_ops {
namespace {

// Writes zeros to the heads of tokens that belong to no sequence.
void clear_nobodys(const Rows& rows, const Tensor& tensor, const std::string& layout) {
  const Heads to(tensor, layout);
  dispatch(tensor.scalar_type(), "q", [&]<class T>(T*) {
    for (int64_t b = 0; b < to.batch; ++b)
      for (int64_t s = 0; s < to.length; ++s)
        for (int64_t n = 0; n < to.heads && rows.at(0, b, s) == kNobody; ++n)
          std::fill_n(output<T>(tensor) + to.at(b, s, n), to.dim, T{});
  });
}

void rope(Tensor q, Tensor k, Tensor cos, Tensor sin, std::optional<Tensor> positions,
          std::string layout, std::string pair_layout, bool inverse, int64_t rotary_dim,
          Tensor q_out, Tensor k_out) {
  const PairLayout pair(pair_layout, rotary_dim, cos.size(-1));
  const Rows rows(positions, cos.size(1), length_of(q, layout), true);
  const int64_t cos_batch = cos.size(0) == 1 ? 0 : cos.stride(0);
  const int64_t sin_batch = sin.size(0) == 1 ? 0 : sin.stride(0);
  dispatch(cos.scalar_type(), "cos", [&]<class C>(C*) {
    rotate_all(q, k, q_out, k_out, layout, pair, [&](int64_t b, int64_t s, Coefficients to) {
      const int64_t row = rows.at(0, b, s);
      if (row == kNobody) return;
      take(input<C>(cos) + b * cos_batch + row * cos.stride(1),
           input<C>(sin) + b * sin_batch + row * sin.stride(1), to, {0, pair.pairs, 1}, pair.step,
           pair.shift, inverse);
    });
  });
  if (!positions) return;
  clear_nobodys(rows, q_out, layout);
  clear_nobodys(rows, k_out, layout);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(npu_ops, CPU, m) { m.impl("rope_cpu", TORCH_BOX(&rope)); }

}  // namespace npu_ops
