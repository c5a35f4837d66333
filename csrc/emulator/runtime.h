// What the parts of the emulated NPU share: its settings, its memory, and how it reports errors.
//
// The emulated NPU is one library that exports the C interface of the vendor's runtime (CANN), so
// that the real torch_npu runs on it. Device memory is host memory; a stream runs its work at once,
// on the thread that submits it. It proves registration, dispatch, marshalling and arithmetic; it
// says nothing about time or rounding on a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace npu_ops::emulator {

// From NPU_OPS_EMULATOR_*, which python/npu_ops_emulator/settings.py writes.
struct Settings {
  std::vector<int> visible;  // the machine's numbers of this process's devices
  int devices;               // how many those are
  std::string soc;
  size_t memory;  // bytes a device
  bool trace;     // print every call of an operator or a collective
  std::string cann;
  int cube_cores;
  int vector_cores;
};
const Settings& settings();

// The device of the calling thread; 0 where none was set.
int current_device();

// Records `sentence` as the reason of `code` for aclGetRecentErrMsg, and returns `code`.
//
// A thread of torch_npu's task queue runs after the call has returned and cannot raise there; later
// operators would run on stale memory. So it prints the sentence and ends the process.
int fail(int code, const std::string& sentence);

void trace(const std::string& line);

// Gives every aten operator of the NPU a CPU fallback; aten.cpp. Called by aclInit.
void install_aten_fallback();

}  // namespace npu_ops::emulator
