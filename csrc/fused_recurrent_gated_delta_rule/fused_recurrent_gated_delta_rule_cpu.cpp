// The recurrent gated delta rule on the CPU. Reference:
// npu_ops/ops/fused_recurrent_gated_delta_rule/reference.py
#include <algorithm>
#include <cmath>

#include "common/parallel.h"
#include "common/sum.h"
#include "fused_recurrent_gated_delta_rule/delta.h"

namespace npu_ops {
namespace {

// A state is processed in blocks of value columns, [keys, kBlock], which are independent of each
// other.
constexpr int64_t kBlock = 64;

// One token of one head and block of values, in fp32. v is 0 beyond the last value.
struct Token {
  const float *q, *k, *key_decay;       // [keys]; q is scaled
  const float *v, *beta, *value_decay;  // [kBlock]
};

// One step of the delta rule: decays the state S, moves S^T k towards v, and writes S^T q to `out`.
NPU_OPS_CLONES void advance(float* state, int64_t keys, Token token, float* out) {
  float change[kBlock] = {};
  for (int64_t i = 0; i < keys; ++i) {
    const float weight = token.key_decay[i] * token.k[i];
#pragma GCC ivdep
    for (int64_t j = 0; j < kBlock; ++j) change[j] += state[i * kBlock + j] * weight;
  }
#pragma GCC ivdep
  for (int64_t j = 0; j < kBlock; ++j)
    change[j] = token.beta[j] * (token.v[j] - change[j] * token.value_decay[j]);
  std::fill_n(out, kBlock, 0.0f);
  for (int64_t i = 0; i < keys; ++i) {
    float* row = state + i * kBlock;
#pragma GCC ivdep
    for (int64_t j = 0; j < kBlock; ++j) {
      const float decay = token.value_decay[j] * token.key_decay[i];
      row[j] = row[j] * decay + change[j] * token.k[i];
      out[j] += row[j] * token.q[i];
    }
  }
}

// Copies between a state in memory and a block [keys, kBlock] of its values from `begin` on.
struct StateLayout {
  int64_t keys, values;
  bool v_first;
  int64_t at(int64_t key, int64_t value) const {
    return v_first ? value * keys + key : key * values + value;
  }
  void to_block(const float* state, int64_t begin, float* block) const {
    const int64_t count = std::min(kBlock, values - begin);
    std::fill(block, block + keys * kBlock, 0.0f);
    for (int64_t i = 0; i < keys; ++i)
      for (int64_t j = 0; j < count; ++j) block[i * kBlock + j] = state[at(i, begin + j)];
  }
  void from_block(const float* block, int64_t begin, float* state) const {
    const int64_t count = std::min(kBlock, values - begin);
    for (int64_t i = 0; i < keys; ++i)
      for (int64_t j = 0; j < count; ++j) state[at(i, begin + j)] = block[i * kBlock + j];
  }
};

// Tokens between two states that the backward stores; it recomputes the states between them.
constexpr int64_t kSegment = 32;

// The inputs of a call, the sizes of its heads, and where its sequences begin.
struct Inputs {
  Inputs(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& g,
         const std::optional<Tensor>& gk, const std::optional<Tensor>& gv, const Tensor& beta,
         const std::optional<Tensor>& cu_seqlens, double scale, bool v_first)
      : heads(q.size(2)),
        value_heads(v.size(2)),
        group(value_heads / heads),
        beta_width(beta.size(3)),
        layout{q.size(3), v.size(3), v_first},
        blocks((v.size(3) + kBlock - 1) / kBlock),
        spans(cu_seqlens, q.size(0), q.size(1), q.size(0) * q.size(1)),
        q(q, q.size(3)),
        k(k, q.size(3)),
        v(v, v.size(3)),
        beta(beta, beta.size(3)),
        scale(static_cast<float>(scale)) {
    if (g) this->g.emplace(*g, 1);
    if (gk) this->gk.emplace(*gk, layout.keys);
    if (gv) this->gv.emplace(*gv, layout.values);
  }

  int64_t matrix() const { return layout.keys * layout.values; }
  int64_t average_work() const {
    const int64_t tokens = spans.count() ? spans.end(spans.count() - 1) / spans.count() : 0;
    return layout.keys * kBlock * (tokens + 1);
  }

  int64_t heads, value_heads, group, beta_width;
  StateLayout layout;
  int64_t blocks;
  Spans spans;
  Rows q, k, v, beta;
  std::optional<Rows> g, gk, gv;
  float scale;
};

// Reads tokens of one value head and block of values, one at a time.
class Reader {
 public:
  Reader(const Inputs& inputs, int64_t value_head, int64_t block)
      : in_(inputs),
        value_head_(value_head),
        begin_(block * kBlock),
        count_(std::min(kBlock, inputs.layout.values - begin_)),
        keys_(3 * inputs.layout.keys),
        values_(3 * kBlock, 0.0f) {}

  Token at(int64_t token) {
    const int64_t keys = in_.layout.keys, row = token * in_.value_heads + value_head_;
    const int64_t qk_row = token * in_.heads + value_head_ / in_.group;
    float *q = keys_.data(), *k = q + keys, *key_decay = k + keys;
    float *v = values_.data(), *beta = v + kBlock, *value_decay = beta + kBlock;
    in_.q.read(qk_row, 0, keys, q);
    for (int64_t i = 0; i < keys; ++i) q[i] *= in_.scale;
    in_.k.read(qk_row, 0, keys, k);
    const float g = in_.g ? in_.g->one(row) : 0.0f;
    if (in_.gk) {
      in_.gk->read(row, 0, keys, key_decay);
      for (int64_t i = 0; i < keys; ++i) key_decay[i] = std::exp(g + key_decay[i]);
    } else {
      std::fill(key_decay, key_decay + keys, std::exp(g));
    }
    in_.v.read(row, begin_, count_, v);
    if (in_.beta_width == in_.layout.values)
      in_.beta.read(row, begin_, count_, beta);
    else
      std::fill(beta, beta + kBlock, in_.beta.one(row));
    std::fill(value_decay, value_decay + kBlock, 1.0f);
    if (in_.gv) {
      in_.gv->read(row, begin_, count_, value_decay);
      for (int64_t j = 0; j < count_; ++j) value_decay[j] = std::exp(value_decay[j]);
    }
    return {q, k, key_decay, v, beta, value_decay};
  }

 private:
  const Inputs& in_;
  int64_t value_head_, begin_, count_;
  std::vector<float> keys_, values_;
};

// Loads one block of values of a state, or of its gradient; zeros if there is none.
void first_state(const std::optional<Tensor>& states, const Inputs& in, int64_t place,
                 int64_t block, float* state) {
  if (states)
    in.layout.to_block(input<float>(*states) + place * in.matrix(), block * kBlock, state);
  else
    std::fill(state, state + in.layout.keys * kBlock, 0.0f);
}

// Loops over the tokens of a sequence, for a block of one value head's values.
void walk(const Inputs& in, int64_t n, int64_t head, int64_t block,
          const std::optional<Tensor>& initial_state, const Tensor& o,
          const std::optional<Tensor>& final_state) {
  const int64_t place = n * in.value_heads + head, values = in.layout.values;
  const int64_t begin = block * kBlock, count = std::min(kBlock, values - begin);
  std::vector<float> state(in.layout.keys * kBlock);
  first_state(initial_state, in, place, block, state.data());
  Reader reader(in, head, block);
  float result[kBlock];
  for (int64_t token = in.spans.begin(n); token < in.spans.end(n); ++token) {
    advance(state.data(), in.layout.keys, reader.at(token), result);
    dispatch(o.scalar_type(), "o", [&]<class T>(T*) {
      T* to = output<T>(o) + (token * in.value_heads + head) * values + begin;
      for (int64_t j = 0; j < count; ++j) store(to + j, result[j]);
    });
  }
  if (final_state)
    in.layout.from_block(state.data(), begin, output<float>(*final_state) + place * in.matrix());
}

void forward(Tensor q, Tensor k, Tensor v, std::optional<Tensor> g, std::optional<Tensor> gk,
             std::optional<Tensor> gv, Tensor beta, std::optional<Tensor> initial_state,
             std::optional<Tensor> cu_seqlens, double scale, bool v_first, Tensor o,
             std::optional<Tensor> final_state) {
  const Inputs in(q, k, v, g, gk, gv, beta, cu_seqlens, scale, v_first);
  // Tokens after the last sequence belong to no sequence: their outputs are 0.
  const int64_t row = in.value_heads * in.layout.values, end = in.spans.end(in.spans.count() - 1);
  dispatch(o.scalar_type(), "o", [&]<class T>(T*) {
    std::fill(output<T>(o) + end * row, output<T>(o) + o.numel(), T{});
  });
  const int64_t items = in.spans.count() * in.value_heads * in.blocks;
  parallel(items, in.average_work(), [&](int64_t first, int64_t last) {
    for (int64_t item = first; item < last; ++item) {
      const int64_t place = item / in.blocks;
      walk(in, place / in.value_heads, place % in.value_heads, item % in.blocks, initial_state, o,
           final_state);
    }
  });
}

// The gradients of one token. Those of q and k are sums over the value heads of a key head; those
// of q, k and the key decay are also sums over the blocks of a value head.
struct TokenGradient {
  float *q, *k, *log_key_decay;       // [keys], added to
  float *v, *beta, *log_value_decay;  // [kBlock], written
};

// Computes a token's gradients. `state` is the state before the token. On entry, `grad_state` is
// the gradient of the state after the token; on return, of the state before it.
NPU_OPS_CLONES void retreat(const float* state, float* grad_state, int64_t keys, Token token,
                            const float* grad_o, float scale, TokenGradient to) {
  float recalled[kBlock] = {}, dchange[kBlock] = {}, change[kBlock];
  for (int64_t i = 0; i < keys; ++i) {
    const float weight = token.key_decay[i] * token.k[i];
    const float* row = state + i * kBlock;
    float* drow = grad_state + i * kBlock;
#pragma GCC ivdep
    for (int64_t j = 0; j < kBlock; ++j) {
      drow[j] += grad_o[j] * token.q[i];
      recalled[j] += row[j] * weight;
      dchange[j] += drow[j] * token.k[i];
    }
  }
#pragma GCC ivdep
  for (int64_t j = 0; j < kBlock; ++j) {
    const float error = token.v[j] - recalled[j] * token.value_decay[j];
    change[j] = token.beta[j] * error;
    to.v[j] = token.beta[j] * dchange[j];
    to.beta[j] = dchange[j] * error;
    to.log_value_decay[j] = 0.0f;
  }
  const float read_change = dot(change, grad_o, kBlock);
  for (int64_t i = 0; i < keys; ++i) {
    const float* row = state + i * kBlock;
    float *drow = grad_state + i * kBlock, decayed[kBlock], before[kBlock];
    const float of_change = dot(drow, change, kBlock);
#pragma GCC ivdep
    for (int64_t j = 0; j < kBlock; ++j) {
      const float decay = token.value_decay[j] * token.key_decay[i];
      decayed[j] = row[j] * decay;
      before[j] = drow[j] - to.v[j] * token.k[i];
      drow[j] = before[j] * decay;
      to.log_value_decay[j] += before[j] * decayed[j];
    }
    to.q[i] += scale * (dot(decayed, grad_o, kBlock) + token.k[i] * read_change);
    to.k[i] += of_change - dot(decayed, to.v, kBlock);
    to.log_key_decay[i] += dot(before, decayed, kBlock);
  }
}

struct Gradients {
  Tensor grad_q, grad_k, grad_v;
  std::optional<Tensor> grad_g, grad_gk, grad_gv;
  Tensor grad_beta;
  std::optional<Tensor> grad_initial_state;
};

// Stores the gradients of v and gv of one token, head and block, and adds those of g, gk and beta.
void add(const Inputs& in, const Gradients& to, int64_t token, int64_t head, int64_t block,
         const TokenGradient& from) {
  const int64_t row = token * in.value_heads + head, keys = in.layout.keys;
  const int64_t values = in.layout.values, begin = block * kBlock;
  const int64_t count = std::min(kBlock, values - begin);
  std::copy(from.v, from.v + count, output<float>(to.grad_v) + row * values + begin);
  if (to.grad_gv)
    std::copy(from.log_value_decay, from.log_value_decay + count,
              output<float>(*to.grad_gv) + row * values + begin);
  for (int64_t i = 0; i < keys; ++i) {
    if (to.grad_g) output<float>(*to.grad_g)[row] += from.log_key_decay[i];
    if (to.grad_gk) output<float>(*to.grad_gk)[row * keys + i] += from.log_key_decay[i];
  }
  float* grad_beta = output<float>(to.grad_beta) + row * in.beta_width;
  for (int64_t j = 0; j < count; ++j)
    grad_beta[in.beta_width == values ? begin + j : 0] += from.beta[j];
}

// Loops backwards over the tokens of a sequence, for a block of one value head's values.
void walk_back(const Inputs& in, int64_t n, int64_t head, int64_t block, const Rows& grad_o,
               const std::optional<Tensor>& grad_final_state,
               const std::optional<Tensor>& initial_state, const Gradients& to) {
  const int64_t keys = in.layout.keys, size = keys * kBlock;
  const int64_t begin = in.spans.begin(n), length = in.spans.end(n) - begin;
  const int64_t segments = (length + kSegment - 1) / kSegment;
  const int64_t place = n * in.value_heads + head;
  std::vector<float> kept(std::max<int64_t>(segments, 1) * size), grad_state(size);
  std::vector<float> states(std::min(length, kSegment) * size), row(4 * kBlock), log_decay(keys);
  std::vector<float> grad_o_row(kBlock, 0.0f);
  Reader reader(in, head, block);
  first_state(initial_state, in, place, block, kept.data());
  for (int64_t s = 0; s + 1 < segments; ++s) {
    float* state = std::copy_n(kept.data() + s * size, size, kept.data() + (s + 1) * size) - size;
    for (int64_t i = 0; i < kSegment; ++i)
      advance(state, keys, reader.at(begin + s * kSegment + i), row.data());
  }
  first_state(grad_final_state, in, place, block, grad_state.data());
  for (int64_t s = segments - 1; s >= 0; --s) {
    const int64_t start = begin + s * kSegment, count = std::min(kSegment, begin + length - start);
    std::copy_n(kept.data() + s * size, size, states.data());
    for (int64_t i = 0; i + 1 < count; ++i) {
      float* state =
          std::copy_n(states.data() + i * size, size, states.data() + (i + 1) * size) - size;
      advance(state, keys, reader.at(start + i), row.data());
    }
    for (int64_t i = count - 1; i >= 0; --i) {
      const int64_t token = start + i, qk_row = (token * in.heads + head / in.group) * keys;
      const int64_t values = in.layout.values;
      grad_o.read(token * in.value_heads + head, block * kBlock,
                  std::min(kBlock, values - block * kBlock), grad_o_row.data());
      std::fill(log_decay.begin(), log_decay.end(), 0.0f);
      const TokenGradient gradient{output<float>(to.grad_q) + qk_row,
                                   output<float>(to.grad_k) + qk_row,
                                   log_decay.data(),
                                   row.data(),
                                   row.data() + kBlock,
                                   row.data() + 2 * kBlock};
      retreat(states.data() + i * size, grad_state.data(), keys, reader.at(token),
              grad_o_row.data(), in.scale, gradient);
      add(in, to, token, head, block, gradient);
    }
  }
  if (to.grad_initial_state)
    in.layout.from_block(grad_state.data(), block * kBlock,
                         output<float>(*to.grad_initial_state) + place * in.matrix());
}

void clear(const Tensor& tensor) { std::fill_n(output<float>(tensor), tensor.numel(), 0.0f); }

// One thread computes a key head of a sequence with all its value heads and blocks, because these
// add to the same gradients of q and k.
void backward(Tensor grad_o, std::optional<Tensor> grad_final_state, Tensor q, Tensor k, Tensor v,
              std::optional<Tensor> g, std::optional<Tensor> gk, std::optional<Tensor> gv,
              Tensor beta, std::optional<Tensor> initial_state, std::optional<Tensor> cu_seqlens,
              double scale, bool v_first, Tensor grad_q, Tensor grad_k, Tensor grad_v,
              std::optional<Tensor> grad_g, std::optional<Tensor> grad_gk,
              std::optional<Tensor> grad_gv, Tensor grad_beta,
              std::optional<Tensor> grad_initial_state) {
  const Inputs in(q, k, v, g, gk, gv, beta, cu_seqlens, scale, v_first);
  const Gradients to{grad_q,  grad_k,  grad_v,    grad_g,
                     grad_gk, grad_gv, grad_beta, grad_initial_state};
  const Rows grad_o_rows(grad_o, in.layout.values);
  clear(grad_q);
  clear(grad_k);
  clear(grad_v);
  clear(grad_beta);
  if (grad_g) clear(*grad_g);
  if (grad_gk) clear(*grad_gk);
  if (grad_gv) clear(*grad_gv);
  const int64_t parts = in.group * in.blocks;
  parallel(in.spans.count() * in.heads, 4 * parts * in.average_work(),
           [&](int64_t first, int64_t last) {
             for (int64_t item = first; item < last; ++item)
               for (int64_t part = 0; part < parts; ++part)
                 walk_back(in, item / in.heads, item % in.heads * in.group + part / in.blocks,
                           part % in.blocks, grad_o_rows, grad_final_state, initial_state, to);
           });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(npu_ops, CPU, m) {
  m.impl("fused_recurrent_gated_delta_rule_cpu", TORCH_BOX(&forward));
  m.impl("fused_recurrent_gated_delta_rule_backward_cpu", TORCH_BOX(&backward));
}

}  // namespace npu_ops
