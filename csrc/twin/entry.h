// Included after a kernel's source in a CPU build (the twin). NPU_OPS_TWIN_ENTRY(kernel) exports
// kernel__twin, which reads the kernel's arguments from one block of memory, as a device does.
#pragma once

#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>

namespace npu_ops::twin {

template <class T>
T take(const char*& at) {
  static_assert(std::is_trivially_copyable_v<T>);
  const auto misaligned = reinterpret_cast<uintptr_t>(at) % alignof(T);
  if (misaligned) at += alignof(T) - misaligned;
  T value;
  std::memcpy(&value, at, sizeof(T));
  at += sizeof(T);
  return value;
}

template <class... T>
void call(void (*kernel)(T...), const void* arguments) {
  const char* at = static_cast<const char*>(arguments);
  std::apply(kernel, std::tuple<T...>{take<T>(at)...});  // braces evaluate from left to right
}

}  // namespace npu_ops::twin

#define NPU_OPS_TWIN_ENTRY(KERNEL)                                                               \
  extern "C" __attribute__((visibility("default"))) void KERNEL##__twin(const void* arguments) { \
    ::npu_ops::twin::call(KERNEL, arguments);                                                    \
  }
