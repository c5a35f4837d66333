// z = 2 x in tiles, right (`mistake` is 0) or with one of several mistakes.
// tests/emulator/test_twin.py has the finding that the twin must report for each.
#include "kernel_operator.h"

using namespace AscendC;

enum Mistake : int32_t {
  kNone,
  kBuffersTooLarge,
  kUnaligned,
  kNeverFreed,
  kInputNotQueued,
  kOutputNotQueued,
  kReadsPastTensor,
  kWritesPastTensor,
  kCopyNotWholeBlocks,
  kCountPastBuffer,
  kUsedAfterFree,
  kFreedTwice,
  kReadsUnwritten,
  kBlocksOverlap,
  kWaitWithoutSet,
  kSetWithoutWait,
  kScalarTooEarly,
  kStoredTooEarly,
  kMaskPastBuffer,
  kVectorChain,
  kGatherOutside,
  kScalarBetween,
};

constexpr int32_t kTile = 256;

class Doubling {
 public:
  __aicore__ inline Doubling(GM_ADDR x, GM_ADDR z, int32_t count, int32_t mistake)
      : tiles_(count / kTile), mistake_(mistake) {
    const int64_t first = (mistake == kBlocksOverlap ? 0 : GetBlockIdx()) * count;
    x_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(x) + first, count);
    z_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(z) + first, count);
    const uint32_t bytes = mistake == kBuffersTooLarge ? 60 * 1024 : kTile * sizeof(float);
    pipe_.InitBuffer(in_, 2, bytes);
    pipe_.InitBuffer(out_, 2, bytes);
    pipe_.InitBuffer(scratch_, kTile * sizeof(float));
  }

  __aicore__ inline void Process() {
    for (int32_t tile = 0; tile < tiles_; ++tile) {
      LocalTensor<float> x = Load(tile);
      LocalTensor<float> z = out_.AllocTensor<float>();
      Compute(tile, z, x);
      if (mistake_ == kUsedAfterFree) {
        in_.FreeTensor(x);
        PipeBarrier<PIPE_V>();
        Add(z, x, x, kTile);
      }
      if (mistake_ == kWaitWithoutSet) WaitFlag<HardEvent::V_S>(EVENT_ID3);
      if (mistake_ == kSetWithoutWait) SetFlag<HardEvent::V_S>(EVENT_ID3);
      Store(tile, z);
      if (mistake_ == kNeverFreed) continue;
      out_.FreeTensor(z);
      if (mistake_ != kUsedAfterFree) in_.FreeTensor(x);
      if (mistake_ == kFreedTwice) in_.FreeTensor(x);
    }
  }

 private:
  __aicore__ inline LocalTensor<float> Load(int32_t tile) {
    LocalTensor<float> x = in_.AllocTensor<float>();
    const int64_t from = tile * kTile + (mistake_ == kReadsPastTensor ? 1 << 20 : 0);
    DataCopy(x, x_[from], mistake_ == kCopyNotWholeBlocks ? kTile - 1 : kTile);
    if (mistake_ == kScalarTooEarly) x.SetValue(0, x.GetValue(1));
    if (mistake_ == kInputNotQueued) return x;
    in_.EnQue(x);
    return in_.DeQue<float>();
  }

  __aicore__ inline void Compute(int32_t tile, LocalTensor<float>& z, LocalTensor<float>& x) {
    LocalTensor<float> scratch = scratch_.Get<float>();
    switch (mistake_) {
      case kUnaligned:
        return Add(z, x[1], x, 64);
      case kCountPastBuffer:
        return Add(z, x, x, 2 * kTile);
      case kReadsUnwritten:
        return Add(z, x, scratch, kTile);
      case kMaskPastBuffer:
        return Add(z, x, x, uint64_t{64}, 8, {1, 1, 1, 8, 8, 8});
      case kVectorChain:
        Muls(scratch, x, 2.0f, kTile);
        return Adds(z, scratch, 0.0f, kTile);
      case kStoredTooEarly:
        Add(scratch, x, x, kTile);
        DataCopy(z_[tile * kTile], scratch, kTile);
        break;
      case kGatherOutside: {
        LocalTensor<uint32_t> offsets = scratch_.Get<uint32_t>();
        Duplicate(offsets, uint32_t{4} << 20, 64);
        PipeBarrier<PIPE_V>();
        return Gather(z, x, offsets, uint32_t{0}, 64);
      }
      default:
        break;
    }
    Add(z, x, x, kTile);
  }

  __aicore__ inline void Store(int32_t tile, LocalTensor<float>& z) {
    if (mistake_ == kScalarBetween) {
      z.SetValue(0, z.GetValue(0));
    } else if (mistake_ != kOutputNotQueued) {
      out_.EnQue(z);
      z = out_.DeQue<float>();
    }
    DataCopy(z_[tile * kTile + (mistake_ == kWritesPastTensor ? 1 << 20 : 0)], z, kTile);
  }

  TPipe pipe_;
  TQue<TPosition::VECIN, 2> in_;
  TQue<TPosition::VECOUT, 2> out_;
  TBuf<TPosition::VECCALC> scratch_;
  GlobalTensor<float> x_, z_;
  int32_t tiles_, mistake_;
};

extern "C" __global__ __aicore__ void doubling(GM_ADDR x, GM_ADDR z, int32_t count,
                                               int32_t mistake) {
  Doubling kernel(x, z, count, mistake);
  kernel.Process();
}
