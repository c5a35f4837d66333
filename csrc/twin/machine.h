// The emulated vector core on which AscendC kernels run in a CPU build (the twin). The instructions
// in this folder call it.
//
// An instruction reports the bytes that it reads and writes before it touches them. The machine
// checks bounds, alignment, that bytes were written before they are read, and that events order the
// pipes. Instructions run in program order, so a race is reported but does not happen.
#pragma once

#include <cstddef>
#include <cstdint>

#include "types.h"

namespace npu_ops::twin {

enum class Access { kRead, kWrite };

// 6.3.1.2 and 6.3.2: the active elements of an instruction. In counter mode `low` is their number.
struct Mask {
  bool counts = false;
  uint64_t low = ~uint64_t{0}, high = ~uint64_t{0};

  bool has(int element) const {
    return (element < 64 ? low >> element : high >> (element - 64)) & 1;
  }
};

enum class Atomic { kNone, kAdd, kMax, kMin };                        // 6.5.2
enum class AtomicType { kNone, kF32, kF16, kS16, kS32, kS8, kBf16 };  // 6.5.2

struct Registers {
  Mask mask;
  uint64_t control = 0;
  uint64_t padding = 0;          // 6.5.9.4 set_mov_pad_val
  uint64_t compare[2] = {0, 0};  // 6.3.3 CMPMASK
  int64_t accumulated = 0;       // 6.3.6.2 ACC_VAL
  uint64_t reserved_count = 0;   // elements that vreducev2 kept
  uint64_t blocks[8][8] = {};    // 6.3.11.4 VA0 to VA7: the addresses of eight blocks each
  uint8_t* gathered = nullptr;   // Gather's source; headers pass only 32 bits of the address
  Atomic atomic = Atomic::kNone;
  AtomicType atomic_type = AtomicType::kNone;
};
Registers& registers();

// Issues an instruction to a pipe. Later calls of `touch` belong to it, until the next instruction.
void issue(const char* name, pipe_t pipe);

// Checks and records that the current instruction reads or writes `bytes` bytes at `address`, in
// the unified buffer or in global memory. Throws CoreStopped if that memory does not exist.
void touch(Access access, const void* address, size_t bytes);

// Checks bytes that an instruction reads and drops: they must exist, but need not have been
// written.
void skim(const void* address, size_t bytes);

// Reports an operand that does not begin at a multiple of `bytes`, counted from the start of the
// unified buffer.
void aligned(const void* address, size_t bytes, const char* operand);

void set_event(pipe_t from, pipe_t to, int id);   // 6.6.3
void wait_event(pipe_t from, pipe_t to, int id);  // 6.6.3
void wait_pipe(pipe_t pipe);                      // 6.6.2

// A scalar access by LocalTensor or GlobalTensor: GetValue, SetValue and operator().
void scalar(Access access, const void* address, size_t bytes);

// The vendor's checks call `log` with a message, or print it. When a check has failed, they call
// vendor_check_failed, which makes the last printed line a finding.
void log(const char* format, ...) __attribute__((format(printf, 1, 2)));
void vendor_check_failed(const char* file, int line);

[[noreturn]] void not_emulated(const char* instruction);

int64_t block_index();
int64_t block_count();

}  // namespace npu_ops::twin
