// Decode attention on the CPU: one query per sequence, keys and values in a KV cache. Reference:
// npu_ops/ops/attention/reference.py; npu_ops/ops/attention/decode.py calls it.
//
// q and out are [N, H, 1, .], lse fp32 [N, H, 1]. k and v are [blocks, Hk, size, .]: key j of
// sequence n is row j % size of block block_table[n, j / size]. Without a table, sequence n has
// block n. Strides are arbitrary, except that a row is contiguous.
//
// Keys are read directly from the cache, once for all query heads that share them.
#include <algorithm>
#include <optional>
#include <vector>

#include "attention/heads.h"
#include "common/indices.h"
#include "common/parallel.h"

namespace npu_ops {
namespace {

// Query heads that are multiplied at a time. The query heads of a key head are rarely fewer, and a
// padding row costs as much as a query head.
constexpr int kQueries = 4;
// Keys that are read at a time: as fp32 rows they fit in the L1 cache.
constexpr int64_t kKeys = 32;

// Locates the cached keys of each sequence.
struct Cache {
  Cache(const Tensor& k, const std::optional<Tensor>& block_table, const Tensor& seqlens_k)
      : size(k.size(2)), table(block_table) {
    const Indices seqlens(seqlens_k);
    const int64_t sequences = seqlens.rows();
    const int64_t most = size * (table ? table.columns() : 1);
    for (int64_t n = 0; n < sequences; ++n) {
      lengths.push_back(within("seqlens_k", seqlens.at(n), 0, most));
      for (int64_t j = 0; table && j < lengths[n]; j += size)
        within("block_table", table.at(n, j / size), 0, k.size(0) - 1);
    }
  }
  // Calls body(block, row, first, count) for runs of up to kKeys keys. A run is the `count` keys of
  // the sequence from `first` on, which lie in a block from `row` on.
  template <class Body>
  void each(int64_t sequence, const Body& body) const {
    for (int64_t first = 0; first < lengths[sequence];) {
      const int64_t row = first % size, left = std::min(size - row, lengths[sequence] - first);
      const int64_t count = std::min(kKeys, left);
      body(table ? table.at(sequence, first / size) : sequence, row, first, count);
      first += count;
    }
  }
  int64_t longest() const { return lengths.empty() ? 0 : *std::ranges::max_element(lengths); }
  int64_t size;
  Indices table;
  std::vector<int64_t> lengths;
};

// Writes the scores of `rows` queries and `count` keys to columns of `scores` from `first` on.
NPU_OPS_CLONES void score(Padded<const float> queries, int64_t rows, Padded<const float> keys,
                          int64_t count, float scale, Padded<float> scores, int64_t first) {
  for (int64_t i = 0; i < rows; i += kQueries)
    multiply_rows<kQueries>(queries.from(i), keys, count, scale,
                            {scores.row(i) + first, scores.step});
}

NPU_OPS_CLONES void soften_rows(Padded<float> scores, int64_t rows, int64_t keys, float* log_sums,
                                float* over) {
  for (int64_t i = 0; i < rows; ++i) {
    log_sums[i] = soften(scores.row(i), keys, padded(keys), over + i);
    over[i] = 1 / over[i];
  }
}

// Adds `count` values, weighted by columns of `weights` from `first` on.
NPU_OPS_CLONES void add_values(Padded<const float> weights, int64_t rows, int64_t first,
                               Padded<const float> values, int64_t count, Padded<float> to) {
  for (int64_t i = 0; i < rows; i += kQueries)
    multiply<kQueries, true>({weights.row(i) + first, weights.step, 1}, values, count, to.from(i),
                             to.step);
}

// One thread's memory. rows: the number of query heads that share keys, rounded up to a multiple of
// kQueries.
struct Scratch {
  Scratch(Pieces& pieces, int64_t rows, int64_t width, int64_t value_width, int64_t longest)
      : rows(rows),
        queries(pieces.take(rows, width)),
        found(pieces.take(rows, value_width)),
        keys(pieces.take(kKeys, width)),
        values(pieces.take(kKeys, value_width)),
        scores(pieces.take(rows, longest)),
        log_sums(pieces.take(1, rows)),
        over(pieces.take(1, rows)) {}
  int64_t rows;
  Padded<float> queries, found, keys, values, scores, log_sums, over;
};

// Computes attention of x.queries to one key head. Writes x.log_sums, x.over (1 / the sum of the
// weights) and x.found. The caller multiplies x.found by x.over.
template <class T>
void attend_to(const Cache& cache, int64_t sequence, const Heads<const T>& k,
               const Heads<const T>& v, int64_t head, int64_t width, int64_t value_width,
               float scale, const Scratch& x) {
  cache.each(sequence, [&](int64_t block, int64_t row, int64_t first, int64_t count) {
    read(k.of(block, head).from(row), count, width, x.keys);
    score(x.queries, x.rows, x.keys, count, scale, x.scores, first);
  });
  soften_rows(x.scores, x.rows, cache.lengths[sequence], x.log_sums.data, x.over.data);
  std::fill_n(x.found.data, x.rows * x.found.step, 0.0f);
  cache.each(sequence, [&](int64_t block, int64_t row, int64_t first, int64_t count) {
    read(v.of(block, head).from(row), count, value_width, x.values);
    add_values(x.scores, x.rows, first, x.values, count, x.found);
  });
}

void decode(Tensor q, Tensor k, Tensor v, std::optional<Tensor> block_table, Tensor seqlens_k,
            double scale, Tensor out, Tensor lse) {
  const Cache cache(k, block_table, seqlens_k);
  const int64_t sequences = q.size(0), key_heads = k.size(1), group = q.size(1) / key_heads;
  const int64_t width = q.size(3), value_width = v.size(3), longest = cache.longest();
  const int64_t rows = (group + kQueries - 1) / kQueries * kQueries;
  dispatch(q.scalar_type(), "q", [&]<class T>(T*) {
    const auto qs = heads_in<T>(q), ks = heads_in<T>(k), vs = heads_in<T>(v);
    const auto outs = heads_out<T>(out);
    const auto lses = heads_out<float>(lse);
    const int64_t cost = longest * (width + value_width);
    parallel(sequences * key_heads, cost, [&](int64_t begin, int64_t end) {
      Pieces pieces;
      const Scratch x(pieces, rows, width, value_width, longest);
      std::fill_n(x.queries.data, rows * x.queries.step, 0.0f);
      for (int64_t at = begin; at < end; ++at) {
        const int64_t n = at / key_heads, key_head = at % key_heads, head = key_head * group;
        read(Strided<const T>{qs.of(n, head).data, qs.head}, group, width, x.queries);
        attend_to(cache, n, ks, vs, key_head, width, value_width, static_cast<float>(scale), x);
        write(x.found, group, value_width, x.over.data,
              Strided<T>{outs.of(n, head).data, outs.head});
        for (int64_t g = 0; g < group; ++g) *lses.of(n, head + g).data = x.log_sums.data[g];
      }
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(npu_ops, CPU, m) { m.impl("attention_decode_cpu", TORCH_BOX(&decode)); }

}  // namespace npu_ops
