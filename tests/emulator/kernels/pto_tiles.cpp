// Tile operations through PTO-ISA's public interface; a launch runs one of them. upstream_pto.py
// in tests/emulator compiles this for PTO-ISA's simulator (__CPU_SIM) and for the twin.
#ifdef __CPU_SIM
#include <cstdint>
#else
#include "pto_on_twin.h"
#endif
#include <pto/pto-inst.hpp>

// clang-format off
enum Operation : int32_t {
  kAdd, kSub, kMul, kDiv, kMax, kMin,              // of two tiles
  kAddScalar, kMulScalar, kMaxScalar, kMinScalar,  // of a tile and a scalar
  kExp, kLog, kSqrt, kAbs, kNeg, kRelu,            // of a tile
  kRowSum, kRowMax, kRowMin, kColumnSum, kColumnMax, kColumnMin,
  kRowExpand, kColumnExpand, kFill, kCount,
  kToHalf, kToFloat, kToInteger,                   // conversions, rounded by `mode`
  kCompareScalar, kSelect,                         // by `mode`; by bits of b
  kGather, kGatherBlocks, kKeep, kTranspose,       // by indices or byte offsets of b; by `mode`
};
// clang-format on

enum Kind : int32_t { kFloat, kHalf, kInt32, kInt16 };

struct Given {
  int32_t operation, kind, rows, columns, mode;
  float scalar;
};

constexpr int kRows = 16, kColumns = 64, kBytes = kRows * kColumns * 4;

template <class T, int ROWS = kRows, int COLUMNS = kColumns>
using Tile = pto::Tile<pto::TileType::Vec, T, ROWS, COLUMNS, pto::BLayout::RowMajor, -1, -1>;

// Allocates the unified buffer in order; the simulator's tiles have memory of their own.
struct Memory {
  uint64_t next;
  template <class T>
  T& place(T& tile) {
    TASSIGN(tile, next);
    next += 2 * kBytes;  // operations may use memory past a tile's last repeat
    return tile;
  }
};

template <class T>
using Global = pto::GlobalTensor<T, pto::Shape<1, 1, 1, -1, -1>, pto::Stride<1, 1, -1, -1, 1>>;

// Rows in global memory have the stride of a tile's rows.
template <class T, class TILE>
void load(TILE& tile, __gm__ uint8_t* from) {
  const int rows = tile.GetValidRow(), columns = tile.GetValidCol();
  Global<T> global(reinterpret_cast<__gm__ T*>(from), {rows, columns}, {TILE::Rows, TILE::Cols});
  TLOAD(tile, global);
}
template <class T, class TILE>
void store(TILE& tile, __gm__ uint8_t* to) {
  const int rows = tile.GetValidRow(), columns = tile.GetValidCol();
  set_flag(PIPE_V, PIPE_MTE3, EVENT_ID0);
  wait_flag(PIPE_V, PIPE_MTE3, EVENT_ID0);
  Global<T> global(reinterpret_cast<__gm__ T*>(to), {rows, columns}, {TILE::Rows, TILE::Cols});
  TSTORE(global, tile);
}
inline void loaded() {
  set_flag(PIPE_MTE2, PIPE_V, EVENT_ID0);
  wait_flag(PIPE_MTE2, PIPE_V, EVENT_ID0);
}

struct Memories {
  __gm__ uint8_t *a, *b, *out;
};

template <class T>
bool of_two(const Given& given, Tile<T>& out, Tile<T>& x, Tile<T>& y) {
  switch (given.operation) {
    case kAdd:
      TADD(out, x, y);
      return true;
    case kSub:
      TSUB(out, x, y);
      return true;
    case kMul:
      TMUL(out, x, y);
      return true;
    case kMax:
      TMAX(out, x, y);
      return true;
    case kMin:
      TMIN(out, x, y);
      return true;
    default:
      return false;
  }
}

template <class T>
bool of_scalar(const Given& given, Tile<T>& out, Tile<T>& x) {
  const T scalar = static_cast<T>(given.scalar);
  switch (given.operation) {
    case kAddScalar:
      TADDS(out, x, scalar);
      return true;
    case kMulScalar:
      TMULS(out, x, scalar);
      return true;
    case kMaxScalar:
      TMAXS(out, x, scalar);
      return true;
    case kMinScalar:
      TMINS(out, x, scalar);
      return true;
    case kFill:
      TEXPANDS(out, scalar);
      return true;
    default:
      return false;
  }
}

template <class T>
bool of_float(const Given& given, Tile<T>& out, Tile<T>& x, Tile<T>& y) {
  switch (given.operation) {
    case kDiv:
      TDIV(out, x, y);
      return true;
    case kExp:
      TEXP(out, x);
      return true;
    case kLog:
      TLOG(out, x);
      return true;
    case kSqrt:
      TSQRT(out, x);
      return true;
    case kAbs:
      TABS(out, x);
      return true;
    case kNeg:
      TNEG(out, x);
      return true;
    case kRelu:
      TRELU(out, x);
      return true;
    default:
      return false;
  }
}

template <class T>
void elementwise(const Given& given, Memories memories, Memory memory) {
  Tile<T> x(given.rows, given.columns), y(given.rows, given.columns);
  Tile<T> out(given.rows, given.columns);
  load<T>(memory.place(x), memories.a);
  load<T>(memory.place(y), memories.b);
  loaded();
  memory.place(out);
  bool done = of_two<T>(given, out, x, y) || of_scalar<T>(given, out, x);
  if constexpr (std::is_same_v<T, float> || std::is_same_v<T, half>)
    done = done || of_float<T>(given, out, x, y);
  store<T>(out, memories.out);
}

template <class T>
void reduced(const Given& given, Memories memories, Memory memory) {
  Tile<T> x(given.rows, given.columns), scratch(given.rows, given.columns);
  load<T>(memory.place(x), memories.a);
  loaded();
  memory.place(scratch);
  if (given.operation <= kRowMin) {
    Tile<T, kRows, 16> out(given.rows, 1);
    memory.place(out);
    if (given.operation == kRowSum) TROWSUM(out, x, scratch);
    if (given.operation == kRowMax) TROWMAX(out, x, scratch);
    if (given.operation == kRowMin) TROWMIN(out, x, scratch);
    return store<T>(out, memories.out);
  }
  Tile<T, 1> out(1, given.columns);
  memory.place(out);
#ifdef __CPU_SIM
  if (given.operation == kColumnSum) TCOLSUM(out, x);
#else
  if (given.operation == kColumnSum) TCOLSUM(out, x, scratch, false);
#endif
  if (given.operation == kColumnMax) TCOLMAX(out, x);
  if (given.operation == kColumnMin) TCOLMIN(out, x);
  store<T>(out, memories.out);
}

template <class T>
void expanded(const Given& given, Memories memories, Memory memory) {
  Tile<T> x(given.rows, given.columns), out(given.rows, given.columns);
  load<T>(memory.place(x), memories.a);
  loaded();
  memory.place(out);
  if (given.operation == kRowExpand)
    TROWEXPAND(out, x);
  else
    TCOLEXPAND(out, x);
  store<T>(out, memories.out);
}

template <class T>
void counted(const Given& given, Memories memories, Memory memory) {
  Tile<T, 1> out(1, given.columns);
  memory.place(out);
  pto::TCI<Tile<T, 1>, T, 0>(out, static_cast<T>(given.scalar));
#ifndef __CPU_SIM
  set_flag(PIPE_S, PIPE_MTE3, EVENT_ID0);
  wait_flag(PIPE_S, PIPE_MTE3, EVENT_ID0);
#endif
  store<T>(out, memories.out);
}

template <class TO, class FROM>
void converted(const Given& given, Memories memories, Memory memory) {
  Tile<FROM> x(given.rows, given.columns);
  Tile<TO> out(given.rows, given.columns);
  load<FROM>(memory.place(x), memories.a);
  loaded();
  TCVT(memory.place(out), x, static_cast<pto::RoundMode>(given.mode));
  store<TO>(out, memories.out);
}

template <class T>
void compared(const Given& given, Memories memories, Memory memory) {
  Tile<T> x(given.rows, kColumns);
  Tile<uint8_t> out(given.rows, kColumns / 8);
  load<T>(memory.place(x), memories.a);
  loaded();
  memory.place(out);
  TCMPS(out, x, static_cast<T>(given.scalar), static_cast<pto::CmpMode>(given.mode));
  store<uint8_t>(out, memories.out);
}

template <class T>
void selected(const Given& given, Memories memories, Memory memory) {
  Tile<uint8_t, kRows, 32> mask(given.rows, (given.columns + 7) / 8);
  Tile<T> x(given.rows, given.columns), y(given.rows, given.columns);
  Tile<T> out(given.rows, given.columns);
  load<T>(memory.place(x), memories.a);
  load<T>(memory.place(y), memories.b);
  load<uint8_t>(memory.place(mask), memories.b);
  loaded();
  memory.place(out);
  TSEL(out, mask, x, y);
  store<T>(out, memories.out);
}

template <class T>
void gathered(const Given& given, Memories memories, Memory memory) {
  Tile<T> x(kRows, kColumns), out(given.rows, given.columns);
  load<T>(memory.place(x), memories.a);
  if (given.operation == kGather) {
    Tile<int32_t> indices(given.rows, given.columns);
    load<int32_t>(memory.place(indices), memories.b);
    loaded();
    TGATHER(memory.place(out), x, indices);
    return store<T>(out, memories.out);
  }
  Tile<uint32_t, kRows, 8> offsets(kRows, 8);  // an instruction takes eight, even past a row's end
  load<uint32_t>(memory.place(offsets), memories.b);
  loaded();
  TGATHERB(memory.place(out), x, offsets);
  store<T>(out, memories.out);
}

// Keeps those elements of one row that a pattern selects.
template <class T, pto::MaskPattern PATTERN>
void kept(Memories memories, Memory memory) {
  Tile<T, 1> x(1, kColumns), out(1, kColumns);
  load<T>(memory.place(x), memories.a);
  load<T>(memory.place(out), memories.b);
  loaded();
  pto::TGATHER<Tile<T, 1>, Tile<T, 1>, PATTERN>(out, x);
  store<T>(out, memories.out);
}

template <class T>
void transposed(Memories memories, Memory memory) {
  using From = pto::Tile<pto::TileType::Vec, T, kRows, kColumns>;
  using To = pto::Tile<pto::TileType::Vec, T, kColumns, kRows>;
  From x;
  To out, scratch;
  load<T>(memory.place(x), memories.a);
  loaded();
  memory.place(out);
  memory.place(scratch);
  TTRANS(out, x, scratch);
  store<T>(out, memories.out);
}

template <class T>
void of_floats(const Given& given, Memories memories, Memory memory) {
  if (given.operation <= kRelu) return elementwise<T>(given, memories, memory);
  if (given.operation <= kColumnMin) return reduced<T>(given, memories, memory);
  switch (given.operation) {
    case kRowExpand:
    case kColumnExpand:
      return expanded<T>(given, memories, memory);
    case kFill:
      return elementwise<T>(given, memories, memory);
    case kToInteger:
      return converted<int32_t, T>(given, memories, memory);
    case kToFloat:
      return converted<float, half>(given, memories, memory);
    case kToHalf:
      return converted<half, float>(given, memories, memory);
    case kCompareScalar:
      return compared<T>(given, memories, memory);
    case kSelect:
      return selected<T>(given, memories, memory);
    case kGather:
    case kGatherBlocks:
      return gathered<T>(given, memories, memory);
    case kTranspose:
      return transposed<T>(memories, memory);
  }
  switch (given.mode) {
    case 1:
      return kept<T, pto::MaskPattern::P0101>(memories, memory);
    case 2:
      return kept<T, pto::MaskPattern::P1010>(memories, memory);
    case 3:
      return kept<T, pto::MaskPattern::P0001>(memories, memory);
    case 4:
      return kept<T, pto::MaskPattern::P0010>(memories, memory);
    case 5:
      return kept<T, pto::MaskPattern::P0100>(memories, memory);
    case 6:
      return kept<T, pto::MaskPattern::P1000>(memories, memory);
    case 7:
      return kept<T, pto::MaskPattern::P1111>(memories, memory);
  }
}

template <class T>
void of_integers(const Given& given, Memories memories, Memory memory) {
  if (given.operation == kCount) return counted<T>(given, memories, memory);
  if (given.operation == kToFloat) return converted<float, T>(given, memories, memory);
  elementwise<T>(given, memories, memory);
}

inline void operate(const Given& given, Memories memories, Memory memory) {
  if (given.kind == kFloat) return of_floats<float>(given, memories, memory);
  if (given.kind == kHalf) return of_floats<half>(given, memories, memory);
  if (given.kind == kInt32) return of_integers<int32_t>(given, memories, memory);
  of_integers<int16_t>(given, memories, memory);
}

#ifdef __CPU_SIM
extern "C" void tiles(uint8_t* a, uint8_t* b, uint8_t* out, Given given) {
  operate(given, {a, b, out}, {0});
}
#else
extern "C" __global__ __aicore__ void tiles(GM_ADDR a, GM_ADDR b, GM_ADDR out, Given given) {
  AscendC::TPipe pipe;
  AscendC::TBuf<AscendC::TPosition::VECCALC> buffer;
  pipe.InitBuffer(buffer, 12 * kBytes);
  AscendC::LocalTensor<float> all = buffer.Get<float>();
  // Upstream's operations read whole repeats, even past the valid part.
  AscendC::Duplicate(all, 1.0f, 12 * kBytes / sizeof(float));
  set_flag(PIPE_V, PIPE_MTE2, EVENT_ID1);
  wait_flag(PIPE_V, PIPE_MTE2, EVENT_ID1);
  const auto first = reinterpret_cast<uint64_t>(all.GetPhyAddr());
  operate(given, {a, b, out}, {first});
}
#endif
