#include "machine.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "core.h"

namespace npu_ops::twin {

Core* core = nullptr;
Launch launch;
GlobalMemory global_memory;

namespace {

uint64_t number(const void* address) { return reinterpret_cast<uint64_t>(address); }

std::string offset_text(uint64_t address) {
  return "offset " + std::to_string(address - core->buffer.begin) + " of the unified buffer";
}

int lane(pipe_t pipe) {
  switch (pipe) {
    case PIPE_S:
      return 0;
    case PIPE_V:
      return 1;
    case PIPE_MTE2:
      return 2;
    case PIPE_MTE3:
      return 3;
    default:
      not_emulated(pipe_name(pipe));
  }
}

constexpr pipe_t kLanes[] = {PIPE_S, PIPE_V, PIPE_MTE2, PIPE_MTE3};

// Bytes at the end of the unified buffer. AscendC's own functions keep scalars there, and would
// overwrite a kernel's buffer in these bytes.
constexpr uint64_t kScratch = 8 * 1024;

bool is_scratch(uint64_t address) {
  UnifiedBuffer& buffer = core->buffer;
  return address >= buffer.begin + buffer.bytes - kScratch && !buffer.find(address);
}

// ---- bounds ----

void check_buffer(uint64_t address, size_t bytes) {
  UnifiedBuffer& buffer = core->buffer;
  if (address + bytes > buffer.begin + buffer.bytes) {
    report(true, "ub-bounds",
           std::to_string(bytes) + " bytes at " + offset_text(address) + " pass its end");
    throw CoreStopped();
  }
  if (buffer.buffers.empty()) return;  // the kernel manages the memory itself
  const auto* entry = buffer.find(address);
  if (!entry && is_scratch(address)) return;
  if (!entry) return report(true, "ub-bounds", offset_text(address) + " belongs to no buffer");
  const auto& [begin, found] = *entry;
  if (address + bytes > begin + found.bytes)
    return report(true, "ub-bounds",
                  std::to_string(bytes) + " bytes at " + offset_text(address) +
                      " pass the end of its buffer of " + std::to_string(found.bytes) + " bytes");
  if (found.scratch) return;
  if (found.state == Buffer::kFree)
    report(true, "queue", "the buffer at " + offset_text(begin) + " is freed, or not allocated");
  if (found.state == Buffer::kQueued)
    report(true, "queue", "the buffer at " + offset_text(begin) + " is enqueued and not dequeued");
}

void check_global(uint64_t address, size_t bytes) {
  const Region* region = global_memory.find(address);
  if (!region) {
    report(true, "gm-bounds", "the address is in no tensor of the launch");
    throw CoreStopped();
  }
  const uint64_t offset = address - region->begin;
  if (offset + bytes > region->bytes) {
    report(true, "gm-bounds",
           std::to_string(bytes) + " bytes at byte " + std::to_string(offset) +
               " pass the end of " + region->name + ", which has " + std::to_string(region->bytes));
    throw CoreStopped();
  }
}

void check_bounds(uint64_t address, size_t bytes) {
  core->buffer.holds(address) ? check_buffer(address, bytes) : check_global(address, bytes);
}

// ---- order ----

// Reports two accesses that nothing orders. If pipe S takes part, this is only a warning: bisheng
// inserts barriers within V and flags to and from S. It inserts nothing between MTE2, V and MTE3
// (asc-devkit's documentation of intra-core synchronisation).
void report_race(pipe_t other, const Stamp& stamp, const char* what, uint64_t address) {
  const bool error = core->pipe != PIPE_S && other != PIPE_S;
  report(error, error ? "race" : "scalar-order",
         std::string("nothing orders it after the ") + what + " of " +
             (core->buffer.holds(address) ? offset_text(address) : "global memory"),
         &core->instructions[stamp.instruction]);
  if (!error) core->order.wait_for(core->pipe, other, stamp.tick);
}

void check_vector_order(const Cell& cell, uint64_t address) {
  if (!launch.vector_order || core->pipe != PIPE_V || kLanes[cell.writer] != PIPE_V) return;
  if (!cell.write.tick || cell.write.tick == core->tick) return;
  if (core->order.past_barrier(PIPE_V, cell.write.tick)) return;
  report(false, "vector-order", "no barrier after the write of " + offset_text(address),
         &core->instructions[cell.write.instruction]);
}

// Returns a stamp of the current instruction. Its bytes include those of `before`, a stamp of the
// same pipe.
Stamp stamped(const Stamp& before, uint32_t bytes) {
  const auto now = static_cast<uint32_t>(core->instructions.size() - 1);
  return {core->tick, now, before.bytes | bytes};
}

// `bytes`: the touched ones of the cell's 32 bytes, one bit each.
void check_order(Cell& cell, Access access, uint64_t address, uint32_t bytes) {
  const int self = lane(core->pipe);
  if ((cell.write.bytes & bytes) &&
      !core->order.after(core->pipe, kLanes[cell.writer], cell.write.tick))
    report_race(kLanes[cell.writer], cell.write, "write", address);
  if (cell.write.bytes & bytes) check_vector_order(cell, address);
  if (access == Access::kRead) {
    cell.reads[self] = stamped(cell.reads[self], bytes);
    return;
  }
  for (int i = 0; i < Cell::kPipes; ++i) {
    Stamp& read = cell.reads[i];
    if ((read.bytes & bytes) && !core->order.after(core->pipe, kLanes[i], read.tick))
      report_race(kLanes[i], read, "read", address);
    read.bytes &= ~bytes;
  }
  cell.write = stamped(cell.writer == self ? cell.write : Stamp{}, bytes);
  cell.writer = self;
}

// Returns the bytes of [first, last] in the cell at address `cell`, one bit each.
uint32_t bits_in(uint64_t cell, uint64_t first, uint64_t last) {
  const uint64_t from = std::max(cell, first) - cell;
  const uint64_t to = std::min(cell + kBlock - 1, last) - cell;
  return static_cast<uint32_t>(((uint64_t{2} << to) - 1) & ~((uint64_t{1} << from) - 1));
}

// On chip, accesses are tracked in whole blocks. In global memory rows may begin anywhere, and
// tiles of two cores may share a block, so single bytes are tracked.
void check_cells(Access access, uint64_t address, size_t bytes) {
  const bool on_chip = core->buffer.holds(address);
  const uint64_t base = on_chip ? core->buffer.begin : 0;
  const uint64_t last = address + bytes - 1;
  for (uint64_t i = (address - base) / kBlock; i <= (last - base) / kBlock; ++i) {
    const uint64_t at = base + i * kBlock;
    if (on_chip)
      check_order(core->cells[i], access, at, ~uint32_t{0});
    else
      check_order(core->global_cells[i], access, at, bits_in(at, address, last));
  }
}

// ---- values ----

void check_written(Access access, uint64_t address, size_t bytes) {
  UnifiedBuffer& buffer = core->buffer;
  if (is_scratch(address)) return;  // the headers also write here in plain C++
  const uint64_t offset = address - buffer.begin;
  const auto begin = buffer.written.begin() + static_cast<ptrdiff_t>(offset);
  const auto end = begin + static_cast<ptrdiff_t>(bytes);
  if (access == Access::kWrite) {
    std::fill(begin, end, 1);
    return;
  }
  const auto missing = std::find(begin, end, 0);
  if (missing != end)
    report(true, "uninitialised",
           "nothing has written " + offset_text(address + (missing - begin)));
}

void check_blocks(Access access, uint64_t address, size_t bytes) {
  if (core->registers.atomic != Atomic::kNone) return;  // atomic stores need no order
  Region& region = *global_memory.find(address);
  const bool write = access == Access::kWrite;
  const int other = region.conflict(core->block, address - region.begin, bytes, write);
  if (other >= 0)
    report(true, "cores-overlap",
           "block " + std::to_string(other) + " uses the same bytes of " + region.name + " (byte " +
               std::to_string(address - region.begin) + "), and one of them writes");
}

}  // namespace

Registers& registers() {
  static Registers outside;  // used outside of a launch; never read
  return core ? core->registers : outside;
}

void report(bool error, const std::string& check, const std::string& what, const Origin* other) {
  Finding finding{error, check, core->block, what, core->instructions.back(), Origin{}, false};
  if (other) {
    finding.other = *other;
    finding.has_other = true;
  }
  std::string key = check + finding.origin.name;
  key.append(reinterpret_cast<const char*>(finding.origin.calls), sizeof(finding.origin.calls));
  if (launch.seen.insert(key).second && launch.findings.size() < 64)
    launch.findings.push_back(finding);
}

void issue(const char* name, pipe_t pipe) {
  if (!core) return;
  core->pipe = pipe;
  core->tick = core->order.issue(pipe);
  core->instructions.push_back(origin_here(name, pipe, core->launch_frame));
}

void touch(Access access, const void* pointer, size_t bytes) {
  if (!core || !bytes) return;
  const uint64_t address = number(pointer);
  check_bounds(address, bytes);
  check_cells(access, address, bytes);
  if (core->buffer.holds(address))
    check_written(access, address, bytes);
  else
    check_blocks(access, address, bytes);
}

void skim(const void* address, size_t bytes) {
  if (core && bytes) check_bounds(number(address), bytes);
}

void aligned(const void* pointer, size_t bytes, const char* operand) {
  if (!core) return;
  const uint64_t address = number(pointer);
  const uint64_t offset = core->buffer.holds(address) ? address - core->buffer.begin : address;
  if (offset % bytes)
    report(true, "alignment",
           std::string(operand) + " is at byte " + std::to_string(offset) +
               ", which is no multiple of " + std::to_string(bytes));
}

namespace {

std::string event_text(pipe_t from, pipe_t to, int id) {
  return std::string("event ") + std::to_string(id) + " from " + pipe_name(from) + " to " +
         pipe_name(to);
}

}  // namespace

void set_event(pipe_t from, pipe_t to, int id) {
  if (!core) return;
  issue("set_flag", PIPE_S);
  if (!core->order.set(from, to, id))
    report(true, "event", event_text(from, to, id) + " is set twice without a wait");
}

void wait_event(pipe_t from, pipe_t to, int id) {
  if (!core) return;
  issue("wait_flag", PIPE_S);
  if (!core->order.wait(from, to, id)) {
    report(true, "event", event_text(from, to, id) + " was not set: the core would wait for ever");
    throw CoreStopped();
  }
}

void wait_pipe(pipe_t pipe) {
  if (core) core->order.barrier(pipe);
}

void scalar(Access access, const void* address, size_t bytes) {
  if (!core) return;
  issue(access == Access::kWrite ? "a scalar store" : "a scalar load", PIPE_S);
  touch(access, address, bytes);
}

void log(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vprintf(format, arguments);
  va_end(arguments);
}

namespace {

// Returns the sentence of the last printed line, whose form is
// "[ERROR][Block_0][AIV_0][file:line][function][process] sentence".
std::string last_sentence() {
  std::string text = printed();
  text.erase(text.find_last_not_of(" \n") + 1);
  text.erase(0, text.rfind('\n') + 1);
  const auto bracket = text.rfind("] ");
  return bracket == std::string::npos ? text : text.substr(bracket + 2);
}

}  // namespace

void vendor_check_failed(const char* file, int line) {
  if (!core) return;
  const char* name = std::strrchr(file, '/');
  issue("a check of AscendC's", PIPE_S);
  report(true, "vendor-check",
         last_sentence() + " (" + (name ? name + 1 : file) + ":" + std::to_string(line) + ")");
  if (!launch.goes_on) throw CoreStopped();
}

void not_emulated(const char* instruction) {
  if (core) report(true, "not-emulated", std::string("the twin does not have ") + instruction);
  throw CoreStopped();
}

int64_t block_index() { return core ? core->block : 0; }
int64_t block_count() { return launch.blocks; }

}  // namespace npu_ops::twin
