// State of the running core and of its launch, which the source files of this folder share.
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

// Thrown to end a core that cannot continue, e.g. after an access outside of all memory.
struct CoreStopped {};

struct Core {
  int block = 0;
  Registers registers;
  Order order;
  UnifiedBuffer buffer;
  std::vector<Origin> instructions{Origin{}};
  pipe_t pipe = PIPE_S;
  uint32_t tick = 0;
  std::vector<Cell> cells;                          // of the unified buffer
  std::unordered_map<uint64_t, Cell> global_cells;  // of global memory, by address / 32
  const void* launch_frame = nullptr;
};

struct Launch {
  std::vector<Finding> findings;
  std::set<std::string> seen;  // checks and call stacks that have a finding
  int64_t blocks = 0;
  bool goes_on = false;       // continue after a failed check of the vendor's headers
  bool vector_order = false;  // warn if V accesses its own result without a barrier
};

// Returns what the kernel has printed so far. The vendor's checks print the reason of a failure.
std::string printed();

extern Core* core;  // null outside of a launch
extern Launch launch;
extern GlobalMemory global_memory;

// Records a finding at the current instruction. `other`: the earlier access, if two accesses
// conflict.
void report(bool error, const std::string& check, const std::string& what,
            const Origin* other = nullptr);

}  // namespace npu_ops::twin
