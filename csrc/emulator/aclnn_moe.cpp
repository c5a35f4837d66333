// Mixture of experts: choice of experts (gating), sorting of tokens by expert, grouped matrix
// products, and the sum over each token's experts. Formulas and constraints: torch_npu's
// documentation of npu_moe_gating_top_k_softmax, npu_moe_init_routing_v2, npu_grouped_matmul,
// npu_moe_finalize_routing, npu_moe_token_permute and npu_moe_token_unpermute, and the vendor's of
// aclnnGroupedMatmulV5 and aclnnMoeToken....
#include <ATen/ops/arange.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros.h>

#include "aclnn.h"

using namespace npu_ops::emulator;

namespace {

enum TokensType : int64_t { kCumulative = 0, kCount = 1 };
enum PadMode : int64_t { kByColumns = 0, kByRows = 2 };  // 1 and 3 drop tokens over the capacity

void check_half_or_float(const char* name, const at::Tensor& x) {
  need(is_float(x), name, ": got ", x.scalar_type(), ", needs float32, float16 or bfloat16");
}

// Gating: softmax, and the k largest values of each row. Equal values keep their order.
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

// Copies each row of x for each of its experts, and writes the copies to `out`, sorted by expert.
// Writes to `where` the row of each copy in `out`; with row_type 1, the copy in each row of `out`.
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

constexpr size_t kMostWeights = 128;
constexpr int64_t kByTokens = 0, kByReduced = 2;  // group_type: the axis that groups divide

// Recognises a transposed matrix by its strides, as the vendor does.
bool transposed(const at::Tensor& matrix) {
  return matrix.stride(-2) == 1 && matrix.stride(-1) == matrix.size(-2) && !matrix.is_contiguous();
}

// Checks weights for group_type 0: one tensor for all groups, or one per group.
void check_by_tokens(const at::Tensor& x, const std::vector<at::Tensor>& weights) {
  const int64_t dims = weights.size() == 1 ? 3 : 2;
  for (const at::Tensor& weight : weights) {
    need(x.dim() == 2 && weight.dim() == dims, "x, weight: got ", x.dim(), " and ", weight.dim(),
         " dimensions, needs 2 and ", dims, " with group_type 0 and ", weights.size(), " weights");
    need(weight.size(-2) == x.size(1), "weight: got ", weight.sizes(), " for x ", x.sizes());
    need(weight.size(-1) == weights[0].size(-1), "weight: got ", weight.sizes(), " beside ",
         weights[0].sizes(), ", needs one last size");
    need(transposed(weight) == transposed(weights[0]),
         "weight: got some that are transposed and some that are not");
  }
  need(!transposed(x), "x: got a transposed tensor, needs one that is not with group_type 0");
}

void check_by_reduced(const at::Tensor& x, const at::Tensor& weight) {
  need(x.dim() == 2 && weight.dim() == 2, "x, weight: got ", x.dim(), " and ", weight.dim(),
       " dimensions, needs 2 and 2 with group_type 2");
  need(weight.size(0) == x.size(1), "weight: got ", weight.sizes(), " for x ", x.sizes());
  need(transposed(x) || x.size(0) == 1 || x.size(1) == 1,
       "x: got a tensor that is not transposed, needs one with group_type 2");
  need(!transposed(weight),
       "weight: got a transposed tensor, needs one that is not with "
       "group_type 2");
}

void check_grouped(const std::vector<at::Tensor>& x, const std::vector<at::Tensor>& weight,
                   bool others, const Tensor& groups, int64_t split_item, int64_t group_type,
                   int64_t list_type, int64_t act_type) {
  need(group_type == kByTokens || group_type == kByReduced, "group_type: got ", group_type,
       "; 0 and 2 are emulated");
  need(x.size() == 1 && !weight.empty() && (weight.size() == 1 || group_type == kByTokens),
       "x, weight: got lists of ", x.size(), " and ", weight.size(), " with group_type ",
       group_type, "; one x is emulated, and several weights with group_type 0");
  need(weight.size() <= kMostWeights, "weight: got ", weight.size(), ", needs at most ",
       kMostWeights);
  check_half_or_float("x", x[0]);
  for (const at::Tensor& each : weight) {
    need(each.scalar_type() == x[0].scalar_type(), "weight: got ", each.scalar_type(),
         ", needs x's ", x[0].scalar_type());
  }
  group_type == kByTokens ? check_by_tokens(x[0], weight) : check_by_reduced(x[0], weight[0]);
  need(!others, "bias, scale, offset: got one, which is not emulated");
  need(bool(groups), "group_list: got none, needs the size of each group");
  need(groups->scalar_type() == at::kLong && groups->dim() == 1 && groups->size(0) <= 1024,
       "group_list: got ", groups->scalar_type(), groups->sizes(),
       ", needs int64 of 1 dimension and at most 1024 groups");
  const int64_t weights = weight.size() == 1 ? weight[0].size(0) : weight.size();
  need(group_type == kByReduced || groups->size(0) == weights, "group_list: got ", groups->size(0),
       " groups for ", weights, " weights");
  need((split_item == 2 || split_item == 3) && act_type == 0, "split_item, act_type: got ",
       split_item, ", ", act_type, "; 2 or 3 and 0 are emulated");
  need(list_type == kCumulative || list_type == kCount, "group_list_type: got ", list_type,
       "; 0 and 1 are emulated");
}

// group_type 0: multiplies each row of x by the weight of its group; rows of `out` after the last
// group stay unchanged. group_type 2: multiplies the columns of x that belong to a group by the
// group's rows of the weight.
void grouped(const at::Tensor& x, const std::vector<at::Tensor>& weights, const at::Tensor& groups,
             int64_t group_type, int64_t list_type, const at::Tensor& out) {
  const at::Tensor ends = list_type == kCumulative ? groups : groups.cumsum(0);
  const int64_t axis = group_type == kByTokens ? 0 : 1;
  int64_t start = 0;
  for (int64_t group = 0; group < ends.numel(); ++group) {
    const int64_t end = ends[group].item<int64_t>();
    need(start <= end && end <= x.size(axis), "group_list: got a group that ends at ", end,
         " after one that ends at ", start, ", needs ", start, " to ", x.size(axis));
    const at::Tensor part = to_float(x.slice(axis, start, end));
    if (group_type == kByTokens) {
      const at::Tensor& weight = weights.size() == 1 ? weights[0][group] : weights[group];
      out.slice(0, start, end).copy_(part.matmul(to_float(weight)));
    } else {
      out[group].copy_(part.matmul(to_float(weights[0].slice(0, start, end))));
    }
    start = end;
  }
}

constexpr int64_t kMostChosen = 512, kMostIndices = 16777215;

void check_chosen(const at::Tensor& sorted, int64_t rows, int64_t k, bool padded) {
  need(!padded, "padded_mode: got True, needs False");
  need(k > 0 && k <= kMostChosen, "top_k: got ", k, ", needs 1 to ", kMostChosen);
  need(sorted.scalar_type() == at::kInt && sorted.dim() == 1 && sorted.size(0) == rows &&
           rows % k == 0,
       "sorted_indices: got ", sorted.scalar_type(), sorted.sizes(), ", needs int32 [", rows,
       "], one for each row and ", k, " for each token");
}

void check_permute(const at::Tensor& tokens, const at::Tensor& indices, bool padded) {
  need(is_float(tokens) || tokens.scalar_type() == at::kChar, "tokens: got ", tokens.scalar_type(),
       ", needs float32, float16, bfloat16 or int8");
  need(indices.scalar_type() == at::kInt || indices.scalar_type() == at::kLong, "indices: got ",
       indices.scalar_type(), ", needs int32 or int64");
  need(indices.dim() > 0 && indices.dim() < 3 && indices.size(0) == tokens.size(0), "indices: got ",
       indices.sizes(), " for tokens ", tokens.sizes());
  need(indices.numel() < kMostIndices, "indices: got ", indices.numel(), ", needs fewer than ",
       kMostIndices);
  need(!padded, "padded_mode: got True, needs False");
  const int64_t k = indices.dim() == 1 ? 1 : indices.size(1);
  need(k <= kMostChosen, "indices: got ", k, " for each token, needs at most ", kMostChosen);
}

// Copies each token for each of its indices, and writes the copies to `out`, sorted by index.
// Writes the row of each copy in `out` to `sorted`.
void permute(const at::Tensor& tokens, const at::Tensor& indices, const at::Tensor& out,
             const at::Tensor& sorted) {
  const at::Tensor flat = indices.flatten().to(at::kLong);
  need((flat >= 0).logical_and(flat < kMostIndices).all().item<bool>(),
       "indices: got one outside [0, ", kMostIndices, "), which is sorted wrong");
  const at::Tensor order = flat.argsort(/*stable=*/true);
  const int64_t k = indices.numel() / indices.size(0);
  out.copy_(tokens.index_select(0, order.floor_divide(k).narrow(0, 0, out.size(0))));
  sorted.index_copy_(0, order, at::arange(order.numel(), sorted.options()));
}

void check_permute_grad(const at::Tensor& grad, const at::Tensor& sorted, int64_t k, bool padded) {
  check_half_or_float("permuted_tokens' gradient", grad);
  check_chosen(sorted, grad.size(0), k, padded);
}

at::Tensor each_token(const at::Tensor& permuted, const at::Tensor& sorted, int64_t k) {
  return to_float(permuted).index_select(0, sorted.to(at::kLong)).view({-1, k, permuted.size(1)});
}

int64_t chosen(const Tensor& probs) { return probs ? probs->size(1) : 1; }

void check_unpermute(const at::Tensor& permuted, const at::Tensor& sorted, const Tensor& probs,
                     bool padded) {
  check_half_or_float("permuted_tokens", permuted);
  if (probs) check_half_or_float("probs", probs);
  check_chosen(sorted, permuted.size(0), chosen(probs), padded);
  need(!probs || probs->numel() == sorted.numel(), "probs: got ", probs ? probs->numel() : 0,
       " for ", sorted.numel(), " rows");
}

// Writes the sum over each token's copies, weighted by `probs` if given.
void unpermute(const at::Tensor& permuted, const at::Tensor& sorted, const Tensor& probs,
               const at::Tensor& out) {
  at::Tensor each = each_token(permuted, sorted, chosen(probs));
  if (probs) each = each * to_float(probs).unsqueeze(-1);
  out.copy_(each.sum(1));
}

void check_unpermute_grad(const Tensor& permuted, const at::Tensor& grad, const at::Tensor& sorted,
                          const Tensor& probs, bool padded) {
  check_half_or_float("unpermuted_tokens' gradient", grad);
  need(!probs || bool(permuted), "permuted_tokens: got none, needs it for the gradient of probs");
  check_chosen(sorted, grad.size(0) * chosen(probs), chosen(probs), padded);
}

void unpermute_grad(const Tensor& permuted, const at::Tensor& grad, const at::Tensor& sorted,
                    const Tensor& probs, const at::Tensor& out, const Tensor& probs_out) {
  at::Tensor each = to_float(grad).unsqueeze(1);
  if (probs) {
    probs_out->copy_((each_token(permuted, sorted, chosen(probs)) * each).sum(-1));
    each = each * to_float(probs).unsqueeze(-1);
  }
  const at::Tensor rows = each.reshape({-1, grad.size(1)}).to(out.scalar_type());
  out.index_copy_(0, sorted.to(at::kLong), rows);
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

// Writes the sum over each token's experts, weighted by `scales` if given.
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
// torch_npu calls V5 if the library also has V4.
#define GROUPED_MATMUL(NAME, TUNING)                                                               \
  ACLNN(NAME,                                                                                      \
        (Tensors x, Tensors weight, Tensors bias, Tensors scale, Tensors offset,                   \
         Tensors antiquant_scale, Tensors antiquant_offset, Tensors per_token_scale,               \
         Tensor groups, Tensors activation, Tensors activation_scale, Tensors activation_offset,   \
         int64_t split_item, int64_t group_type, int64_t list_type,                                \
         int64_t act_type NPU_OPS_UNPACK TUNING, Tensors out, Tensors act_out, Tensors scale_out), \
        check_grouped(*x, *weight, bias || scale || offset || antiquant_scale || per_token_scale,  \
                      groups, split_item, group_type, list_type, act_type),                        \
        grouped((*x)[0], *weight, groups, group_type, list_type, (*out)[0]))
GROUPED_MATMUL(GroupedMatmulV4, ())
GROUPED_MATMUL(GroupedMatmulV5, (, Ints tuning))
ACLNN(MoeFinalizeRoutingV2,
      (Tensor rows, Tensor where, Tensor skip1, Tensor skip2, Tensor bias, Tensor scales,
       Tensor experts, int64_t mode, Tensor out),
      check_finalize(rows, where, scales, mode),
      finalize(rows, where, skip1, skip2, bias, scales, experts, mode, out))
ACLNN(MoeTokenPermute,
      (Tensor tokens, Tensor indices, int64_t, bool padded, Tensor out, Tensor sorted),
      check_permute(tokens, indices, padded), permute(tokens, indices, out, sorted))
ACLNN(MoeTokenPermuteGrad, (Tensor grad, Tensor sorted, int64_t k, bool padded, Tensor out),
      check_permute_grad(grad, sorted, k, padded), out->copy_(each_token(grad, sorted, k).sum(1)))
ACLNN(MoeTokenUnpermute,
      (Tensor permuted, Tensor sorted, Tensor probs, bool padded, Ints shape, Tensor out),
      check_unpermute(permuted, sorted, probs, padded), unpermute(permuted, sorted, probs, out))
ACLNN(MoeTokenUnpermuteGrad,
      (Tensor permuted, Tensor grad, Tensor sorted, Tensor probs, bool padded, Ints shape,
       Tensor out, Tensor probs_out),
      check_unpermute_grad(permuted, grad, sorted, probs, padded),
      unpermute_grad(permuted, grad, sorted, probs, out, probs_out))
