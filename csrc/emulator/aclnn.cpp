// The aclnn objects, and the operators that torch_npu calls directly, e.g. for copies and casts.
#include "aclnn.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>

#include "graph.h"

namespace npu_ops::emulator {

// Turns off the recording of gradients. The task queue's thread may write tensors that the caller's
// thread made under torch.inference_mode. torch allows this only in inference mode.
using Unrecorded = c10::InferenceMode;

int plan(const char* name, uint64_t* workspace, aclOpExecutor** executor,
         const std::function<void()>& check, std::function<void()> run) {
  trace(name);
  const Unrecorded mode;
  try {
    check();
  } catch (const Rejected& rejected) {
    return fail(rejected.code, std::string(name) + ": " + rejected.sentence);
  } catch (const std::exception& error) {
    return fail(kParamInvalid, std::string(name) + ": " + error.what());
  }
  *workspace = 0;
  *executor = new aclOpExecutor{name, std::move(run)};
  return 0;
}

int execute(aclOpExecutor* executor, const void* stream) {
  return submit(stream, [owned = std::shared_ptr<aclOpExecutor>(executor)] {
    const Unrecorded mode;
    try {
      owned->run();
      return 0;
    } catch (const Rejected& rejected) {
      return fail(rejected.code, owned->name + ": " + rejected.sentence);
    } catch (const std::exception& error) {
      return fail(kRuntimeFailed, owned->name + ": " + error.what());
    }
  });
}

at::ScalarType scalar_type(aclDataType dtype) {
  switch (dtype) {
    case ACL_FLOAT:
      return at::kFloat;
    case ACL_FLOAT16:
      return at::kHalf;
    case ACL_BF16:
      return at::kBFloat16;
    case ACL_DOUBLE:
      return at::kDouble;
    case ACL_INT8:
      return at::kChar;
    case ACL_UINT8:
      return at::kByte;
    case ACL_INT16:
      return at::kShort;
    case ACL_INT32:
      return at::kInt;
    case ACL_INT64:
      return at::kLong;
    case ACL_BOOL:
      return at::kBool;
    case ACL_COMPLEX64:
      return at::kComplexFloat;
    case ACL_COMPLEX128:
      return at::kComplexDouble;
    default:
      throw Rejected{kParamInvalid, say("a tensor of ACL data type ", dtype, " is not emulated")};
  }
}

namespace {

at::Scalar read_scalar(const void* value, aclDataType dtype) {
  switch (dtype) {
    case ACL_FLOAT:
      return *static_cast<const float*>(value);
    case ACL_DOUBLE:
      return *static_cast<const double*>(value);
    case ACL_FLOAT16:
      return static_cast<float>(*static_cast<const at::Half*>(value));
    case ACL_BF16:
      return static_cast<float>(*static_cast<const at::BFloat16*>(value));
    case ACL_INT64:
      return *static_cast<const int64_t*>(value);
    case ACL_INT32:
      return *static_cast<const int32_t*>(value);
    case ACL_BOOL:
      return *static_cast<const bool*>(value);
    default:
      return 0;
  }
}

void nothing() {}

// In a capture, keeps the object until the graph is destroyed: every replay reads it.
template <class Object>
int destroy(const Object* object) {
  release_later([object] { delete object; });
  return 0;
}

}  // namespace
}  // namespace npu_ops::emulator

using namespace npu_ops::emulator;

extern "C" {

aclTensor* aclCreateTensor(const int64_t* sizes, uint64_t rank, aclDataType dtype,
                           const int64_t* strides, int64_t offset, aclFormat, const int64_t*,
                           uint64_t, void* data) {
  try {
    const auto type = scalar_type(dtype);
    const Unrecorded mode;
    void* first = static_cast<char*>(data) + offset * c10::elementSize(type);
    return new aclTensor{at::from_blob(
        first, at::IntArrayRef(sizes, rank), at::IntArrayRef(strides, rank), [](void*) {},
        at::TensorOptions().dtype(type))};
  } catch (const Rejected& rejected) {
    fail(rejected.code, rejected.sentence);
    return nullptr;
  }
}
aclScalar* aclCreateScalar(void* value, aclDataType dtype) {
  return new aclScalar{read_scalar(value, dtype)};
}
aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t count) {
  return new aclIntArray{{values, values + count}};
}
aclFloatArray* aclCreateFloatArray(const float* values, uint64_t count) {
  return new aclFloatArray{{values, values + count}};
}
aclBoolArray* aclCreateBoolArray(const bool* values, uint64_t count) {
  return new aclBoolArray{std::vector<bool>(values, values + count)};
}
aclTensorList* aclCreateTensorList(const aclTensor* const* values, uint64_t count) {
  return new aclTensorList{{values, values + count}};
}
aclScalarList* aclCreateScalarList(const aclScalar* const* values, uint64_t count) {
  return new aclScalarList{{values, values + count}};
}
int aclDestroyTensor(const aclTensor* object) { return destroy(object); }
int aclDestroyScalar(const aclScalar* object) { return destroy(object); }
int aclDestroyIntArray(const aclIntArray* object) { return destroy(object); }
int aclDestroyFloatArray(const aclFloatArray* object) { return destroy(object); }
int aclDestroyBoolArray(const aclBoolArray* object) { return destroy(object); }
int aclDestroyTensorList(const aclTensorList* list) {
  for (const aclTensor* tensor : list->value) destroy(tensor);
  return destroy(list);
}
int aclDestroyScalarList(const aclScalarList* list) {
  for (const aclScalar* scalar : list->value) destroy(scalar);
  return destroy(list);
}
int aclDestroyAclOpExecutor(aclOpExecutor* executor) { return delete executor, 0; }
}

// Operators that torch_npu calls directly, not through the dispatcher and its aten fallback.
ACLNN(InplaceCopy, (Tensor out, Tensor in), nothing(), out->copy_(in))
ACLNN(Cast, (Tensor in, aclDataType, Tensor out), nothing(), out->copy_(in))
ACLNN(InplaceZero, (Tensor out), nothing(), out->zero_())
ACLNN(InplaceOne, (Tensor out), nothing(), out->fill_(1))
ACLNN(InplaceFillScalar, (Tensor out, Scalar value), nothing(), out->fill_(value))
ACLNN(InplaceFillTensor, (Tensor out, Tensor value), nothing(), out->fill_(*value))
ACLNN(ConstantPadNd, (Tensor in, Ints pads, Scalar value, Tensor out), nothing(),
      out->copy_(at::constant_pad_nd(in, *pads, value)))
ACLNN(Cat, (Tensors in, int64_t dim, Tensor out), nothing(), out->copy_(at::cat(*in, dim)))
ACLNN(Add, (Tensor a, Tensor b, Scalar alpha, Tensor out), nothing(), out->copy_(a->add(b, alpha)))
ACLNN(Adds, (Tensor a, Scalar b, Scalar alpha, Tensor out), nothing(), out->copy_(a->add(b, alpha)))
ACLNN(Sub, (Tensor a, Tensor b, Scalar alpha, Tensor out), nothing(), out->copy_(a->sub(b, alpha)))
ACLNN(Subs, (Tensor a, Scalar b, Scalar alpha, Tensor out), nothing(), out->copy_(a->sub(b, alpha)))
ACLNN(Mul, (Tensor a, Tensor b, Tensor out), nothing(), out->copy_(a->mul(b)))
ACLNN(Muls, (Tensor a, Scalar b, Tensor out), nothing(), out->copy_(a->mul(b)))
ACLNN(Div, (Tensor a, Tensor b, Tensor out), nothing(), out->copy_(a->div(b)))
ACLNN(Divs, (Tensor a, Scalar b, Tensor out), nothing(), out->copy_(a->div(b)))
ACLNN(InplaceAdd, (Tensor a, Tensor b, Scalar alpha), nothing(), a->add_(b, alpha))
ACLNN(InplaceAdds, (Tensor a, Scalar b, Scalar alpha), nothing(), a->add_(b, alpha))
ACLNN(InplaceMul, (Tensor a, Tensor b), nothing(), a->mul_(*b))
ACLNN(InplaceMuls, (Tensor a, Scalar b), nothing(), a->mul_(b))
ACLNN(InplaceDiv, (Tensor a, Tensor b), nothing(), a->div_(*b))
ACLNN(InplaceDivs, (Tensor a, Scalar b), nothing(), a->div_(b))
ACLNN(Matmul, (Tensor a, Tensor b, Tensor out, int8_t), nothing(), out->copy_(a->matmul(b)))
ACLNN(Mm, (Tensor a, Tensor b, Tensor out, int8_t), nothing(), out->copy_(a->mm(b)))
ACLNN(BatchMatMul, (Tensor a, Tensor b, Tensor out, int8_t), nothing(), out->copy_(a->bmm(b)))
