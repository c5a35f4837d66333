// The runtime of compiled Triton kernels on an emulated NPU: copies between views, counts of bytes
// loaded from and stored to global memory, the bounds guard, and the threads that run programs.
// Plain C interface, no torch: python/npu_ops_emulator/triton_launch.py is the only caller.
#include <setjmp.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

namespace {

// A pointer argument of a launch: its address, and the begin and end of its memory (unknown if the
// end is before the begin). `loaded` and `stored` are results, in bytes.
struct Argument {
  uintptr_t base, low, high;
  int64_t loaded, stored;
};

enum Kind : int64_t { kRead = 0, kWrite = 1 };

// The first access, in program order, outside of its argument's memory. `first` and `end`
// (exclusive) are in bytes from the argument's pointer.
struct Fault {
  int64_t argument, kind, first, end, program;
};

using Program = void (*)(const int64_t* arguments, int32_t gx, int32_t gy, int32_t gz, int32_t x,
                         int32_t y, int32_t z);

struct Launch {
  Program program;
  const int64_t* slots;
  int32_t gx, gy, gz;
  Argument* arguments;
  int64_t argument_count;
  bool guard;
  Fault* fault;
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> end;
  std::mutex mutex;
};

// One thread's share of a launch.
struct Worker {
  Launch& launch;
  std::vector<Argument> arguments;
  Fault fault{};
  jmp_buf escape;

  explicit Worker(Launch& of)
      : launch(of), arguments(of.arguments, of.arguments + of.argument_count) {
    for (Argument& argument : arguments) argument.loaded = argument.stored = 0;
  }
};

thread_local Worker* current = nullptr;

// Returns false if the guard ended the program; memory that the program allocated is then not
// freed.
bool run_program(Worker& worker, int64_t index) {
  const Launch& launch = worker.launch;
  if (_setjmp(worker.escape)) return false;
  const int64_t row = index / launch.gx;
  launch.program(launch.slots, launch.gx, launch.gy, launch.gz,
                 static_cast<int32_t>(index % launch.gx), static_cast<int32_t>(row % launch.gy),
                 static_cast<int32_t>(row / launch.gy));
  return true;
}

// Programs with a lower index than a faulty one were all taken before it and run to their end, so
// the fault reported does not depend on the threads' timing.
void record(Worker& worker, int64_t index) {
  Launch& launch = worker.launch;
  const std::lock_guard lock(launch.mutex);
  if (index >= launch.end) return;
  worker.fault.program = index;
  *launch.fault = worker.fault;
  launch.end = index;
}

// Runs programs until none is left, or until `budget` has passed (0: no limit).
void work(Worker& worker, std::chrono::microseconds budget) {
  using clock = std::chrono::steady_clock;
  const auto start = clock::now();
  Launch& launch = worker.launch;
  current = &worker;
  while (launch.next < launch.end) {
    const int64_t index = launch.next++;
    if (index >= launch.end) break;
    if (!run_program(worker, index)) record(worker, index);
    if (budget.count() && clock::now() - start > budget) break;
  }
  current = nullptr;
}

void add_counters(const Worker& worker) {
  const std::lock_guard lock(worker.launch.mutex);
  for (int64_t i = 0; i < worker.launch.argument_count; ++i) {
    worker.launch.arguments[i].loaded += worker.arguments[i].loaded;
    worker.launch.arguments[i].stored += worker.arguments[i].stored;
  }
}

// MLIR's memref descriptor: sizes[rank], then strides[rank], in elements.
struct Descriptor {
  char *allocated, *aligned;
  int64_t offset;
  int64_t sizes_strides[1];
};

struct Unranked {
  int64_t rank;
  const Descriptor* descriptor;
};

void copy_dimensions(char* to, const char* from, const int64_t* sizes, const int64_t* to_strides,
                     const int64_t* from_strides, int64_t rank, int64_t element) {
  if (rank == 0) {
    std::memcpy(to, from, element);
    return;
  }
  const int64_t to_step = to_strides[0] * element, from_step = from_strides[0] * element;
  if (rank == 1 && to_strides[0] == 1 && from_strides[0] == 1) {
    std::memcpy(to, from, sizes[0] * element);
    return;
  }
  for (int64_t i = 0; i < sizes[0]; ++i) {
    copy_dimensions(to + i * to_step, from + i * from_step, sizes + 1, to_strides + 1,
                    from_strides + 1, rank - 1, element);
  }
}

}  // namespace

extern "C" {

// Called by a kernel before each access to memory that may be global: a view of `rank` dimensions
// with `sizes_strides` (in elements of `element` bytes) at `offset` elements from `base`. Views of
// on-chip buffers are ignored: their base is no argument's address.
void npu_ops_access(int64_t kind, int64_t element, uintptr_t base, int64_t offset, int64_t rank,
                    const int64_t* sizes_strides) {
  Worker& worker = *current;
  const auto found = std::find_if(worker.arguments.begin(), worker.arguments.end(),
                                  [&](const Argument& a) { return a.base == base; });
  if (found == worker.arguments.end()) return;
  int64_t elements = 1, first = offset, last = offset;
  for (int64_t i = 0; i < rank; ++i) {
    if (sizes_strides[i] <= 0) return;
    elements *= sizes_strides[i];
    const int64_t reach = (sizes_strides[i] - 1) * sizes_strides[rank + i];
    (reach < 0 ? first : last) += reach;
  }
  (kind == kWrite ? found->stored : found->loaded) += elements * element;
  if (!worker.launch.guard || found->high < found->low) return;
  // Computed with integers, because an offset from an invalid index may overflow a pointer.
  const int64_t low = static_cast<int64_t>(found->low - base);
  const int64_t high = static_cast<int64_t>(found->high - base);
  if (first >= low / element && last < high / element) return;
  worker.fault = {found - worker.arguments.begin(), kind, first * element, (last + 1) * element, 0};
  _longjmp(worker.escape, 1);
}

void memrefCopy(int64_t element, const Unranked* source, const Unranked* target) {
  const int64_t rank = source->rank;
  const Descriptor &from = *source->descriptor, &to = *target->descriptor;
  const int64_t *sizes = from.sizes_strides, *from_strides = sizes + rank;
  for (int64_t i = 0; i < rank; ++i) {
    if (sizes[i] <= 0) return;
  }
  copy_dimensions(to.aligned + to.offset * element, from.aligned + from.offset * element, sizes,
                  to.sizes_strides + rank, from_strides, rank, element);
}

// Runs a grid. Returns the number of faults: 0, or 1 with `fault` filled.
int npu_ops_launch(Program program, const int64_t* slots, const int32_t* grid, Argument* arguments,
                   int64_t argument_count, int guard, int threads, Fault* fault) {
  const int64_t total = int64_t{grid[0]} * grid[1] * grid[2];
  Launch launch{program,   slots,          grid[0],    grid[1], grid[2],
                arguments, argument_count, guard != 0, fault};
  launch.end = total;
  Worker caller(launch);
  // The caller first works alone: it finishes a small launch before a second thread would have
  // started.
  constexpr std::chrono::microseconds kAlone{100};
  if (threads > 1) work(caller, kAlone);
  const int64_t left = launch.end - launch.next;
  std::vector<std::thread> helpers;
  for (int64_t i = 1; i < std::min<int64_t>(threads, left); ++i) {
    helpers.emplace_back([&launch] {
      Worker helper(launch);
      work(helper, {});
      add_counters(helper);
    });
  }
  work(caller, {});
  for (std::thread& helper : helpers) helper.join();
  add_counters(caller);
  return launch.end < total;
}

// LLVM calls this function to round to bfloat16; libgcc has it only since GCC 13. The result is in
// the low half of the register in which a float is returned.
float __truncsfbf2(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const bool is_nan = value != value;
  bits = is_nan ? (bits >> 16) | 0x40 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // extern "C"
