// Launches causal_conv1d_update_ascendc.cpp on an NPU.
#include <optional>

#include "causal_conv1d_update/causal_conv1d_update_tiling.h"
#include "common/ascendc_launch.h"

namespace npu_ops {
namespace {

using Optional = std::optional<Tensor>;

Plane plane(const Tensor& tensor, int64_t channel, int64_t column) {
  return {tensor.stride(channel), tensor.stride(column), false};
}

int32_t is_wide(const Optional& indices) {
  return indices && indices->scalar_type() == ScalarType::Long;
}

// Returns the tiling with the sizes, strides and dtypes of the tensors.
CausalConv1dUpdateTiling tiling_of(const Tensor& x, const Tensor& state, const Tensor& weight,
                                   const Optional& bias, const Optional& starts,
                                   const Optional& window, const Tensor& y) {
  CausalConv1dUpdateTiling tiling{};
  tiling.sequences = starts ? starts->size(0) - 1 : x.size(0);
  tiling.tokens = x.size(1);
  tiling.channels = static_cast<int32_t>(x.size(2));
  tiling.width = static_cast<int32_t>(weight.size(1));
  tiling.slots = state.size(0);
  tiling.columns = state.size(2);
  tiling.x_batch = x.stride(0);
  tiling.x_token = x.stride(1);
  tiling.y_batch = y.stride(0);
  tiling.y_token = y.stride(1);
  tiling.state_slot = state.stride(0);
  tiling.state = plane(state, 1, 2);
  const int64_t end = (tiling.channels - 1) * tiling.state.channel + tiling.columns;
  tiling.state.mixed = tiling.slots > 1 && tiling.state_slot < end;
  tiling.weight = plane(weight, 0, 1);
  tiling.window = {1, 1, false};
  if (window) {
    tiling.windows = window->size(0);
    tiling.window_row = window->stride(0);
    tiling.window_token = window->stride(1);
    tiling.window = plane(*window, 2, 3);
  }
  tiling.type = element_type(x, "x");
  tiling.weight_type = element_type(weight, "weight");
  tiling.bias_type = bias ? element_type(*bias, "bias") : kFloat32;
  return tiling;
}

void update(Tensor x, Tensor conv_state, Tensor weight, Optional bias, Optional indices,
            Optional accepted, Optional starts, Optional window, Optional window_indices,
            int64_t pad, bool silu, bool update, Tensor y, std::string binary, int64_t cores,
            int64_t ub, int64_t stream) {
  auto tiling = tiling_of(x, conv_state, weight, bias, starts, window, y);
  tiling.pad = pad;
  tiling.silu = silu;
  tiling.update = update;
  tiling.wide_indices = is_wide(indices);
  tiling.wide_accepted = is_wide(accepted);
  tiling.wide_starts = is_wide(starts);
  tiling.wide_windows = is_wide(window_indices);
  if (tiling.sequences == 0) return;
  cut(tiling, cores, ub);
  launch_ascendc({binary, cores, ub, stream}, "causal_conv1d_update", tiling.pieces(),
                 NPU_OPS_TENSORS(x, conv_state, weight, bias, indices, accepted, starts, window,
                                 window_indices, y),
                 tiling);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(npu_ops, PrivateUse1, m) {
  m.impl("causal_conv1d_update_ascendc", TORCH_BOX(&update));
}

}  // namespace npu_ops
