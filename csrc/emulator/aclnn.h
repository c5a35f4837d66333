// Defines an aclnn operator in one ACLNN line: its C parameters, its check and its computation.
//
// The vendor's two phases: `aclnnXGetWorkspaceSize(arguments..., &workspace, &executor)` checks and
// plans, `aclnnX(workspace, size, executor, stream)` runs. A call that hardware would reject is
// rejected in the first phase, so that torch_npu raises the error at the call.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <acl/acl_base.h>

#include <functional>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "runtime.h"

struct aclTensor {
  at::Tensor value;  // a CPU tensor over device memory
};
struct aclScalar {
  at::Scalar value;
};
struct aclIntArray {
  std::vector<int64_t> value;
};
struct aclBoolArray {
  std::vector<bool> value;
};
struct aclFloatArray {
  std::vector<float> value;
};
struct aclTensorList {
  std::vector<const aclTensor*> value;
};
struct aclScalarList {
  std::vector<const aclScalar*> value;
};
struct aclOpExecutor {
  std::string name;
  std::function<void()> run;
};

namespace npu_ops::emulator {

// The vendor's status codes.
enum AclnnStatus {
  kParamInvalid = 161002,   // ACLNN_ERR_PARAM_INVALID: a dtype, rank or attribute
  kTilingFailed = 561002,   // ACLNN_ERR_INNER_TILING_ERROR: a shape the kernel has no tiling for
  kRuntimeFailed = 361001,  // ACLNN_ERR_RUNTIME_ERROR
};

struct Rejected {
  int code;
  std::string sentence;
};

template <class... Parts>
std::string say(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// Unless `fine`, rejects a call as the vendor's library would.
template <class... Parts>
void need(bool fine, const Parts&... sentence) {
  if (!fine) throw Rejected{kParamInvalid, say(sentence...)};
}
template <class... Parts>
void need_tiling(bool fine, const Parts&... sentence) {
  if (!fine) throw Rejected{kTilingFailed, say(sentence...)};
}

// Types of operator parameters. Each has the representation of a pointer of the C interface, and is
// used like a value. The caller keeps the objects valid until the second phase has run.
class Tensor {
 public:
  const at::Tensor& operator*() const { return pointer_->value; }
  const at::Tensor* operator->() const { return &pointer_->value; }
  operator const at::Tensor&() const { return pointer_->value; }
  // Returns whether the caller passed the tensor: an optional one may be null or undefined.
  explicit operator bool() const { return pointer_ && pointer_->value.defined(); }

 private:
  const aclTensor* pointer_;
};

class Ints {
 public:
  explicit operator bool() const { return pointer_ && !pointer_->value.empty(); }
  const std::vector<int64_t>& operator*() const { return pointer_->value; }
  const std::vector<int64_t>* operator->() const { return &pointer_->value; }

 private:
  const aclIntArray* pointer_;
};

class Scalar {
 public:
  operator const at::Scalar&() const { return pointer_->value; }

 private:
  const aclScalar* pointer_;
};

class Tensors {
 public:
  // Returns whether the caller passed any tensor.
  explicit operator bool() const { return pointer_ && !pointer_->value.empty(); }
  std::vector<at::Tensor> operator*() const {
    std::vector<at::Tensor> all;
    for (const aclTensor* tensor : pointer_->value) all.push_back(tensor->value);
    return all;
  }

 private:
  const aclTensorList* pointer_;
};

static_assert(sizeof(Tensor) == sizeof(void*) && std::is_trivially_copyable_v<Tensor>);

int plan(const char* name, uint64_t* workspace, aclOpExecutor** executor,
         const std::function<void()>& check, std::function<void()> run);
int execute(aclOpExecutor* executor, const void* stream);

at::ScalarType scalar_type(aclDataType dtype);

inline at::Tensor to_float(const at::Tensor& tensor) { return tensor.to(at::kFloat); }

inline bool is_half(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}
inline bool is_float(const at::Tensor& tensor) {
  return is_half(tensor) || tensor.scalar_type() == at::kFloat;
}

}  // namespace npu_ops::emulator

#define NPU_OPS_UNPACK(...) __VA_ARGS__

// ACLNN(Name, (C parameters), check, compute): the pair aclnnNameGetWorkspaceSize and aclnnName.
#define ACLNN(NAME, PARAMETERS, CHECK, ...) ACLNN_KEEP(NAME, PARAMETERS, (=), CHECK, __VA_ARGS__)

// Like ACLNN, with explicit captures of `compute`. Use it to copy strings in
// aclnnNameGetWorkspaceSize: a caller may free them before it calls aclnnName.
#define ACLNN_KEEP(NAME, PARAMETERS, CAPTURES, CHECK, ...)                                      \
  extern "C" int aclnn##NAME##GetWorkspaceSize(NPU_OPS_UNPACK PARAMETERS, uint64_t* workspace_, \
                                               aclOpExecutor** executor_) {                     \
    return npu_ops::emulator::plan(                                                             \
        "aclnn" #NAME, workspace_, executor_, [&] { CHECK; },                                   \
        [NPU_OPS_UNPACK CAPTURES] { __VA_ARGS__; });                                            \
  }                                                                                             \
  extern "C" int aclnn##NAME(void*, uint64_t, aclOpExecutor* executor, const void* stream) {    \
    return npu_ops::emulator::execute(executor, stream);                                        \
  }
