// Launches qk_norm_rope_ascendc.cpp on an NPU.
#include <algorithm>

#include "mrope/sections.h"
#include "qk_norm_rope/qk_norm_rope_tiling.h"
#include "rope/rotary_launch.h"

namespace npu_ops {
namespace {

// The arguments that forward and backward share.
struct Arguments {
  const Tensor &qkv, &q_weight, &k_weight, &cos, &sin;
  const std::optional<Tensor>& positions;
  int64_t heads, kv_heads;
  double eps;
  bool zero_centered, gated;
  const std::vector<int64_t>& section;
  const std::string &section_layout, &pair_layout;
  int64_t rotary_dim;

  int64_t dim() const { return q_weight.numel(); }
};

// Returns count and strides of the heads of a [B, S, N, D] tensor, or zeros if x is null.
HeadTensor own_heads(const Tensor* x) { return x ? heads_of(*x, "BSND") : HeadTensor{}; }

// Sets count, offset and strides of each kind of head in the projection, or in its gradient. Each
// gate head follows the query head that it belongs to.
void fill_inside(HeadTensor* heads, const Tensor& qkv, const Arguments& given) {
  const int64_t step = given.gated ? 2 : 1, queries = step * given.heads;
  const auto part = [&](int64_t first, int64_t apart, int64_t count) {
    const int64_t dim = given.dim();
    return HeadTensor{first * dim, qkv.stride(0), qkv.stride(1), apart * dim,
                      static_cast<int32_t>(count)};
  };
  heads[0] = part(0, step, given.heads);
  heads[1] = part(queries, 1, given.kv_heads);
  heads[2] = part(queries + given.kv_heads, 1, given.kv_heads);
  heads[3] = part(1, step, given.gated ? given.heads : 0);
}

// Returns the tiling except `own` and `grad`, which the callers set, and the sizes that `cut` sets.
QkNormRopeTiling tiling_of(const Arguments& given, bool inverse) {
  const int64_t length = given.qkv.size(1), pairs = given.rotary_dim / 2;
  const bool interleaved = given.section_layout == "interleaved";
  const auto spans = given.section.empty() ? std::vector<Span>{{0, pairs, 1}}
                                           : owned(given.section, interleaved, pairs);
  QkNormRopeTiling tiling{};
  tiling.angles = angles_of(given.cos, given.sin, given.positions, given.pair_layout, inverse,
                            given.rotary_dim, length, spans);
  fill_inside(tiling.inside, given.qkv, given);
  tiling.type = element_type(given.qkv, "qkv");
  tiling.weight_type[0] = element_type(given.q_weight, "q_weight");
  tiling.weight_type[1] = element_type(given.k_weight, "k_weight");
  tiling.eps = static_cast<float>(given.eps);
  tiling.zero_centered = given.zero_centered;
  tiling.rows.groups = static_cast<int32_t>(given.qkv.size(0) * length);
  tiling.rows.inner = 1;
  tiling.rows.width = static_cast<int32_t>(given.dim());
  return tiling;
}

// `queues`: the number of tiles on chip in the projection's dtype.
void cut(QkNormRopeTiling& tiling, const Arguments& given, const KernelTarget& target,
         int64_t queues, int64_t element_bytes) {
  for (const HeadTensor& heads : tiling.inside) tiling.rows.rows += heads.count;
  const int64_t of_queues = queues * static_cast<int64_t>(given.qkv.element_size());
  const int64_t weights = kQkNormRopeWeightBytes * (given.dim() + 15);
  cut_rows(tiling.rows, target.cores, target.ub_bytes, of_queues + element_bytes,
           kQkNormRopeRowBytes, kQkNormRopeFixedBytes + weights);
}

void forward(Tensor qkv, Tensor q_weight, Tensor k_weight, Tensor cos, Tensor sin,
             std::optional<Tensor> positions, int64_t heads, int64_t kv_heads, double eps,
             bool zero_centered, bool gated, std::vector<int64_t> section,
             std::string section_layout, std::string pair_layout, int64_t rotary_dim, Tensor q,
             Tensor k, std::optional<Tensor> v, std::optional<Tensor> gate, std::string binary,
             int64_t cores, int64_t ub, int64_t stream) {
  const Arguments given{qkv,       q_weight, k_weight,       cos,         sin,
                        positions, heads,    kv_heads,       eps,         zero_centered,
                        gated,     section,  section_layout, pair_layout, rotary_dim};
  const KernelTarget target{binary, cores, ub, stream};
  QkNormRopeTiling tiling = tiling_of(given, false);
  const Tensor* outputs[] = {&q, &k, pointer(v), pointer(gate)};
  for (int32_t kind = 0; kind < kKinds; ++kind) {
    tiling.own[kind] = own_heads(outputs[kind]);
    tiling.inside[kind].count = tiling.own[kind].count;
  }
  cut(tiling, given, target, 6, kQkNormRopeElementBytes);
  launch_ascendc(target, "qk_norm_rope", tiling.rows.pieces(),
                 NPU_OPS_TENSORS(qkv, q_weight, k_weight, cos, sin, positions, q, k, v, gate),
                 tiling);
}

void backward(Tensor grad_q, Tensor grad_k, std::optional<Tensor> grad_v,
              std::optional<Tensor> grad_gate, Tensor qkv, Tensor q_weight, Tensor k_weight,
              Tensor cos, Tensor sin, std::optional<Tensor> positions, int64_t heads,
              int64_t kv_heads, double eps, bool zero_centered, bool gated,
              std::vector<int64_t> section, std::string section_layout, std::string pair_layout,
              int64_t rotary_dim, Tensor grad_qkv, Tensor grad_q_weight, Tensor grad_k_weight,
              std::string binary, int64_t cores, int64_t ub, int64_t stream) {
  const Arguments given{qkv,       q_weight, k_weight,       cos,         sin,
                        positions, heads,    kv_heads,       eps,         zero_centered,
                        gated,     section,  section_layout, pair_layout, rotary_dim};
  const KernelTarget target{binary, cores, ub, stream};
  QkNormRopeTiling tiling = tiling_of(given, true);
  const Tensor* grads[] = {&grad_q, &grad_k, pointer(grad_v), pointer(grad_gate)};
  for (int32_t kind = 0; kind < kKinds; ++kind) tiling.own[kind] = own_heads(grads[kind]);
  fill_inside(tiling.grad, grad_qkv, given);
  cut(tiling, given, target, 8, kQkNormRopeBackwardElementBytes);
  const int64_t blocks = std::min(cores, tiling.rows.pieces()), dim = given.dim();
  Tensor partials = new_empty(grad_q_weight, {blocks, kNormed, dim});
  launch_ascendc(target, "qk_norm_rope_backward", tiling.rows.pieces(),
                 NPU_OPS_TENSORS(grad_q, grad_k, grad_v, grad_gate, qkv, q_weight, k_weight, cos,
                                 sin, positions, grad_qkv, partials),
                 tiling);
  const int64_t over_blocks[] = {0};
  const Tensor sums = sum(partials, over_blocks);
  copy_(grad_q_weight, select(sums, 0, 0));
  copy_(grad_k_weight, select(sums, 0, 1));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(npu_ops, PrivateUse1, m) {
  m.impl("qk_norm_rope_ascendc", TORCH_BOX(&forward));
  m.impl("qk_norm_rope_backward_ascendc", TORCH_BOX(&backward));
}

}  // namespace npu_ops
