#include "memory.h"

#include <algorithm>

namespace npu_ops::twin {
namespace {

// Returns the last entry of a map that begins at or before `address`, or null.
template <class Map>
typename Map::value_type* at_or_before(Map& map, uint64_t address) {
  auto next = map.upper_bound(address);
  return next == map.begin() ? nullptr : &*std::prev(next);
}

}  // namespace

std::pair<const uint64_t, Buffer>* UnifiedBuffer::find(uint64_t address) {
  auto* entry = at_or_before(buffers, address);
  return entry && address < entry->first + entry->second.bytes ? entry : nullptr;
}

void UnifiedBuffer::forget(uint64_t address, uint64_t count) {
  const auto first = written.begin() + static_cast<ptrdiff_t>(address - begin);
  std::fill_n(first, count, 0);
}

Region* GlobalMemory::find(uint64_t address) {
  auto* entry = at_or_before(regions, address);
  return entry && address < entry->first + entry->second.bytes ? &entry->second : nullptr;
}

int Region::conflict(int block, uint64_t offset, size_t count, bool write) {
  if (writer.empty()) {
    writer.resize(bytes);
    reader.resize(bytes);
  }
  const auto self = static_cast<uint16_t>(block + 1);
  int other = -1;
  for (uint64_t i = offset; i < offset + count; ++i) {
    const uint16_t wrote = writer[i], read = reader[i];
    if (wrote != kNobody && wrote != self) other = wrote - 1;
    if (write && read != kNobody && read != self) other = read == kSeveral ? 0 : read - 1;
    if (write)
      writer[i] = self;
    else
      reader[i] = read == kNobody || read == self ? self : kSeveral;
  }
  return other;
}

}  // namespace npu_ops::twin
