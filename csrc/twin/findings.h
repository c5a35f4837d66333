// Findings: errors and warnings of a launch, with their source lines.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "types.h"

namespace npu_ops::twin {

// An instruction that was issued: its name, its pipe, and the calls that led to it.
struct Origin {
  static constexpr int kDepth = 28;
  const char* name = "the kernel";
  pipe_t pipe = PIPE_S;
  void* calls[kDepth] = {};
};

// Returns an Origin with the current call stack up to the kernel's launch. Follows frame pointers.
Origin origin_here(const char* name, pipe_t pipe, const void* launch_frame);

const char* pipe_name(pipe_t pipe);

struct Finding {
  bool error;  // false: a warning, because bisheng inserts the missing wait
  std::string check;
  int block;
  std::string what;
  Origin origin, other;  // other: the earlier access, if two accesses conflict
  bool has_other;
};

// Formats a finding as one line of tab-separated fields: severity, check, block, message, access,
// earlier access. An access ends with file:line of the kernel's source, found with addr2line.
std::string describe(const Finding& finding);

}  // namespace npu_ops::twin
