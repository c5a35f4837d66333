// Settings, versions, errors and devices: the parts of libascendcl that are not memory or streams.
#include "runtime.h"

#include <acl/acl.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>

namespace npu_ops::emulator {
namespace {

thread_local std::string last_error;
thread_local int device = -1;
char contexts[64];  // the address of the i-th is the context of device i

const char* environment(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value && *value ? value : otherwise;
}

// Returns the devices that ASCEND_RT_VISIBLE_DEVICES lists, up to the first invalid number; without
// the variable, all `devices`. Ray sets it for each worker, to an empty list for a worker that
// asked for no device.
std::vector<int> visible(int devices) {
  std::vector<int> found;
  const char* named = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
  if (!named) {
    for (int id = 0; id < devices; ++id) found.push_back(id);
    return found;
  }
  std::istringstream list(named);
  for (std::string number; std::getline(list, number, ',');) {
    char* end = nullptr;
    const long id = std::strtol(number.c_str(), &end, 10);
    if (end == number.c_str() || id < 0 || id >= devices) break;
    found.push_back(static_cast<int>(id));
  }
  return found;
}

Settings read_settings() {
  Settings s;
  s.visible = visible(std::clamp(std::atoi(environment("NPU_OPS_EMULATOR_DEVICES", "2")), 1, 64));
  s.devices = static_cast<int>(s.visible.size());
  s.soc = environment("NPU_OPS_EMULATOR_SOC", "Ascend910B3");
  const double gib = std::atof(environment("NPU_OPS_EMULATOR_MEMORY_GIB", "64"));
  s.memory = static_cast<size_t>(gib * (size_t{1} << 30));
  s.trace = environment("NPU_OPS_EMULATOR_TRACE", "0")[0] == '1';
  s.cann = environment("NPU_OPS_EMULATOR_CANN", "9.1.0");
  s.cube_cores = std::atoi(environment("NPU_OPS_EMULATOR_CUBE_CORES", "24"));
  s.vector_cores = 2 * s.cube_cores;
  return s;
}

bool on_task_queue() {
  char name[32] = "";
  pthread_getname_np(pthread_self(), name, sizeof(name));
  return std::strcmp(name, "acl_thread") == 0;  // torch_npu's name for its consumer threads
}

int64_t attribute(int attr) {
  switch (attr) {
    case ACL_DEV_ATTR_AICORE_CORE_NUM:
    case 102:  // ACL_DEV_ATTR_CUBE_CORE_NUM, which headers of torch_npu 2.9 do not have
      return settings().cube_cores;
    case ACL_DEV_ATTR_VECTOR_CORE_NUM:
      return settings().vector_cores;
    case ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE:
      return static_cast<int64_t>(settings().memory);
    case ACL_DEV_ATTR_L2_CACHE_SIZE:
      return int64_t{192} << 20;
    default:
      return 1;
  }
}

uint32_t limit(aclrtDevResLimitType type) {
  return type == ACL_RT_DEV_RES_VECTOR_CORE ? settings().vector_cores : settings().cube_cores;
}

}  // namespace

const Settings& settings() {
  static const Settings read = read_settings();
  return read;
}

int current_device() { return std::max(device, 0); }

int fail(int code, const std::string& sentence) {
  last_error = "[npu-ops emulated NPU] " + sentence;
  if (on_task_queue()) {
    std::fprintf(stderr,
                 "\n%s (error %d)\nThis happened on torch_npu's task queue, where it cannot be "
                 "raised at the call; the process ends. TASK_QUEUE_ENABLE=0 raises at the call.\n",
                 last_error.c_str(), code);
    std::fflush(nullptr);
    _exit(70);
  }
  return code;
}

void trace(const std::string& line) {
  if (settings().trace) std::fprintf(stderr, "[npu-ops emulated NPU] %s\n", line.c_str());
}

}  // namespace npu_ops::emulator

using namespace npu_ops::emulator;

extern "C" {
aclError aclInit(const char*) {
  static const bool once = (install_aten_fallback(), true);
  return once ? ACL_SUCCESS : ACL_ERROR_INTERNAL_ERROR;
}
aclError aclFinalize() { return ACL_SUCCESS; }
void aclAppLog(aclLogLevel, const char*, const char*, uint32_t, const char*, ...) {}
const char* aclGetRecentErrMsg() { return last_error.empty() ? nullptr : last_error.c_str(); }
aclError aclrtGetLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }
aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }

const char* aclrtGetSocName() { return settings().soc.c_str(); }
aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion* version) {
  std::memset(version, 0, sizeof(*version));
  std::snprintf(version->version, sizeof(version->version), "%s", settings().cann.c_str());
  return ACL_SUCCESS;
}
aclError aclsysGetVersionStr(char*, char* version) {
  std::strcpy(version, settings().cann.c_str());
  return ACL_SUCCESS;
}
aclError aclGetCannAttributeList(const aclCannAttr** list, size_t* count) {
  static const aclCannAttr kAttributes[] = {ACL_CANN_ATTR_INF_NAN, ACL_CANN_ATTR_BF16};
  *list = kAttributes;
  *count = 2;
  return ACL_SUCCESS;
}
aclError aclGetCannAttribute(aclCannAttr attr, int32_t* value) {
  *value = attr == ACL_CANN_ATTR_INF_NAN || attr == ACL_CANN_ATTR_BF16;
  return ACL_SUCCESS;
}

// Devices.
aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = settings().devices;
  return ACL_SUCCESS;
}
aclError aclrtSetDevice(int32_t id) {
  if (id < 0 || id >= settings().devices)
    return fail(ACL_ERROR_RT_INVALID_DEVICEID,
                "there is no device " + std::to_string(id) + "; there are " +
                    std::to_string(settings().devices) +
                    " (npu-ops emulate --devices, ASCEND_RT_VISIBLE_DEVICES)");
  device = id;
  return ACL_SUCCESS;
}
aclError aclrtGetDevice(int32_t* id) {
  *id = device;
  return device < 0 ? ACL_ERROR_RT_CONTEXT_NULL : ACL_SUCCESS;
}
aclError aclrtResetDevice(int32_t) { return ACL_SUCCESS; }
aclError aclrtResetDeviceForce(int32_t) { return ACL_SUCCESS; }
aclError aclrtGetLogicDevIdByUserDevId(const int32_t user, int32_t* const logic) {
  *logic = user;
  return ACL_SUCCESS;
}
aclError aclrtGetCurrentContext(aclrtContext* context) {
  if (device < 0) return ACL_ERROR_RT_CONTEXT_NULL;
  *context = &contexts[device];
  return ACL_SUCCESS;
}
aclError aclrtSetCurrentContext(aclrtContext context) {
  device = static_cast<int>(static_cast<char*>(context) - contexts);
  return ACL_SUCCESS;
}
aclError aclrtGetPrimaryCtxState(int32_t, uint32_t* flags, int32_t* active) {
  if (flags) *flags = 0;
  *active = 1;
  return ACL_SUCCESS;
}
aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t, int32_t) {
  *can = 1;
  return ACL_SUCCESS;
}
aclError aclrtDeviceEnablePeerAccess(int32_t, uint32_t) { return ACL_SUCCESS; }
aclError aclrtDeviceGetBareTgid(int32_t* pid) {
  *pid = getpid();
  return ACL_SUCCESS;
}
aclError aclrtDeviceGetUuid(int32_t id, aclrtUuid* uuid) {
  if (id < 0 || id >= settings().devices) return fail(ACL_ERROR_RT_INVALID_DEVICEID, "no device");
  std::memset(uuid, 0, sizeof(*uuid));
  std::snprintf(uuid->bytes, sizeof(uuid->bytes), "emulated-%d", settings().visible[id]);
  return ACL_SUCCESS;
}
aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo info, int64_t* value) {
  *value = info == ACL_DEVICE_INFO_AI_CORE_NUM       ? settings().cube_cores
           : info == ACL_DEVICE_INFO_VECTOR_CORE_NUM ? settings().vector_cores
                                                     : int64_t{192} << 20;
  return ACL_SUCCESS;
}
aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr attr, int64_t* value) {
  *value = attribute(attr);
  return ACL_SUCCESS;
}
aclError aclrtGetDeviceUtilizationRate(int32_t, aclrtUtilizationInfo* info) {
  std::memset(info, 0, sizeof(*info));
  return ACL_SUCCESS;
}
aclError aclrtGetDeviceResLimit(int32_t, aclrtDevResLimitType type, uint32_t* value) {
  *value = limit(type);
  return ACL_SUCCESS;
}
aclError aclrtGetStreamResLimit(aclrtStream, aclrtDevResLimitType type, uint32_t* value) {
  *value = limit(type);
  return ACL_SUCCESS;
}
aclError aclrtGetResInCurrentThread(aclrtDevResLimitType type, uint32_t* value) {
  *value = limit(type);
  return ACL_SUCCESS;
}
aclError aclrtSetDeviceResLimit(int32_t, aclrtDevResLimitType, uint32_t) { return ACL_SUCCESS; }
aclError aclrtResetDeviceResLimit(int32_t) { return ACL_SUCCESS; }
aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) { return ACL_SUCCESS; }
aclError aclrtSetOpWaitTimeout(uint32_t) { return ACL_SUCCESS; }
aclError aclrtSetOpExecuteTimeOut(uint32_t) { return ACL_SUCCESS; }
aclError aclrtSetOpExecuteTimeOutV2(uint64_t, uint64_t* actual) {
  if (actual) *actual = 0;
  return ACL_SUCCESS;
}
aclError aclrtCtxSetSysParamOpt(aclSysParamOpt, int64_t) { return ACL_SUCCESS; }
aclError aclrtSetSysParamOpt(aclSysParamOpt, int64_t) { return ACL_SUCCESS; }
aclError aclrtGetSysParamOpt(aclSysParamOpt, int64_t* value) {
  *value = 0;
  return ACL_SUCCESS;
}
}
