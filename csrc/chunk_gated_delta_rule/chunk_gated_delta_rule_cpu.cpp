// The gates of a chunk of the gated delta rule, and the triangular system that they form, on the
// CPU. Reference: npu_ops/ops/chunk_gated_delta_rule/reference.py.
// npu_ops/ops/chunk_gated_delta_rule/cpu.py computes the rest.
//
// A chunk has c tokens and H heads with G value heads each. Tensors by value head are fp32 [G, H,
// c, ...]: value head n is matrix [n % G, n / G].
#include <algorithm>

#include "common/check.h"
#include "common/math.h"
#include "common/parallel.h"
#include "common/sum.h"

namespace npu_ops {
namespace {

constexpr int64_t kChunk = 64;  // the most tokens of a chunk; the row length of buffers

// Returns e^x, or 0 for x below -87.
NPU_OPS_INLINE float decay(double x) {
  const float y = static_cast<float>(x);
  return keep_if(!(y < -87.0f), exp_within(y));
}

// One value head's tokens of a chunk.
struct Tokens {
  // `step`: elements from one token of a head to the next. Sums are fp64: in fp32, a decay to 0
  // would leave no digits for the tokens after it. Log decays below -1e5 are set to -1e5, because
  // the difference of two infinite sums would be NaN.
  Tokens(const float* g, const float* beta, int64_t step, int64_t count) : count(count) {
    double sum = 0;
    for (int64_t i = 0; i < count; ++i) {
      const float one = g[i * step];
      total[i] = sum += one < -1e5f ? -1e5f : one;
      this->beta[i] = beta[i * step];
    }
  }
  int64_t count;
  double total[kChunk] = {};  // cumulative log decay, including this token's
  float beta[kChunk] = {};
};

// Sets row[j] to the decay from token j to token i if j <= i, else to 0.
NPU_OPS_INLINE void decays(const Tokens& tokens, int64_t i, float* row) {
  for (int64_t j = 0; j < kChunk; ++j)
    row[j] = keep_if(j <= i, decay(tokens.total[i] - tokens.total[j]));
}

struct Square {
  alignas(64) float rows[kChunk][kChunk] = {};
};

// Writes inverse = (1 + L)^-1, where L is beta_i (k_i . k_j) decay_ij, j < i. If `qk` is given,
// writes attention = (q_i . k_j) decay_ij, j <= i.
NPU_OPS_CLONES void solve(const Tokens& tokens, const float* kk, const float* qk, float* inverse,
                          float* attention, Square& solved) {
  const int64_t count = tokens.count;
  for (int64_t i = 0; i < count; ++i) {
    float faded[kChunk], row[kChunk] = {};
    decays(tokens, i, faded);
    row[i] = 1.0f;
    for (int64_t j = 0; j < i; ++j) {
      const float weight = tokens.beta[i] * kk[i * count + j] * faded[j];
      for (int64_t l = 0; l < kChunk; ++l) row[l] -= weight * solved.rows[j][l];
    }
    std::copy(row, row + kChunk, solved.rows[i]);
    std::copy(row, row + count, inverse + i * count);
    if (qk)
      for (int64_t j = 0; j < count; ++j)
        attention[i * count + j] = keep_if(j <= i, qk[i * count + j]) * faded[j];
  }
}

// Computes `inverse` and `attention` (see `solve`) and the decays of all value heads.
// - recalled [H, c or 2c, c]: k k^T, and below it q k^T if `attention` is given.
// - g, beta: [c, HV].
// - decays_out [3, G, H, c]: the decay from the chunk's start to each token, the decay from each
//   token to the chunk's end, and beta.
void gates(Tensor recalled, Tensor g, Tensor beta, Tensor inverse, std::optional<Tensor> attention,
           Tensor decays_out) {
  const int64_t heads = recalled.size(0), rows = recalled.size(1), count = recalled.size(2);
  const int64_t value_heads = g.size(1), group = value_heads / heads, square = count * count;
  STD_TORCH_CHECK(count <= kChunk, "chunk_size: got ", count, ", needs 64 or less");
  parallel(value_heads, square * 8, [&](int64_t first, int64_t last) {
    Square solved;
    for (int64_t m = first; m < last; ++m) {
      const int64_t head = m % heads, at = head * group + m / heads;
      const Tokens tokens(input<float>(g) + at, input<float>(beta) + at, value_heads, count);
      const float* kk = input<float>(recalled) + head * rows * count;
      solve(tokens, kk, attention ? kk + square : nullptr, output<float>(inverse) + m * square,
            attention ? output<float>(*attention) + m * square : nullptr, solved);
      float* out = output<float>(decays_out) + m * count;
      for (int64_t i = 0; i < count; ++i) {
        out[i] = decay(tokens.total[i]);
        out[value_heads * count + i] = decay(tokens.total[count - 1] - tokens.total[i]);
        out[2 * value_heads * count + i] = tokens.beta[i];
      }
    }
  });
}

// Adds the gradients of k k^T and q k^T of one value head, and of its decays and betas. grad_solve
// is the gradient of -L, and grad_attention that of `attention` (see `solve`). Their elements above
// the diagonal are ignored, and those of grad_solve on the diagonal.
NPU_OPS_CLONES void solve_backward(const Tokens& tokens, const float* kk, const float* qk,
                                   const float* grad_solve, const float* grad_attention,
                                   Square& dkk, Square& dqk, float* grad_beta, float* grad_total) {
  const int64_t count = tokens.count;
  float columns[kChunk] = {};
  for (int64_t i = 0; i < count; ++i) {
    float faded[kChunk], by_beta[kChunk] = {}, by_decay[kChunk] = {};
    decays(tokens, i, faded);
    for (int64_t j = 0; j < count; ++j) {
      const int64_t at = i * count + j;
      const float dl = -keep_if(j < i, grad_solve[at]) * faded[j];
      const float dp = keep_if(j <= i, grad_attention[at]) * faded[j];
      dkk.rows[i][j] += tokens.beta[i] * dl;
      dqk.rows[i][j] += dp;
      by_beta[j] = dl * kk[at];
      by_decay[j] = tokens.beta[i] * by_beta[j] + keep_if(j < i, dp * qk[at]);
      columns[j] += by_decay[j];
    }
    grad_beta[i] += sum(kChunk, [&](int64_t j) { return by_beta[j]; });
    grad_total[i] += sum(kChunk, [&](int64_t j) { return by_decay[j]; });
  }
  for (int64_t i = 0; i < count; ++i) grad_total[i] -= columns[i];
}

// Computes the gradients of `gates`. Inputs:
// - kept [G, H, c] and faded [G, H]: gradients of the log decays to the chunk's end, from each
//   token and from the chunk's start.
// - grad_beta_in and grad_total_in [G, H, c]: earlier contributions to the gradients of beta and of
//   the cumulative log decays.
//
// Outputs:
// - grad_g and grad_beta [c, HV].
// - grad_recalled [H, 2c, 2c]. The caller adds its product with [k; q] to the gradient of [k; q].
void gates_backward(Tensor recalled, Tensor g, Tensor beta, Tensor grad_solve,
                    Tensor grad_attention, Tensor grad_beta_in, Tensor grad_total_in, Tensor kept,
                    Tensor faded, Tensor grad_recalled, Tensor grad_g, Tensor grad_beta) {
  const int64_t heads = recalled.size(0), count = recalled.size(2), square = count * count;
  const int64_t value_heads = g.size(1), group = value_heads / heads;
  parallel(heads, group * square * 16, [&](int64_t first, int64_t last) {
    for (int64_t head = first; head < last; ++head) {
      Square dkk, dqk;
      const float* kk = input<float>(recalled) + head * 2 * square;
      for (int64_t m = head; m < value_heads; m += heads) {
        const int64_t at = head * group + m / heads;
        const Tokens tokens(input<float>(g) + at, input<float>(beta) + at, value_heads, count);
        float by_beta[kChunk], by_total[kChunk];
        std::copy_n(input<float>(grad_beta_in) + m * count, count, by_beta);
        std::copy_n(input<float>(grad_total_in) + m * count, count, by_total);
        solve_backward(tokens, kk, kk + square, input<float>(grad_solve) + m * square,
                       input<float>(grad_attention) + m * square, dkk, dqk, by_beta, by_total);
        float last_total = input<float>(faded)[m];
        for (int64_t i = 0; i < count; ++i) {
          const float one = input<float>(kept)[m * count + i];
          by_total[i] -= one;
          last_total += one;
        }
        for (int64_t i = count - 1; i >= 0; --i) {
          last_total += by_total[i];
          output<float>(grad_g)[i * value_heads + at] = last_total;
          output<float>(grad_beta)[i * value_heads + at] = by_beta[i];
        }
      }
      float* out = output<float>(grad_recalled) + head * 4 * square;
      for (int64_t i = 0; i < count; ++i) {
        float *k_row = out + i * 2 * count, *q_row = k_row + 2 * square;
        for (int64_t j = 0; j < count; ++j) {
          k_row[j] = dkk.rows[i][j] + dkk.rows[j][i];
          k_row[count + j] = dqk.rows[j][i];
          q_row[j] = dqk.rows[i][j];
          q_row[count + j] = 0.0f;
        }
      }
    }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(npu_ops, CPU, m) {
  m.impl("chunk_gated_delta_rule_gates_cpu", TORCH_BOX(&gates));
  m.impl("chunk_gated_delta_rule_gates_backward_cpu", TORCH_BOX(&gates_backward));
}

}  // namespace npu_ops
