// Launches AscendC kernels from an operator: the binary and the function are loaded once, and every
// status is checked. The runtime's functions are found at run time, so nothing links against CANN.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "common/ascendc_types.h"
#include "common/check.h"

namespace npu_ops {

inline const Tensor* pointer(const Tensor& tensor) { return &tensor; }

inline const Tensor* pointer(const std::optional<Tensor>& tensor) {
  return tensor ? &*tensor : nullptr;
}

// The tensors that a kernel accesses, null if absent, and their names: "x, weight, out".
struct KernelTensors {
  const char* names;
  std::vector<const Tensor*> tensors;
};

// Makes KernelTensors of these variables, with the variables' names.
#define NPU_OPS_TENSORS(...) \
  ::npu_ops::KernelTensors { #__VA_ARGS__, pointers(__VA_ARGS__) }

template <class... T>
std::vector<const Tensor*> pointers(const T&... tensors) {
  return {pointer(tensors)...};
}

ElementType element_type(const Tensor& tensor, const char* argument);

// The result of `npu_ops.core.ascendc.target`: the path of the kernel's binary (on the emulated
// NPU, of its twin, the CPU build), the number of vector cores, the bytes of unified buffer per
// core, and the address of the current stream.
struct KernelTarget {
  const std::string& binary;
  int64_t cores, ub_bytes, stream;
};

// Launches `kernel` on the stream with min(cores, pieces) blocks. The kernel's arguments are the
// addresses of the tensors, in their order, followed by the tiling.
//
// Raises with the runtime's error message if a step fails.
void launch_ascendc(const KernelTarget& target, const char* kernel, int64_t pieces,
                    const KernelTensors& tensors, const void* tiling, size_t bytes);

template <class Tiling>
void launch_ascendc(const KernelTarget& target, const char* kernel, int64_t pieces,
                    const KernelTensors& tensors, const Tiling& tiling) {
  static_assert(std::is_trivially_copyable_v<Tiling> && alignof(Tiling) <= alignof(void*));
  launch_ascendc(target, kernel, pieces, tensors, &tiling, sizeof(Tiling));
}

}  // namespace npu_ops
