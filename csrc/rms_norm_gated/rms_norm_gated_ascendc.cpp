// rms_norm_gated for Ascend910B and Ascend910_93, forward and backward. Reference, with the same
// names: npu_ops/ops/rms_norm_gated/reference.py
//
// A row wider than a tile is read twice: for its sums, then for its result. Each piece of rows (see
// rows_tiling.h) writes its sums to a row of `partials`, [pieces, width], so that no core waits for
// another. bisheng inserts the barriers inside the vector pipe (--cce-auto-sync); queues order the
// copies.
#include "common/activation_ascendc.h"
#include "common/rows_ascendc.h"
#include "rms_norm_gated/rms_norm_gated_tiling.h"

namespace npu_ops {

using namespace AscendC;

// The common part of forward and backward: u (the value to normalise), its reciprocal root mean
// square, weight and the gate.
class Gated {
 public:
  __aicore__ inline Gated(GM_ADDR x, GM_ADDR weight, GM_ADDR z, GM_ADDR out,
                          const RmsNormGatedTiling& tiling)
      : tiling_(tiling), rows_(tiling.rows), x_(x), weight_(weight), z_(z), out_(out) {
    rows_.make(x_queue_, tiling.x);
    rows_.make(z_queue_, tiling.z);
    rows_.make(out_queue_, tiling.out);
    rows_.pipe_.InitBuffer(weight_queue_, 2, tiling.rows.stride * sizeof(float));
    ones_ = rows_.floats(tiling.rows.elements, 1.0f);
    wide_x_ = rows_.tile_of_floats();
    wide_z_ = rows_.tile_of_floats();
    gate_ = rows_.tile_of_floats();
    weight_row_ = rows_.floats(tiling.rows.stride);
    squares_ = rows_.floats(kLanes * tiling.rows.tile_rows);
    spread_ = rows_.floats(kLanes * ((tiling.rows.tile_rows + 7) / 8));
    r_ = rows_.float_of_each_row();
  }

  __aicore__ inline void Process() {
    const bool whole = tiling_.rows.chunks() == 1;
    rows_.each_tile(
        [&](RowTile rows) {
          rows_.each_chunk(rows, [&](RowTile tile) {
            Load(tile);
            U(tile);
            Mul(gate_, wide_x_, wide_x_, rows_.count(tile));
            rows_.add_products(squares_, gate_, tile);
          });
          Finish(rows);
          rows_.each_chunk(rows, [&](RowTile tile) {
            if (!whole) {
              Load(tile);
              U(tile);
            }
            Result(tile);
          });
        },
        [](int64_t) {});
  }

 protected:
  __aicore__ inline void Load(RowTile tile) {
    rows_.load(x_queue_, x_, tiling_.x, tile);
    rows_.load(z_queue_, z_, tiling_.z, tile);
    LoadWeight(tile);
    rows_.take(x_queue_, wide_x_, tiling_.x, tile);
    rows_.take(z_queue_, wide_z_, tiling_.z, tile);
  }

  __aicore__ inline void LoadWeight(RowTile tile) {
    const RowTile row{tile.group, 0, 1, tile.column, tile.columns};
    rows_.load(weight_queue_, weight_, tiling_.weight, row);
    rows_.take(weight_queue_, weight_row_, tiling_.weight, row);
  }

  // Turns wide_x into u: x, or x * gate.
  __aicore__ inline void U(RowTile tile) {
    if (tiling_.norm_before_gate) return;
    Gate(tile);
    Mul(wide_x_, wide_x_, gate_, rows_.count(tile));
  }

  __aicore__ inline void Gate(RowTile tile) {
    sigmoid(gate_, wide_z_, ones_, rows_.count(tile));
    if (tiling_.silu) Mul(gate_, gate_, wide_z_, rows_.count(tile));
  }

  // r = 1 / sqrt(mean(u^2) + eps). Uses Sqrt and Div, because Rsqrt is inexact.
  __aicore__ inline void Finish(RowTile tile) {
    rows_.finish_sums(r_, squares_, tile);
    Muls(r_, r_, 1.0f / static_cast<float>(tiling_.rows.width), tile.rows);
    Adds(r_, r_, tiling_.eps, tile.rows);
    Sqrt(r_, r_, tile.rows);
    Div(r_, ones_, r_, tile.rows);
  }

  __aicore__ inline void Result(RowTile tile) {
    rows_.scale_rows(wide_x_, r_, spread_, tile);
    rows_.times_row(wide_x_, weight_row_, tile);
    if (tiling_.norm_before_gate) {
      Gate(tile);
      Mul(wide_x_, wide_x_, gate_, rows_.count(tile));
    }
    rows_.store(out_queue_, out_, tiling_.out, wide_x_, tile);
  }

  RmsNormGatedTiling tiling_;
  Rows rows_;
  __gm__ uint8_t *x_, *weight_, *z_, *out_;
  TQue<TPosition::VECIN, 2> x_queue_, z_queue_, weight_queue_;
  TQue<TPosition::VECOUT, 2> out_queue_;
  Floats wide_x_, wide_z_, gate_, weight_row_, ones_, squares_, spread_, r_;
};

class GatedBackward : private Gated {
 public:
  __aicore__ inline GatedBackward(GM_ADDR grad, GM_ADDR x, GM_ADDR weight, GM_ADDR z,
                                  GM_ADDR grad_x, GM_ADDR partials, GM_ADDR grad_z,
                                  const RmsNormGatedTiling& tiling)
      : Gated(x, weight, z, grad_x, tiling), grad_(grad), partials_(partials), grad_z_(grad_z) {
    rows_.make(grad_queue_, tiling.grad);
    rows_.make(grad_z_queue_, tiling.grad_z);
    wide_grad_ = rows_.tile_of_floats();
    u_ = rows_.tile_of_floats();
    scratch_ = rows_.tile_of_floats();
    term_ = rows_.tile_of_floats();
    products_ = rows_.floats(kLanes * tiling.rows.tile_rows);
    along_ = rows_.float_of_each_row();
    rows_.pipe_.InitBuffer(sum_queue_, 1, tiling.rows.whole_row() * sizeof(float));
  }

  __aicore__ inline void Process() {
    sums_ = sum_queue_.AllocTensor<float>();
    Duplicate(sums_, 0.0f, tiling_.rows.whole_row());
    rows_.each_tile(
        [&](RowTile rows) {
          rows_.each_chunk(rows, [&](RowTile tile) { Sum(tile); });
          FinishAlong(rows);
          rows_.each_chunk(rows, [&](RowTile tile) { Gradients(tile); });
        },
        [&](int64_t piece) { StoreSums(piece); });
    sum_queue_.FreeTensor(sums_);
  }

 private:
  __aicore__ inline void LoadAll(RowTile tile) {
    rows_.load(grad_queue_, grad_, tiling_.grad, tile);
    Load(tile);
    rows_.take(grad_queue_, wide_grad_, tiling_.grad, tile);
    Gate(tile);
    const int32_t count = rows_.count(tile);
    if (tiling_.norm_before_gate)
      Muls(u_, wide_x_, 1.0f, count);
    else
      Mul(u_, wide_x_, gate_, count);
  }

  // Computes scratch = grad_n: grad * weight, times the gate if the gate comes after the norm.
  __aicore__ inline void GradN(RowTile tile) {
    const int32_t count = rows_.count(tile);
    if (tiling_.norm_before_gate)
      Mul(scratch_, wide_grad_, gate_, count);
    else
      Muls(scratch_, wide_grad_, 1.0f, count);
    rows_.times_row(scratch_, weight_row_, tile);
  }

  __aicore__ inline void Sum(RowTile tile) {
    LoadAll(tile);
    GradN(tile);
    Mul(scratch_, scratch_, u_, rows_.count(tile));
    rows_.add_products(products_, scratch_, tile);
    Mul(scratch_, u_, u_, rows_.count(tile));
    rows_.add_products(squares_, scratch_, tile);
  }

  // Computes along = mean(grad_n * n) * r with n = u * r; then grad_u = r * (grad_n - u * along).
  __aicore__ inline void FinishAlong(RowTile tile) {
    Finish(tile);
    rows_.finish_sums(along_, products_, tile);
    Muls(along_, along_, 1.0f / static_cast<float>(tiling_.rows.width), tile.rows);
    Mul(along_, along_, r_, tile.rows);
    Mul(along_, along_, r_, tile.rows);
  }

  __aicore__ inline void Gradients(RowTile tile) {
    const int32_t count = rows_.count(tile);
    if (tiling_.rows.chunks() > 1) LoadAll(tile);
    GradN(tile);  // and from it grad_u = r * (grad_n - u * along)
    Muls(term_, u_, 1.0f, count);
    rows_.scale_rows(term_, along_, spread_, tile);
    Sub(scratch_, scratch_, term_, count);
    rows_.scale_rows(scratch_, r_, spread_, tile);
    rows_.scale_rows(u_, r_, spread_, tile);  // n
    Mul(wide_grad_, wide_grad_, u_, count);   // grad * n
    if (tiling_.norm_before_gate) {
      rows_.store(out_queue_, out_, tiling_.out, scratch_, tile);
      Muls(u_, wide_grad_, 1.0f, count);
      rows_.times_row(u_, weight_row_, tile);  // the gradient of the gate
      Mul(wide_grad_, wide_grad_, gate_, count);
    } else {
      Mul(u_, scratch_, wide_x_, count);
      Mul(scratch_, scratch_, gate_, count);
      rows_.store(out_queue_, out_, tiling_.out, scratch_, tile);
    }
    rows_.add_rows(sums_[tile.column], wide_grad_, tile);
    Slope(count);
    Mul(u_, u_, gate_, count);
    rows_.store(grad_z_queue_, grad_z_, tiling_.grad_z, u_, tile);
  }

  // Turns the gate into the activation's slope at z: sigmoid'(z), or sigmoid(z) + z * sigmoid'(z).
  __aicore__ inline void Slope(int32_t count) {
    sigmoid_slope(gate_, wide_z_, scratch_, count);
    if (!tiling_.silu) return;
    Mul(gate_, gate_, wide_z_, count);
    sigmoid(scratch_, wide_z_, ones_, count);
    Add(gate_, gate_, scratch_, count);
  }

  __aicore__ inline void StoreSums(int64_t piece) {
    sum_queue_.EnQue(sums_);
    sums_ = sum_queue_.DeQue<float>();
    const int32_t width = tiling_.rows.width;
    copy_out(partials_ + piece * width * sizeof(float), sums_.ReinterpretCast<uint8_t>(), kFloat32,
             {1, width, width}, (width + 15) / 16 * 16);
    sum_queue_.FreeTensor(sums_);
    sums_ = sum_queue_.AllocTensor<float>();
    Duplicate(sums_, 0.0f, tiling_.rows.whole_row());
  }

  __gm__ uint8_t *grad_, *partials_, *grad_z_;
  TQue<TPosition::VECIN, 2> grad_queue_;
  TQue<TPosition::VECOUT, 2> grad_z_queue_;
  TQue<TPosition::VECOUT, 1> sum_queue_;
  Floats wide_grad_, u_, scratch_, term_, products_, along_, sums_;
};

}  // namespace npu_ops

extern "C" __global__ __aicore__ void rms_norm_gated(GM_ADDR x, GM_ADDR weight, GM_ADDR z,
                                                     GM_ADDR out,
                                                     npu_ops::RmsNormGatedTiling tiling) {
  npu_ops::Gated(x, weight, z, out, tiling).Process();
}

extern "C" __global__ __aicore__ void rms_norm_gated_backward(GM_ADDR grad, GM_ADDR x,
                                                              GM_ADDR weight, GM_ADDR z,
                                                              GM_ADDR grad_x, GM_ADDR partials,
                                                              GM_ADDR grad_z,
                                                              npu_ops::RmsNormGatedTiling tiling) {
  npu_ops::GatedBackward(grad, x, weight, z, grad_x, partials, grad_z, tiling).Process();
}
