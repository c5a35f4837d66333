// The decode step of Gated Delta Net on the CPU. Reference:
// npu_ops/ops/gated_delta_rule_update/reference.py
#include <algorithm>
#include <cmath>

#include "common/parallel.h"
#include "common/sum.h"
#include "common/widen.h"
#include "fused_recurrent_gated_delta_rule/delta.h"

namespace npu_ops {
namespace {

// A sequence that is not skipped: its tokens [begin, end), and the indices of the states that it
// reads and writes.
struct Sequence {
  int64_t n, begin, end;
  bool starts_kept;   // its first state is an intermediate state
  int64_t slot, row;  // of the pool, and of the intermediate states (-1: none)
  int64_t step;       // if starts_kept: which of the row's states
};

struct Call {
  Call(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& a, const Tensor& b,
       const std::optional<Tensor>& A_log, const std::optional<Tensor>& dt_bias,
       const Tensor& state, const Tensor& state_indices, const std::optional<Tensor>& kept,
       double scale, bool normalize, bool v_first, bool update, double softplus_beta,
       double softplus_threshold, const Tensor& o)
      : q(q, q.stride(0)),
        k(k, k.stride(0)),
        v(v, v.stride(0)),
        a(a, a.stride(0)),
        b(b, b.stride(0)),
        state(state),
        o(o),
        kept(kept),
        slots(state_indices),
        heads(q.size(1)),
        value_heads(v.size(1)),
        keys(q.size(2)),
        values(v.size(2)),
        scale(static_cast<float>(scale)),
        softplus_beta(static_cast<float>(softplus_beta)),
        softplus_threshold(static_cast<float>(softplus_threshold)),
        normalize(normalize),
        v_first(v_first),
        update(update) {
    if (A_log) this->A_log.emplace(*A_log, 1);
    if (dt_bias) this->dt_bias.emplace(*dt_bias, 1);
  }

  Rows q, k, v, a, b;
  std::optional<Rows> A_log, dt_bias;  // absent if a holds g, and b holds beta
  const Tensor &state, &o;
  const std::optional<Tensor>& kept;
  Indices slots;
  int64_t heads, value_heads, keys, values;
  float scale, softplus_beta, softplus_threshold;
  bool normalize, v_first, update;
};

// Checks the slots of sequence n and adds them to `all`, without -1 and without repeats: a sequence
// may use a slot twice.
void add_slots(const Indices& slots, int64_t n, int64_t last, std::vector<int64_t>& all) {
  const auto begin = static_cast<std::ptrdiff_t>(all.size());
  for (int64_t i = 0; i < slots.columns(); ++i) {
    const int64_t slot = within("state_indices", slots.at(n, i), -1, last);
    if (slot >= 0 && std::find(all.begin() + begin, all.end(), slot) == all.end())
      all.push_back(slot);
  }
}

std::vector<Sequence> find_sequences(const Call& call, const Spans& spans, const Indices& accepted,
                                     const Indices& rows) {
  std::vector<Sequence> found;
  std::vector<int64_t> slots_written, rows_written;
  const int64_t last_slot = call.state.size(0) - 1, columns = call.slots.columns();
  const bool by_token = call.slots.by_column();
  const int64_t steps = call.kept ? call.kept->size(1) : columns;
  within("cu_seqlens", spans.count(), call.slots.rows(), call.slots.rows());
  for (int64_t n = 0; n < spans.count(); ++n) {
    const int64_t count = spans.end(n) - spans.begin(n), done = accepted ? accepted.at(n) : 0;
    Sequence one{n, spans.begin(n), spans.end(n), !by_token && done > 0, 0, -1, done - 1};
    one.slot = call.slots.at(n, by_token ? std::clamp<int64_t>(done, 1, columns) - 1 : 0);
    if (one.slot == -1) continue;  // nothing else of a skipped sequence is read
    if (call.kept || by_token) within("tokens of a sequence", count, 0, steps);
    if (accepted) within("num_accepted_tokens", done, by_token ? 1 : 0, steps);
    add_slots(call.slots, n, last_slot, slots_written);
    if (count == 0) continue;
    if (call.kept)
      one.row = within("intermediate_state_indices", rows ? rows.at(n) : n,
                       one.starts_kept ? 0 : -1, call.kept->size(0) - 1);
    if (one.row >= 0) rows_written.push_back(one.row);
    found.push_back(one);
  }
  if (call.update) check_distinct("state_indices", std::move(slots_written));
  check_distinct("intermediate_state_indices", std::move(rows_written));
  return found;
}

// One head's token in fp32. q is scaled.
struct Token {
  const float *q, *k, *v;
  float decay, beta;
};

// One step of the delta rule: decays the state S [keys, values], moves S^T k towards v, and writes
// S^T q to `out`. change: scratch for a row.
NPU_OPS_CLONES void advance_columns(float* state, int64_t keys, int64_t values, Token token,
                                    float* change, float* out) {
  std::fill_n(change, values, 0.0f);
  std::fill_n(out, values, 0.0f);
  for (int64_t i = 0; i < keys; ++i)
#pragma GCC ivdep
    for (int64_t j = 0; j < values; ++j) change[j] += state[i * values + j] * token.k[i];
#pragma GCC ivdep
  for (int64_t j = 0; j < values; ++j)
    change[j] = token.beta * (token.v[j] - token.decay * change[j]);
  for (int64_t i = 0; i < keys; ++i) {
    float* row = state + i * values;
#pragma GCC ivdep
    for (int64_t j = 0; j < values; ++j) {
      row[j] = row[j] * token.decay + change[j] * token.k[i];
      out[j] += row[j] * token.q[i];
    }
  }
}

// Like advance_columns, for a state [values, keys].
NPU_OPS_CLONES void advance_rows(float* state, int64_t keys, int64_t values, Token token,
                                 float* out) {
  for (int64_t i = 0; i < values; ++i) {
    float* row = state + i * keys;
    const float change = token.beta * (token.v[i] - token.decay * dot(row, token.k, keys));
#pragma GCC ivdep
    for (int64_t j = 0; j < keys; ++j) row[j] = row[j] * token.decay + token.k[j] * change;
    out[i] = dot(row, token.q, keys);
  }
}

// One head of a sequence: its state in fp32, and its tokens.
class Head {
 public:
  explicit Head(const Call& call)
      : call_(call),
        state_(call.keys * call.values),
        q_(call.keys),
        k_(call.keys),
        v_(call.values),
        change_(call.values),
        out_(call.values) {}

  template <class S>
  void load_state(const S* from) {
    widen(from, state_.data(), call_.keys * call_.values);
  }

  template <class S>
  void store_state(S* to) {
    narrow(state_.data(), to, call_.keys * call_.values);
  }

  void advance_token(int64_t token, int64_t head) {
    const int64_t qk_at = head / (call_.value_heads / call_.heads) * call_.keys;
    read_key(call_.q, token, qk_at, call_.scale, q_.data());
    read_key(call_.k, token, qk_at, 1.0f, k_.data());
    call_.v.read(token, head * call_.values, call_.values, v_.data());
    Token one{q_.data(), k_.data(), v_.data(), call_.a.one(token, head), call_.b.one(token, head)};
    if (call_.A_log) {
      const float raw = one.decay + call_.dt_bias->one(head);
      one.decay = -rate(call_.A_log->one(head), raw);
      one.beta = 1.0f / (1.0f + std::exp(-one.beta));
    }
    one.decay = std::exp(one.decay);
    if (call_.v_first)
      advance_rows(state_.data(), call_.keys, call_.values, one, out_.data());
    else
      advance_columns(state_.data(), call_.keys, call_.values, one, change_.data(), out_.data());
  }

  void store_output(int64_t token, int64_t head) const {
    dispatch(call_.o.scalar_type(), "o", [&]<class T>(T*) {
      T* to = output<T>(call_.o) + (token * call_.value_heads + head) * call_.values;
      narrow(out_.data(), to, call_.values);
    });
  }

 private:
  // Returns exp(A_log) softplus(x). It is computed in long double, because a factor may overflow a
  // float if the product does not. In double, `exp` would require glibc 2.29.
  float rate(long double A_log, long double x) const {
    const long double bent = call_.softplus_beta * x;
    const long double plus = std::max(bent, 0.0L) + std::log1p(std::exp(-std::abs(bent)));
    const long double value = bent > call_.softplus_threshold ? x : plus / call_.softplus_beta;
    return static_cast<float>(std::exp(A_log) * value);
  }
  void read_key(const Rows& rows, int64_t token, int64_t at, float scale, float* to) const {
    rows.read(token, at, call_.keys, to);
    float squares = 0;
    for (int64_t i = 0; i < call_.keys; ++i) squares += to[i] * to[i];
    const float factor = call_.normalize ? scale / std::sqrt(squares + 1e-6f) : scale;
    for (int64_t i = 0; i < call_.keys; ++i) to[i] *= factor;
  }

  const Call& call_;
  std::vector<float> state_, q_, k_, v_, change_, out_;
};

template <class S>
void walk(const Call& call, const Sequence& one, int64_t head, Head& scratch) {
  const int64_t at = head * call.keys * call.values;
  const auto slot = [&](int64_t index) {
    return output<S>(call.state) + index * call.state.stride(0) + at;
  };
  const auto kept = [&](int64_t step) {
    return output<S>(*call.kept) + one.row * call.kept->stride(0) + step * call.kept->stride(1) +
           at;
  };
  scratch.load_state(one.starts_kept ? kept(one.step) : slot(one.slot));
  for (int64_t token = one.begin; token < one.end; ++token) {
    const int64_t i = token - one.begin;
    scratch.advance_token(token, head);
    scratch.store_output(token, head);
    if (one.row >= 0) scratch.store_state(kept(i));
    const int64_t own = call.slots.by_column() ? call.slots.at(one.n, i) : -1;
    if (call.update && own >= 0) scratch.store_state(slot(own));
  }
  if (call.update && !call.slots.by_column()) scratch.store_state(slot(one.slot));
}

void update(Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, std::optional<Tensor> A_log,
            std::optional<Tensor> dt_bias, Tensor state, Tensor state_indices,
            std::optional<Tensor> cu_seqlens, std::optional<Tensor> num_accepted_tokens,
            std::optional<Tensor> intermediate_states,
            std::optional<Tensor> intermediate_state_indices, double scale, bool normalize,
            bool v_first, bool update, double softplus_beta, double softplus_threshold, Tensor o) {
  const Call call(q, k, v, a, b, A_log, dt_bias, state, state_indices, intermediate_states, scale,
                  normalize, v_first, update, softplus_beta, softplus_threshold, o);
  const int64_t count = state_indices.size(0);
  const Spans spans(cu_seqlens, count, count ? q.size(0) / count : 0, q.size(0));
  const auto sequences = find_sequences(call, spans, Indices(num_accepted_tokens),
                                        Indices(intermediate_state_indices));
  dispatch(o.scalar_type(), "o", [&]<class T>(T*) { std::fill_n(output<T>(o), o.numel(), T{}); });
  const int64_t items = static_cast<int64_t>(sequences.size()) * call.value_heads;
  dispatch(state.scalar_type(), "state", [&]<class S>(S*) {
    parallel(items, call.keys * call.values, [&](int64_t first, int64_t last) {
      Head scratch(call);
      for (int64_t item = first; item < last; ++item)
        walk<S>(call, sequences[item / call.value_heads], item % call.value_heads, scratch);
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(npu_ops, CPU, m) {
  m.impl("gated_delta_rule_update_cpu", TORCH_BOX(&update));
}

}  // namespace npu_ops
