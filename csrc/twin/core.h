// The core that runs now, and the launch that it belongs to; machine.cpp and launch.cpp share them.
#pragma once

#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "findings.h"
#include "machine.h"
#include "memory.h"
#include "order.h"

namespace npu_ops::twin {

// Thrown where the core cannot go on, e.g. at an access outside of all memory.
struct CoreStopped {};

struct Core {
  int block = 0;
  Registers registers;
  Order order;
  UnifiedBuffer buffer;
  std::vector<Origin> instructions{Origin{}};
  pipe_t pipe = PIPE_S;
  uint32_t tick = 0;
  std::vector<Cell> cells;                          // the unified buffer's
  std::unordered_map<uint64_t, Cell> global_cells;  // global memory's, by address / 32
  const void* launch_frame = nullptr;
};

struct Launch {
  std::vector<Finding> findings;
  std::set<std::string> seen;  // one finding for each check and line
  int64_t blocks = 0;
  bool goes_on = false;       // continue after a failed check of the vendor's headers
  bool vector_order = false;  // also warn where V reads its own result without a barrier
};

// The kernel's output so far. The vendor's checks print there why they fail.
std::string printed();

extern Core* core;  // null outside of a launch
extern Launch launch;
extern GlobalMemory global_memory;

// Records a finding at the current instruction; `other` is the earlier access, if two are to blame.
void report(bool error, const std::string& check, const std::string& what,
            const Origin* other = nullptr);

}  // namespace npu_ops::twin
