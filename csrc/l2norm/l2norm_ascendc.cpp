// l2norm for Ascend910B and Ascend910_93, forward and backward. Reference:
// npu_ops/ops/l2norm/reference.py
//
// A row wider than a tile is read twice: for its sums, then for its result. bisheng inserts the
// barriers inside the vector pipe (--cce-auto-sync); queues order the copies.
#include "common/rows_ascendc.h"
#include "l2norm/l2norm_tiling.h"

namespace npu_ops {

using namespace AscendC;

class L2Norm {
 public:
  __aicore__ inline L2Norm(GM_ADDR grad, GM_ADDR x, GM_ADDR out, const L2NormTiling& tiling)
      : tiling_(tiling), rows_(tiling.rows), grad_(grad), x_(x), out_(out) {
    rows_.make(x_queue_, tiling.x);
    rows_.make(out_queue_, tiling.out);
    value_ = rows_.tile_of_floats();
    product_ = rows_.tile_of_floats();
    squares_ = rows_.floats(kLanes * tiling.rows.tile_rows);
    spread_ = rows_.floats(kLanes * ((tiling.rows.tile_rows + 7) / 8));
    ones_ = rows_.float_of_each_row();
    rstd_ = rows_.float_of_each_row();
    if (!grad) return;
    rows_.make(grad_queue_, tiling.grad);
    slope_ = rows_.tile_of_floats();
    slopes_ = rows_.floats(kLanes * tiling.rows.tile_rows);
    along_ = rows_.float_of_each_row();
  }

  __aicore__ inline void Process() {
    const bool whole = tiling_.rows.chunks() == 1;  // then Result needs no second Load
    rows_.each_tile(
        [&](RowTile rows) {
          rows_.each_chunk(rows, [&](RowTile tile) {
            Load(tile);
            Sum(tile);
          });
          Finish(rows);
          rows_.each_chunk(rows, [&](RowTile tile) {
            if (!whole) Load(tile);
            Result(tile);
          });
        },
        [](int64_t) {});
  }

 private:
  __aicore__ inline void Load(RowTile tile) {
    rows_.load(x_queue_, x_, tiling_.x, tile);
    if (grad_) rows_.load(grad_queue_, grad_, tiling_.grad, tile);
    rows_.take(x_queue_, value_, tiling_.x, tile);
    if (grad_) rows_.take(grad_queue_, slope_, tiling_.grad, tile);
  }

  __aicore__ inline void Sum(RowTile tile) {
    Mul(product_, value_, value_, rows_.count(tile));
    rows_.add_products(squares_, product_, tile);
    if (!grad_) return;
    Mul(product_, slope_, value_, rows_.count(tile));
    rows_.add_products(slopes_, product_, tile);
  }

  // rstd = 1 / sqrt(sum(x^2) + eps); along = rstd^2 * sum(grad * x). Uses Sqrt and Div, because
  // Rsqrt is inexact.
  __aicore__ inline void Finish(RowTile tile) {
    rows_.finish_sums(rstd_, squares_, tile);
    Adds(rstd_, rstd_, tiling_.eps, tile.rows);
    Sqrt(rstd_, rstd_, tile.rows);
    Div(rstd_, ones_, rstd_, tile.rows);
    if (!grad_) return;
    rows_.finish_sums(along_, slopes_, tile);
    Mul(along_, along_, rstd_, tile.rows);
    Mul(along_, along_, rstd_, tile.rows);
  }

  // Computes x * rstd; in the backward (grad - x * along) * rstd.
  __aicore__ inline void Result(RowTile tile) {
    if (grad_) {
      rows_.scale_rows(value_, along_, spread_, tile);
      Sub(value_, slope_, value_, rows_.count(tile));
    }
    rows_.scale_rows(value_, rstd_, spread_, tile);
    rows_.store(out_queue_, out_, tiling_.out, value_, tile);
  }

  L2NormTiling tiling_;
  Rows rows_;
  __gm__ uint8_t *grad_, *x_, *out_;
  TQue<TPosition::VECIN, 2> grad_queue_, x_queue_;
  TQue<TPosition::VECOUT, 2> out_queue_;
  Floats value_, slope_, product_, squares_, slopes_, spread_, ones_, rstd_, along_;
};

}  // namespace npu_ops

extern "C" __global__ __aicore__ void l2norm(GM_ADDR x, GM_ADDR out, npu_ops::L2NormTiling tiling) {
  npu_ops::L2Norm(nullptr, x, out, tiling).Process();
}

extern "C" __global__ __aicore__ void l2norm_backward(GM_ADDR grad, GM_ADDR x, GM_ADDR grad_x,
                                                      npu_ops::L2NormTiling tiling) {
  npu_ops::L2Norm(grad, x, grad_x, tiling).Process();
}
