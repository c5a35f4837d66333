// Launches the AscendC kernels of rope and mrope; qk_norm_rope shares parts of it.
#pragma once

#include <optional>

#include "common/ascendc_launch.h"
#include "rope/rotary_tiling.h"
#include "rope/rotate.h"

namespace npu_ops {

struct RotaryArguments {
  const Tensor &q, &k, &cos, &sin;
  const std::optional<Tensor>& positions;
  const std::string &layout, &pair_layout;
  bool inverse;
  int64_t rotary_dim;
  const Tensor &q_out, &k_out;
};

inline HeadTensor heads_of(const Tensor& x, const std::string& layout) {
  const auto stride = [&](char axis) {
    const size_t at = layout.find(axis);
    return at == std::string::npos ? 0 : x.stride(static_cast<int64_t>(at));
  };
  const char token = layout == "TND" ? 'T' : 'S';
  const auto count = x.size(static_cast<int64_t>(layout.find('N')));
  return {0, stride('B'), stride(token), stride('N'), static_cast<int32_t>(count)};
}

// Returns the strides of a table [..., batch, rows, width] if `behind` is 1, or of positions [...,
// batch, tokens] if it is 0. An axis or batch of size 1 is broadcast: its stride is 0.
inline Table table_of(const Tensor& table, int64_t behind) {
  const auto stride = [&](int64_t from_end) {
    const int64_t at = table.dim() - 1 - from_end;
    return at < 0 || table.size(at) == 1 ? 0 : table.stride(at);
  };
  const int64_t row = table.stride(table.dim() - 1 - behind);
  return {stride(2 + behind), stride(1 + behind), row};
}

// Returns the tiling of a rotation's angles. `owned`: for each axis, the pairs that take its
// frequencies; a later axis overrides earlier ones. `length`: tokens per batch element.
inline AnglesTiling angles_of(const Tensor& cos, const Tensor& sin,
                              const std::optional<Tensor>& positions,
                              const std::string& pair_layout, bool inverse, int64_t rotary_dim,
                              int64_t length, const std::vector<Span>& owned) {
  AnglesTiling angles{};
  angles.cos = table_of(cos, 1);
  angles.sin = table_of(sin, 1);
  if (positions) angles.positions = table_of(*positions, 0);
  angles.wide_positions = positions && positions->scalar_type() == ScalarType::Long;
  angles.table_type = element_type(cos, "cos");
  angles.length = length;
  angles.table_rows = cos.size(cos.dim() - 2);
  angles.table_width = static_cast<int32_t>(cos.size(cos.dim() - 1));
  angles.rotary_dim = static_cast<int32_t>(rotary_dim);
  angles.axes = static_cast<int32_t>(owned.size());
  angles.interleaved = pair_layout == "interleaved";
  angles.inverse = inverse;
  for (size_t axis = 0; axis < owned.size(); ++axis)
    for (int64_t pair = owned[axis].begin; pair < owned[axis].end; pair += owned[axis].by)
      angles.axis_of_pair[pair] = static_cast<uint8_t>(axis);
  return angles;
}

inline void launch_rotary(const char* kernel, const RotaryArguments& given,
                          const std::vector<Span>& owned, const KernelTarget& target) {
  const auto& [q, k, cos, sin, positions, layout, pair_layout, inverse, rotary_dim, q_out, k_out] =
      given;
  const int64_t length = q.size(static_cast<int64_t>(layout.find_first_of("ST")));
  const int64_t batch = layout == "TND" ? 1 : q.size(static_cast<int64_t>(layout.find('B')));
  RotaryTiling tiling{};
  tiling.angles = angles_of(cos, sin, positions, pair_layout, inverse, rotary_dim, length, owned);
  tiling.q = heads_of(q, layout);
  tiling.k = heads_of(k, layout);
  tiling.q_out = heads_of(q_out, layout);
  tiling.k_out = heads_of(k_out, layout);
  tiling.type = element_type(q, "q");
  // In place, elements beyond rotary_dim need no copy. But tokens of no sequence need zeros in all
  // elements.
  const bool may_be_nobodys = positions && layout == "TND";
  const bool in_place = q.const_data_ptr() == q_out.const_data_ptr() && !may_be_nobodys;
  tiling.rows.groups = static_cast<int32_t>(batch * length);
  tiling.rows.rows = tiling.q.count + tiling.k.count;
  tiling.rows.inner = 1;
  tiling.rows.width = static_cast<int32_t>(in_place ? rotary_dim : q.size(q.dim() - 1));
  const int64_t queues = 4 * static_cast<int64_t>(q.element_size());
  cut_rows(tiling.rows, target.cores, target.ub_bytes, queues + kRotaryElementBytes, 0,
           kAnglesFixedBytes);
  launch_ascendc(target, kernel, tiling.rows.pieces(),
                 NPU_OPS_TENSORS(q, k, cos, sin, positions, q_out, k_out), tiling);
}

}  // namespace npu_ops
