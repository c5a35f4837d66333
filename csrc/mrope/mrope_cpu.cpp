// mrope on the CPU. Reference: npu_ops/ops/mrope/reference.py
#include "mrope/sections.h"

namespace npu_ops {
namespace {

void mrope(Tensor q, Tensor k, Tensor cos, Tensor sin, std::optional<Tensor> positions,
           std::vector<int64_t> section, std::string section_layout, std::string layout,
           std::string pair_layout, bool inverse, int64_t rotary_dim, Tensor q_out, Tensor k_out) {
  const PairLayout pair(pair_layout, rotary_dim, cos.size(-1));
  const Rows rows(positions, cos.size(2), length_of(q, layout));
  const auto spans = owned(section, section_layout == "interleaved", pair.pairs);
  const auto table_row = [&](const Tensor& table, int64_t axis, int64_t b, int64_t row) {
    return (table.size(0) == 1 ? 0 : axis * table.stride(0)) +
           (table.size(1) == 1 ? 0 : b * table.stride(1)) + row * table.stride(2);
  };
  dispatch(cos.scalar_type(), "cos", [&]<class C>(C*) {
    rotate_all(q, k, q_out, k_out, layout, pair, [&](int64_t b, int64_t s, Coefficients to) {
      for (int64_t axis = 0; axis < 3; ++axis) {
        const int64_t row = rows.at(axis, b, s);
        take(input<C>(cos) + table_row(cos, axis, b, row),
             input<C>(sin) + table_row(sin, axis, b, row), to, spans[axis], pair.step, pair.shift,
             inverse);
      }
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(npu_ops, CPU, m) { m.impl("mrope_cpu", TORCH_BOX(&mrope)); }

}  // namespace npu_ops
