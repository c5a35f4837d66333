// Rotates all heads of q and k; rope and mrope share it, for Ascend910B and Ascend910_93.
//
// bisheng inserts the barriers inside the vector pipe (--cce-auto-sync); queues order the copies.
#pragma once

#include "rope/angles_ascendc.h"

namespace npu_ops {

class Rotary {
 public:
  __aicore__ inline Rotary(GM_ADDR q, GM_ADDR k, GM_ADDR cos, GM_ADDR sin, GM_ADDR positions,
                           GM_ADDR q_out, GM_ADDR k_out, const RotaryTiling& tiling)
      : tiling_(tiling),
        rows_(tiling.rows),
        angles_(rows_, tiling.angles, cos, sin, positions),
        q_(q),
        k_(k),
        q_out_(q_out),
        k_out_(k_out) {
    rows_.make(in_queue_, of_heads(tiling.q));
    rows_.make(out_queue_, of_heads(tiling.q_out));
    x_ = rows_.tile_of_floats();
    crossed_ = rows_.tile_of_floats();
  }

  __aicore__ inline void Process() {
    rows_.each_tile(
        [&](RowTile tile) {
          angles_.prepare(tile.group);
          Rotate(q_, q_out_, tiling_.q, tiling_.q_out, tile.group,
                 rows_among(tile, 0, tiling_.q.count));
          Rotate(k_, k_out_, tiling_.k, tiling_.k_out, tile.group,
                 rows_among(tile, tiling_.q.count, tiling_.k.count));
        },
        [](int64_t) {});
  }

 private:
  __aicore__ inline RowTensor of_heads(const HeadTensor& heads) const {
    return {0, heads.head, heads.head, tiling_.type};
  }

  // Rotates a tile of a token's heads.
  __aicore__ inline void Rotate(GM_ADDR from, GM_ADDR to, const HeadTensor& x,
                                const HeadTensor& out, int64_t token, RowTile tile) {
    if (tile.rows <= 0) return;
    const int64_t length = tiling_.angles.length;
    const auto bytes = bytes_of(static_cast<ElementType>(tiling_.type));
    rows_.load(in_queue_, from + x.at(token, length) * bytes, of_heads(x), tile);
    rows_.take(in_queue_, x_, of_heads(x), tile);
    if (angles_.nobodys())
      AscendC::Duplicate(x_, 0.0f, rows_.count(tile));
    else
      angles_.rotate(x_, crossed_, tile);
    rows_.store(out_queue_, to + out.at(token, length) * bytes, of_heads(out), x_, tile);
  }

  RotaryTiling tiling_;
  Rows rows_;
  Angles angles_;
  __gm__ uint8_t *q_, *k_, *q_out_, *k_out_;
  AscendC::TQue<AscendC::TPosition::VECIN, 2> in_queue_;
  AscendC::TQue<AscendC::TPosition::VECOUT, 2> out_queue_;
  Floats x_, crossed_;
};

}  // namespace npu_ops
