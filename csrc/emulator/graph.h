// Work of a stream, which a graph may record.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

namespace npu_ops::emulator {

// Whether a stream is being captured.
bool capturing();

// Runs work of a stream now. In a capture it is recorded too, and what it wrote is undone at the
// capture's end; in an update on this stream it is recorded alone. Returns what the work does: 0,
// or an error.
int submit(const void* stream, std::function<int()> work);

// A graph that waits for external events is replayed beside the host, as on a device. These wait
// for the replay on a stream, or for all of them. They return 0, or the replay's error.
int wait_for_replay(const void* stream);
int wait_for_replays();

// What waits for the replay that is on a stream now; it may be called later, also twice.
std::function<int()> replay_before(const void* stream);

// In a capture, records work that the caller has run already, in a form that can be repeated.
void record_only(std::function<int()> work);

// In a capture, calls `release` when the graph is destroyed; otherwise now.
void release_later(std::function<void()> release);

// Returns 0, or in a capture an error: there the host must neither wait nor copy by itself.
int check_not_captured(const char* call);

// While one exists, the emulator itself may wait for this thread's work.
class Waiting {
 public:
  Waiting();
  ~Waiting();
};

// Device memory as it was: `restore` puts it back, and fills what was allocated since with NaN.
class Snapshot {
 public:
  Snapshot();
  void restore() const;

 private:
  std::map<uintptr_t, std::vector<char>> before_;  // by the address of an allocation
};

}  // namespace npu_ops::emulator
