// Gated delta rule and causal convolution. Constraints: torch_npu's documentation of
// npu_recurrent_gated_delta_rule, npu_chunk_gated_delta_rule and npu_masked_causal_conv1d.
#include "aclnn.h"

using namespace npu_ops::emulator;

namespace {

struct Limits {
  int64_t heads, dim;
  bool float_state;
};

void check_delta(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, Tensor beta,
                 const at::Tensor& state, Tensor lengths, Tensor g, Limits limits) {
  for (const at::Tensor& x : {q, k, v}) {
    need(x.scalar_type() == at::kBFloat16, "query, key and value: got ", x.scalar_type(),
         ", need bfloat16");
    need(x.dim() == 3, "query, key and value: got ", x.sizes(), ", need 3 dimensions (TND)");
    need(x.numel() > 0, "an empty tensor is not supported");
  }
  need(q.sizes() == k.sizes() && v.size(0) == q.size(0), "query ", q.sizes(), ", key ", k.sizes(),
       " and value ", v.sizes(), " do not match");
  need(state.scalar_type() == at::kBFloat16 ||
           (limits.float_state && state.scalar_type() == at::kFloat),
       "state: got ", state.scalar_type(), ", needs bfloat16");
  need(state.dim() == 4 && state.size(1) == v.size(1) && state.size(2) == v.size(2) &&
           state.size(3) == k.size(2),
       "state: got ", state.sizes(), ", needs [blocks, value heads, value dim, key dim]");
  need_tiling(q.size(1) <= limits.heads && v.size(1) <= limits.heads && v.size(1) % q.size(1) == 0,
              "heads: key ", q.size(1), ", value ", v.size(1), "; needs at most ", limits.heads,
              " and a multiple");
  need_tiling(q.size(2) <= limits.dim && v.size(2) <= limits.dim, "head dimensions: key ",
              q.size(2), ", value ", v.size(2), "; needs at most ", limits.dim);
  if (beta)
    need(beta->scalar_type() == at::kBFloat16 && beta->sizes() == v.sizes().slice(0, 2),
         "beta: got ", beta->scalar_type(), beta->sizes(),
         ", needs bfloat16 [tokens, value heads]");
  if (g)
    need(g->scalar_type() == at::kFloat && g->sizes() == v.sizes().slice(0, 2), "g: got ",
         g->scalar_type(), g->sizes(), ", needs float32 [tokens, value heads]");
  need(static_cast<bool>(lengths), "actual_seq_lengths: needed");
  need(lengths->scalar_type() == at::kInt && lengths->dim() == 1, "actual_seq_lengths: got ",
       lengths->scalar_type(), lengths->sizes(), ", needs int32 of 1 dimension");
}

// One token for all value heads, in fp32: q, k and gk [heads, Dk], v [heads, Dv], beta and g
// [heads]. `step` changes the state [heads, Dv, Dk] and returns the output [heads, Dv].
struct Token {
  at::Tensor q, k, v;
  std::optional<at::Tensor> beta, g, gk;
};

at::Tensor step(at::Tensor& state, const Token& t) {
  if (t.g) state = state * t.g->exp().view({-1, 1, 1});
  if (t.gk) state = state * t.gk->exp().unsqueeze(1);
  at::Tensor delta = t.v - state.matmul(t.k.unsqueeze(-1)).squeeze(-1);
  if (t.beta) delta = delta * t.beta->unsqueeze(-1);
  state = state + delta.unsqueeze(-1) * t.k.unsqueeze(1);
  return state.matmul(t.q.unsqueeze(-1)).squeeze(-1);
}

struct Tokens {
  at::Tensor q, k, v;
  Tensor beta, g, gk;
  double scale;

  Token at(int64_t i) const {
    const int64_t times = v.size(1) / q.size(1);
    const auto of = [&](Tensor x) {
      return x ? std::optional(to_float(x->select(0, i))) : std::nullopt;
    };
    return {to_float(q.select(0, i)).repeat_interleave(times, 0) * scale,
            to_float(k.select(0, i)).repeat_interleave(times, 0),
            to_float(v.select(0, i)),
            of(beta),
            of(g),
            of(gk)};
  }
};

std::vector<int64_t> values(const at::Tensor& x) {
  std::vector<int64_t> out;
  for (int64_t i = 0; i < x.numel(); ++i) out.push_back(x.select(0, i).item<int64_t>());
  return out;
}

void check_total(const std::vector<int64_t>& lengths, int64_t tokens) {
  int64_t sum = 0;
  for (int64_t length : lengths) sum += length;
  need(sum == tokens, "actual_seq_lengths: they sum to ", sum, ", there are ", tokens, " tokens");
}

void recurrent(const Tokens& tokens, const at::Tensor& states, const at::Tensor& lengths_in,
               Tensor slots_in, Tensor accepted_in, const at::Tensor& out) {
  const auto lengths = values(lengths_in);
  check_total(lengths, tokens.q.size(0));
  const auto slots = slots_in ? values(slots_in) : std::vector<int64_t>{};
  const auto accepted = accepted_in ? values(accepted_in) : std::vector<int64_t>{};
  for (int64_t slot : slots)
    need(slot >= 0 && slot < states.size(0), "ssm_state_indices: got ", slot, ", needs 0 to ",
         states.size(0) - 1);
  int64_t begin = 0;
  for (size_t b = 0; b < lengths.size(); begin += lengths[b++]) {
    need(lengths[b] >= 1 && lengths[b] <= 8, "actual_seq_lengths: got ", lengths[b],
         ", needs 1 to 8");
    const int64_t first = accepted.empty() ? 1 : accepted[b];
    need(first >= 1 && first <= lengths[b], "num_accepted_tokens: got ", first, ", needs 1 to ",
         lengths[b]);
    const auto slot = [&](int64_t i) { return slots.empty() ? begin + i : slots[begin + i]; };
    at::Tensor state = to_float(states.select(0, slot(first - 1)));
    for (int64_t i = 0; i < lengths[b]; ++i) {
      out.select(0, begin + i).copy_(step(state, tokens.at(begin + i)));
      states.select(0, slot(i)).copy_(state);
    }
  }
}

void chunk(const Tokens& tokens, const at::Tensor& initial, const at::Tensor& lengths_in,
           const at::Tensor& out, const at::Tensor& final_state) {
  const auto lengths = values(lengths_in);
  check_total(lengths, tokens.q.size(0));
  int64_t begin = 0;
  for (size_t b = 0; b < lengths.size(); begin += lengths[b++]) {
    at::Tensor state = to_float(initial.select(0, static_cast<int64_t>(b)));
    for (int64_t i = begin; i < begin + lengths[b]; ++i)
      out.select(0, i).copy_(step(state, tokens.at(i)));
    final_state.select(0, static_cast<int64_t>(b)).copy_(state);
  }
}

bool is_950() { return settings().soc.rfind("Ascend950", 0) == 0; }

// npu_masked_causal_conv1d: x [S, B, H], weight [W, H], mask [B, S].
void check_conv(const at::Tensor& x, const at::Tensor& weight, Tensor mask) {
  need(is_half(x), "input: got ", x.scalar_type(), ", needs float16 or bfloat16");
  need(weight.scalar_type() == x.scalar_type(), "weight: got ", weight.scalar_type(),
       ", needs input's ", x.scalar_type());
  need(x.dim() == 3 && weight.dim() == 2 && weight.size(1) == x.size(2), "input ", x.sizes(),
       " and weight ", weight.sizes(), " need [S, B, H] and [W, H]");
  need_tiling(weight.size(0) == 3, "weight: window ", weight.size(0), ", needs 3");
  if (mask)
    need(mask->scalar_type() == at::kBool && mask->dim() == 2 && mask->size(0) == x.size(1) &&
             mask->size(1) == x.size(0),
         "mask: got ", mask->scalar_type(), mask->sizes(), ", needs bool [B, S]");
}

at::Tensor masked(const at::Tensor& x, Tensor mask) {
  return mask ? x * mask->t().unsqueeze(-1) : x;
}

// Returns x moved `by` positions later in time, with zeros before it.
at::Tensor later(const at::Tensor& x, int64_t by) {
  at::Tensor out = x.new_zeros(x.sizes());
  if (by < x.size(0)) out.slice(0, by).copy_(x.slice(0, 0, x.size(0) - by));
  return out;
}

at::Tensor conv(const at::Tensor& x, const at::Tensor& weight, Tensor mask) {
  at::Tensor sum = at::Tensor(to_float(x)) * 0;
  const int64_t width = weight.size(0);
  for (int64_t w = 0; w < width; ++w)
    sum = sum + later(to_float(x), width - 1 - w) * to_float(weight.select(0, w));
  return masked(sum, mask);
}

void conv_grad(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight, Tensor mask,
               const at::Tensor& dx, const at::Tensor& dweight) {
  const at::Tensor grad = masked(to_float(dy), mask), backwards = grad.flip(0);
  at::Tensor sum = grad * 0;
  const int64_t width = weight.size(0);
  for (int64_t w = 0; w < width; ++w) {
    const int64_t by = width - 1 - w;
    sum = sum + later(backwards, by).flip(0) * to_float(weight.select(0, w));
    dweight.select(0, w).copy_((grad * later(to_float(x), by)).sum(at::IntArrayRef({0, 1})));
  }
  dx.copy_(sum);
}

}  // namespace

ACLNN(RecurrentGatedDeltaRule,
      (Tensor q, Tensor k, Tensor v, Tensor beta, Tensor state, Tensor lengths, Tensor slots,
       Tensor g, Tensor gk, Tensor accepted, float scale, Tensor out),
      check_delta(q, k, v, beta, state, lengths, g, {256, 512, false}),
      recurrent({q, k, v, beta, g, gk, scale}, state, lengths, slots, accepted, out))
ACLNN(ChunkGatedDeltaRule,
      (Tensor q, Tensor k, Tensor v, Tensor beta, Tensor initial, Tensor lengths, float scale,
       Tensor g, Tensor out, Tensor final_state),
      check_delta(q, k, v, beta, initial, lengths, g, {64, 128, is_950()}),
      chunk({q, k, v, beta, g, {}, scale}, initial, lengths, out, final_state))
ACLNN(MaskedCausalConv1d, (Tensor x, Tensor weight, Tensor mask, Tensor out),
      check_conv(x, weight, mask), out->copy_(conv(x, weight, mask)))
ACLNN(MaskedCausalConv1dBackward,
      (Tensor dy, Tensor x, Tensor weight, Tensor mask, Tensor dx, Tensor dweight),
      check_conv(x, weight, mask), conv_grad(dy, x, weight, mask, dx, dweight))
