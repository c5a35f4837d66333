// Helpers of all files that register kernels with torch: dtype dispatch and data pointers.
#pragma once

#include "common/torch.h"
#include "common/vec.h"

namespace npu_ops {

// Calls `body` with a null pointer to the storage type of `dtype`: float, bf16 or fp16.
template <class Body>
void dispatch(ScalarType dtype, const char* argument, const Body& body) {
  switch (dtype) {
    case ScalarType::Float:
      return body(static_cast<float*>(nullptr));
    case ScalarType::BFloat16:
      return body(static_cast<bf16*>(nullptr));
    case ScalarType::Half:
      return body(static_cast<fp16*>(nullptr));
    default:
      STD_TORCH_CHECK(false, argument, ": needs float32, bfloat16 or float16");
  }
}

template <class T>
const T* input(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

template <class T>
T* output(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

}  // namespace npu_ops
