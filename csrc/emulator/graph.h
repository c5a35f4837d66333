// Work of a stream, and how graphs (torch.npu.NPUGraph) record it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

namespace npu_ops::emulator {

// Returns whether a stream is being captured.
bool capturing();

// Runs work of a stream at once, and returns its result: 0 or an error. In a capture, also records
// the work; the end of the capture undoes its writes. In an update of a task group on this stream,
// only records it.
int submit(const void* stream, std::function<int()> work);

// A graph that waits for external events is replayed on a thread of its own, in parallel to the
// host as on a device. These functions wait for the replay on a stream, or for all replays. They
// return 0, or the replay's error.
int wait_for_replay(const void* stream);
int wait_for_replays();

// Returns a function that waits for the replay that is now on a stream. It may be called later, and
// more than once.
std::function<int()> replay_before(const void* stream);

// In a capture or an update, records work that the caller has run already. `work` must be
// repeatable.
void record_only(std::function<int()> work);

// In a capture or an update, calls `release` when the graph is destroyed; otherwise at once.
void release_later(std::function<void()> release);

// Returns 0, or an error in a capture, in which the host must neither wait nor copy.
int check_not_captured(const char* call);

// While a thread has such an object, check_not_captured returns 0 on it: the emulator itself waits
// for the work that the thread has queued.
class Waiting {
 public:
  Waiting();
  ~Waiting();
};

// A copy of all device memory. `restore` writes it back, and fills memory that was allocated since
// with NaN.
class Snapshot {
 public:
  Snapshot();
  void restore() const;

 private:
  std::map<uintptr_t, std::vector<char>> before_;  // by the address of an allocation
};

}  // namespace npu_ops::emulator
