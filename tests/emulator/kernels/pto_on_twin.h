// Lets g++ compile PTO-ISA's headers for Ascend910B for the twin: defines what bisheng has beyond
// C++, and instructions that take 32-bit addresses, which on a device are whole addresses.
#pragma once

#include <algorithm>

#include "kernel_operator.h"
#include "pto/common/type.hpp"

#undef AICORE
#undef PTO_INLINE
#undef PTO_INTERNAL
#undef PTO_INST
#define AICORE
#define PTO_INLINE inline
#define PTO_INTERNAL inline
#define PTO_INST inline
#define __tf__
#define __in__
#define __out__
#define __cce_get_tile_ptr

using float16_t = half;
using float32_t = float;
using std::max;
template <class... T>
void st_atomic(T...);

inline uint8_t* unified_buffer() { return AscendC::ConstDefiner::Instance().cpuUB; }
// Returns the address in the unified buffer whose low 32 bits are these.
inline uint8_t* address_of(uint32_t low) {
  const auto begin = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(unified_buffer()));
  return unified_buffer() + static_cast<uint32_t>(low - begin);
}

// Returns the address of an offset in the unified buffer.
template <class T>
uint64_t get_imm(T offset) {
  return reinterpret_cast<uint64_t>(unified_buffer() + offset);
}

template <class T>
void vgather(T* to, uint32_t* offsets, uintptr_t from, int to_repeat, int repeats) {
  npu_ops::twin::registers().gathered = reinterpret_cast<uint8_t*>(from);
  vgather(to, offsets, uint32_t{0}, static_cast<uint16_t>(to_repeat),
          static_cast<uint8_t>(repeats));
}
template <class T>
void vgatherb(T* to, uint32_t* offsets, uint32_t from, uint16_t to_repeat, int to_block,
              uint8_t repeats) {
  npu_ops::twin::registers().gathered = address_of(from);
  vgatherb(to, offsets, from, to_repeat, static_cast<uint8_t>(to_block), repeats);
}

template <class T, class MODE, class = std::enable_if_t<std::is_enum_v<MODE>>>
void vsel(T* to, T* a, T* b, int repeats, int to_block, int a_block, int b_block, int to_repeat,
          int a_repeat, int b_repeat, MODE mode) {
  // Mode 2: the register holds the address of the bits.
  uint32_t low;
  std::memcpy(&low, npu_ops::twin::registers().compare, sizeof(low));
  const uint8_t* bits = address_of(low);
  if (static_cast<int>(mode) == 2)
    std::memcpy(npu_ops::twin::registers().compare, &bits, sizeof(bits));
  vsel(to, a, b, repeats, to_block, a_block, b_block, to_repeat, a_repeat, b_repeat,
       static_cast<uint8_t>(mode));
}
template <class T, class MODE, class = std::enable_if_t<std::is_enum_v<MODE>>>
void vreducev2(T* to, T* a, T* b, int repeats, int a_block, MODE mode, int a_repeat, int b_repeat) {
  vreducev2(to, a, b, repeats, a_block, static_cast<uint8_t>(mode), a_repeat, b_repeat);
}
