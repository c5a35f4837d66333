// Work of a stream, which a graph may record.
#pragma once

#include <functional>
#include <vector>

namespace npu_ops::emulator {

// Whether a stream is being captured.
bool capturing();

// Runs work now. In a capture it is recorded too, and what it wrote is undone at the capture's end.
// Returns what the work does: 0, or an error.
int submit(std::function<int()> work);

// In a capture: records work that has run already, in another way.
void record_only(std::function<int()> work);

// In a capture, calls `release` when the graph is destroyed; otherwise now.
void release_later(std::function<void()> release);

// 0, or outside of a capture's rules an error: the host must not wait, nor copy by itself.
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
  Snapshot(const Snapshot&);
  ~Snapshot();
  void restore() const;

 private:
  struct Bytes;
  std::vector<Bytes> before_;
};

}  // namespace npu_ops::emulator
