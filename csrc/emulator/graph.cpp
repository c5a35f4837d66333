// Graphs: torch.npu.NPUGraph records the work of a stream once, and replays it without the host.
//
// On a device nothing runs in a capture. Here work also runs while it is recorded, because only
// torch's CPU kernels know the shapes of results; the end of the capture restores all memory. As on
// a device, the host can neither wait nor copy in a capture. The vendor's functions are defined
// here without the vendor's types, because headers of torch_npu 2.7 lack these.
#include "graph.h"

#include <chrono>
#include <condition_variable>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "runtime.h"

extern "C" int aclrtSetDevice(int32_t);
extern "C" const char* aclGetRecentErrMsg();

namespace npu_ops::emulator {
namespace {

using Work = std::function<int()>;

// The vendor's error codes, as in rt_error_codes.h.
constexpr int kTimeout = 107019, kCaptured = 107027, kNotCaptured = 107029;
constexpr int kNotInACapture = 107030;

struct Graph {
  std::vector<Work> work;
  std::vector<std::function<void()>> releases;
  bool waits = false;  // for external events
  ~Graph() {
    for (const auto& release : releases) release();
  }
};

// A task group: tasks [begin, end) of a graph, which an update replaces before a replay.
struct Group {
  Graph* graph;
  size_t begin, end;
};

struct Capture {
  void* stream;
  std::unique_ptr<Graph> graph;
  Snapshot before;
  std::vector<uint64_t*> awaited;  // values that replays wait for
};

// New work for a group, recorded and not run. Other streams and threads still run their work: a
// server updates a graph while it is replayed.
struct Update {
  const void* stream;
  std::thread::id thread;
  Group* group;
  std::vector<Work> work;
};

// How long a replay waits for a value that another thread writes.
constexpr std::chrono::seconds kPatience{120};
constexpr uint32_t kEqual = 1;  // the only condition that torch_npu uses

std::mutex mutex, mutex_of_values;
std::condition_variable written;
std::optional<Capture> capture;
std::optional<Update> update;
size_t group_begin = 0;
thread_local int waiting = 0;

// Returns the graph that is being captured, or null.
Graph* captured() { return capture ? capture->graph.get() : nullptr; }

// Waits until another thread has written `expected`, as NPUGraph.update does during a replay.
int wait_for(const uint64_t* value, uint64_t expected) {
  std::unique_lock lock(mutex_of_values);
  if (written.wait_for(lock, kPatience, [=] { return *value == expected; })) return 0;
  return fail(kTimeout,
              "a stream waits for an external event that nobody records: call NPUGraph.update for "
              "each replay");
}

int write(uint64_t* to, uint64_t value) {
  {
    std::lock_guard lock(mutex_of_values);
    *to = value;
  }
  written.notify_all();
  return 0;
}

int run(const std::vector<Work>& all) {
  for (const Work& work : all)
    if (const int code = work()) return code;
  return 0;
}

struct Outcome {
  int code = 0;
  std::string reason;
};
using Replay = std::shared_future<Outcome>;

// Replays by stream. Never destroyed: a replay may outlive static destructors.
std::map<const void*, Replay>& replays() {
  static auto& all = *new std::map<const void*, Replay>;
  return all;
}

int outcome_of(const Replay& replay) {
  const Outcome& found = replay.get();
  return found.code ? fail(found.code, found.reason) : 0;
}

// Replays a graph on a thread of its own, because the host may record the events that the graph
// waits for after this call.
void replay_beside(Graph* graph, const void* stream) {
  std::promise<Outcome> promise;
  {
    std::lock_guard lock(mutex);
    replays()[stream] = promise.get_future().share();
  }
  std::thread([graph, device = current_device(), promise = std::move(promise)]() mutable {
    aclrtSetDevice(device);
    const int code = run(graph->work);
    promise.set_value({code, code ? aclGetRecentErrMsg() : ""});
  }).detach();
}

}  // namespace

Waiting::Waiting() { ++waiting; }
Waiting::~Waiting() { --waiting; }

bool capturing() {
  std::lock_guard lock(mutex);
  return capture.has_value();
}

int submit(const void* stream, Work work) {
  {
    std::lock_guard lock(mutex);
    if (update && update->stream == stream) {
      update->work.push_back(std::move(work));
      return 0;
    }
    if (Graph* graph = captured()) graph->work.push_back(work);
  }
  const int code = wait_for_replay(stream);
  return code ? code : work();
}

int wait_for_replay(const void* stream) {
  Replay replay;
  {
    std::lock_guard lock(mutex);
    const auto found = replays().find(stream);
    if (found == replays().end()) return 0;
    replay = found->second;
  }
  const int code = outcome_of(replay);
  std::lock_guard lock(mutex);
  replays().erase(stream);
  return code;
}

int wait_for_replays() {
  std::vector<const void*> streams;
  {
    std::lock_guard lock(mutex);
    for (const auto& [stream, replay] : replays()) streams.push_back(stream);
  }
  for (const void* stream : streams)
    if (const int code = wait_for_replay(stream)) return code;
  return 0;
}

Work replay_before(const void* stream) {
  std::lock_guard lock(mutex);
  const auto found = replays().find(stream);
  if (found == replays().end()) return [] { return 0; };
  return [replay = found->second] { return outcome_of(replay); };
}

void record_only(Work work) {
  std::lock_guard lock(mutex);
  if (update && update->thread == std::this_thread::get_id())
    update->work.push_back(std::move(work));
  else if (Graph* graph = captured())
    graph->work.push_back(std::move(work));
}

void release_later(std::function<void()> release) {
  {
    std::lock_guard lock(mutex);
    Graph* graph = update ? update->group->graph : captured();
    if (graph) {
      graph->releases.push_back(std::move(release));
      return;
    }
  }
  release();
}

int check_not_captured(const char* call) {
  if (waiting > 0 || !capturing()) return 0;
  return fail(kNotInACapture, std::string(call) +
                                  ": a stream is being captured, and a graph cannot replay what "
                                  "the host does: read, copy or wait outside of it");
}

}  // namespace npu_ops::emulator

using namespace npu_ops::emulator;

extern "C" {

// Python calls this function before and after a wait for this thread's task queue. Such waits are
// allowed in a capture.
void npu_ops_emulator_wait(int begin) { waiting += begin ? 1 : -1; }
int npu_ops_emulator_capturing() { return capturing(); }
// Records the launch of a Triton kernel, which Python has run already. `work` repeats it and must
// outlive the graph.
void npu_ops_emulator_record(int (*work)()) { record_only(work); }

int aclmdlRICaptureBegin(void* stream, int) {
  std::lock_guard lock(mutex);
  if (capture) return fail(kCaptured, "a capture begins in another: one at a time is emulated");
  capture.emplace(stream, std::make_unique<Graph>(), Snapshot());
  return 0;
}

int aclmdlRICaptureEnd(void*, void** graph) {
  std::lock_guard lock(mutex);
  if (!capture) return fail(kNotCaptured, "a capture ends that did not begin");
  capture->before.restore();
  for (uint64_t* value : capture->awaited) *value = 0;
  *graph = capture->graph.release();
  capture.reset();
  return 0;
}

int aclmdlRICaptureGetInfo(void* stream, int* status, void** graph) {
  std::lock_guard lock(mutex);
  const bool active = capture && capture->stream == stream;
  *status = active;
  if (graph) *graph = active ? capture->graph.get() : nullptr;
  return 0;
}

int aclmdlRICaptureThreadExchangeMode(int*) { return 0; }

// External events are values in device memory.
int aclrtValueWait(void* address, uint64_t value, uint32_t flag, void*) {
  if (flag != kEqual) return fail(kNotInACapture, "aclrtValueWait: waits for equality alone");
  auto* awaited = static_cast<uint64_t*>(address);
  {
    std::lock_guard lock(mutex);
    if (capture) {
      capture->awaited.push_back(awaited);
      capture->graph->waits = true;
      capture->graph->work.push_back([=] { return wait_for(awaited, value); });
      return 0;
    }
  }
  return wait_for(awaited, value);
}

int aclrtValueWrite(void* address, uint64_t value, uint32_t, void* stream) {
  return submit(stream, [=] { return write(static_cast<uint64_t*>(address), value); });
}

int aclmdlRIExecuteAsync(void* opaque, void* stream) {
  auto* graph = static_cast<Graph*>(opaque);
  if (const int code = wait_for_replay(stream)) return code;
  if (!graph->waits) return run(graph->work);
  replay_beside(graph, stream);
  return 0;
}

int aclmdlRIDestroy(void* graph) {
  wait_for_replays();
  delete static_cast<Graph*>(graph);
  return 0;
}

int aclmdlRIDebugPrint(void*) { return 0; }
int aclmdlRIDebugJsonPrint(void*, const char*, uint32_t) { return 0; }

int aclmdlRICaptureTaskGrpBegin(void*) {
  std::lock_guard lock(mutex);
  if (!capture) return fail(kNotCaptured, "a task group begins outside of a capture");
  group_begin = capture->graph->work.size();
  return 0;
}

int aclmdlRICaptureTaskGrpEnd(void*, void** group) {
  std::lock_guard lock(mutex);
  if (!capture) return fail(kNotCaptured, "a task group ends outside of a capture");
  Graph* graph = capture->graph.get();
  auto* made = new Group{graph, group_begin, graph->work.size()};
  graph->releases.push_back([made] { delete made; });
  *group = made;
  return 0;
}

int aclmdlRICaptureTaskUpdateBegin(void* stream, void* group) {
  std::lock_guard lock(mutex);
  update.emplace(Update{stream, std::this_thread::get_id(), static_cast<Group*>(group), {}});
  return 0;
}

int aclmdlRICaptureTaskUpdateEnd(void*) {
  std::lock_guard lock(mutex);
  const Update made = *std::exchange(update, std::nullopt);
  const Group& group = *made.group;
  if (made.work.size() != group.end - group.begin)
    return fail(kNotInACapture, "an update has " + std::to_string(made.work.size()) +
                                    " tasks, its group " + std::to_string(group.end - group.begin));
  std::copy(made.work.begin(), made.work.end(), group.graph->work.begin() + group.begin);
  return 0;
}
}
