// Device memory: host memory that belongs to a device, with a limit per device.
#include <acl/acl.h>
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "graph.h"
#include "runtime.h"

namespace npu_ops::emulator {
namespace {

struct Allocation {
  uintptr_t begin = 0;
  size_t size = 0;
  int device = -1;  // -1: not device memory
};

// In bytes. `allocate` rounds sizes up to kAlign, and aligns memory to kAlign, or to kPage if the
// size is at least kPage.
constexpr size_t kAlign = 512, kPage = size_t{2} << 20;

struct Pool {
  std::mutex mutex;
  std::map<uintptr_t, Allocation> allocations;
  size_t used[64] = {};

  // Charges `size` to a device. Returns false if it does not fit.
  bool charge(int device, size_t size) {
    if (size > settings().memory - used[device]) return false;
    used[device] += size;
    return true;
  }
};

// Never destroyed: torch_npu frees memory after static destructors have run.
Pool& pool() {
  static Pool& instance = *new Pool;
  return instance;
}

// Allocates memory. Its contents are undefined, as on a device.
aclError allocate(void** out, size_t bytes) {
  const int device = current_device();
  const size_t size = (std::max<size_t>(bytes, 1) + kAlign - 1) / kAlign * kAlign;
  std::lock_guard lock(pool().mutex);
  // No message: torch_npu frees its cache and tries again before it raises OutOfMemoryError.
  if (!pool().charge(device, size)) return ACL_ERROR_RT_MEMORY_ALLOCATION;
  void* address = nullptr;
  if (posix_memalign(&address, size >= kPage ? kPage : kAlign, size)) {
    pool().used[device] -= size;
    return ACL_ERROR_RT_MEMORY_ALLOCATION;
  }
  const auto begin = reinterpret_cast<uintptr_t>(address);
  pool().allocations[begin] = {begin, size, device};
  *out = address;
  return ACL_SUCCESS;
}

aclError copy(void* to, size_t room, const void* from, size_t bytes) {
  if (bytes > room)
    return fail(ACL_ERROR_RT_PARAM_INVALID, "a copy of " + std::to_string(bytes) +
                                                " bytes does not fit into " + std::to_string(room));
  std::memmove(to, from, bytes);
  return ACL_SUCCESS;
}

aclError fill(void* to, size_t room, int value, size_t bytes) {
  if (bytes > room)
    return fail(ACL_ERROR_RT_PARAM_INVALID, "a fill of " + std::to_string(bytes) +
                                                " bytes does not fit into " + std::to_string(room));
  std::memset(to, value, bytes);
  return ACL_SUCCESS;
}

struct Physical {
  size_t size;
  int device;
};

// Returns the device allocation that holds `address`; its device is -1 if there is none.
Allocation find_allocation(const void* address) {
  const auto wanted = reinterpret_cast<uintptr_t>(address);
  std::lock_guard lock(pool().mutex);
  auto next = pool().allocations.upper_bound(wanted);
  if (next == pool().allocations.begin()) return {};
  const Allocation& found = std::prev(next)->second;
  return wanted < found.begin + found.size ? found : Allocation{};
}

}  // namespace

Snapshot::Snapshot() {
  std::lock_guard lock(pool().mutex);
  for (const auto& [begin, allocation] : pool().allocations) {
    const auto* first = reinterpret_cast<const char*>(begin);
    before_.try_emplace(begin, first, first + allocation.size);
  }
}

void Snapshot::restore() const {
  std::lock_guard lock(pool().mutex);
  for (const auto& [begin, allocation] : pool().allocations) {
    const auto found = before_.find(begin);
    auto* memory = reinterpret_cast<char*>(begin);
    if (found != before_.end() && found->second.size() == allocation.size)
      std::memcpy(memory, found->second.data(), allocation.size);
    else
      std::memset(memory, 0xFF, allocation.size);
  }
}

}  // namespace npu_ops::emulator

using namespace npu_ops::emulator;

extern "C" {
aclError aclrtMalloc(void** out, size_t bytes, aclrtMemMallocPolicy) {
  return allocate(out, bytes);
}
aclError aclrtMallocAlign32(void** out, size_t bytes, aclrtMemMallocPolicy) {
  return allocate(out, bytes);
}
aclError aclrtFree(void* address) {
  std::lock_guard lock(pool().mutex);
  auto found = pool().allocations.find(reinterpret_cast<uintptr_t>(address));
  if (found == pool().allocations.end()) return ACL_ERROR_RT_PARAM_INVALID;
  pool().used[found->second.device] -= found->second.size;
  pool().allocations.erase(found);
  std::free(address);
  return ACL_SUCCESS;
}
aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free, size_t* total) {
  std::lock_guard lock(pool().mutex);
  *total = settings().memory;
  *free = settings().memory - pool().used[current_device()];
  return ACL_SUCCESS;
}
aclError aclrtPointerGetAttributes(const void* address, aclrtPtrAttributes* attributes) {
  const Allocation found = find_allocation(address);
  std::memset(attributes, 0, sizeof(*attributes));
  attributes->location.type =
      found.device < 0 ? ACL_MEM_LOCATION_TYPE_HOST : ACL_MEM_LOCATION_TYPE_DEVICE;
  attributes->location.id = std::max(found.device, 0);
  return ACL_SUCCESS;
}

// Pinned host memory.
aclError aclrtMallocHost(void** out, size_t bytes) {
  return posix_memalign(out, 64, std::max<size_t>(bytes, 64)) ? ACL_ERROR_RT_MEMORY_ALLOCATION
                                                              : ACL_SUCCESS;
}
aclError aclrtMallocHostWithCfg(void** out, uint64_t bytes, aclrtMallocConfig*) {
  return aclrtMallocHost(out, bytes);
}
aclError aclrtFreeHost(void* address) {
  std::free(address);
  return ACL_SUCCESS;
}
aclError aclrtHostRegister(void* address, uint64_t, aclrtHostRegisterType, void** device) {
  *device = address;
  return ACL_SUCCESS;
}
aclError aclrtHostUnregister(void*) { return ACL_SUCCESS; }

// Copies and fills. A stream runs its work at once, so the asynchronous ones are the same.
aclError aclrtMemcpy(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind) {
  if (const int code = check_not_captured("aclrtMemcpy")) return code;
  const int code = wait_for_replays();
  return code ? code : copy(to, room, from, bytes);
}
aclError aclrtMemcpyAsync(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind,
                          aclrtStream stream) {
  return submit(stream, [=] { return copy(to, room, from, bytes); });
}
aclError aclrtMemcpyAsyncWithCondition(void* to, size_t room, const void* from, size_t bytes,
                                       aclrtMemcpyKind, aclrtStream stream) {
  return submit(stream, [=] { return copy(to, room, from, bytes); });
}
// Allowed in a capture too: torch_npu creates external events this way.
aclError aclrtMemset(void* to, size_t room, int32_t value, size_t bytes) {
  return fill(to, room, value, bytes);
}
aclError aclrtMemsetAsync(void* to, size_t room, int32_t value, size_t bytes, aclrtStream stream) {
  return submit(stream, [=] { return fill(to, room, value, bytes); });
}

// Virtual addresses with memory mapped in later (PYTORCH_NPU_ALLOC_CONF=expandable_segments).
aclError aclrtReserveMemAddress(void** out, size_t size, size_t, void*, uint64_t) {
  void* address =
      mmap(nullptr, size + kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) return ACL_ERROR_RT_MEMORY_ALLOCATION;
  const auto aligned = (reinterpret_cast<uintptr_t>(address) + kPage - 1) / kPage * kPage;
  *out = reinterpret_cast<void*>(aligned);
  return ACL_SUCCESS;
}
aclError aclrtReleaseMemAddress(void*) { return ACL_SUCCESS; }
aclError aclrtMallocPhysical(aclrtDrvMemHandle* out, size_t size, const aclrtPhysicalMemProp*,
                             uint64_t) {
  std::lock_guard lock(pool().mutex);
  if (!pool().charge(current_device(), size)) return ACL_ERROR_RT_MEMORY_ALLOCATION;
  *out = reinterpret_cast<aclrtDrvMemHandle>(new Physical{size, current_device()});
  return ACL_SUCCESS;
}
aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
  auto* physical = reinterpret_cast<Physical*>(handle);
  std::lock_guard lock(pool().mutex);
  pool().used[physical->device] -= physical->size;
  delete physical;
  return ACL_SUCCESS;
}
aclError aclrtMapMem(void* address, size_t size, size_t, aclrtDrvMemHandle handle, uint64_t) {
  if (mprotect(address, size, PROT_READ | PROT_WRITE)) return ACL_ERROR_RT_MEMORY_ALLOCATION;
  const auto begin = reinterpret_cast<uintptr_t>(address);
  std::lock_guard lock(pool().mutex);
  pool().allocations[begin] = {begin, size, reinterpret_cast<Physical*>(handle)->device};
  return ACL_SUCCESS;
}
aclError aclrtUnmapMem(void* address) {
  std::lock_guard lock(pool().mutex);
  auto found = pool().allocations.find(reinterpret_cast<uintptr_t>(address));
  if (found == pool().allocations.end()) return ACL_ERROR_RT_PARAM_INVALID;
  madvise(address, found->second.size, MADV_DONTNEED);
  mprotect(address, found->second.size, PROT_NONE);
  pool().allocations.erase(found);
  return ACL_SUCCESS;
}
aclError aclrtMemExportToShareableHandle(aclrtDrvMemHandle, aclrtMemHandleType, uint64_t,
                                         uint64_t*) {
  return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "memory cannot be shared between processes");
}
aclError aclrtMemImportFromShareableHandle(uint64_t, int32_t, aclrtDrvMemHandle*) {
  return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "memory cannot be shared between processes");
}
aclError aclrtMemSetPidToShareableHandle(uint64_t, int32_t*, size_t) {
  return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "memory cannot be shared between processes");
}
}
