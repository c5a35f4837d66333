#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <vector>

#include "common/ascendc_launch.h"
#include "common/old_glibc.h"

namespace npu_ops {
namespace {

// The functions of the runtime's C interface (acl/acl_rt.h) that are used here.
using Status = int;
using Load = Status (*)(const char* path, void* options, void** binary);
using GetFunction = Status (*)(void* binary, const char* name, void** function);
using Run = Status (*)(void* function, uint32_t blocks, void* stream, void* configuration,
                       void* arguments, size_t bytes, void* placeholders, size_t placeholder_count);
using Message = const char* (*)();
// Only on the emulated NPU: sets the memory that the next launch may access.
using Tensors = void (*)(const char* const* names, const uint64_t* addresses, const uint64_t* bytes,
                         int64_t count);

template <class F>
F symbol(void* library, const char* name) {
  auto* found = reinterpret_cast<F>(dlsym(library, name));
  STD_TORCH_CHECK(found, "ascendc: libascendcl.so has no ", name, "; this CANN is too old");
  return found;
}

struct Runtime {
  Load load;
  GetFunction function;
  Run run;
  Message message;
  Tensors tensors;

  Runtime() {
    void* library = dlopen("libascendcl.so", RTLD_NOW);
    STD_TORCH_CHECK(library, "ascendc: libascendcl.so does not load: ", dlerror());
    load = symbol<Load>(library, "aclrtBinaryLoadFromFile");
    function = symbol<GetFunction>(library, "aclrtBinaryGetFunction");
    run = symbol<Run>(library, "aclrtLaunchKernelWithHostArgs");
    message = symbol<Message>(library, "aclGetRecentErrMsg");
    tensors = reinterpret_cast<Tensors>(dlsym(library, "npu_ops_emulator_tensors"));
  }

  void check(Status status, const char* step, const std::string& kernel) const {
    if (status == 0) return;
    const char* text = message();
    STD_TORCH_CHECK(false, kernel, ": ", step, " failed with ", status, ": ",
                    text ? text : "the runtime gives no reason");
  }
};

const Runtime& runtime() {
  static const Runtime found;
  return found;
}

// Loads each binary once per device: a loaded binary and its functions belong to one device.
void* function_of(const std::string& binary, const std::string& kernel, int device) {
  static std::mutex mutex;
  static std::map<std::pair<std::string, int>, void*> binaries;
  static std::map<std::pair<void*, std::string>, void*> functions;
  const std::lock_guard lock(mutex);
  void*& loaded = binaries[{binary, device}];
  if (!loaded)
    runtime().check(runtime().load(binary.c_str(), nullptr, &loaded), "loading ", binary);
  void*& function = functions[{loaded, kernel}];
  if (!function)
    runtime().check(runtime().function(loaded, kernel.c_str(), &function), "finding it", kernel);
  return function;
}

// Returns the bytes from the first element to the last; gaps between rows count too.
uint64_t span(const Tensor& tensor) {
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) == 0) return 0;
    last += (tensor.size(i) - 1) * tensor.stride(i);
  }
  return static_cast<uint64_t>((last + 1) * static_cast<int64_t>(tensor.element_size()));
}

void announce(const KernelTensors& touched) {
  if (!runtime().tensors) return;
  std::istringstream all(touched.names);
  std::vector<std::string> kept;
  std::vector<uint64_t> addresses, bytes;
  std::string name;
  for (const Tensor* tensor : touched.tensors) {
    std::getline(all >> std::ws, name, ',');
    if (!tensor) continue;
    kept.push_back(name);
    addresses.push_back(reinterpret_cast<uint64_t>(tensor->const_data_ptr()));
    bytes.push_back(span(*tensor));
  }
  std::vector<const char*> names;
  for (const std::string& each : kept) names.push_back(each.c_str());
  runtime().tensors(names.data(), addresses.data(), bytes.data(),
                    static_cast<int64_t>(names.size()));
}

}  // namespace

ElementType element_type(const Tensor& tensor, const char* argument) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return kFloat32;
    case ScalarType::Half:
      return kFloat16;
    case ScalarType::BFloat16:
      return kBfloat16;
    default:
      STD_TORCH_CHECK(false, argument, ": needs float32, bfloat16 or float16");
  }
}

void launch_ascendc(const KernelTarget& target, const char* kernel, int64_t pieces,
                    const KernelTensors& touched, const void* tiling, size_t bytes) {
  std::vector<uint64_t> arguments;
  for (const Tensor* tensor : touched.tensors)
    arguments.push_back(tensor ? reinterpret_cast<uint64_t>(tensor->const_data_ptr()) : 0);
  const size_t addresses = arguments.size();
  arguments.resize(addresses + (bytes + sizeof(uint64_t) - 1) / sizeof(uint64_t));
  std::memcpy(&arguments[addresses], tiling, bytes);
  const int device = device_index(*touched.tensors.front());
  const DeviceGuard guard(device);
  void* function = function_of(target.binary, kernel, device);
  announce(touched);
  const auto blocks = static_cast<uint32_t>(std::min(target.cores, pieces));
  runtime().check(runtime().run(function, blocks, reinterpret_cast<void*>(target.stream), nullptr,
                                arguments.data(), addresses * sizeof(uint64_t) + bytes, nullptr, 0),
                  "the launch", kernel);
}

}  // namespace npu_ops
