// Comparisons and selections: CCE intrinsic guide, 6.3.7, 6.3.8.3 to 6.3.8.5, and 6.3.6.5.
#pragma once

#include <cstring>

#include "lanes.h"

namespace npu_ops::twin {

inline bool bit(const uint8_t* bits, int64_t index) { return bits[index / 8] >> (index % 8) & 1; }

inline void set_bit(uint8_t* bits, int64_t index, bool value) {
  const auto one = static_cast<uint8_t>(1u << (index % 8));
  bits[index / 8] = static_cast<uint8_t>(value ? bits[index / 8] | one : bits[index / 8] & ~one);
}

// 6.3.8.4, 6.3.8.5: one bit for each element of whole repeats. The mask is ignored, except in
// counter mode, where it gives the number of repeats.
template <class T, class F>
void compare(const char* name, uint8_t* to, int repeats, F f,
             std::initializer_list<Operand<T>> sources) {
  issue(name, PIPE_V);
  const int each = per_repeat<T>();
  const Mask mask = registers().mask;
  if (mask.counts) repeats = static_cast<int>((mask.low + each - 1) / each);
  for (const Operand<T>& source : sources) {
    aligned(source.base, kBlockBytes, "a source");
    for (int r = 0; r < repeats; ++r)
      for (int e = 0; e < each; e += Operand<T>::kPerBlock)
        touch(Access::kRead, source.at(r, e), kBlockBytes);
  }
  aligned(to, kBlockBytes, "the target");
  touch(Access::kWrite, to, static_cast<size_t>(repeats) * each / 8);
  for (int r = 0; r < repeats; ++r)
    for (int e = 0; e < each; ++e) set_bit(to, int64_t{r} * each + e, f(r, e));
}

// Sets each active element of `to` to that of `a` if chosen(repeat, element), else to other(repeat,
// element).
template <class T, class Bit, class Other>
void select(const Operand<T>& to, const Operand<T>& a, const Extent& extent, Bit chosen,
            Other other) {
  touch(Access::kWrite, to, extent);
  extent.each([&](int r, int e) { *to.at(r, e) = chosen(r, e) ? *a.at(r, e) : other(r, e); });
}

}  // namespace npu_ops::twin

#define NPU_OPS_TWIN_COMPARE(NAME, OPERATOR)                                                      \
  template <class T>                                                                              \
  inline void vcmpv_##NAME(uint8_t* to, T* a, T* b, uint8_t repeats, uint8_t, uint8_t a_block,    \
                           uint8_t b_block, uint8_t, uint8_t a_repeat, uint8_t b_repeat) {        \
    using Operand = npu_ops::twin::Operand<T>;                                                    \
    const Operand x{a, a_block, a_repeat}, y{b, b_block, b_repeat};                               \
    npu_ops::twin::compare<T>("vcmpv_" #NAME, to, repeats,                                        \
                              [&](int r, int e) { return *x.at(r, e) OPERATOR * y.at(r, e); },    \
                              {x, y});                                                            \
  }                                                                                               \
  template <class T, class S>                                                                     \
  inline void vcmpvs_##NAME(uint8_t* to, T* a, S scalar, uint8_t repeats, uint16_t,               \
                            uint16_t a_block, uint16_t, uint16_t a_repeat) {                      \
    const npu_ops::twin::Operand<T> x{a, a_block, a_repeat};                                      \
    const T y = T(scalar);                                                                        \
    npu_ops::twin::compare<T>("vcmpvs_" #NAME, to, repeats,                                       \
                              [&](int r, int e) { return *x.at(r, e) OPERATOR y; }, {x});         \
  }                                                                                               \
  /* 6.3.8.3: writes CMPMASK. Bits of inactive elements stay as they are. */                      \
  template <class T>                                                                              \
  inline void vcmp_##NAME(T* a, T* b, uint8_t repeats, uint8_t, uint8_t a_block, uint8_t b_block, \
                          uint8_t, uint8_t a_repeat, uint8_t b_repeat) {                          \
    using namespace npu_ops::twin;                                                                \
    issue("vcmp_" #NAME, PIPE_V);                                                                 \
    const npu_ops::twin::Operand<T> x{a, a_block, a_repeat}, y{b, b_block, b_repeat};             \
    const Extent extent(repeats, per_repeat<T>());                                                \
    npu_ops::twin::touch(Access::kRead, x, extent);                                               \
    npu_ops::twin::touch(Access::kRead, y, extent);                                               \
    auto* bits = reinterpret_cast<uint8_t*>(registers().compare);                                 \
    extent.each([&](int r, int e) { set_bit(bits, e, *x.at(r, e) OPERATOR * y.at(r, e)); });      \
  }
NPU_OPS_TWIN_COMPARE(lt, <)
NPU_OPS_TWIN_COMPARE(gt, >)
NPU_OPS_TWIN_COMPARE(le, <=)
NPU_OPS_TWIN_COMPARE(ge, >=)
NPU_OPS_TWIN_COMPARE(eq, ==)
NPU_OPS_TWIN_COMPARE(ne, !=)
#undef NPU_OPS_TWIN_COMPARE

// CCE intrinsic guide, 6.3.7.1.
template <class T, class B>
inline void vsel(T* to, T* a, B* b, uint8_t repeats, uint8_t to_block, uint8_t a_block,
                 uint8_t b_block, uint8_t to_repeat, uint8_t a_repeat, uint8_t b_repeat,
                 uint8_t mode = 0) {
  using namespace npu_ops::twin;
  issue("vsel", PIPE_V);
  aligned(to, kBlockBytes, "the target");
  aligned(a, kBlockBytes, "the first source");
  aligned(b, kBlockBytes, mode == 1 ? "the mask" : "the second source");
  const Operand<T> target{to, to_block, to_repeat}, first{a, a_block, a_repeat};
  const Operand<T> second{reinterpret_cast<T*>(b), b_block, b_repeat};
  const Extent extent(repeats, per_repeat<T>());
  npu_ops::twin::touch(Access::kRead, first, extent);
  const auto* bits = reinterpret_cast<const uint8_t*>(registers().compare);
  T constant;
  std::memcpy(&constant, bits, sizeof(T));
  if (mode == 1) bits = reinterpret_cast<const uint8_t*>(b);
  if (mode == 2) std::memcpy(&bits, registers().compare, sizeof(bits));
  if (mode != 0) {
    aligned(bits, kBlockBytes, "the mask");
    touch(Access::kRead, bits, static_cast<size_t>(extent.repeats()) * extent.per_repeat() / 8);
  }
  if (mode != 1) npu_ops::twin::touch(Access::kRead, second, extent);
  // Modes 1 and 2 read new bits in each repeat; mode 0 reads the same bits again.
  const int step = mode == 0 ? 0 : extent.per_repeat();
  select(
      target, first, extent, [&](int r, int e) { return bit(bits, int64_t{r} * step + e); },
      [&](int r, int e) { return mode == 1 ? constant : *second.at(r, e); });
}

// 6.3.6.5: keeps the elements that a pattern, or bits in memory, choose. The mask is ignored,
// except in counter mode, where it gives the number of elements of each repeat.
template <class T>
inline void vreducev2(T* to, T* from, T* pattern, uint16_t repeats, uint8_t from_block,
                      uint8_t mode, uint16_t from_repeat, uint8_t pattern_repeat) {
  using namespace npu_ops::twin;
  issue("vreducev2", PIPE_V);
  aligned(to, kBlockBytes, "the target");
  aligned(from, kBlockBytes, "the source");
  static constexpr int kPeriod[] = {0, 2, 2, 4, 4, 4, 4, 1}, kPhase[] = {0, 0, 1, 0, 1, 2, 3, 0};
  const Operand<T> source{from, from_block, from_repeat};
  const Mask mask = registers().mask;
  const int each = mask.counts ? static_cast<int>(mask.low) : per_repeat<T>();
  int64_t kept = 0;
  for (int r = 0; r < repeats; ++r) {
    const auto* bits =
        reinterpret_cast<const uint8_t*>(pattern) + int64_t{r} * pattern_repeat * kBlockBytes;
    if (mode == 0) touch(Access::kRead, bits, (each + 7) / 8);
    for (int e = 0; e < each; ++e) {
      if (mode == 0 ? !bit(bits, e) : e % kPeriod[mode] != kPhase[mode]) continue;
      touch(Access::kRead, source.at(r, e), sizeof(T));
      touch(Access::kWrite, to + kept, sizeof(T));
      to[kept++] = *source.at(r, e);
    }
  }
  registers().reserved_count = kept;
}
