// mrope on the CPU. Definition: npu_ops/ops/mrope/reference.py
#include "rope/rotate.h"

namespace npu_ops {
namespace {

// The frequencies that axes T, H and W own. Interleaved, T is given all of them, and H and W then
// take every third of theirs back.
std::vector<Span> owned(const std::vector<int64_t>& section, bool interleaved, int64_t pairs) {
  const int64_t t = section[0], h = section[1], w = section[2];
  if (interleaved) return {{0, pairs, 1}, {1, 3 * h, 3}, {2, 3 * w, 3}};
  return {{0, t, 1}, {t, t + h, 1}, {t + h, t + h + w, 1}};
}

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
