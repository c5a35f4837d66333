#include "findings.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

namespace npu_ops::twin {
namespace {

struct Frame {
  Frame* caller;
  void* return_address;
};

// Returns addr2line's lines, "file:line", for an offset in a library. An inlined function comes
// before its caller.
std::vector<std::string> lines_of(const std::string& library, uintptr_t offset) {
  char command[4096];
  std::snprintf(command, sizeof(command), "addr2line -i -e '%s' 0x%lx 2>/dev/null", library.c_str(),
                static_cast<unsigned long>(offset));
  std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command, "r"), pclose);
  std::vector<std::string> lines;
  char line[4096];
  while (pipe && std::fgets(line, sizeof(line), pipe.get())) {
    line[std::strcspn(line, "\n (")] = 0;
    lines.emplace_back(line);
  }
  return lines;
}

// Returns whether a source line is in the kernel, not in the vendor's headers or in this folder.
bool is_kernel(const std::string& line) {
  if (line.empty() || line[0] == '?' || line.find("/csrc/twin/") != std::string::npos) return false;
  for (const char* part : {"/basic_api/", "/adv_api/", "/asc-devkit/", "/asc-tools/", "/usr/"})
    if (line.find(part) != std::string::npos) return false;
  return true;
}

std::string base_name(const std::string& path) { return path.substr(path.rfind('/') + 1); }

// Returns the innermost line that is in the kernel's own source.
std::string place(const Origin& origin) {
  static std::mutex mutex;
  static std::map<void*, std::string> known;
  const std::lock_guard lock(mutex);
  for (void* call : origin.calls) {
    if (!call) break;
    auto found = known.find(call);
    if (found == known.end()) {
      std::string line;
      Dl_info library{};
      if (dladdr(call, &library) && library.dli_fname) {
        // One byte back: a return address may belong to the next line.
        const auto offset =
            reinterpret_cast<uintptr_t>(call) - reinterpret_cast<uintptr_t>(library.dli_fbase) - 1;
        for (const std::string& candidate : lines_of(library.dli_fname, offset))
          if (is_kernel(candidate)) {
            line = base_name(candidate);
            break;
          }
      }
      found = known.emplace(call, line).first;
    }
    if (!found->second.empty()) return found->second;
  }
  return "?";
}

std::string access(const Origin& origin) {
  return std::string(origin.name) + " on pipe " + pipe_name(origin.pipe) + " at " + place(origin);
}

}  // namespace

Origin origin_here(const char* name, pipe_t pipe, const void* launch_frame) {
  Origin origin;
  origin.name = name;
  origin.pipe = pipe;
  auto* frame = static_cast<Frame*>(__builtin_frame_address(0));
  for (int i = 0; i < Origin::kDepth && frame && frame < launch_frame; ++i) {
    origin.calls[i] = frame->return_address;
    if (frame->caller <= frame) break;  // a function without a frame pointer ends the search
    frame = frame->caller;
  }
  return origin;
}

const char* pipe_name(pipe_t pipe) {
  static constexpr const char* kNames[] = {"S",   "V",    "M",    "MTE1", "MTE2", "MTE3",
                                           "all", "MTE4", "MTE5", "V2",   "FIX"};
  return kNames[pipe];
}

std::string describe(const Finding& finding) {
  std::string text = finding.error ? "error" : "warning";
  text += "\t" + finding.check + "\t" + std::to_string(finding.block) + "\t" + finding.what + "\t" +
          access(finding.origin) + "\t";
  return finding.has_other ? text + access(finding.other) : text;
}

}  // namespace npu_ops::twin
