// Attention: FlashAttentionScore (training, forward and backward) and the inference operators.
// Constraints: torch_npu's documentation of npu_fusion_attention and
// npu_fused_infer_attention_score.
//
// A call is cut into one problem per sequence, computed in fp32. A problem has scores [heads, rows,
// columns]: rows are queries, columns are keys.
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <cfloat>

#include "aclnn_dropout.h"

using namespace npu_ops::emulator;

namespace {

using Optional = std::optional<at::Tensor>;

Optional optional(Tensor tensor) { return tensor ? Optional(*tensor) : std::nullopt; }
// Returns the gradient of an optional input if the input is given. Otherwise torch_npu passes an
// empty tensor as gradient.
Optional wanted(Tensor input, Tensor gradient) { return input ? optional(gradient) : std::nullopt; }
std::vector<int64_t> ints(Ints array) { return array ? *array : std::vector<int64_t>{}; }

// The sizes of a tensor in any layout. BSH and SBH fold heads and head dimension into one.
struct Shape {
  int64_t batch, length, heads, dim;
};

Shape shape_of(const at::Tensor& x, const std::string& layout, int64_t heads) {
  need(x.dim() == (layout == "BSND" || layout == "BNSD" ? 4 : 3), "a tensor has ", x.dim(),
       " dimensions, which is not ", layout);
  if (layout == "BSND") return {x.size(0), x.size(1), x.size(2), x.size(3)};
  if (layout == "BNSD") return {x.size(0), x.size(2), x.size(1), x.size(3)};
  if (layout == "TND") return {1, x.size(0), x.size(1), x.size(2)};
  const bool batch_first = layout == "BSH";
  need(x.size(2) % heads == 0, layout, ": last dimension ", x.size(2), " is not ", heads, " heads");
  return {x.size(batch_first ? 0 : 1), x.size(batch_first ? 1 : 0), heads, x.size(2) / heads};
}

// Returns a view [heads, length, dim] of rows [begin, end) of one batch entry. Results are written
// through such views, too.
at::Tensor heads_of(const at::Tensor& x, const std::string& layout, int64_t heads, int64_t batch,
                    int64_t begin, int64_t end) {
  const int64_t length = end - begin;
  if (layout == "BNSD") return x.select(0, batch).narrow(1, begin, length);
  if (layout == "TND") return x.narrow(0, begin, length).transpose(0, 1);
  const at::Tensor rows = x.select(layout == "SBH" ? 1 : 0, batch).narrow(0, begin, length);
  return (layout == "BSND" ? rows : rows.unflatten(-1, {heads, -1})).transpose(0, 1);
}

struct Mask {
  Optional tensor;  // true for a masked pair of query and key
  int64_t mode, pre, next;
};

constexpr int64_t kCompressed = 2048;

void check_mask(const Mask& mask, bool packed) {
  if (!mask.tensor) return;
  const at::Tensor& m = *mask.tensor;
  need(m.scalar_type() == at::kBool || m.scalar_type() == at::kByte || m.scalar_type() == at::kChar,
       "atten_mask: got ", m.scalar_type(), ", needs bool or uint8");
  need(mask.mode >= 0 && mask.mode <= 8, "sparse_mode: got ", mask.mode, ", needs 0 to 8");
  need(mask.mode <= 4, "sparse_mode ", mask.mode, " is not emulated (0 to 4 are)");
  need(m.dim() >= 2 && m.dim() <= 4, "atten_mask: got ", m.dim(), " dimensions, needs 2 to 4");
  if (packed)
    need(m.numel() == m.size(-1) * m.size(-2), "atten_mask: got ", m.sizes(),
         ", needs [S, S] for TND");
  if (mask.mode >= 2)
    need_tiling(m.size(-1) == kCompressed && m.size(-2) == kCompressed &&
                    m.numel() == kCompressed * kCompressed,
                "atten_mask: got ", m.sizes(),
                ", needs the compressed [2048, 2048] causal mask in "
                "sparse_mode ",
                mask.mode);
}

// Returns the mask of one sequence, [rows, columns] or [heads or 1, rows, columns], true for masked
// pairs; nullopt without a mask tensor. The vendor then ignores sparse_mode and both token counts.
Optional left_out(const Mask& mask, int64_t batch, int64_t rows, int64_t columns) {
  if (!mask.tensor) return std::nullopt;
  const at::Tensor difference = at::arange(columns).unsqueeze(0) - at::arange(rows).unsqueeze(1);
  if (mask.mode >= 2) {
    const at::Tensor given = mask.tensor->reshape({kCompressed, kCompressed}).ne(0);
    need(given.equal(at::ones({kCompressed, kCompressed}, at::kBool).triu(1)),
         "atten_mask: sparse_mode ", mask.mode,
         " needs ones above the diagonal and zeros elsewhere");
  }
  const int64_t shift = columns - rows;  // modes 3 and 4 count from the lower right corner
  if (mask.mode == 2) return difference.gt(0);
  if (mask.mode == 3) return difference.gt(shift);
  if (mask.mode == 4)
    return difference.gt(shift + mask.next).logical_or(difference.lt(shift - mask.pre));
  at::Tensor own = mask.tensor->ne(0);
  if (own.dim() == 4) own = own.select(0, own.size(0) == 1 ? 0 : batch);
  if (own.dim() == 3 && own.size(0) != 1 && mask.tensor->dim() == 3) own = own.select(0, batch);
  need(own.size(-2) >= rows && own.size(-1) >= columns, "atten_mask: got ", mask.tensor->sizes(),
       ", needs ", rows, " rows and ", columns, " columns");
  own = own.narrow(-2, 0, rows).narrow(-1, 0, columns);
  if (mask.mode == 1) return own;
  return own.logical_or(difference.gt(mask.next)).logical_or(difference.lt(-mask.pre));
}

// Attention of one sequence.
struct Problem {
  at::Tensor q, k, v;  // [heads, rows or columns, dim], fp32, k and v repeated for each query head
  Optional pse, masked, keep;  // keep: dropout, true if kept
  double scale, keep_prob;
  bool scale_pse;

  at::Tensor scores() const {
    at::Tensor s = q.matmul(k.transpose(1, 2));
    if (pse && scale_pse) s = s + *pse;
    s = s * scale;
    if (pse && !scale_pse) s = s + *pse;
    return masked ? s.masked_fill(*masked, -INFINITY) : s;
  }

  // Returns the problem for heads [first, first + count). Tensors that all heads share stay whole.
  Problem of_heads(int64_t first, int64_t count) const {
    const auto some = [&](const at::Tensor& x) { return x.narrow(0, first, count); };
    const auto some_or_all = [&](const Optional& x) {
      return x && x->dim() == 3 && x->size(0) > 1 ? Optional(some(*x)) : x;
    };
    return {some(q),           some(k), some(v),   some_or_all(pse), some_or_all(masked),
            some_or_all(keep), scale,   keep_prob, scale_pse};
  }
};

// Calls body(problem, first head, count) for groups of heads whose scores take at most 256 MiB, or
// for single heads: an image of 16384 patches has 1 GiB of scores in each of 16 heads.
template <class Body>
void by_heads(const Problem& p, const Body& body) {
  constexpr int64_t kScores = int64_t{1} << 26;
  const int64_t heads = p.q.size(0), each = p.q.size(1) * p.k.size(1);
  const int64_t step = std::clamp<int64_t>(kScores / std::max<int64_t>(1, each), 1, heads);
  for (int64_t first = 0; first < heads; first += step) {
    const int64_t count = std::min(step, heads - first);
    body(count == heads ? p : p.of_heads(first, count), first, count);
  }
}

struct Softmax {
  at::Tensor max, sum, weights;  // [heads, rows, 1] twice, [heads, rows, columns]
};

Softmax softmax(const at::Tensor& scores) {
  // A row whose pairs are all masked gives zeros, as the vendor does for invalid rows.
  if (scores.size(-1) == 0) {
    const at::Tensor none = scores.new_zeros({scores.size(0), scores.size(1), 1});
    return {none - FLT_MAX, none, scores};
  }
  const at::Tensor max = scores.amax(-1, true).clamp_min(-FLT_MAX);
  const at::Tensor e = (scores - max).exp(), sum = e.sum(-1, true);
  return {max, sum, e / sum.clamp_min(FLT_MIN)};
}

at::Tensor repeat_heads(const at::Tensor& x, int64_t heads) {
  return to_float(x).repeat_interleave(heads / x.size(0), 0);
}

// A call of FlashAttentionScore, in any of its versions.
struct Training {
  at::Tensor q, k, v;
  Optional q_rope, k_rope, pse, drop;
  Mask mask;
  std::vector<int64_t> q_ends, k_ends;  // TND: where each sequence ends
  double scale, keep_prob;
  int64_t heads;
  std::string layout;
  int64_t pse_type = 1;
  std::string softmax_layout;

  int64_t kv_heads() const {
    return layout == "BSH" || layout == "SBH" ? k.size(2) / (q.size(2) / heads)
                                              : k.size(layout == "BNSD" ? 1 : k.dim() - 2);
  }
  bool packed() const { return layout == "TND"; }

  void check() const {
    need(layout == "BSH" || layout == "SBH" || layout == "BSND" || layout == "BNSD" || packed(),
         "input_layout: got ", layout, ", needs BSH, SBH, BSND, BNSD or TND");
    need(is_float(q), "query: got ", q.scalar_type(), ", needs float16, bfloat16 or float32");
    need(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(),
         "key and value: got ", k.scalar_type(), " and ", v.scalar_type(), ", need query's ",
         q.scalar_type());
    need(heads >= 1 && heads <= 256, "head_num: got ", heads, ", needs 1 to 256");
    need(keep_prob > 0 && keep_prob <= 1, "keep_prob: got ", keep_prob, ", needs (0, 1]");
    need(pse_type == 0 || pse_type == 1, "pse_type ", pse_type, " is not emulated (0 and 1 are)");
    const Shape qs = shape_of(q, layout, heads);
    need(qs.heads == heads, "head_num: got ", heads, ", query has ", qs.heads);
    const Shape ks = shape_of(k, layout, kv_heads()), vs = shape_of(v, layout, kv_heads());
    need_tiling(ks.heads > 0 && qs.heads % ks.heads == 0, "key: ", ks.heads,
                " heads do not divide query's ", qs.heads);
    need_tiling(ks.dim == qs.dim && vs.dim <= ks.dim, "head dimensions: query ", qs.dim, ", key ",
                ks.dim, ", value ", vs.dim, "; needs query = key >= value");
    need_tiling(qs.dim >= 1 && qs.dim <= 768, "head dimension ", qs.dim, ", needs 1 to 768");
    need(ks.batch == qs.batch && ks.length == vs.length, "key and value do not match query");
    need(packed() == !q_ends.empty() && packed() == !k_ends.empty(),
         "actual_seq_qlen and actual_seq_kvlen: needed by TND, and only by TND");
    check_mask(mask, packed());
    if (packed()) check_ends("actual_seq_qlen", q_ends, q.size(0));
    if (packed()) check_ends("actual_seq_kvlen", k_ends, k.size(0));
    need(q_ends.size() == k_ends.size(), "actual_seq_qlen has ", q_ends.size(),
         " sequences, actual_seq_kvlen has ", k_ends.size());
    if (pse && !packed()) need(pse->dim() == 4, "pse: got ", pse->sizes(), ", needs 4 dimensions");
    need(!pse || !packed(), "pse with TND is not emulated");
  }

  static void check_ends(const char* name, const std::vector<int64_t>& ends, int64_t total) {
    need_tiling(ends.size() <= 2048, name, ": got ", ends.size(), " sequences, needs at most 2048");
    for (size_t i = 1; i < ends.size(); ++i)
      need(ends[i] >= ends[i - 1], name, ": got ", at::IntArrayRef(ends),
           ", needs cumulative lengths (2, 4, 6 and not 2, 2, 2)");
    need(ends.back() == total, name, ": the last value is ", ends.back(),
         ", needs the number of tokens ", total);
  }

  // Calls body(problem, batch, q0, q1, k0, k1) for each sequence, which has query rows [q0, q1) and
  // key rows [k0, k1).
  template <class Body>
  void each(const Body& body) const {
    int64_t bit = 0;
    const int64_t kv = kv_heads();
    const int64_t count =
        packed() ? static_cast<int64_t>(q_ends.size()) : shape_of(q, layout, heads).batch;
    for (int64_t b = 0; b < count; ++b) {
      const int64_t batch = packed() ? 0 : b;
      const int64_t q0 = packed() && b > 0 ? q_ends[b - 1] : 0;
      const int64_t q1 = packed() ? q_ends[b] : shape_of(q, layout, heads).length;
      const int64_t k0 = packed() && b > 0 ? k_ends[b - 1] : 0;
      const int64_t k1 = packed() ? k_ends[b] : shape_of(k, layout, kv).length;
      Problem p;
      p.q = to_float(heads_of(q, layout, heads, batch, q0, q1));
      p.k = repeat_heads(heads_of(k, layout, kv, batch, k0, k1), heads);
      p.v = repeat_heads(heads_of(v, layout, kv, batch, k0, k1), heads);
      if (q_rope) {
        p.q = at::cat({p.q, to_float(heads_of(*q_rope, layout, heads, batch, q0, q1))}, -1);
        p.k = at::cat({p.k, repeat_heads(heads_of(*k_rope, layout, kv, batch, k0, k1), heads)}, -1);
      }
      if (pse) p.pse = to_float(pse->select(0, pse->size(0) == 1 ? 0 : b));
      p.masked = left_out(mask, b, q1 - q0, k1 - k0);
      if (drop && keep_prob < 1) {
        const int64_t bits = heads * (q1 - q0) * (k1 - k0);
        const at::Tensor all = unpack_mask(*drop, bit + bits);
        p.keep = all.narrow(0, bit, bits).view({heads, q1 - q0, k1 - k0});
        bit += bits;
      }
      p.scale = scale;
      p.keep_prob = keep_prob;
      p.scale_pse = pse_type == 1;
      body(p, batch, q0, q1, k0, k1);
    }
  }

  // Returns a view [heads, rows, 8] of one sequence in softmax_max or softmax_sum. For packed
  // inputs, the default order is all heads of a sequence, then the next sequence. softmax_layout
  // "TND" puts tokens first.
  at::Tensor statistics(const at::Tensor& all, int64_t batch, int64_t q0, int64_t q1) const {
    if (!packed()) return all.select(0, batch);
    if (!softmax_layout.empty()) return all.narrow(0, q0, q1 - q0).transpose(0, 1);
    return all.view({-1, 8}).narrow(0, q0 * heads, (q1 - q0) * heads).view({heads, q1 - q0, 8});
  }

  void forward(const at::Tensor& max, const at::Tensor& sum, const at::Tensor& out) const {
    each([&](const Problem& all, int64_t batch, int64_t q0, int64_t q1, int64_t, int64_t) {
      const at::Tensor to = heads_of(out, layout, heads, batch, q0, q1);
      const at::Tensor tops = statistics(max, batch, q0, q1), sums = statistics(sum, batch, q0, q1);
      by_heads(all, [&](const Problem& p, int64_t first, int64_t count) {
        const Softmax s = softmax(p.scores());
        at::Tensor weights = s.weights;
        if (p.keep) weights = weights * *p.keep / p.keep_prob;
        to.narrow(0, first, count).copy_(weights.matmul(p.v));
        tops.narrow(0, first, count).copy_(s.max.expand({count, q1 - q0, 8}));
        sums.narrow(0, first, count).copy_(s.sum.expand({count, q1 - q0, 8}));
      });
    });
  }

  struct Gradients {
    at::Tensor q, k, v;
    Optional q_rope, k_rope, pse;
  };

  // The weights come from the saved maxima and sums, as on a device: a caller may have merged them
  // over several key blocks (context parallelism).
  void backward(const at::Tensor& dy, const at::Tensor& max, const at::Tensor& sum,
                const at::Tensor& out, const Gradients& to) const {
    const int64_t kv = kv_heads(), dim = shape_of(q, layout, heads).dim;
    if (to.pse) to.pse->zero_();
    each([&](const Problem& all, int64_t b, int64_t q0, int64_t q1, int64_t k0, int64_t k1) {
      const at::Tensor top = statistics(max, b, q0, q1).narrow(-1, 0, 1);
      const at::Tensor total = statistics(sum, b, q0, q1).narrow(-1, 0, 1);
      const at::Tensor dys = to_float(heads_of(dy, layout, heads, b, q0, q1));
      const at::Tensor ys = to_float(heads_of(out, layout, heads, b, q0, q1));
      const at::Tensor dq = at::empty_like(all.q), dk = at::empty_like(all.k),
                       dv = at::empty_like(all.v);
      by_heads(all, [&](const Problem& p, int64_t first, int64_t count) {
        const auto some = [&](const at::Tensor& x) { return x.narrow(0, first, count); };
        const at::Tensor grad = some(dys), y = some(ys);
        const at::Tensor weights = (p.scores() - some(top)).exp() / some(total).clamp_min(FLT_MIN);
        at::Tensor dropped = weights, dweights = grad.matmul(p.v.transpose(1, 2));
        if (p.keep) {
          dropped = weights * *p.keep / p.keep_prob;
          dweights = dweights * *p.keep / p.keep_prob;
        }
        const at::Tensor ds = weights * (dweights - (grad * y).sum(-1, true));
        some(dq).copy_(ds.matmul(p.k) * p.scale);
        some(dk).copy_(ds.transpose(1, 2).matmul(p.q) * p.scale);
        some(dv).copy_(dropped.transpose(1, 2).matmul(grad));
        if (to.pse) add_pse(*to.pse, p.scale_pse ? ds * p.scale : ds, b, first);
      });
      const auto grouped = [&](const at::Tensor& x) { return x.unflatten(0, {kv, -1}).sum(1); };
      const at::Tensor dks = grouped(dk);
      heads_of(to.q, layout, heads, b, q0, q1).copy_(dq.narrow(-1, 0, dim));
      heads_of(to.k, layout, kv, b, k0, k1).copy_(dks.narrow(-1, 0, dim));
      heads_of(to.v, layout, kv, b, k0, k1).copy_(grouped(dv));
      if (q_rope) {
        heads_of(*to.q_rope, layout, heads, b, q0, q1).copy_(dq.slice(-1, dim));
        heads_of(*to.k_rope, layout, kv, b, k0, k1).copy_(dks.slice(-1, dim));
      }
    });
  }

  // Adds the gradients of the bias (pse) of heads from `first` on. All heads may share one bias.
  static void add_pse(const at::Tensor& to, const at::Tensor& ds, int64_t b, int64_t first) {
    at::Tensor own = to.select(0, to.size(0) == 1 ? 0 : b);
    if (own.size(0) > 1) own = own.narrow(0, first, ds.size(0));
    own.add_(ds.sum_to_size(own.sizes()));
  }
};

Training training(Tensor q, Tensor k, Tensor v, Tensor pse, Tensor drop, Tensor mask, Ints q_ends,
                  Ints k_ends, double scale, double keep_prob, int64_t pre, int64_t next,
                  int64_t heads, const char* layout, int64_t mode) {
  Training call;
  call.q = q, call.k = k, call.v = v;
  call.pse = optional(pse), call.drop = optional(drop);
  call.mask = {optional(mask), mode, pre, next};
  call.q_ends = ints(q_ends), call.k_ends = ints(k_ends);
  call.scale = scale, call.keep_prob = keep_prob, call.heads = heads, call.layout = layout;
  return call;
}

Training with_rope(Training call, Tensor q_rope, Tensor k_rope) {
  call.q_rope = optional(q_rope), call.k_rope = optional(k_rope);
  return call;
}
Training with_pse(Training call, int64_t type) { return call.pse_type = type, call; }
Training with_softmax(Training call, const char* layout) {
  return call.softmax_layout = layout, call;
}

const Ints kNone{};

}  // namespace

// The versions of these operators differ in their parameters, not in their computation.
#define QKV Tensor q, Tensor k, Tensor v
#define MASKS Tensor pse, Tensor drop, Tensor, Tensor mask
#define NUMBERS                                                                            \
  double scale, double keep, int64_t pre, int64_t next, int64_t heads, const char *layout, \
      int64_t, int64_t mode
#define OUTPUTS Tensor max, Tensor sum, Tensor, Tensor out
#define SAVED Tensor max, Tensor sum, Tensor, Tensor out
#define DENSE \
  training(q, k, v, pse, drop, mask, kNone, kNone, scale, keep, pre, next, heads, layout, mode)
#define PACKED \
  training(q, k, v, pse, drop, mask, q_ends, k_ends, scale, keep, pre, next, heads, layout, mode)
#define FORWARD(NAME, PARAMETERS, CALL) \
  ACLNN_KEEP(NAME, PARAMETERS, (=, call = CALL), CALL.check(), call.forward(max, sum, out))
#define BACKWARD(NAME, PARAMETERS, CALL)                       \
  ACLNN_KEEP(NAME, PARAMETERS, (=, call = CALL), CALL.check(), \
             call.backward(dy, max, sum, out, {dq, dk, dv, {}, {}, wanted(pse, dpse)}))

FORWARD(FlashAttentionScore, (QKV, MASKS, Ints, NUMBERS, OUTPUTS), DENSE)
FORWARD(FlashAttentionScoreV2, (QKV, MASKS, Ints, Ints, Ints, NUMBERS, int64_t type, OUTPUTS),
        with_pse(DENSE, type))
FORWARD(FlashAttentionVarLenScore, (QKV, MASKS, Ints, Ints q_ends, Ints k_ends, NUMBERS, OUTPUTS),
        PACKED)
FORWARD(FlashAttentionVarLenScoreV2,
        (QKV, MASKS, Ints, Ints q_ends, Ints k_ends, Ints, Ints, NUMBERS, int64_t type, OUTPUTS),
        with_pse(PACKED, type))
FORWARD(FlashAttentionVarLenScoreV3,
        (Tensor q, Tensor q_rope, Tensor k, Tensor k_rope, Tensor v, MASKS, Ints, Ints q_ends,
         Ints k_ends, Ints, Ints, NUMBERS, int64_t type, OUTPUTS),
        with_rope(with_pse(PACKED, type), q_rope, k_rope))
FORWARD(FlashAttentionVarLenScoreV4,
        (QKV, MASKS, Ints, Ints q_ends, Ints k_ends, NUMBERS, const char* softmax, OUTPUTS),
        with_softmax(PACKED, softmax))

BACKWARD(FlashAttentionScoreGrad,
         (QKV, Tensor dy, MASKS, SAVED, Ints, NUMBERS, Tensor dq, Tensor dk, Tensor dv,
          Tensor dpse),
         DENSE)
BACKWARD(FlashAttentionScoreGradV2,
         (QKV, Tensor dy, MASKS, SAVED, Ints, Ints, Ints, NUMBERS, int64_t type, Tensor dq,
          Tensor dk, Tensor dv, Tensor dpse),
         with_pse(DENSE, type))
BACKWARD(FlashAttentionUnpaddingScoreGrad,
         (QKV, Tensor dy, MASKS, SAVED, Ints, Ints q_ends, Ints k_ends, NUMBERS, Tensor dq,
          Tensor dk, Tensor dv, Tensor dpse),
         PACKED)
BACKWARD(FlashAttentionUnpaddingScoreGradV2,
         (QKV, Tensor dy, MASKS, SAVED, Ints, Ints q_ends, Ints k_ends, Ints, Ints, NUMBERS,
          int64_t type, Tensor dq, Tensor dk, Tensor dv, Tensor dpse),
         with_pse(PACKED, type))
BACKWARD(FlashAttentionUnpaddingScoreGradV4,
         (QKV, Tensor dy, MASKS, SAVED, Ints, Ints q_ends, Ints k_ends, NUMBERS, Tensor dq,
          Tensor dk, Tensor dv, Tensor dpse, const char* softmax),
         with_softmax(PACKED, softmax))
ACLNN_KEEP(FlashAttentionUnpaddingScoreGradV3,
           (Tensor q, Tensor q_rope, Tensor k, Tensor k_rope, Tensor v, Tensor dy, MASKS, SAVED,
            Ints, Ints q_ends, Ints k_ends, Ints, Ints, NUMBERS, int64_t type, Tensor dq,
            Tensor dq_rope, Tensor dk, Tensor dk_rope, Tensor dv, Tensor dpse),
           (=, call = with_rope(with_pse(PACKED, type), q_rope, k_rope)), PACKED.check(),
           call.backward(dy, max, sum, out,
                         {dq, dk, dv, optional(dq_rope), optional(dk_rope), wanted(pse, dpse)}))

// Attention for inference.
namespace {

struct Inference {
  at::Tensor q;
  std::vector<at::Tensor> keys, values;
  Optional q_rope, k_rope, pse, table;
  Mask mask;
  std::vector<int64_t> q_lengths, k_lengths;
  int64_t heads, kv_heads, block;
  double scale;
  std::string layout;

  // Returns the layout of the output: "BNSD_BSND" reads BNSD and writes BSND.
  std::string layout_out() const {
    const auto at = layout.find('_');
    return at == std::string::npos ? layout : layout.substr(at + 1);
  }
  std::string layout_in() const { return layout.substr(0, layout.find('_')); }
  bool packed() const { return layout_in() == "TND"; }

  void check() const {
    const std::string in = layout_in();
    need(in == "BSH" || in == "BSND" || in == "BNSD" || in == "TND", "input_layout: got ", layout,
         ", needs BSH, BSND, BNSD, BNSD_BSND or TND");
    need(layout_out() != "NBSD" && layout_out() != "NTD", "input_layout ", layout,
         " is not emulated");
    need(is_half(q), "query: got ", q.scalar_type(),
         ", needs float16 or bfloat16 (int8 is not emulated)");
    need(heads >= 1 && heads <= 256 && heads % kv_heads == 0, "num_heads ", heads,
         " is not a multiple of num_key_value_heads ", kv_heads);
    for (const at::Tensor& x : keys)
      need(x.scalar_type() == q.scalar_type(), "key: got ", x.scalar_type(), ", needs query's ",
           q.scalar_type());
    need(keys.size() == values.size(), "key and value lists differ in length");
    const Shape s = shape_of(q, in, heads);
    need(s.heads == heads, "num_heads: got ", heads, ", query has ", s.heads);
    need_tiling(s.dim <= 512, "head dimension ", s.dim, ", needs at most 512");
    need_tiling(s.length == 1 || s.dim % 16 == 0, "head dimension ", s.dim,
                ", needs a multiple of 16");
    check_mask(mask, packed());
    if (packed()) {
      need(!q_lengths.empty() && !k_lengths.empty(),
           "actual_seq_lengths and actual_seq_lengths_kv: needed by TND");
      Training::check_ends("actual_seq_lengths", q_lengths, q.size(0));
      need(q_lengths.size() == k_lengths.size(), "actual_seq_lengths has ", q_lengths.size(),
           " sequences, actual_seq_lengths_kv has ", k_lengths.size());
      if (!table) Training::check_ends("actual_seq_lengths_kv", k_lengths, keys[0].size(0));
    }
    if (!table) return;
    need(!k_lengths.empty(), "actual_seq_lengths_kv: needed with a block_table");
    need(table->dim() == 2 && table->scalar_type() == at::kInt, "block_table: got ",
         table->scalar_type(), table->sizes(), ", needs int32 of 2 dimensions");
    need(keys.size() == 1, "key: a list is not supported with a block_table");
    need_tiling(block > 0 && block <= 512, "block_size: got ", block, ", needs 1 to 512");
    need_tiling(s.length == 1 || packed() || block % 128 == 0, "block_size: got ", block,
                ", needs a multiple of 128 where queries are longer than 1");
  }

  int64_t batches() const {
    return packed() ? static_cast<int64_t>(q_lengths.size()) : shape_of(q, layout, heads).batch;
  }

  // Returns the keys (or values) of one sequence, [kv heads, length, dim].
  at::Tensor cache(const std::vector<at::Tensor>& all, int64_t b, int64_t length) const {
    if (table) {
      std::vector<at::Tensor> parts;
      for (int64_t at = 0; at < length; at += block) {
        const at::Tensor one =
            all[0].select(0, table->select(0, b).select(0, at / block).item<int64_t>());
        parts.push_back(one.dim() == 3 ? one : one.unflatten(-1, {kv_heads, -1}).transpose(0, 1));
      }
      if (parts.empty())
        return all[0].new_zeros({kv_heads, 0, shape_of(q, layout_in(), heads).dim});
      return at::cat(parts, 1).narrow(1, 0, length);
    }
    const std::string in = layout_in();
    if (packed()) {
      const int64_t begin = b > 0 ? k_lengths[b - 1] : 0;
      return heads_of(all[0], in, kv_heads, 0, begin, begin + length);
    }
    const bool listed = all.size() > 1;
    return heads_of(all[listed ? b : 0], in, kv_heads, listed ? 0 : b, 0, length);
  }

  int64_t key_length(int64_t b) const {
    if (packed() && !table) return k_lengths[b] - (b > 0 ? k_lengths[b - 1] : 0);
    if (!k_lengths.empty()) return k_lengths[k_lengths.size() == 1 ? 0 : b];
    return shape_of(keys[keys.size() > 1 ? b : 0], layout_in(), kv_heads).length;
  }

  void run(const at::Tensor& out, Tensor lse) const {
    out.zero_();
    for (int64_t b = 0; b < batches(); ++b) {
      const std::string in = layout_in();
      const int64_t q0 = packed() && b > 0 ? q_lengths[b - 1] : 0;
      const int64_t q1 = packed()            ? q_lengths[b]
                         : q_lengths.empty() ? shape_of(q, in, heads).length
                                             : q_lengths[q_lengths.size() == 1 ? 0 : b];
      const int64_t batch = packed() ? 0 : b, length = key_length(b);
      Problem p;
      p.q = to_float(heads_of(q, in, heads, batch, q0, q1));
      p.k = repeat_heads(cache(keys, b, length), heads);
      p.v = repeat_heads(cache(values, b, length), heads);
      if (q_rope) {
        p.q = at::cat({p.q, to_float(heads_of(*q_rope, in, heads, batch, q0, q1))}, -1);
        p.k = at::cat({p.k, repeat_heads(cache({*k_rope}, b, length), heads)}, -1);
      }
      if (pse)
        p.pse = to_float(pse->select(0, pse->size(0) == 1 ? 0 : b))
                    .narrow(-2, 0, q1 - q0)
                    .narrow(-1, 0, length);
      p.scale = scale;
      p.scale_pse = false;
      p.masked = masked(b, q1 - q0, length);
      const at::Tensor to = heads_of(out, layout_out(), heads, batch, q0, q1);
      Optional logs;
      if (lse && lse->numel() > 1)
        logs = packed() ? lse->narrow(0, q0, q1 - q0).transpose(0, 1)
                        : lse->select(0, b).narrow(1, 0, q1 - q0);
      by_heads(p, [&](const Problem& some, int64_t first, int64_t count) {
        const Softmax s = softmax(some.scores());
        to.narrow(0, first, count).copy_(s.weights.matmul(some.v));
        if (logs) logs->narrow(0, first, count).copy_(s.max + s.sum.log());
      });
    }
  }

  // Returns the mask of one sequence. With one query and sparse_mode 0 or 1, the mask tensor has a
  // row per sequence, and both token counts are ignored.
  Optional masked(int64_t b, int64_t rows, int64_t columns) const {
    if (!mask.tensor || mask.mode >= 2 || rows > 1) return left_out(mask, b, rows, columns);
    const at::Tensor flat = mask.tensor->ne(0).reshape({-1, mask.tensor->size(-1)});
    return flat.select(0, flat.size(0) == 1 ? 0 : b).narrow(0, 0, columns).unsqueeze(0);
  }
};

Inference inference(Tensor q, std::vector<at::Tensor> keys, std::vector<at::Tensor> values,
                    Tensor pse, Tensor mask, Ints q_lengths, Ints k_lengths, Tensor table,
                    Tensor q_rope, Tensor k_rope, int64_t heads, double scale, int64_t pre,
                    int64_t next, const char* layout, int64_t kv_heads, int64_t mode,
                    int64_t block) {
  Inference call;
  call.q = q, call.keys = std::move(keys), call.values = std::move(values);
  call.pse = optional(pse), call.table = optional(table);
  call.q_rope = optional(q_rope), call.k_rope = optional(k_rope);
  call.mask = {optional(mask), mode, pre, next};
  call.q_lengths = ints(q_lengths), call.k_lengths = ints(k_lengths);
  call.heads = heads, call.kv_heads = kv_heads ? kv_heads : heads, call.block = block;
  call.scale = scale, call.layout = layout;
  return call;
}

template <class... Extras>
void refuse_quantised(const Extras&... extras) {
  need(!(static_cast<bool>(extras) || ...),
       "quantisation, padding and shared prefixes are not emulated");
}

const Tensor kNothing{};

}  // namespace

#define EXTRAS                                                                               \
  Tensor e1, Tensor e2, Tensor e3, Tensor e4, Tensor e5, Tensor e6, Tensor e7, Tensor table, \
      Tensor e8, Tensor e9, Tensor e10, Tensor e11, Tensor e12, Tensor e13, Tensor e14,      \
      Tensor e15, Ints
#define REFUSE refuse_quantised(e1, e2, e3, e4, e5, e6, e7, e8, e9, e10, e11, e12, e13, e14, e15)
#define INFER                                                                                     \
  inference(q, *k, *v, pse, mask, q_lengths, k_lengths, table, q_rope, k_rope, heads, scale, pre, \
            next, layout, kv_heads, mode, block)
#define INFER_HEAD \
  Tensor q, Tensors k, Tensors v, Tensor pse, Tensor mask, Ints q_lengths, Ints k_lengths
#define INFER_NUMBERS                                                                           \
  int64_t heads, double scale, int64_t pre, int64_t next, const char *layout, int64_t kv_heads, \
      int64_t mode, int64_t, int64_t block, int64_t, bool, int64_t, int64_t

ACLNN_KEEP(FusedInferAttentionScoreV3,
           (INFER_HEAD, EXTRAS, Tensor q_rope, Tensor k_rope, Tensor e16, INFER_NUMBERS, Tensor out,
            Tensor lse),
           (=, call = INFER), (REFUSE, refuse_quantised(e16), INFER.check()), call.run(out, lse))
ACLNN_KEEP(FusedInferAttentionScoreV4,
           (INFER_HEAD, EXTRAS, Tensor q_rope, Tensor k_rope, Tensor e16, Tensor e17, Tensor sink,
            INFER_NUMBERS, int64_t, Tensor out, Tensor lse),
           (=, call = INFER), (REFUSE, refuse_quantised(e16, e17, sink), INFER.check()),
           call.run(out, lse))
// Callers ask for the workspace of the longest sequences before they capture a graph. The emulator
// needs none, so the function is an alias of GetWorkspaceSize.
#define MAX_WORKSPACE(NAME)                                            \
  __asm__(".globl aclnn" #NAME "GetMaxWorkspaceSize\n.set aclnn" #NAME \
          "GetMaxWorkspaceSize, aclnn" #NAME "GetWorkspaceSize")
MAX_WORKSPACE(FusedInferAttentionScoreV3);
MAX_WORKSPACE(FusedInferAttentionScoreV4);
ACLNN_KEEP(PromptFlashAttentionV3,
           (QKV, Tensor pse, Tensor mask, Ints q_lengths, Ints k_lengths, Tensor e1, Tensor e2,
            Tensor e3, Tensor e4, Tensor e5, int64_t heads, double scale, int64_t pre, int64_t next,
            const char* layout, int64_t kv_heads, int64_t mode, int64_t, Tensor out),
           (=, call = inference(q, {*k}, {*v}, pse, mask, q_lengths, k_lengths, kNothing, kNothing,
                                kNothing, heads, scale, pre, next, layout, kv_heads, mode, 0)),
           (refuse_quantised(e1, e2, e3, e4, e5),
            inference(q, {*k}, {*v}, pse, mask, q_lengths, k_lengths, kNothing, kNothing, kNothing,
                      heads, scale, pre, next, layout, kv_heads, mode, 0)
                .check()),
           call.run(out, kNothing))
ACLNN_KEEP(IncreFlashAttentionV4,
           (Tensor q, Tensors k, Tensors v, Tensor pse, Tensor mask, Ints k_lengths, Tensor e1,
            Tensor e2, Tensor e3, Tensor e4, Tensor e5, Tensor e6, Tensor e7, Tensor table,
            Tensor e8, int64_t heads, double scale, const char* layout, int64_t kv_heads,
            int64_t block, int64_t, Tensor out),
           (=, call = inference(q, *k, *v, pse, mask, kNone, k_lengths, table, kNothing, kNothing,
                                heads, scale, INT32_MAX, INT32_MAX, layout, kv_heads, 0, block)),
           (refuse_quantised(e1, e2, e3, e4, e5, e6, e7, e8),
            inference(q, *k, *v, pse, mask, kNone, k_lengths, table, kNothing, kNothing, heads,
                      scale, INT32_MAX, INT32_MAX, layout, kv_heads, 0, block)
                .check()),
           call.run(out, kNothing))
