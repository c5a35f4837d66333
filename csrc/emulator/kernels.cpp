// Loads and launches AscendC kernels.
//
// A device binary cannot run here. Its twin can: the kernel's source, compiled for this machine
// with the instructions of csrc/twin. Instead of a binary, this file loads the twin's library. If
// the twin finds errors in a kernel, the launch fails and its message lists them.
#include <acl/acl.h>
#include <dlfcn.h>

#include <sstream>
#include <string>
#include <vector>

#include "graph.h"
#include "runtime.h"

namespace npu_ops::emulator {
namespace {

// The interface of a twin's library (csrc/twin/launch.h).
using Kernel = void (*)(const void*);
using Regions = void (*)(const char* const*, const uint64_t*, const uint64_t*, int64_t);
using Launch = int64_t (*)(Kernel, int64_t, const void*, int, int);
using Findings = const char* (*)();

struct Function {
  std::string name;
  Kernel kernel;
  Regions regions;
  Launch launch;
  Findings findings;
};

struct Tensors {
  std::vector<std::string> names;
  std::vector<uint64_t> addresses, bytes;
};
thread_local Tensors announced;

template <class F>
F symbol(void* library, const std::string& name) {
  return reinterpret_cast<F>(dlsym(library, name.c_str()));
}

int refuse(const std::string& what) { return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, what); }

int refuse_binary() {
  return refuse("a device binary cannot run here; the twin of an AscendC kernel can");
}

// Returns sentences for the errors among findings, one per line:
// "severity<tab>check<tab>block<tab>what<tab>access<tab>earlier access". Warnings are only traced,
// because bisheng inserts the missing waits.
std::string errors_in(const std::string& findings, const std::string& kernel) {
  std::istringstream lines(findings);
  std::string line, errors;
  while (std::getline(lines, line)) {
    std::istringstream fields(line);
    std::string severity, check, block, what, access, earlier;
    for (std::string* field : {&severity, &check, &block, &what, &access, &earlier})
      std::getline(fields, *field, '\t');
    std::string text = kernel + ", block " + block + ": " + check + ": " + access;
    if (!earlier.empty()) text += ", after " + earlier;
    text += ": " + what;
    if (severity == "error")
      errors += "\n  " + text;
    else
      trace(text);
  }
  return errors;
}

int launch(const Function& function, uint32_t blocks, const Tensors& tensors,
           const void* arguments) {
  std::vector<const char*> names;
  for (const std::string& name : tensors.names) names.push_back(name.c_str());
  function.regions(names.data(), tensors.addresses.data(), tensors.bytes.data(),
                   static_cast<int64_t>(names.size()));
  function.launch(function.kernel, blocks, arguments, 0, 0);
  const std::string errors = errors_in(function.findings(), function.name);
  if (errors.empty()) return ACL_SUCCESS;
  return fail(ACL_ERROR_RT_AICORE_EXCEPTION, "the AscendC kernel is wrong:" + errors);
}

}  // namespace
}  // namespace npu_ops::emulator

using namespace npu_ops::emulator;

extern "C" {

// npu_ops calls it before a launch, which may then touch only these tensors. The bounds of
// torch_npu's allocations would be too wide, because one allocation holds many tensors.
void npu_ops_emulator_tensors(const char* const* names, const uint64_t* addresses,
                              const uint64_t* bytes, int64_t count) {
  announced = {{names, names + count}, {addresses, addresses + count}, {bytes, bytes + count}};
}

aclError aclrtBinaryLoadFromFile(const char* path, aclrtBinaryLoadOptions*,
                                 aclrtBinHandle* binary) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) return refuse(std::string("the twin does not load: ") + dlerror());
  if (!dlsym(library, "npu_ops_twin_launch")) return refuse_binary();
  *binary = library;
  return ACL_SUCCESS;
}

aclError aclrtBinaryUnLoad(aclrtBinHandle binary) {
  dlclose(binary);
  return ACL_SUCCESS;
}

aclError aclrtBinaryGetFunction(const aclrtBinHandle binary, const char* name,
                                aclrtFuncHandle* function) {
  auto* kernel = symbol<Kernel>(binary, std::string(name) + "__twin");
  if (!kernel) return refuse(std::string("the binary has no kernel ") + name);
  *function = new Function{name, kernel, symbol<Regions>(binary, "npu_ops_twin_regions"),
                           symbol<Launch>(binary, "npu_ops_twin_launch"),
                           symbol<Findings>(binary, "npu_ops_twin_findings")};
  return ACL_SUCCESS;
}

// Declared here, because headers of torch_npu 2.8 lack the type aclrtPlaceHolderInfo.
aclError launch_with_host_args(aclrtFuncHandle, uint32_t, aclrtStream, aclrtLaunchKernelCfg*, void*,
                               size_t, void*, size_t) __asm__("aclrtLaunchKernelWithHostArgs");

aclError launch_with_host_args(aclrtFuncHandle handle, uint32_t blocks, aclrtStream stream,
                               aclrtLaunchKernelCfg*, void* arguments, size_t bytes,
                               void* /*placeholders*/, size_t) {
  const auto& function = *static_cast<Function*>(handle);
  if (blocks == 0 || blocks > 65535)
    return fail(ACL_ERROR_RT_PARAM_INVALID,
                function.name + ": got " + std::to_string(blocks) + " blocks, needs 1 to 65535");
  trace("AscendC kernel " + function.name + ", " + std::to_string(blocks) + " blocks");
  const auto* first = static_cast<const char*>(arguments);
  return submit(
      stream, [&function, blocks, tensors = announced, copied = std::vector(first, first + bytes)] {
        return launch(function, blocks, tensors, copied.data());
      });
}

aclError aclrtBinaryLoadFromData(const void*, size_t, const aclrtBinaryLoadOptions*,
                                 aclrtBinHandle*) {
  return refuse_binary();
}
aclError aclrtGetFunctionAddr(aclrtFuncHandle, void**, void**) { return refuse_binary(); }
int rtDevBinaryRegister(const void*, void**) { return refuse_binary(); }
int rtFunctionRegister(void*, const void*, const char*, const void*, uint32_t) {
  return refuse_binary();
}
int rtKernelLaunch(const void*, uint32_t, void*, uint32_t, void*, void*) { return refuse_binary(); }
}
