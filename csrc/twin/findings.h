// What a launch did wrong, and where.
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

// The calls from here up to the kernel's launch, by frame pointers.
Origin origin_here(const char* name, pipe_t pipe, const void* launch_frame);

const char* pipe_name(pipe_t pipe);

struct Finding {
  bool error;  // else a warning: bisheng inserts the missing wait by itself
  std::string check;
  int block;
  std::string what;
  Origin origin, other;  // `other` is the earlier of two accesses, if two are to blame
  bool has_other;
};

// One line: severity, check, block, message, place and the other place, separated by tabs.
// Places are file:line of the kernel's source, found with addr2line.
std::string describe(const Finding& finding);

}  // namespace npu_ops::twin
