// Launches AscendC kernels from an operator: the binary and the function are loaded once, and every
// status is checked. The runtime's functions are found at run time, so nothing links against CANN.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "common/ascendc_types.h"
#include "common/check.h"

namespace npu_ops {

// A tensor that a kernel touches, by the name of the operator's argument; null: there is none.
struct KernelTensor {
  const char* name;
  const Tensor* tensor;
};

inline void* address(const Tensor* tensor) { return tensor ? tensor->mutable_data_ptr() : nullptr; }

ElementType element_type(const Tensor& tensor, const char* argument);

// Runs `kernel` of `binary` (a device object, or its twin on the emulated NPU) on the current
// stream. `arguments` are the kernel's, each at its natural alignment.
//
// Raises with the runtime's own sentence if a step fails.
void launch_ascendc(const std::string& binary, const char* kernel, int64_t blocks, void* arguments,
                    size_t bytes, std::initializer_list<KernelTensor> tensors);

}  // namespace npu_ops
