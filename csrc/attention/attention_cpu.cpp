// Attention of short sequences on the CPU. Reference: npu_ops/ops/attention/reference.py;
// npu_ops/ops/attention/short.py calls it.
//
// q, out and their gradients are [B, H, Tq, .], k and v [B, Hk, Tk, .], lse fp32 [B, H, Tq].
// Strides are arbitrary, except that a row is contiguous. Query i sees key j if j <= i + shift. The
// kernel computes in fp32, a few queries at a time against all keys, so that their scores stay in
// the L1 cache.
//
// Several rows are multiplied at once, up to the last key that any of their queries sees; keys that
// a query does not see have weight 0. But 0 times infinity or NaN is NaN. So if an operand is not
// finite, each row is multiplied alone, with the keys that its query sees.
#include <vector>

#include "attention/heads.h"
#include "common/parallel.h"

namespace npu_ops {
namespace {

struct Sizes {
  Sizes(const Tensor& q, const Tensor& k, const Tensor& v, double scale, int64_t shift)
      : batch(q.size(0)),
        heads(q.size(1)),
        key_heads(k.size(1)),
        queries(q.size(2)),
        keys(k.size(2)),
        width(q.size(3)),
        values(v.size(3)),
        scale(static_cast<float>(scale)),
        shift(shift) {}
  int64_t group() const { return heads / key_heads; }
  // The number of keys that a query sees.
  int64_t seen(int64_t query) const { return std::clamp<int64_t>(query + shift + 1, 0, keys); }
  // The work of a head, in elements, see parallel.h.
  int64_t cost() const { return (queries * keys + 8 * (queries + keys)) * (width + values) / 32; }
  int64_t batch, heads, key_heads, queries, keys, width, values;
  float scale;
  int64_t shift;
};

NPU_OPS_CLONES bool finite(Padded<const float> from, int64_t rows) {
  const float nothing = sum(rows * from.step, [&](int64_t j) { return 0.0f * from.data[j]; });
  return nothing == 0.0f;  // false for NaN, and infinity * 0 is NaN
}

// Sets `to` to the transpose of `from`, times `by`; rows are padded with zeros up to their step.
NPU_OPS_CLONES void transpose(Padded<const float> from, int64_t rows, int64_t columns, float by,
                              Padded<float> to) {
  if (rows < to.step) std::fill_n(to.data, columns * to.step, 0.0f);
  for (int64_t i = 0; i < rows; i += kLanes) {  // writes each line of the L1 cache once
    const int64_t count = std::min(kLanes, rows - i);
    for (int64_t j = 0; j < columns; ++j)
      for (int64_t r = 0; r < count; ++r) to.row(j)[i + r] = by * from.row(i + r)[j];
  }
}

// Sets kRows rows of `to` to left * right. Keys that a query does not see never change its row,
// even if they are not finite.
NPU_OPS_INLINE void multiply_seen(const Sizes& of, int64_t first, Padded<const float> left,
                                  Padded<const float> right, Padded<float> to, bool all_finite) {
  if (all_finite)
    return multiply<kRows>({left.data, left.step, 1}, right, of.seen(first + kRows - 1), to,
                           to.step);
  for (int64_t i = 0; i < kRows; ++i)
    multiply<1>({left.row(i), left.step, 1}, right, of.seen(first + i), to.from(i), to.step);
}

// Computes attention of `count` queries (at most kRows) from `first` on. keys_t: the keys,
// transposed and scaled. The caller divides `out` by `sums`.
NPU_OPS_CLONES void attend(const Sizes& of, int64_t first, int64_t count, Padded<const float> q,
                           Padded<const float> keys_t, Padded<const float> values,
                           bool finite_values, Padded<float> scores, Padded<float> out, float* lse,
                           float* sums) {
  const int64_t most = of.seen(first + kRows - 1), columns = padded(most);
  multiply<kRows>({q.data, q.step, 1}, keys_t, of.width, scores, columns);
  for (int64_t i = 0; i < count; ++i)
    lse[i] = soften(scores.row(i), of.seen(first + i), columns, sums + i);
  multiply_seen(of, first, scores, values, out, finite_values);
}

void forward(Tensor q, Tensor k, Tensor v, double scale, int64_t shift, Tensor out, Tensor lse) {
  const Sizes of(q, k, v, scale, shift);
  dispatch(q.scalar_type(), "q", [&]<class T>(T*) {
    const auto qs = heads_in<T>(q), ks = heads_in<T>(k), vs = heads_in<T>(v);
    const auto outs = heads_out<T>(out);
    const auto lses = heads_out<float>(lse);
    parallel(of.batch * of.heads, of.cost(), [&](int64_t begin, int64_t end) {
      Pieces pieces;
      const auto keys = pieces.take(of.keys, of.width), keys_t = pieces.take(of.width, of.keys);
      const auto values = pieces.take(of.keys, of.values), scores = pieces.take(kRows, of.keys);
      const auto queries = pieces.take(kRows, of.width), found = pieces.take(kRows, of.values);
      bool finite_values = true;
      for (int64_t at = begin; at < end; ++at) {
        const int64_t b = at / of.heads, h = at % of.heads, key_head = h / of.group();
        if (at == begin || h % of.group() == 0) {
          read(ks.of(b, key_head), of.keys, of.width, keys);
          transpose(keys, of.keys, of.width, of.scale, keys_t);
          read(vs.of(b, key_head), of.keys, of.values, values);
          finite_values = finite(values, of.keys);
        }
        for (int64_t i = 0; i < of.queries; i += kRows) {
          const int64_t count = std::min<int64_t>(kRows, of.queries - i);
          float log_sums[kRows], over[kRows] = {};
          read(qs.of(b, h).from(i), count, of.width, queries);
          attend(of, i, count, queries, keys_t, values, finite_values, scores, found, log_sums,
                 over);
          for (float& sum : over) sum = 1 / sum;
          write(found, count, of.values, over, outs.of(b, h).from(i));
          for (int64_t r = 0; r < count; ++r) *lses.of(b, h).row(i + r) = log_sums[r];
        }
      }
    });
  });
}

// One thread's matrices of the backward for one key head: keys and values, also transposed; queries
// and grad_out of one query head; weights and gradients of scores, [queries, keys]; the results.
struct Gradients {
  Gradients(const Sizes& of, Pieces& pieces)
      : keys(pieces.take(of.keys, of.width)),
        values(pieces.take(of.keys, of.values)),
        keys_t(pieces.take(of.width, of.keys)),
        values_t(pieces.take(of.values, of.keys)),
        queries(pieces.take(of.queries + kRows, of.width)),
        grad_out(pieces.take(of.queries + kRows, of.values)),
        weights(pieces.take(of.queries + kRows, of.keys)),
        grad_scores(pieces.take(of.queries + kRows, of.keys)),
        grad_queries(pieces.take(kRows, of.width)),
        grad_keys(pieces.take(of.keys + kRows, of.width)),
        grad_values(pieces.take(of.keys + kRows, of.values)) {}
  Padded<float> keys, values, keys_t, values_t, queries, grad_out, weights, grad_scores,
      grad_queries, grad_keys, grad_values;
};

// Computes, for kRows queries from `first` on, their weights, the gradients of their scores, and
// the gradients of the queries.
NPU_OPS_CLONES void attend_backward(const Sizes& of, const Gradients& x, int64_t first,
                                    const float* lse, bool finite_keys) {
  const int64_t most = of.seen(first + kRows - 1), columns = padded(most);
  const auto weights = x.weights.from(first), grads = x.grad_scores.from(first);
  const auto grad_out = x.grad_out.from(first);
  // `add_to_keys` reads kRows keys at once, of which these queries may see only the first. So zeros
  // are written up to `asked`.
  const int64_t asked = std::min(columns + kLanes, weights.step);
  multiply<kRows>({x.queries.row(first), x.queries.step, 1}, x.keys_t, of.width, weights, columns);
  multiply<kRows>({grad_out.data, grad_out.step, 1}, x.values_t, of.values, grads, columns);
  for (int i = 0; i < kRows; ++i) {
    const int64_t seen = of.seen(first + i);
    float *p = weights.row(i), *ds = grads.row(i);  // ds: first the gradients of the weights
    for (int64_t j = 0; j < columns; ++j) p[j] = exp_within(p[j] - lse[i]);
    std::fill(p + seen, p + asked, 0.0f);
    std::fill(ds + seen, ds + asked, 0.0f);
    // Computed from p and ds instead of out: then a query with one key has a gradient of exactly 0,
    // and out's rounding has no effect.
    const float along = dot(p, ds, columns);
    for (int64_t j = 0; j < seen; ++j) ds[j] = p[j] * (ds[j] - along);
  }
  multiply_seen(of, first, grads, x.keys, x.grad_queries, finite_keys);
}

// Adds the contribution of a head's queries to the gradients of their keys and values.
template <int ROWS>
NPU_OPS_CLONES void add_to_keys(const Sizes& of, const Gradients& x) {
  for (int64_t j = 0; j < of.keys; j += ROWS) {
    const int64_t first = std::max<int64_t>(0, j - of.shift), count = of.queries - first;
    if (count <= 0) return;  // no query sees this key or a later one
    const Left weights{x.weights.row(first) + j, 1, x.weights.step};
    const Left grads{x.grad_scores.row(first) + j, 1, x.grad_scores.step};
    multiply<ROWS, true>(weights, x.grad_out.from(first), count, x.grad_values.from(j),
                         x.grad_values.step);
    multiply<ROWS, true>(grads, x.queries.from(first), count, x.grad_keys.from(j),
                         x.grad_keys.step);
  }
}

void backward(Tensor grad_out, Tensor lse, Tensor q, Tensor k, Tensor v, double scale,
              int64_t shift, Tensor grad_q, Tensor grad_k, Tensor grad_v) {
  const Sizes of(q, k, v, scale, shift);
  dispatch(q.scalar_type(), "q", [&]<class T>(T*) {
    const auto qs = heads_in<T>(q), ks = heads_in<T>(k), vs = heads_in<T>(v);
    const auto grad_outs = heads_in<T>(grad_out);
    const auto lses = heads_in<float>(lse);
    const auto grad_qs = heads_out<T>(grad_q), grad_ks = heads_out<T>(grad_k);
    const auto grad_vs = heads_out<T>(grad_v);
    const std::vector<float> by_scale(std::max(of.keys, int64_t{kRows}), of.scale);
    const std::vector<float> by_one(of.keys, 1.0f);
    parallel(of.batch * of.key_heads, of.group() * of.cost(), [&](int64_t begin, int64_t end) {
      Pieces pieces;
      const Gradients x(of, pieces);
      for (int64_t at = begin; at < end; ++at) {
        const int64_t b = at / of.key_heads, key_head = at % of.key_heads;
        read(ks.of(b, key_head), of.keys, of.width, x.keys);
        read(vs.of(b, key_head), of.keys, of.values, x.values);
        transpose(x.keys, of.keys, of.width, of.scale, x.keys_t);
        transpose(x.values, of.keys, of.values, 1.0f, x.values_t);
        const bool finite_keys = finite(x.keys, of.keys);
        std::fill_n(x.grad_keys.data, (of.keys + kRows) * x.grad_keys.step, 0.0f);
        std::fill_n(x.grad_values.data, (of.keys + kRows) * x.grad_values.step, 0.0f);
        for (int64_t h = key_head * of.group(); h < (key_head + 1) * of.group(); ++h) {
          read(qs.of(b, h), of.queries, of.width, x.queries);
          read(grad_outs.of(b, h), of.queries, of.values, x.grad_out);
          const bool all_finite = finite(x.queries, of.queries) && finite(x.grad_out, of.queries);
          for (int64_t i = 0; i < of.queries; i += kRows) {
            const int64_t count = std::min<int64_t>(kRows, of.queries - i);
            float log_sums[kRows] = {};
            for (int64_t r = 0; r < count; ++r) log_sums[r] = *lses.of(b, h).row(i + r);
            attend_backward(of, x, i, log_sums, finite_keys);
            write(x.grad_queries, count, of.width, by_scale.data(), grad_qs.of(b, h).from(i));
          }
          all_finite ? add_to_keys<kRows>(of, x) : add_to_keys<1>(of, x);
        }
        write(x.grad_keys, of.keys, of.width, by_scale.data(), grad_ks.of(b, key_head));
        write(x.grad_values, of.keys, of.values, by_one.data(), grad_vs.of(b, key_head));
      }
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(npu_ops, CPU, m) {
  m.impl("attention_short_cpu", TORCH_BOX(&forward));
  m.impl("attention_short_backward_cpu", TORCH_BOX(&backward));
}

}  // namespace npu_ops
