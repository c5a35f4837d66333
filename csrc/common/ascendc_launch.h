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

// A tensor that a kernel touches, by the name of the operator's argument; null: there is none.
struct KernelTensor {
  const char* name;
  const Tensor* tensor;
};

inline const Tensor* pointer(const std::optional<Tensor>& tensor) {
  return tensor ? &*tensor : nullptr;
}

ElementType element_type(const Tensor& tensor, const char* argument);

// What `npu_ops.core.ascendc.target` hands out: a device object, or its twin on the emulated NPU;
// the device's vector cores, and bytes of unified buffer of each; and the current stream's address.
struct KernelTarget {
  const std::string& binary;
  int64_t cores, ub_bytes, stream;
};

// Runs `kernel` on the stream, on no more blocks than there are pieces of work. Its
// arguments are the tensors' addresses, in their order, and then the tiling.
//
// Raises with the runtime's own sentence if a step fails.
void launch_ascendc(const KernelTarget& target, const char* kernel, int64_t pieces,
                    const std::vector<KernelTensor>& tensors, const void* tiling, size_t bytes);

template <class Tiling>
void launch_ascendc(const KernelTarget& target, const char* kernel, int64_t pieces,
                    const std::vector<KernelTensor>& tensors, const Tiling& tiling) {
  static_assert(std::is_trivially_copyable_v<Tiling> && alignof(Tiling) <= alignof(void*));
  launch_ascendc(target, kernel, pieces, tensors, &tiling, sizeof(Tiling));
}

}  // namespace npu_ops
