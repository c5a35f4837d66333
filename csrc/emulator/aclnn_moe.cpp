// Mixtures of experts: choosing experts, sorting tokens by them, a product for each, and back.
// Formulas and constraints: torch_npu's documentation of npu_moe_gating_top_k_softmax,
// npu_moe_init_routing_v2, npu_grouped_matmul and npu_moe_finalize_routing.
#include <ATen/ops/arange.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros.h>

#include "aclnn.h"

using namespace npu_ops::emulator;

namespace {

enum TokensType : int64_t { kCumulative = 0, kCount = 1 };
enum PadMode : int64_t { kByColumns = 0, kByRows = 2 };  // 1 and 3 drop what is too much

void check_half_or_float(const char* name, const at::Tensor& x) {
  need(is_float(x), name, ": got ", x.scalar_type(), ", needs float32, float16 or bfloat16");
}

// Softmax and the k largest of each row, the first of equals first.
void check_gating(const at::Tensor& x, bool finished, int64_t k) {
  check_half_or_float("x", x);
  need(!finished, "finished: got one, which is not emulated");
  need(k > 0 && k <= x.size(-1) && k <= 1024, "k: got ", k, ", needs 1 to ", x.size(-1));
}

void gating(const at::Tensor& x, int64_t k, const at::Tensor& y, const at::Tensor& experts,
            const at::Tensor& rows) {
  const at::Tensor chances = to_float(x).softmax(-1);
  const auto [sorted, order] = chances.sort(/*stable=*/true, /*dim=*/-1, /*descending=*/true);
  y.copy_(sorted.narrow(-1, 0, k));
  experts.copy_(order.narrow(-1, 0, k));
  const at::Tensor all = at::arange(rows.numel(), at::kInt).view({k, -1}).t();
  rows.copy_(all.reshape(rows.sizes()));
}

void check_routing(const at::Tensor& x, const at::Tensor& experts, int64_t expert_num,
                   int64_t pad_mode, int64_t tokens_type, int64_t quant_mode, const Ints& range,
                   int64_t row_type) {
  need(experts.scalar_type() == at::kInt && experts.dim() == 2, "expert_idx: got ",
       experts.scalar_type(), experts.sizes(), ", needs int32 of 2 dimensions");
  need(x.dim() == 2 && x.size(0) == experts.size(0), "x: got ", x.sizes(), " for expert_idx ",
       experts.sizes());
  need(quant_mode == -1, "quant_mode: got ", quant_mode, "; -1 alone is emulated");
  need(pad_mode == 0, "drop_pad_mode: got ", pad_mode, "; 0 alone is emulated");
  need(tokens_type == kCumulative || tokens_type == kCount, "expert_tokens_num_type: got ",
       tokens_type, "; 0 and 1 alone are emulated");
  need(row_type == 0 || row_type == 1, "row_idx_type: got ", row_type, ", needs 0 or 1");
  need(!range || (range->at(0) == 0 && range->at(1) == expert_num),
       "active_expert_range: got a part, which is not emulated");
}

// Rows of x sorted by their experts, each as often as it has experts; and where each went.
void route(const at::Tensor& x, const at::Tensor& experts, int64_t expert_num, int64_t tokens_type,
           bool count, int64_t row_type, const at::Tensor& out, const at::Tensor& where,
           const at::Tensor& tokens) {
  const at::Tensor flat = experts.flatten().to(at::kLong);
  const at::Tensor order = flat.argsort(/*stable=*/true);
  const at::Tensor token = order.floor_divide(experts.size(1));
  out.copy_(x.index_select(0, token.narrow(0, 0, out.size(0))));
  if (row_type == 1) {
    where.copy_(order);
  } else {
    where.index_copy_(0, order, at::arange(order.numel(), where.options()));
  }
  if (!count) return;
  const at::Tensor each = at::bincount(flat, {}, expert_num);
  tokens.copy_(tokens_type == kCount ? each : each.cumsum(0));
}

void check_grouped(const std::vector<at::Tensor>& x, const std::vector<at::Tensor>& weight,
                   bool others, bool groups, int64_t split_item, int64_t group_type,
                   int64_t list_type, int64_t act_type) {
  need(x.size() == 1 && weight.size() == 1 && weight[0].dim() == 3, "x, weight: got lists of ",
       x.size(), " and ", weight.size(),
       "; one of each, the weights of all groups together, is emulated");
  check_half_or_float("x", x[0]);
  need(weight[0].scalar_type() == x[0].scalar_type(), "weight: got ", weight[0].scalar_type(),
       ", needs x's ", x[0].scalar_type());
  need(weight[0].size(1) == x[0].size(-1), "weight: got ", weight[0].sizes(), " for x ",
       x[0].sizes());
  need(!others, "bias, scale, offset: got one, which is not emulated");
  need(groups, "group_list: got none, needs the rows of each group");
  need((split_item == 2 || split_item == 3) && group_type == 0 && act_type == 0,
       "split_item, group_type, act_type: got ", split_item, ", ", group_type, ", ", act_type,
       "; 2 or 3, 0 and 0 are emulated");
  need(list_type == 0 || list_type == 1, "group_list_type: got ", list_type,
       "; 0 and 1 are emulated");
}

// Row i of x by the weight of its group; rows behind the last group stay as they are.
void grouped(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& groups,
             int64_t list_type, const at::Tensor& out) {
  const at::Tensor ends = list_type == 0 ? groups : groups.cumsum(0);
  int64_t start = 0;
  for (int64_t group = 0; group < ends.numel(); ++group) {
    const int64_t end = ends[group].item<int64_t>();
    const at::Tensor rows = to_float(x.slice(0, start, end));
    out.slice(0, start, end).copy_(rows.matmul(to_float(weight[group])));
    start = end;
  }
}

void check_finalize(const at::Tensor& rows, const at::Tensor& where, const Tensor& scales,
                    int64_t mode) {
  check_half_or_float("expanded_permuted_rows", rows);
  need(where.scalar_type() == at::kInt && where.dim() == 1, "expanded_src_to_dst_row: got ",
       where.scalar_type(), where.sizes(), ", needs int32 of 1 dimension");
  need(mode == kByColumns || mode == kByRows, "drop_pad_mode: got ", mode,
       "; 0 and 2 are emulated");
  need(!scales || scales->scalar_type() == rows.scalar_type(), "scales: got ",
       scales ? scales->scalar_type() : at::kFloat, ", needs expanded_permuted_rows' ",
       rows.scalar_type());
}

// The sum of each token's experts, weighted.
void finalize(const at::Tensor& rows, const at::Tensor& where, const Tensor& skip1,
              const Tensor& skip2, const Tensor& bias, const Tensor& scales, const Tensor& experts,
              int64_t mode, const at::Tensor& out) {
  const int64_t tokens = out.size(0), k = where.numel() / tokens;
  const at::Tensor place = where.to(at::kLong);
  const at::Tensor of_token =
      mode == kByRows ? place.view({tokens, k}) : place.view({k, tokens}).t();
  at::Tensor each = to_float(rows).index_select(0, of_token.flatten()).view({tokens, k, -1});
  if (bias) {
    const at::Tensor chosen = experts->to(at::kLong).flatten();
    each = each + to_float(bias).index_select(0, chosen).view({tokens, k, -1});
  }
  if (scales) each = each * to_float(scales).unsqueeze(-1);
  at::Tensor sum = each.sum(1);
  if (skip1) sum = sum + to_float(skip1);
  if (skip2) sum = sum + to_float(skip2);
  out.copy_(sum);
}

}  // namespace

ACLNN(MoeGatingTopKSoftmax,
      (Tensor x, Tensor finished, int64_t k, Tensor y, Tensor experts, Tensor rows),
      check_gating(x, bool(finished), k), gating(x, k, y, experts, rows))
ACLNN(MoeInitRoutingV3,
      (Tensor x, Tensor experts, Tensor scale, Tensor offset, int64_t active, int64_t capacity,
       int64_t expert_num, int64_t pad_mode, int64_t tokens_type, bool count, int64_t quant_mode,
       Ints range, int64_t row_type, Tensor out, Tensor where, Tensor tokens, Tensor out_scale),
      check_routing(x, experts, expert_num, pad_mode, tokens_type, quant_mode, range, row_type),
      route(x, experts, expert_num, tokens_type, count, row_type, out, where, tokens))
// torch_npu calls V5, once it has found that there is V4.
#define GROUPED_MATMUL(NAME, TUNING)                                                               \
  ACLNN(NAME,                                                                                      \
        (Tensors x, Tensors weight, Tensors bias, Tensors scale, Tensors offset,                   \
         Tensors antiquant_scale, Tensors antiquant_offset, Tensors per_token_scale,               \
         Tensor groups, Tensors activation, Tensors activation_scale, Tensors activation_offset,   \
         int64_t split_item, int64_t group_type, int64_t list_type,                                \
         int64_t act_type NPU_OPS_UNPACK TUNING, Tensors out, Tensors act_out, Tensors scale_out), \
        check_grouped(*x, *weight, bias || scale || offset || antiquant_scale || per_token_scale,  \
                      bool(groups), split_item, group_type, list_type, act_type),                  \
        grouped((*x)[0], (*weight)[0], groups, list_type, (*out)[0]))
GROUPED_MATMUL(GroupedMatmulV4, ())
GROUPED_MATMUL(GroupedMatmulV5, (, Ints tuning))
ACLNN(MoeFinalizeRoutingV2,
      (Tensor rows, Tensor where, Tensor skip1, Tensor skip2, Tensor bias, Tensor scales,
       Tensor experts, int64_t mode, Tensor out),
      check_finalize(rows, where, scales, mode),
      finalize(rows, where, skip1, skip2, bias, scales, experts, mode, out))
