// bias_dropout_add for Ascend910B and Ascend910_93, forward and backward. Reference:
// npu_ops/ops/bias_dropout_add/reference.py. The mask equals the CPU's bit for bit.
//
// bisheng inserts the barriers inside the vector pipe (--cce-auto-sync); queues order the copies.
#include "bias_dropout_add/bias_dropout_add_tiling.h"
#include "common/ascendc.h"
#include "common/philox_ascendc.h"

namespace npu_ops {

using namespace AscendC;

// Draws and applies the dropout mask of a tile; forward and backward draw the same mask.
class Dropper {
 public:
  __aicore__ inline void Init(TPipe& pipe, GM_ADDR rng_state, const BiasDropoutAddTiling& tiling) {
    tiling_ = tiling;
    if (!tiling.drops) return;
    GlobalTensor<uint64_t> state;
    state.SetGlobalBuffer(reinterpret_cast<__gm__ uint64_t*>(rng_state), 2);
    seed_ = state.GetValue(0);
    offset_ = state.GetValue(1);
    pipe.InitBuffer(words_, Philox::kBuffers * tiling.elements * sizeof(int32_t));
    pipe.InitBuffer(columns_, tiling.elements * sizeof(int32_t));
    philox_.Init(words_.Get<int32_t>(), tiling.elements);
    FillColumns();
  }

  __aicore__ inline void Draw(int64_t row, int32_t rows, int32_t column) {
    if (!tiling_.drops) return;
    const int32_t chunk = tiling_.chunk, elements = tiling_.elements;
    Adds(philox_.counter(0), columns_.Get<int32_t>(), column, elements);
    Duplicate(philox_.counter(1), static_cast<int32_t>(row), elements);
    for (int32_t i = 1; i < rows; ++i)
      Duplicate(philox_.counter(1)[i * chunk], static_cast<int32_t>(row + i), chunk);
    Duplicate(philox_.counter(2), static_cast<int32_t>(offset_), elements);
    Duplicate(philox_.counter(3), static_cast<int32_t>(offset_ >> 32), elements);
    philox_.Draw(seed_);
  }

  // Sets elements to values * scale where the mask keeps them, else to 0, even where a value is not
  // finite.
  __aicore__ inline void Drop(LocalTensor<float> values, int32_t lane) {
    if (!tiling_.drops) return;
    const LocalTensor<float> draws = philox_.scratch(0).ReinterpretCast<float>();
    const LocalTensor<uint8_t> keeps = philox_.scratch(1).ReinterpretCast<uint8_t>();
    philox_.Halves(draws, lane);
    CompareScalar(keeps, draws, static_cast<float>(tiling_.threshold), CMPMODE::GE,
                  tiling_.elements);
    Muls(values, values, tiling_.scale, tiling_.elements);
    Select(values, keeps, values, 0.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, tiling_.elements);
  }

 private:
  // Writes 0, 1, ..., chunk - 1 for each row of a tile. The scalar unit sets the first 16; vector
  // copies then double the filled part until a row is full.
  __aicore__ inline void FillColumns() {
    const LocalTensor<int32_t> columns = columns_.Get<int32_t>();
    const int32_t used = tiling_.tile_rows * tiling_.chunk;
    for (int32_t i = 0; i < 16; ++i) columns.SetValue(i, i);
    Wait<HardEvent::S_V>();
    for (int32_t filled = 16; filled < tiling_.chunk; filled *= 2)
      Adds(columns[filled], columns, filled,
           filled < tiling_.chunk - filled ? filled : tiling_.chunk - filled);
    for (int32_t row = 1; row < tiling_.tile_rows; ++row)
      Adds(columns[row * tiling_.chunk], columns, 0, tiling_.chunk);
    if (used < tiling_.elements) Duplicate(columns[used], 0, tiling_.elements - used);
  }

  BiasDropoutAddTiling tiling_;
  Philox philox_;
  TBuf<TPosition::VECCALC> words_, columns_;
  uint64_t seed_ = 0, offset_ = 0;
};

// Calls body(row, rows, column) for each tile of this core's pieces, and done(row piece, column)
// after each piece.
template <class Body, class Done>
__aicore__ inline void each_tile(const BiasDropoutAddTiling& tiling, Body body, Done done) {
  const int64_t chunks = tiling.chunks();
  for (int64_t piece = GetBlockIdx(); piece < tiling.pieces(); piece += GetBlockNum()) {
    const int64_t begin = piece / chunks * tiling.piece_rows;
    const int64_t end =
        begin + tiling.piece_rows < tiling.rows ? begin + tiling.piece_rows : tiling.rows;
    const auto column = static_cast<int32_t>(piece % chunks * tiling.chunk);
    for (int64_t row = begin; row < end; row += tiling.tile_rows) {
      const int64_t left = end - row;
      body(row, static_cast<int32_t>(left < tiling.tile_rows ? left : tiling.tile_rows), column);
    }
    done(piece / chunks, column);
  }
}

// The part of a tile in one lane, and its offset in a [rows, width] tensor.
struct LaneTile {
  TileShape shape;
  int64_t offset;
};

__aicore__ inline LaneTile lane_tile(const BiasDropoutAddTiling& tiling, int64_t row, int32_t rows,
                                     int32_t column, int32_t lane) {
  const int64_t first = int64_t{lane} * tiling.lane_width + column;
  int64_t columns = tiling.lane_width - column;  // left in the lane
  if (columns > tiling.chunk) columns = tiling.chunk;
  if (columns > tiling.width - first) columns = tiling.width - first;  // left in the row
  return {{rows, static_cast<int32_t>(columns < 0 ? 0 : columns), tiling.width},
          row * tiling.width + first};
}

class Forward {
 public:
  __aicore__ inline Forward(GM_ADDR x, GM_ADDR bias, GM_ADDR residual, GM_ADDR rng_state,
                            GM_ADDR out, const BiasDropoutAddTiling& tiling)
      : tiling_(tiling), x_(x), bias_(bias), residual_(residual), out_(out) {
    const uint32_t bytes = tiling.elements * sizeof(float);
    pipe_.InitBuffer(x_queue_, 2, bytes);
    if (tiling.bias_kind != kNoBias) pipe_.InitBuffer(bias_queue_, 2, bytes);
    pipe_.InitBuffer(residual_queue_, 2, bytes);
    pipe_.InitBuffer(out_queue_, 2, bytes);
    pipe_.InitBuffer(sum_, bytes);
    pipe_.InitBuffer(term_, bytes);
    Duplicate(sum_.Get<float>(), 0.0f, tiling.elements);
    Duplicate(term_.Get<float>(), 0.0f, tiling.elements);
    dropper_.Init(pipe_, rng_state, tiling);
  }

  __aicore__ inline void Process() {
    each_tile(
        tiling_,
        [this](int64_t row, int32_t rows, int32_t column) {
          dropper_.Draw(row, rows, column);
          for (int32_t lane = 0; lane < 8; ++lane) {
            const LaneTile tile = lane_tile(tiling_, row, rows, column, lane);
            if (tile.shape.columns == 0) return;
            CopyIn(tile, lane, column);
            Compute(tile.shape, lane);
            CopyOut(tile);
          }
        },
        [](int64_t, int32_t) {});
  }

 private:
  template <class Queue>
  __aicore__ inline void Load(Queue& queue, GM_ADDR from, int32_t type, int64_t offset,
                              TileShape shape) {
    const auto element = static_cast<ElementType>(type);
    LocalTensor<uint8_t> tensor = queue.template AllocTensor<uint8_t>();
    copy_in(tensor, from + offset * bytes_of(element), element, shape, tiling_.chunk);
    queue.EnQue(tensor);
  }

  __aicore__ inline void CopyIn(LaneTile tile, int32_t lane, int32_t column) {
    Load(x_queue_, x_, tiling_.x_type, tile.offset, tile.shape);
    if (tiling_.bias_kind == kFullBias)
      Load(bias_queue_, bias_, tiling_.bias_type, tile.offset, tile.shape);
    if (tiling_.bias_kind == kRowBias)
      Load(bias_queue_, bias_, tiling_.bias_type, lane * tiling_.lane_width + column,
           {1, tile.shape.columns, tile.shape.columns});
    Load(residual_queue_, residual_, tiling_.residual_type, tile.offset, tile.shape);
  }

  // Takes the next tile of a queue as floats.
  template <class Queue>
  __aicore__ inline void Take(Queue& queue, LocalTensor<float> to, int32_t type, TileShape shape) {
    LocalTensor<uint8_t> tensor = queue.template DeQue<uint8_t>();
    each_run(shape, tiling_.chunk, [&](int32_t first, int32_t count) {
      widen(to, tensor, static_cast<ElementType>(type), first, count);
    });
    queue.FreeTensor(tensor);
  }

  __aicore__ inline void AddBias(LocalTensor<float> sum, LocalTensor<float> term, TileShape shape) {
    if (tiling_.bias_kind == kNoBias) return;
    const bool row_bias = tiling_.bias_kind == kRowBias;
    Take(bias_queue_, term, tiling_.bias_type, {row_bias ? 1 : shape.rows, shape.columns, 0});
    if (!row_bias) return Add(sum, sum, term, tiling_.elements);
    for (int32_t row = 0; row < shape.rows; ++row)
      Add(sum[row * tiling_.chunk], sum[row * tiling_.chunk], term, shape.columns);
  }

  __aicore__ inline void Compute(TileShape shape, int32_t lane) {
    const LocalTensor<float> sum = sum_.Get<float>(), term = term_.Get<float>();
    Take(x_queue_, sum, tiling_.x_type, shape);
    AddBias(sum, term, shape);
    dropper_.Drop(sum, lane);
    Take(residual_queue_, term, tiling_.residual_type, shape);
    Add(sum, sum, term, tiling_.elements);
    LocalTensor<uint8_t> out = out_queue_.AllocTensor<uint8_t>();
    each_run(shape, tiling_.chunk, [&](int32_t first, int32_t count) {
      narrow(out, sum, static_cast<ElementType>(tiling_.out_type), first, count);
    });
    out_queue_.EnQue(out);
  }

  __aicore__ inline void CopyOut(LaneTile tile) {
    const auto type = static_cast<ElementType>(tiling_.out_type);
    LocalTensor<uint8_t> out = out_queue_.DeQue<uint8_t>();
    copy_out(out_ + tile.offset * bytes_of(type), out, type, tile.shape, tiling_.chunk);
    out_queue_.FreeTensor(out);
  }

  TPipe pipe_;
  BiasDropoutAddTiling tiling_;
  __gm__ uint8_t *x_, *bias_, *residual_, *out_;
  TQue<TPosition::VECIN, 2> x_queue_, bias_queue_, residual_queue_;
  TQue<TPosition::VECOUT, 2> out_queue_;
  TBuf<TPosition::VECCALC> sum_, term_;
  Dropper dropper_;
};

// In the tiling, x_type is the type of the output's gradient, and out_type the type of x's
// gradient. Each piece writes the sums over its rows to its columns of one row of `partials`,
// [row_pieces, width], so that no core waits for another.
class Backward {
 public:
  __aicore__ inline Backward(GM_ADDR grad, GM_ADDR rng_state, GM_ADDR grad_x, GM_ADDR partials,
                             const BiasDropoutAddTiling& tiling)
      : tiling_(tiling), grad_(grad), grad_x_(grad_x), partials_(partials) {
    const uint32_t bytes = tiling.elements * sizeof(float);
    pipe_.InitBuffer(in_queue_, 2, bytes);
    pipe_.InitBuffer(out_queue_, 2, bytes);
    pipe_.InitBuffer(values_, bytes);
    Duplicate(values_.Get<float>(), 0.0f, tiling.elements);
    if (partials) pipe_.InitBuffer(sum_queue_, 1, 8 * tiling.chunk * sizeof(float));
    dropper_.Init(pipe_, rng_state, tiling);
  }

  __aicore__ inline void Process() {
    bool begun = false;
    LocalTensor<float> sums;
    each_tile(
        tiling_,
        [&](int64_t row, int32_t rows, int32_t column) {
          if (partials_ && !begun) {
            sums = sum_queue_.AllocTensor<float>();
            Duplicate(sums, 0.0f, 8 * tiling_.chunk);
            begun = true;
          }
          dropper_.Draw(row, rows, column);
          for (int32_t lane = 0; lane < 8; ++lane) {
            const LaneTile tile = lane_tile(tiling_, row, rows, column, lane);
            if (tile.shape.columns == 0) return;
            Lane(tile, lane, sums);
          }
        },
        [&](int64_t piece, int32_t column) {
          if (!partials_) return;
          begun = false;
          StoreSums(sums, piece, column);
        });
  }

 private:
  __aicore__ inline void Lane(LaneTile tile, int32_t lane, LocalTensor<float> sums) {
    const auto from = static_cast<ElementType>(tiling_.x_type);
    const auto to = static_cast<ElementType>(tiling_.out_type);
    const LocalTensor<float> values = values_.Get<float>();
    LocalTensor<uint8_t> in = in_queue_.AllocTensor<uint8_t>();
    copy_in(in, grad_ + tile.offset * bytes_of(from), from, tile.shape, tiling_.chunk);
    in_queue_.EnQue(in);
    in = in_queue_.DeQue<uint8_t>();
    each_run(tile.shape, tiling_.chunk,
             [&](int32_t first, int32_t count) { widen(values, in, from, first, count); });
    in_queue_.FreeTensor(in);
    dropper_.Drop(values, lane);
    if (partials_)
      for (int32_t row = 0; row < tile.shape.rows; ++row)
        Add(sums[lane * tiling_.chunk], sums[lane * tiling_.chunk], values[row * tiling_.chunk],
            tile.shape.columns);
    LocalTensor<uint8_t> out = out_queue_.AllocTensor<uint8_t>();
    each_run(tile.shape, tiling_.chunk,
             [&](int32_t first, int32_t count) { narrow(out, values, to, first, count); });
    out_queue_.EnQue(out);
    out = out_queue_.DeQue<uint8_t>();
    copy_out(grad_x_ + tile.offset * bytes_of(to), out, to, tile.shape, tiling_.chunk);
    out_queue_.FreeTensor(out);
  }

  __aicore__ inline void StoreSums(LocalTensor<float> sums, int64_t piece, int32_t column) {
    sum_queue_.EnQue(sums);
    sums = sum_queue_.DeQue<float>();
    for (int32_t lane = 0; lane < 8; ++lane) {
      const LaneTile tile = lane_tile(tiling_, piece, 1, column, lane);
      if (tile.shape.columns == 0) break;
      copy_out(partials_ + tile.offset * sizeof(float),
               sums[lane * tiling_.chunk].ReinterpretCast<uint8_t>(), kFloat32, tile.shape,
               (tile.shape.columns + 15) / 16 * 16);
    }
    sum_queue_.FreeTensor(sums);
  }

  TPipe pipe_;
  BiasDropoutAddTiling tiling_;
  __gm__ uint8_t *grad_, *grad_x_, *partials_;
  TQue<TPosition::VECIN, 2> in_queue_;
  TQue<TPosition::VECOUT, 2> out_queue_;
  TQue<TPosition::VECOUT, 1> sum_queue_;
  TBuf<TPosition::VECCALC> values_;
  Dropper dropper_;
};

}  // namespace npu_ops

extern "C" __global__ __aicore__ void bias_dropout_add(GM_ADDR x, GM_ADDR bias, GM_ADDR residual,
                                                       GM_ADDR rng_state, GM_ADDR out,
                                                       npu_ops::BiasDropoutAddTiling tiling) {
  npu_ops::Forward kernel(x, bias, residual, rng_state, out, tiling);
  kernel.Process();
}

extern "C" __global__ __aicore__ void bias_dropout_add_backward(
    GM_ADDR grad, GM_ADDR rng_state, GM_ADDR grad_x, GM_ADDR partials,
    npu_ops::BiasDropoutAddTiling tiling) {
  npu_ops::Backward kernel(grad, rng_state, grad_x, partials, tiling);
  kernel.Process();
}
