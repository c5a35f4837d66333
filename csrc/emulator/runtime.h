// Shared by all files of the emulated NPU: settings, the current device, errors and traces.
//
// The emulated NPU is one library that exports the C interface of the vendor's runtime (CANN), so
// that the real torch_npu runs on it. Device memory is host memory; a stream runs its work at once,
// on the thread that submits it. Tests on it cover registration, dispatch, marshalling and
// arithmetic, but neither speed nor rounding on a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace npu_ops::emulator {

// Read from ASCEND_RT_VISIBLE_DEVICES and from NPU_OPS_EMULATOR_*. All of the latter but
// NPU_OPS_EMULATOR_CANN are set by python/npu_ops_emulator/settings.py.
struct Settings {
  std::vector<int> visible;  // ids, on the machine, of this process's devices
  int devices;               // the size of `visible`
  std::string soc;
  size_t memory;  // bytes per device
  bool trace;     // print every call of an operator or a collective
  std::string cann;
  int cube_cores;
  int vector_cores;
};
const Settings& settings();

// Returns the device of the calling thread, or 0 if none was set.
int current_device();

// Records `sentence` as the reason of `code` for aclGetRecentErrMsg, and returns `code`.
//
// On a thread of torch_npu's task queue, prints the sentence and ends the process. Such a thread
// runs after the Python call has returned, so it cannot raise, and later operators would run on
// stale memory.
int fail(int code, const std::string& sentence);

void trace(const std::string& line);

// Gives the NPU's aten operators torch's CPU kernels (aten.cpp). aclInit calls it.
void install_aten_fallback();

}  // namespace npu_ops::emulator
