// Launches gated_delta_rule_update_ascendc.cpp on an NPU.
#include <optional>

#include "common/ascendc_launch.h"
#include "gated_delta_rule_update/gated_delta_rule_update_tiling.h"

namespace npu_ops {
namespace {

using Optional = std::optional<Tensor>;

int32_t is_wide(const Tensor* indices) {
  return indices && indices->scalar_type() == ScalarType::Long;
}

// The unnamed arguments are softplus_beta and softplus_threshold. op.py accepts only calls with
// A_log and dt_bias whose softplus is log(1 + exp(x)).
void update(Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Optional A_log, Optional dt_bias,
            Tensor state, Tensor state_indices, Optional cu_seqlens, Optional num_accepted_tokens,
            Optional intermediate_states, Optional intermediate_state_indices, double scale,
            bool normalize, bool v_first, bool update, double, double, Tensor o, std::string binary,
            int64_t cores, int64_t ub, int64_t stream) {
  GatedDeltaRuleUpdateTiling tiling{};
  tiling.sequences = state_indices.size(0);
  tiling.tokens = q.size(0);
  tiling.length = tiling.tokens / tiling.sequences;
  tiling.slots = state.size(0);
  tiling.slot_per_token = state_indices.dim() == 2;
  tiling.index_sequence = state_indices.stride(0);
  tiling.index_token = tiling.slot_per_token ? state_indices.stride(1) : 0;
  tiling.steps = tiling.slot_per_token ? state_indices.size(1) : 0;
  if (const Tensor* kept = pointer(intermediate_states)) {
    tiling.rows = kept->size(0);
    tiling.steps = kept->size(1);
    tiling.kept_row = kept->stride(0);
    tiling.kept_step = kept->stride(1);
  }
  tiling.q_token = q.stride(0);
  tiling.k_token = k.stride(0);
  tiling.v_token = v.stride(0);
  tiling.a_token = a.stride(0);
  tiling.b_token = b.stride(0);
  tiling.state_slot = state.stride(0);
  tiling.heads = static_cast<int32_t>(q.size(1));
  tiling.value_heads = static_cast<int32_t>(v.size(1));
  tiling.keys = static_cast<int32_t>(q.size(2));
  tiling.values = static_cast<int32_t>(v.size(2));
  tiling.q_type = element_type(q, "q");
  tiling.k_type = element_type(k, "k");
  tiling.v_type = element_type(v, "v");
  tiling.a_type = element_type(a, "a");
  tiling.b_type = element_type(b, "b");
  tiling.rate_type = element_type(A_log.value(), "A_log");
  tiling.bias_type = element_type(dt_bias.value(), "dt_bias");
  tiling.state_type = element_type(state, "state");
  tiling.wide_indices = is_wide(&state_indices);
  tiling.wide_starts = is_wide(pointer(cu_seqlens));
  tiling.wide_accepted = is_wide(pointer(num_accepted_tokens));
  tiling.wide_kept = is_wide(pointer(intermediate_state_indices));
  tiling.packed = cu_seqlens.has_value();
  tiling.normalize = normalize;
  tiling.v_first = v_first;
  tiling.update = update;
  tiling.scale = static_cast<float>(scale);
  cut(tiling, cores, ub);
  launch_ascendc(
      {binary, cores, ub, stream}, "gated_delta_rule_update", tiling.pieces(),
      NPU_OPS_TENSORS(q, k, v, a, b, A_log, dt_bias, state, state_indices, cu_seqlens,
                      num_accepted_tokens, intermediate_states, intermediate_state_indices, o),
      tiling);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(npu_ops, PrivateUse1, m) {
  m.impl("gated_delta_rule_update_ascendc", TORCH_BOX(&update));
}

}  // namespace npu_ops
