// Reductions: CCE intrinsic guide, 6.3.6. Sums run in float in the order of the elements; a
// device's order is not documented, so a kernel must not depend on it.
#pragma once

#include <cstring>

#include "lanes.h"
#include "narrow.h"

namespace npu_ops::twin {

// Folds the active elements of each group of a repeat, and calls out(repeat, group, result). A
// group without elements has no result. `fold` gets the result so far, an element and its index;
// the first element of a group is passed to `start`.
template <class T, class R, class Start, class Fold, class Out>
void reduce(const Operand<T>& from, const Extent& extent, int group_size, Start start, Fold fold,
            Out out) {
  for (int repeat = 0; repeat < extent.repeats(); ++repeat) {
    for (int first = 0; first < extent.per_repeat(); first += group_size) {
      bool any = false;
      R result{};
      for (int e = first; e < first + group_size; ++e) {
        if (!extent.has(repeat, e)) continue;
        result = any ? fold(result, *from.at(repeat, e), e) : start(*from.at(repeat, e), e);
        any = true;
      }
      if (any) out(repeat, first / group_size, result);
    }
  }
}

template <class T>
void put(T* at, T value) {
  touch(Access::kWrite, at, sizeof(T));
  *at = value;
}

// 6.3.6.3: writes one result for each block of 32 bytes. The results of a repeat are contiguous.
template <class T, class F>
void by_block(const char* name, T* to, const Operand<T>& from, int repeats, int to_repeat, F f) {
  issue(name, PIPE_V);
  aligned(from.base, kBlockBytes, "the source");
  aligned(to, 8 * sizeof(T), "the target");
  const Extent extent(repeats, per_repeat<T>());
  touch(Access::kRead, from, extent);
  reduce<T, float>(
      from, extent, Operand<T>::kPerBlock, [](T value, int) { return float(value); },
      [f](float a, T b, int) { return f(a, float(b)); },
      [&](int repeat, int block, float value) {
        put(to + int64_t{repeat} * to_repeat * 8 + block, narrow<T>(value));
      });
}

struct Best {
  float value = 0;
  uint32_t index = 0;
};

// 6.3.6.1: writes the largest or smallest element of a repeat and its index, in the given order.
template <class T>
void put_best(T* to, int repeat, int to_repeat, Order_t order, Best best) {
  if (order == ONLY_INDEX)
    return put(reinterpret_cast<uint32_t*>(to) + int64_t{repeat} * to_repeat, best.index);
  if (order == ONLY_VALUE) return put(to + int64_t{repeat} * to_repeat, narrow<T>(best.value));
  T index;
  std::memcpy(&index, &best.index, sizeof(T));
  T* pair = to + int64_t{repeat} * to_repeat * 2;
  put(pair, order == VALUE_INDEX ? narrow<T>(best.value) : index);
  put(pair + 1, order == VALUE_INDEX ? index : narrow<T>(best.value));
}

template <class T, class Better>
void best_of(const char* name, T* to, const Operand<T>& from, int repeats, int to_repeat,
             Order_t order, Better better) {
  issue(name, PIPE_V);
  aligned(from.base, kBlockBytes, "the source");
  const Extent extent(repeats, per_repeat<T>());
  touch(Access::kRead, from, extent);
  reduce<T, Best>(
      from, extent, extent.per_repeat(),
      [](T value, int e) { return Best{float(value), static_cast<uint32_t>(e)}; },
      [&](Best best, T value, int e) {
        return better(float(value), best.value) ? Best{float(value), static_cast<uint32_t>(e)}
                                                : best;
      },
      [&](int repeat, int, Best best) { put_best(to, repeat, to_repeat, order, best); });
}

}  // namespace npu_ops::twin

// 6.3.6.2: writes a sum for each repeat, or sets ACC_VAL to the sum of all repeats.
template <class T>
inline void vcadd(T* to, T* from, uint8_t repeats, uint16_t to_repeat, uint16_t from_block,
                  uint16_t from_repeat, bool accumulate) {
  using namespace npu_ops::twin;
  issue("vcadd", PIPE_V);
  aligned(from, kBlockBytes, "the source");
  const Operand<T> operand{from, from_block, from_repeat};
  const Extent extent(repeats, per_repeat<T>());
  touch(Access::kRead, operand, extent);
  float total = 0;
  reduce<T, float>(
      operand, extent, extent.per_repeat(), [](T value, int) { return float(value); },
      [](float sum, T value, int) { return sum + float(value); },
      [&](int repeat, int, float sum) {
        total += sum;
        if (!accumulate) put(to + int64_t{repeat} * to_repeat, narrow<T>(sum));
      });
  if (!accumulate) return;
  const T result = narrow<T>(total);
  registers().accumulated = 0;
  std::memcpy(&registers().accumulated, &result, sizeof(T));
}

#define NPU_OPS_TWIN_BY_BLOCK(NAME, EXPRESSION)                                                \
  template <class T>                                                                           \
  inline void NAME(T* to, T* from, uint8_t repeats, uint16_t to_repeat, uint16_t from_block,   \
                   uint16_t from_repeat) {                                                     \
    npu_ops::twin::by_block<T>(#NAME, to, {from, from_block, from_repeat}, repeats, to_repeat, \
                               [](float a, float b) { return EXPRESSION; });                   \
  }
NPU_OPS_TWIN_BY_BLOCK(vcgadd, a + b)
NPU_OPS_TWIN_BY_BLOCK(vcgmax, a > b ? a : b)
NPU_OPS_TWIN_BY_BLOCK(vcgmin, a < b ? a : b)
#undef NPU_OPS_TWIN_BY_BLOCK

#define NPU_OPS_TWIN_BEST(NAME, OPERATOR)                                                     \
  template <class T>                                                                          \
  inline void NAME(T* to, T* from, uint8_t repeats, uint16_t to_repeat, uint16_t from_block,  \
                   uint16_t from_repeat, Order_t order) {                                     \
    npu_ops::twin::best_of<T>(#NAME, to, {from, from_block, from_repeat}, repeats, to_repeat, \
                              order, [](float a, float b) { return a OPERATOR b; });          \
  }
NPU_OPS_TWIN_BEST(vcmax, >)
NPU_OPS_TWIN_BEST(vcmin, <)
#undef NPU_OPS_TWIN_BEST

// 6.3.6.4: writes the sums of neighbours; the results of a repeat fill 128 bytes.
template <class T>
inline void vcpadd(T* to, T* from, uint8_t repeats, uint16_t to_repeat, uint16_t from_block,
                   uint16_t from_repeat) {
  using namespace npu_ops::twin;
  issue("vcpadd", PIPE_V);
  aligned(from, kBlockBytes, "the source");
  const Operand<T> operand{from, from_block, from_repeat};
  const Extent extent(repeats, per_repeat<T>());
  touch(Access::kRead, operand, extent);
  reduce<T, float>(
      operand, extent, 2, [](T value, int) { return float(value); },
      [](float sum, T value, int) { return sum + float(value); },
      [&](int repeat, int pair, float sum) {
        put(to + int64_t{repeat} * to_repeat * (128 / sizeof(T)) + pair, narrow<T>(sum));
      });
}
