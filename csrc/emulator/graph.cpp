// Graphs: torch.npu.NPUGraph records the work of a stream once, and replays it without the host.
//
// On a device nothing runs in a capture. Here work runs as it is recorded, because torch's CPU
// kernels say what shapes results have; at the end memory is as it was before. What a device
// refuses in a capture is refused: waiting for it, and copies by the host. By their names alone,
// because headers of torch_npu 2.7 lack the types.
#include "graph.h"

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime.h"

namespace npu_ops::emulator {
namespace {

using Work = std::function<int()>;

// The vendor's error codes, as in rt_error_codes.h.
constexpr int kCaptured = 107027, kNotCaptured = 107029, kNotInACapture = 107030;

struct Graph {
  std::vector<Work> work;
  std::vector<std::function<void()>> releases;
  ~Graph() {
    for (const auto& release : releases) release();
  }
};

// Work whose arguments are set again before a replay.
struct Group {
  Graph* graph;
  size_t begin, end;
};

struct Capture {
  void* stream;
  std::unique_ptr<Graph> graph;
  Snapshot before;
};

// New work for a group, recorded and not run.
struct Update {
  Group* group;
  std::vector<Work> work;
};

std::mutex mutex;
std::optional<Capture> capture;
std::optional<Update> update;
size_t group_begin = 0;
thread_local int waiting = 0;

// Where work is recorded; null where it is not.
std::vector<Work>* record_of_work() {
  return update ? &update->work : capture ? &capture->graph->work : nullptr;
}

int run(const std::vector<Work>& all) {
  for (const Work& work : all)
    if (const int code = work()) return code;
  return 0;
}

}  // namespace

Waiting::Waiting() { ++waiting; }
Waiting::~Waiting() { --waiting; }

bool capturing() {
  std::lock_guard lock(mutex);
  return capture.has_value();
}

int submit(Work work) {
  {
    std::lock_guard lock(mutex);
    if (auto* record = record_of_work()) record->push_back(work);
    if (update) return 0;
  }
  return work();
}

void record_only(Work work) {
  std::lock_guard lock(mutex);
  if (auto* record = record_of_work()) record->push_back(std::move(work));
}

void release_later(std::function<void()> release) {
  {
    std::lock_guard lock(mutex);
    Graph* graph = capture ? capture->graph.get() : update ? update->group->graph : nullptr;
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

// Called from Python around what only waits for this thread's queue.
void npu_ops_emulator_wait(int begin) { waiting += begin ? 1 : -1; }
int npu_ops_emulator_capturing() { return capturing(); }
// A launch of a Triton kernel, which Python has run and repeats. It must outlive the graph.
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

int aclmdlRIExecuteAsync(void* graph, void*) { return run(static_cast<Graph*>(graph)->work); }

int aclmdlRIDestroy(void* graph) {
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

int aclmdlRICaptureTaskUpdateBegin(void*, void* group) {
  std::lock_guard lock(mutex);
  update.emplace(Update{static_cast<Group*>(group), {}});
  return 0;
}

int aclmdlRICaptureTaskUpdateEnd(void*) {
  std::lock_guard lock(mutex);
  const auto [group, work] = *std::exchange(update, std::nullopt);
  if (work.size() != group->end - group->begin)
    return fail(kNotInACapture, "an update has " + std::to_string(work.size()) +
                                    " tasks, its group " +
                                    std::to_string(group->end - group->begin));
  std::copy(work.begin(), work.end(), group->graph->work.begin() + group->begin);
  return 0;
}
}
