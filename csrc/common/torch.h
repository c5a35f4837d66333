// The parts of torch that the kernels use: its stable ABI, or the same names over the C++ API of
// torch 2.7 to 2.9, whose stable ABI lacks some of them.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>

#if defined(TORCH_TARGET_VERSION)

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

namespace npu_ops {

using torch::headeronly::ScalarType;
using torch::stable::copy_;
using torch::stable::new_empty;
using torch::stable::parallel_for;
using torch::stable::select;
using torch::stable::sum;
using torch::stable::Tensor;
using torch::stable::accelerator::DeviceGuard;

inline int device_index(const Tensor& tensor) { return tensor.get_device_index(); }

}  // namespace npu_ops

#else

#include <ATen/Parallel.h>
#include <ATen/ops/select.h>
#include <ATen/ops/sum.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#define STABLE_TORCH_LIBRARY_IMPL TORCH_LIBRARY_IMPL
#undef STD_TORCH_CHECK  // in some of these versions, it raises another error type
#define STD_TORCH_CHECK TORCH_CHECK
#define TORCH_BOX(function) function

namespace npu_ops {

using at::parallel_for;
using at::ScalarType;
using at::select;
using at::sum;
using at::Tensor;

inline Tensor new_empty(const Tensor& like, std::initializer_list<int64_t> size,
                        std::optional<ScalarType> dtype = std::nullopt) {
  return like.new_empty(size, like.options().dtype(dtype.value_or(like.scalar_type())));
}

inline int device_index(const Tensor& tensor) { return tensor.get_device(); }

inline void copy_(Tensor& to, const Tensor& from) { to.copy_(from); }

struct DeviceGuard : c10::DeviceGuard {
  explicit DeviceGuard(int index)
      : c10::DeviceGuard({c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index)}) {}
};

}  // namespace npu_ops

#endif
