#include "launch.h"

#include <kernel_operator.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>

#include "core.h"

namespace npu_ops::twin {
namespace {

std::mutex mutex;  // the vendor's headers keep a core's state in globals
std::string text;

// Captures stdout while a kernel runs.
class Capture {
 public:
  Capture() : outside_(stdout), inside_(open_memstream(&text_, &bytes_)) {
    std::fflush(outside_);
    if (inside_) stdout = inside_;
    current = this;
  }
  ~Capture() {
    current = nullptr;
    stdout = outside_;
    if (inside_) std::fclose(inside_);
    std::free(text_);
  }
  std::string read() const {
    if (!inside_) return "";
    std::fflush(inside_);
    return std::string(text_, bytes_);
  }
  static Capture* current;

 private:
  FILE* outside_;
  char* text_ = nullptr;
  size_t bytes_ = 0;
  FILE* inside_;
};
Capture* Capture::current = nullptr;

// Memory of finished cores, for reuse: allocating it takes longer than to compute a tile.
std::vector<Cell> spare_cells;
std::vector<uint8_t> spare_written;

std::unique_ptr<Core> new_core(int block, const void* frame) {
  auto made = std::make_unique<Core>();
  auto& memory = AscendC::ConstDefiner::Instance();
  made->cells.swap(spare_cells);
  made->buffer.written.swap(spare_written);
  made->block = block;
  made->launch_frame = frame;
  made->buffer.begin = reinterpret_cast<uint64_t>(memory.cpuUB);
  made->buffer.bytes = memory.bufferInitLen.at(AscendC::Hardware::UB);
  made->buffer.written.assign(made->buffer.bytes, 0);
  made->cells.assign(made->buffer.bytes / kBlock, Cell{});
  std::memset(memory.cpuUB, 0xCD, made->buffer.bytes);
  memory.allocatorUsed.clear();
  return made;
}

// Reports events that nothing has waited for, and tensors that are not freed.
void check_end() {
  issue("the end of the kernel", PIPE_S);
  for (const auto& [event, clock] : core->order.pending()) {
    const auto& [from, to, id] = event;
    report(true, "event",
           "event " + std::to_string(id) + " from " + pipe_name(from) + " to " + pipe_name(to) +
               " is set and never waited for");
  }
  for (const auto& [begin, buffer] : core->buffer.buffers)
    if (!buffer.scratch && buffer.state != Buffer::kFree)
      report(true, "queue",
             "the tensor at offset " + std::to_string(begin - core->buffer.begin) +
                 " of the unified buffer is not freed");
}

void run_block(int block, NpuOpsTwinKernel kernel, const void* arguments) {
  block_idx = block;
  const auto owned = new_core(block, __builtin_frame_address(0));
  core = owned.get();
  try {
    kernel(arguments);
    check_end();
  } catch (const CoreStopped&) {
  } catch (const std::exception& error) {
    report(true, "not-emulated", error.what());
  }
  core = nullptr;
  owned->cells.swap(spare_cells);
  owned->buffer.written.swap(spare_written);
}

// Shrinks all memories but the unified buffer to one block. TPipe's constructor sets up all of
// them, but a vector core has no other.
void forget_other_memories() {
  for (auto& [memory, bytes] : AscendC::ConstDefiner::Instance().bufferInitLen)
    if (memory != AscendC::Hardware::UB) const_cast<uint32_t&>(bytes) = kBlock;
}

}  // namespace

std::string printed() { return Capture::current ? Capture::current->read() : ""; }

}  // namespace npu_ops::twin

using namespace npu_ops::twin;

void npu_ops_twin_regions(const char* const* names, const uint64_t* addresses,
                          const uint64_t* bytes, int64_t count) {
  const std::lock_guard lock(mutex);
  global_memory.regions.clear();
  for (int64_t i = 0; i < count; ++i) {
    Region region;
    region.name = names[i];
    region.begin = addresses[i];
    region.bytes = bytes[i];
    global_memory.regions[addresses[i]] = std::move(region);
  }
}

int64_t npu_ops_twin_launch(NpuOpsTwinKernel kernel, int64_t blocks, const void* arguments,
                            int vector_order, int goes_on) {
  const std::lock_guard lock(mutex);
  launch = Launch{};
  launch.blocks = blocks;
  launch.vector_order = vector_order != 0;
  launch.goes_on = goes_on != 0;
  block_num = blocks;
  sub_block_idx = 0;
  g_coreType = AscendC::AIV;
  g_taskRation = 1;
  forget_other_memories();
  for (auto& [begin, region] : global_memory.regions) {
    region.writer.clear();
    region.reader.clear();
  }
  std::string said;
  {
    const Capture capture;
    for (int block = 0; block < blocks; ++block) run_block(block, kernel, arguments);
    said = capture.read();
  }
  // With findings, the output may contain messages of the vendor's checks, which are findings
  // already. So it is printed only without findings.
  if (launch.findings.empty()) std::fputs(said.c_str(), stdout);
  text.clear();
  for (const Finding& finding : launch.findings) text += describe(finding) + "\n";
  return static_cast<int64_t>(launch.findings.size());
}

const char* npu_ops_twin_findings() { return text.c_str(); }

// ---- functions that the vendor's headers declare, but only a closed library defines ----

uint64_t ModelFactoryGetMaskHigh() { return registers().mask.high; }
uint64_t ModelFactoryGetMaskLow() { return registers().mask.low; }
int ModelFactoryGetMaskMode() { return registers().mask.counts; }

namespace AscendC {
void SetModelGatherbSrc0Tensor(uint64_t address, uint32_t) {
  registers().gathered = reinterpret_cast<uint8_t*>(address);
}
// No lock is needed: blocks run one after another in one process.
bool g_isAtomic = false;
ProcessLock* ProcessLock::processLock = nullptr;
ProcessLock::ProcessLock() {}
ProcessLock::~ProcessLock() {}
ProcessLock* ProcessLock::CreateLock() { return new ProcessLock; }
int ProcessLock::Read() { return 0; }
int ProcessLock::Write() { return 0; }
int ProcessLock::Unlock() { return 0; }
}  // namespace AscendC

namespace bfloat16 {
namespace {
// Rounds to nearest, ties to even; NaN stays NaN.
uint16_t encoded(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FFF;
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
}  // namespace
uint16_t Bf16T::FloatToBf16(const float& value) const { return encoded(value); }
Bf16T& Bf16T::operator=(const Bf16T& other) {
  val = other.val;
  return *this;
}
Bf16T& Bf16T::operator=(const float& value) {
  val = encoded(value);
  return *this;
}
float Bf16T::ToFloat() const {
  const uint32_t bits = uint32_t{val} << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
Bf16T::operator float() const { return ToFloat(); }
Bf16T Bf16T::operator+(const Bf16T other) const { return Bf16T(ToFloat() + other.ToFloat()); }
Bf16T Bf16T::operator-(const Bf16T other) const { return Bf16T(ToFloat() - other.ToFloat()); }
Bf16T Bf16T::operator+=(const Bf16T other) { return *this = *this + other; }
Bf16T Bf16T::operator-=(const Bf16T other) { return *this = *this - other; }
Bf16T Bf16T::operator-() const { return Bf16T(-ToFloat()); }
}  // namespace bfloat16
