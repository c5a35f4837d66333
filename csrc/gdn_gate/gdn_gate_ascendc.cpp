// gdn_gate for Ascend910B and Ascend910_93, forward and backward. Reference:
// npu_ops/ops/gdn_gate/reference.py
//
// A row is a token, a column a head. Each piece of tokens (see rows_tiling.h) writes its sums to a
// row of `A_sums` and of `bias_sums`, [pieces, heads]. bisheng inserts the barriers inside the
// vector pipe (--cce-auto-sync); queues order the copies.
#include "common/activation_ascendc.h"
#include "common/rows_ascendc.h"
#include "gdn_gate/gdn_gate_tiling.h"

namespace npu_ops {

using namespace AscendC;

// The common part of forward and backward: a + dt_bias, its softplus, and A_log of each head.
class Gate {
 public:
  __aicore__ inline Gate(GM_ADDR a, GM_ADDR A_log, GM_ADDR dt_bias, GM_ADDR b,
                         const GdnGateTiling& tiling)
      : tiling_(tiling), rows_(tiling.rows), a_(a), A_log_(A_log), dt_bias_(dt_bias), b_(b) {
    rows_.make(in_queue_);
    rows_.pipe_.InitBuffer(head_queue_, 2, tiling.rows.stride * sizeof(float));
    x_ = rows_.tile_of_floats();
    plus_ = rows_.tile_of_floats();
    s_ = rows_.tile_of_floats();
    t_ = rows_.tile_of_floats();
    root_ = rows_.tile_of_floats();
    ones_ = rows_.floats(tiling.rows.elements, 1.0f);
    A_log_row_ = rows_.floats(tiling.rows.stride);
    bias_ = rows_.floats(tiling.rows.stride);
  }

 protected:
  // Loads the row of A_log, and computes x = a + dt_bias.
  __aicore__ inline void LoadGate(RowTile tile) {
    rows_.load(in_queue_, a_, tiling_.a, tile);
    LoadHeads(A_log_row_, A_log_, tiling_.A_log, tile);
    rows_.take(in_queue_, x_, tiling_.a, tile);
    if (!dt_bias_) return;
    LoadHeads(bias_, dt_bias_, tiling_.dt_bias, tile);
    rows_.plus_row(x_, bias_, tile);
  }

  // Computes root and plus, so that exp(A_log) softplus(x) = root^2 plus. part_softplus clamps x_
  // to near = max(x, -17), and the derivative by x is root^2 sigmoid(near).
  __aicore__ inline void Softplus(RowTile tile) {
    const int32_t count = rows_.count(tile);
    part_softplus(x_, root_, t_, count);
    rows_.plus_row(root_, A_log_row_, tile);
    Muls(root_, root_, 0.5f, count);
    Exp(root_, root_, count);
    softplus(plus_, x_, s_, t_, count);
  }

  GdnGateTiling tiling_;
  Rows rows_;
  __gm__ uint8_t *a_, *A_log_, *dt_bias_, *b_;
  TQue<TPosition::VECIN, 2> in_queue_, head_queue_;
  Floats x_, plus_, s_, t_, ones_, root_, A_log_row_, bias_;

 private:
  __aicore__ inline void LoadHeads(Floats to, GM_ADDR from, const RowTensor& tensor, RowTile tile) {
    const RowTile row{0, 0, 1, tile.column, tile.columns};
    rows_.load(head_queue_, from, tensor, row);
    rows_.take(head_queue_, to, tensor, row);
  }
};

class Forward : private Gate {
 public:
  __aicore__ inline Forward(GM_ADDR a, GM_ADDR A_log, GM_ADDR dt_bias, GM_ADDR b, GM_ADDR g,
                            GM_ADDR beta, const GdnGateTiling& tiling)
      : Gate(a, A_log, dt_bias, b, tiling), g_(g), beta_(beta) {
    rows_.make(g_queue_, tiling.g);
    if (b) rows_.make(beta_queue_, tiling.beta);
  }

  __aicore__ inline void Process() {
    rows_.each_tile([&](RowTile rows) { rows_.each_chunk(rows, [&](RowTile tile) { Run(tile); }); },
                    [](int64_t) {});
  }

 private:
  __aicore__ inline void Run(RowTile tile) {
    const int32_t count = rows_.count(tile);
    LoadGate(tile);
    Softplus(tile);
    Mul(plus_, plus_, root_, count);
    Mul(plus_, plus_, root_, count);
    Muls(plus_, plus_, -1.0f, count);
    rows_.store(g_queue_, g_, tiling_.g, plus_, tile);
    if (!b_) return;
    rows_.load(in_queue_, b_, tiling_.b, tile);
    rows_.take(in_queue_, x_, tiling_.b, tile);
    sigmoid(s_, x_, ones_, count);
    Muls(s_, s_, tiling_.scale, count);
    rows_.store(beta_queue_, beta_, tiling_.beta, s_, tile);
  }

  __gm__ uint8_t *g_, *beta_;
  TQue<TPosition::VECOUT, 2> g_queue_, beta_queue_;
};

class Backward : private Gate {
 public:
  __aicore__ inline Backward(GM_ADDR grad_g, GM_ADDR grad_beta, GM_ADDR a, GM_ADDR A_log,
                             GM_ADDR dt_bias, GM_ADDR b, GM_ADDR grad_a, GM_ADDR A_sums,
                             GM_ADDR bias_sums, GM_ADDR grad_b, const GdnGateTiling& tiling)
      : Gate(a, A_log, dt_bias, b, tiling),
        grad_g_(grad_g),
        grad_beta_(grad_beta),
        grad_a_(grad_a),
        A_sums_(A_sums),
        bias_sums_(bias_sums),
        grad_b_(grad_b) {
    rows_.make(slope_queue_);
    rows_.make(grad_a_queue_, tiling.grad_a);
    if (b) rows_.make(grad_b_queue_, tiling.grad_b);
    slope_ = rows_.tile_of_floats();
    sum_width_ = tiling.rows.whole_row();
    rows_.pipe_.InitBuffer(sum_queue_, 1, 2 * sum_width_ * sizeof(float));
  }

  __aicore__ inline void Process() {
    BeginSums();
    rows_.each_tile([&](RowTile rows) { rows_.each_chunk(rows, [&](RowTile tile) { Run(tile); }); },
                    [&](int64_t piece) { StoreSums(piece); });
    sum_queue_.FreeTensor(sums_);
  }

 private:
  __aicore__ inline void Run(RowTile tile) {
    const int32_t count = rows_.count(tile);
    LoadGate(tile);
    rows_.load(slope_queue_, grad_g_, tiling_.g, tile);
    Softplus(tile);
    sigmoid(s_, x_, ones_, count);
    rows_.take(slope_queue_, slope_, tiling_.g, tile);
    Muls(slope_, slope_, -1.0f, count);
    TimesDecay(plus_, count);
    rows_.add_rows(sums_[tile.column], plus_, tile);
    TimesDecay(s_, count);
    rows_.store(grad_a_queue_, grad_a_, tiling_.grad_a, s_, tile);
    rows_.add_rows(sums_[sum_width_ + tile.column], s_, tile);
    if (b_) GradB(tile);
  }

  // Computes values *= slope * root^2, where slope is -grad_g. In this order, no intermediate
  // product overflows or vanishes if the result does not.
  __aicore__ inline void TimesDecay(Floats values, int32_t count) {
    Mul(values, values, root_, count);
    Mul(values, values, slope_, count);
    Mul(values, values, root_, count);
  }

  __aicore__ inline void GradB(RowTile tile) {
    const int32_t count = rows_.count(tile);
    rows_.load(in_queue_, b_, tiling_.b, tile);
    rows_.load(slope_queue_, grad_beta_, tiling_.beta, tile);
    rows_.take(in_queue_, x_, tiling_.b, tile);
    rows_.take(slope_queue_, plus_, tiling_.beta, tile);
    sigmoid_slope(s_, x_, t_, count);
    Mul(s_, s_, plus_, count);
    Muls(s_, s_, tiling_.scale, count);
    rows_.store(grad_b_queue_, grad_b_, tiling_.grad_b, s_, tile);
  }

  __aicore__ inline void BeginSums() {
    sums_ = sum_queue_.AllocTensor<float>();
    Duplicate(sums_, 0.0f, 2 * sum_width_);
  }

  __aicore__ inline void StoreSums(int64_t piece) {
    sum_queue_.EnQue(sums_);
    sums_ = sum_queue_.DeQue<float>();
    const int32_t heads = tiling_.rows.width, stride = (heads + 15) / 16 * 16;
    const int64_t at = piece * heads * sizeof(float);
    copy_out(A_sums_ + at, sums_.ReinterpretCast<uint8_t>(), kFloat32, {1, heads, heads}, stride);
    copy_out(bias_sums_ + at, sums_[sum_width_].ReinterpretCast<uint8_t>(), kFloat32,
             {1, heads, heads}, stride);
    sum_queue_.FreeTensor(sums_);
    BeginSums();
  }

  __gm__ uint8_t *grad_g_, *grad_beta_, *grad_a_, *A_sums_, *bias_sums_, *grad_b_;
  TQue<TPosition::VECIN, 2> slope_queue_;
  TQue<TPosition::VECOUT, 2> grad_a_queue_, grad_b_queue_;
  TQue<TPosition::VECOUT, 1> sum_queue_;
  Floats slope_, sums_;
  int32_t sum_width_;
};

}  // namespace npu_ops

extern "C" __global__ __aicore__ void gdn_gate(GM_ADDR a, GM_ADDR A_log, GM_ADDR dt_bias, GM_ADDR b,
                                               GM_ADDR g, GM_ADDR beta,
                                               npu_ops::GdnGateTiling tiling) {
  npu_ops::Forward(a, A_log, dt_bias, b, g, beta, tiling).Process();
}

extern "C" __global__ __aicore__ void gdn_gate_backward(GM_ADDR grad_g, GM_ADDR grad_beta,
                                                        GM_ADDR a, GM_ADDR A_log, GM_ADDR dt_bias,
                                                        GM_ADDR b, GM_ADDR grad_a, GM_ADDR A_sums,
                                                        GM_ADDR bias_sums, GM_ADDR grad_b,
                                                        npu_ops::GdnGateTiling tiling) {
  npu_ops::Backward(grad_g, grad_beta, a, A_log, dt_bias, b, grad_a, A_sums, bias_sums, grad_b,
                    tiling)
      .Process();
}
