// Helpers of kernels that work on rows: copies of tiles between global memory and fp32 in the
// unified buffer, sums along rows and over rows. Included only by device code.
//
// In fp32 buffers, the rows of a tile begin `stride` elements apart. The padding between rows is
// initialised once, when a buffer is made. Instructions compute on it too, but its values are never
// used.
#pragma once

#include "common/ascendc.h"
#include "common/rows_tiling.h"

namespace npu_ops {

using Floats = AscendC::LocalTensor<float>;

struct RowTile {
  int32_t group;
  int64_t row;
  int32_t rows, column, columns;
};

// Returns the part of a tile that lies in rows [first, first + count), with rows counted from
// `first`. If there is no such part, its `rows` is 0 or negative.
__aicore__ inline RowTile rows_among(RowTile tile, int64_t first, int64_t count) {
  const int64_t begin = tile.row < first ? 0 : tile.row - first;
  const int64_t end = smaller(tile.row + tile.rows - first, count);
  return {0, begin, static_cast<int32_t>(end - begin), tile.column, tile.columns};
}

constexpr int32_t kLanes = 64;  // floats per repeat of a vector instruction

class Rows {
 public:
  __aicore__ inline explicit Rows(const RowsTiling& tiling) : tiling_(tiling) {}

  // Makes a buffer of `count` floats with the value `value`.
  __aicore__ inline Floats floats(int32_t count, float value = 0.0f) {
    AscendC::TBuf<AscendC::TPosition::VECCALC> buffer;
    pipe_.InitBuffer(buffer, (count * sizeof(float) + 31) / 32 * 32);
    Floats made = buffer.Get<float>();
    AscendC::Duplicate(made, value, count);
    return made;
  }
  __aicore__ inline Floats tile_of_floats() { return floats(tiling_.elements); }
  __aicore__ inline Floats float_of_each_row(float value = 1.0f) {
    return floats((tiling_.tile_rows + 7) / 8 * 8, value);
  }

  // Allocates two tiles of a tensor, so that one is copied while the other is used. Each tile uses
  // an event, and a pair of pipes has eight events, so a kernel has at most four such queues in
  // each direction.
  template <class Queue>
  __aicore__ inline void make(Queue& queue, const RowTensor& tensor) {
    pipe_.InitBuffer(queue, 2, tiling_.elements * bytes_of(type(tensor)));
  }

  // Allocates two fp32 tiles for a queue that tensors of several dtypes use in turn.
  template <class Queue>
  __aicore__ inline void make(Queue& queue) {
    pipe_.InitBuffer(queue, 2, tiling_.elements * sizeof(float));
  }

  // Calls body(tile) for each tile of this core's pieces. The tile has the columns of the first
  // chunk; each_chunk goes through the others. Calls done(piece) after each piece.
  template <class Body, class Done>
  __aicore__ inline void each_tile(Body body, Done done) {
    const int64_t of_group = tiling_.pieces_of_group();
    for (int64_t piece = AscendC::GetBlockIdx(); piece < tiling_.pieces();
         piece += AscendC::GetBlockNum()) {
      const int64_t first = piece % of_group * tiling_.piece_rows;
      const int64_t last = smaller(first + tiling_.piece_rows, tiling_.rows);
      for (int64_t row = first; row < last; row += tiling_.tile_rows)
        body(RowTile{static_cast<int32_t>(piece / of_group), row,
                     static_cast<int32_t>(smaller(tiling_.tile_rows, last - row)), 0,
                     tiling_.chunk});
      done(piece);
    }
  }

  // Calls f(tile) for each chunk of a tile's rows.
  template <class F>
  __aicore__ inline void each_chunk(RowTile tile, F f) {
    for (; tile.column < tiling_.width; tile.column += tiling_.chunk) {
      tile.columns =
          static_cast<int32_t>(smaller(tiling_.chunk, int64_t{tiling_.width} - tile.column));
      f(tile);
    }
  }

  template <class Queue>
  __aicore__ inline void load(Queue& queue, GM_ADDR from, const RowTensor& tensor, RowTile tile) {
    AscendC::LocalTensor<uint8_t> to = queue.template AllocTensor<uint8_t>();
    each_copy(tensor, tile, [&](int32_t row, int64_t offset, TileShape shape) {
      copy_in(to[row * row_bytes(tensor)], from + offset * bytes_of(type(tensor)), type(tensor),
              shape, tiling_.stride);
    });
    queue.EnQue(to);
  }

  // Takes the next tile of a queue, as floats.
  template <class Queue>
  __aicore__ inline void take(Queue& queue, Floats to, const RowTensor& tensor, RowTile tile) {
    AscendC::LocalTensor<uint8_t> from = queue.template DeQue<uint8_t>();
    widen_rows(to, from, type(tensor), tile);
    queue.FreeTensor(from);
  }

  template <class Queue>
  __aicore__ inline void store(Queue& queue, GM_ADDR to, const RowTensor& tensor, Floats values,
                               RowTile tile) {
    AscendC::LocalTensor<uint8_t> from = queue.template AllocTensor<uint8_t>();
    narrow_rows(from, values, type(tensor), tile);
    queue.EnQue(from);
    unload(queue, to, tensor, tile);
  }

  // Copies the next tile of a queue to global memory unchanged. If the queue binds loads to stores
  // (TQueBind), that is the loaded tile.
  template <class Queue>
  __aicore__ inline void unload(Queue& queue, GM_ADDR to, const RowTensor& tensor, RowTile tile) {
    AscendC::LocalTensor<uint8_t> from = queue.template DeQue<uint8_t>();
    each_copy(tensor, tile, [&](int32_t row, int64_t offset, TileShape shape) {
      copy_out(to + offset * bytes_of(type(tensor)), from[row * row_bytes(tensor)], type(tensor),
               shape, tiling_.stride);
    });
    queue.FreeTensor(from);
  }

  // Adds column c of `product`, a tile, to column c % 64 of `partial`, [tile_rows, 64].
  __aicore__ inline void add_products(Floats partial, Floats product, RowTile tile) {
    const auto apart = static_cast<uint8_t>(tiling_.stride / 8);
    for (int32_t column = 0; column < tile.columns; column += kLanes)
      AscendC::Add(partial, partial, product[column], lanes(tile.columns - column), tile.rows,
                   {1, 1, 1, 8, 8, apart});
  }

  // Sets `sums` to the sum of each row of `partial`, and `partial` to 0.
  __aicore__ inline void finish_sums(Floats sums, Floats partial, RowTile tile) {
    AscendC::WholeReduceSum(sums, partial, kLanes, tile.rows, 1, 1, 8);
    AscendC::Duplicate(partial, 0.0f, tile.rows * kLanes);
  }

  // Computes values *= factors[row]. `spread` is scratch of eight floats per row.
  __aicore__ inline void scale_rows(Floats values, Floats factors, Floats spread, RowTile tile) {
    AscendC::Brcb(spread, factors, static_cast<uint8_t>((tile.rows + 7) / 8), {1, 8});
    const auto apart = static_cast<uint8_t>(tiling_.stride / 8);
    for (int32_t column = 0; column < tiling_.stride; column += kLanes)
      AscendC::Mul(values[column], values[column], spread, lanes(tiling_.stride - column),
                   tile.rows, {1, 1, 0, apart, apart, 1});
  }

  // Computes to = from * row for `columns` columns, with one row for all rows of the tile.
  __aicore__ inline void times_row(Floats to, Floats from, Floats row, int32_t columns,
                                   RowTile tile) {
    const auto apart = static_cast<uint8_t>(tiling_.stride / 8);
    for (int32_t column = 0; column < columns; column += kLanes)
      AscendC::Mul(to[column], from[column], row[column], lanes(columns - column), tile.rows,
                   {1, 1, 1, apart, apart, 0});
  }
  // times_row computes values *= row, plus_row values += row, for all rows of the tile.
  __aicore__ inline void times_row(Floats values, Floats row, RowTile tile) {
    times_row(values, values, row, tiling_.stride, tile);
  }
  __aicore__ inline void plus_row(Floats values, Floats row, RowTile tile) {
    const auto apart = static_cast<uint8_t>(tiling_.stride / 8);
    for (int32_t column = 0; column < tiling_.stride; column += kLanes)
      AscendC::Add(values[column], values[column], row[column], lanes(tiling_.stride - column),
                   tile.rows, {1, 1, 1, apart, apart, 0});
  }

  // Computes values += others for the first `columns` columns.
  __aicore__ inline void plus(Floats values, Floats others, int32_t columns, RowTile tile) {
    const auto apart = static_cast<uint8_t>(tiling_.stride / 8);
    for (int32_t column = 0; column < columns; column += kLanes)
      AscendC::Add(values[column], values[column], others[column], lanes(columns - column),
                   tile.rows, {1, 1, 1, apart, apart, apart});
  }

  // Computes sum += the sum over the tile's rows, always in the same order. It destroys `values`.
  __aicore__ inline void add_rows(Floats sum, Floats values, RowTile tile) {
    for (int32_t left = tile.rows; left > 1;) {
      const int32_t half = left / 2;
      left -= half;
      AscendC::Add(values, values, values[left * tiling_.stride], half * tiling_.stride);
    }
    AscendC::Add(sum, sum, values, tile.columns);
  }

  // Returns the number of elements of a tile in a buffer, including padding between its rows.
  __aicore__ inline int32_t count(RowTile tile) const { return tile.rows * tiling_.stride; }

  __aicore__ inline void widen_rows(Floats to, AscendC::LocalTensor<uint8_t> from, ElementType type,
                                    RowTile tile) {
    if (tile.columns == tiling_.stride) return widen(to, from, type, 0, count(tile));
    for (int32_t row = 0; row < tile.rows; ++row)
      widen(to, from, type, row * tiling_.stride, tile.columns);
  }

  __aicore__ inline const RowsTiling& tiling() const { return tiling_; }

  AscendC::TPipe pipe_;

 private:
  __aicore__ static inline uint64_t lanes(int32_t left) { return left < kLanes ? left : kLanes; }
  __aicore__ static inline ElementType type(const RowTensor& tensor) {
    return static_cast<ElementType>(tensor.type);
  }
  __aicore__ inline int32_t row_bytes(const RowTensor& tensor) const {
    return tiling_.stride * bytes_of(type(tensor));
  }

  __aicore__ inline void narrow_rows(AscendC::LocalTensor<uint8_t> to, Floats from,
                                     ElementType type, RowTile tile) {
    narrow(to, from, type, 0, count(tile));
  }

  // Calls f(row in the tile, offset in the tensor, shape) for each run of rows with a constant
  // stride.
  template <class F>
  __aicore__ inline void each_copy(const RowTensor& tensor, RowTile tile, F f) {
    const bool even = tensor.outer == tiling_.inner * tensor.inner;
    for (int32_t done = 0; done < tile.rows;) {
      const int64_t row = tile.row + done, within = row % tiling_.inner;
      const int64_t left = tile.rows - done;
      const auto rows = static_cast<int32_t>(even ? left : smaller(left, tiling_.inner - within));
      const int64_t offset = tile.group * tensor.group + row / tiling_.inner * tensor.outer +
                             within * tensor.inner + tile.column;
      f(done, offset, TileShape{rows, tile.columns, tensor.inner});
      done += rows;
    }
  }

  RowsTiling tiling_;
};

}  // namespace npu_ops
