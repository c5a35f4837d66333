// The memory of a core: its unified buffer, divided into TPipe's buffers, and the launch's tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

namespace npu_ops::twin {

constexpr uint64_t kBlock = 32;  // bytes: the unit of the unified buffer, and of tracked accesses

// A buffer that a kernel got from TPipe::InitBuffer.
struct Buffer {
  enum State { kFree, kAllocated, kQueued, kDequeued };
  uint64_t bytes;
  bool scratch;  // a TBuf: it has no queue and is always allocated
  State state;
};

struct UnifiedBuffer {
  uint64_t begin = 0, bytes = 0;
  std::map<uint64_t, Buffer> buffers;  // by address
  std::vector<uint8_t> written;        // by byte

  bool holds(uint64_t address) const { return address >= begin && address < begin + bytes; }
  // The buffer that contains an address, or null.
  std::pair<const uint64_t, Buffer>* find(uint64_t address);
  void forget(uint64_t address, uint64_t count);
};

// A tensor that the launch may touch, and the blocks (cores) that have touched its bytes.
struct Region {
  static constexpr uint16_t kNobody = 0, kSeveral = 0xFFFF;
  std::string name;
  uint64_t begin = 0, bytes = 0;
  std::vector<uint16_t> writer, reader;  // by byte: block + 1

  // Records an access by a block. Returns another block whose earlier access conflicts with it, or
  // -1. If several blocks have read the bytes, returns 0 for them.
  int conflict(int block, uint64_t offset, size_t count, bool write);
};

struct GlobalMemory {
  std::map<uint64_t, Region> regions;  // by address
  Region* find(uint64_t address);
};

// An access that a later one may conflict with: its tick, and its instruction in the core's list.
struct Stamp {
  uint32_t tick = 0, instruction = 0;
  uint32_t bytes = 0;  // the bytes of the cell, one bit each
};

// The last accesses to 32 bytes by the pipes of a vector core: S, V, MTE2, MTE3.
struct Cell {
  static constexpr int kPipes = 4;
  int writer = 0;
  Stamp write;
  Stamp reads[kPipes];
};

}  // namespace npu_ops::twin
