// The older interfaces torch_npu links against: graph operators (aclop), dumps, profiling.
//
// A graph operator is refused, and the error names it. torch_npu calls one if an operator has no
// aclnn form, or if the emulator lacks that form.
#include <acl/acl.h>
#include <acl/acl_mdl.h>
#include <acl/acl_op.h>
#include <acl/acl_op_compiler.h>

#include <cstdio>
#include <vector>

#include "runtime.h"

struct aclTensorDesc {
  aclDataType dtype;
  aclFormat format;
  std::vector<int64_t> dims;
};
struct aclDataBuffer {
  void* data;
  size_t size;
};
struct aclopAttr {};

namespace {

aclError refuse(const char* op) {
  return npu_ops::emulator::fail(
      ACL_ERROR_OP_NOT_FOUND, std::string("the operator ") + op +
                                  " is not emulated (torch_npu asked for its graph form, aclop)");
}

}  // namespace

extern "C" {

aclError aclSetCompileopt(aclCompileOpt, const char*) { return ACL_SUCCESS; }
size_t aclGetCompileoptSize(aclCompileOpt) { return 16; }
// "disable": torch_npu must not prefer graph operators, which compile on the device's host.
aclError aclGetCompileopt(aclCompileOpt, char* value, size_t size) {
  std::snprintf(value, size, "disable");
  return ACL_SUCCESS;
}

aclTensorDesc* aclCreateTensorDesc(aclDataType dtype, int count, const int64_t* dims,
                                   aclFormat format) {
  return new aclTensorDesc{dtype, format, {dims, dims + count}};
}
void aclDestroyTensorDesc(const aclTensorDesc* desc) { delete desc; }
aclFormat aclGetTensorDescFormat(const aclTensorDesc* desc) { return desc->format; }
aclDataType aclGetTensorDescType(const aclTensorDesc* desc) { return desc->dtype; }
size_t aclGetTensorDescNumDims(const aclTensorDesc* desc) { return desc->dims.size(); }
aclError aclGetTensorDescDimV2(const aclTensorDesc* desc, size_t index, int64_t* size) {
  *size = desc->dims.at(index);
  return ACL_SUCCESS;
}
void aclSetTensorDescName(aclTensorDesc*, const char*) {}
aclError aclSetTensorFormat(aclTensorDesc*, aclFormat) { return ACL_SUCCESS; }
aclError aclSetTensorPlaceMent(aclTensorDesc*, aclMemType) { return ACL_SUCCESS; }
aclError aclSetTensorShape(aclTensorDesc*, int, const int64_t*) { return ACL_SUCCESS; }
aclDataBuffer* aclCreateDataBuffer(void* data, size_t size) {
  return new aclDataBuffer{data, size};
}
aclError aclDestroyDataBuffer(const aclDataBuffer* buffer) {
  delete buffer;
  return ACL_SUCCESS;
}

aclopAttr* aclopCreateAttr() { return new aclopAttr; }
void aclopDestroyAttr(const aclopAttr* attr) { delete attr; }
aclError aclopSetAttrBool(aclopAttr*, const char*, uint8_t) { return ACL_SUCCESS; }
aclError aclopSetAttrDataType(aclopAttr*, const char*, aclDataType) { return ACL_SUCCESS; }
aclError aclopSetAttrFloat(aclopAttr*, const char*, float) { return ACL_SUCCESS; }
aclError aclopSetAttrInt(aclopAttr*, const char*, int64_t) { return ACL_SUCCESS; }
aclError aclopSetAttrString(aclopAttr*, const char*, const char*) { return ACL_SUCCESS; }
aclError aclopSetAttrListBool(aclopAttr*, const char*, int, const uint8_t*) { return ACL_SUCCESS; }
aclError aclopSetAttrListFloat(aclopAttr*, const char*, int, const float*) { return ACL_SUCCESS; }
aclError aclopSetAttrListInt(aclopAttr*, const char*, int, const int64_t*) { return ACL_SUCCESS; }
aclError aclopSetAttrListListInt(aclopAttr*, const char*, int, const int*, const int64_t* const[]) {
  return ACL_SUCCESS;
}

aclError aclopCompileAndExecute(const char* op, int, const aclTensorDesc* const[],
                                const aclDataBuffer* const[], int, const aclTensorDesc* const[],
                                aclDataBuffer* const[], const aclopAttr*, aclopEngineType,
                                aclopCompileType, const char*, aclrtStream) {
  return refuse(op);
}
aclError aclopCompileAndExecuteV2(const char* op, int, aclTensorDesc*[], aclDataBuffer*[], int,
                                  aclTensorDesc*[], aclDataBuffer*[], aclopAttr*, aclopEngineType,
                                  aclopCompileType, const char*, aclrtStream) {
  return refuse(op);
}

aclError aclmdlInitDump() { return ACL_SUCCESS; }
aclError aclmdlSetDump(const char*) { return ACL_SUCCESS; }
aclError aclmdlFinalizeDump() { return ACL_SUCCESS; }

int rtGetC2cCtrlAddr(uint64_t* address, uint32_t* size) {
  *address = 0;
  *size = 0;
  return ACL_SUCCESS;
}

// Profiling hooks: registered, never called back.
uint64_t MsprofGetHashId(const char*, size_t) { return 0; }
int32_t MsprofRegisterCallback(uint32_t, void*) { return 0; }
int32_t MsprofReportAdditionalInfo(uint32_t, const void*, uint32_t) { return 0; }
int32_t MsprofReportApi(uint32_t, const void*) { return 0; }
int32_t MsprofReportCompactInfo(uint32_t, const void*, uint32_t) { return 0; }
uint64_t MsprofSysCycleTime() { return 0; }
}
