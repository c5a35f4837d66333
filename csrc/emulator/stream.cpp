// Streams and events. A stream has no queue: the thread that submits work runs it. Only the replay
// of a graph that waits for external events runs on a thread of its own (graph.h).
#include <acl/acl.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include "graph.h"
#include "runtime.h"

namespace npu_ops::emulator {
namespace {

struct Stream {
  int id;
};

struct Event {
  std::atomic<bool> recorded{false};
  std::atomic<uint64_t> microseconds{0};
  std::function<int()> before = [] {
    return 0;
  };  // waits for the replay that ran when the event was recorded
};

std::atomic<int> next_stream{1};

uint64_t now() {
  using namespace std::chrono;
  return duration_cast<microseconds>(steady_clock::now().time_since_epoch()).count();
}

aclError new_event(aclrtEvent* out) {
  *out = new Event;
  return ACL_SUCCESS;
}

Event& event_of(aclrtEvent event) { return *static_cast<Event*>(event); }

aclError synchronize(const char* call, const std::function<int()>& wait) {
  const int code = check_not_captured(call);
  return code ? code : wait();
}

}  // namespace
}  // namespace npu_ops::emulator

using namespace npu_ops::emulator;

extern "C" {
aclError aclrtCreateStreamWithConfig(aclrtStream* out, uint32_t, uint32_t) {
  *out = new Stream{next_stream++};
  return ACL_SUCCESS;
}
aclError aclrtCreateStream(aclrtStream* out) { return aclrtCreateStreamWithConfig(out, 0, 0); }
aclError aclrtDestroyStream(aclrtStream stream) {
  delete static_cast<Stream*>(stream);
  return ACL_SUCCESS;
}
aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }
aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) {
  *id = stream ? static_cast<Stream*>(stream)->id : 0;
  return ACL_SUCCESS;
}
aclError aclrtStreamQuery(aclrtStream, aclrtStreamStatus* status) {
  *status = ACL_STREAM_STATUS_COMPLETE;
  return ACL_SUCCESS;
}
aclError aclrtSynchronizeStream(aclrtStream stream) {
  return synchronize(__func__, [=] { return wait_for_replay(stream); });
}
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t) {
  return aclrtSynchronizeStream(stream);
}
aclError aclrtSynchronizeDevice() { return synchronize(__func__, wait_for_replays); }
aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return aclrtSynchronizeDevice(); }
aclError aclrtStreamWaitEvent(aclrtStream, aclrtEvent event) { return event_of(event).before(); }
aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return ACL_SUCCESS; }
aclError aclrtSetStreamAttribute(aclrtStream, aclrtStreamAttr, aclrtStreamAttrValue*) {
  return ACL_SUCCESS;
}
aclError aclrtSetStreamOverflowSwitch(aclrtStream, uint32_t) { return ACL_SUCCESS; }
aclError aclrtGetStreamOverflowSwitch(aclrtStream, uint32_t* flag) {
  *flag = 0;
  return ACL_SUCCESS;
}

aclError aclrtCreateEvent(aclrtEvent* out) { return new_event(out); }
aclError aclrtCreateEventWithFlag(aclrtEvent* out, uint32_t) { return new_event(out); }
aclError aclrtCreateEventExWithFlag(aclrtEvent* out, uint32_t) { return new_event(out); }
aclError aclrtDestroyEvent(aclrtEvent event) {
  delete static_cast<Event*>(event);
  return ACL_SUCCESS;
}
aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
  event_of(event).before = replay_before(stream);
  event_of(event).microseconds = now();
  event_of(event).recorded = true;
  return ACL_SUCCESS;
}
aclError aclrtResetEvent(aclrtEvent, aclrtStream) { return ACL_SUCCESS; }
aclError aclrtSynchronizeEvent(aclrtEvent event) { return event_of(event).before(); }
aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus* status) {
  *status = event_of(event).recorded ? ACL_EVENT_RECORDED_STATUS_COMPLETE
                                     : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return ACL_SUCCESS;
}
aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus* status) {
  *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
  return ACL_SUCCESS;
}
aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent begin, aclrtEvent end) {
  const uint64_t from = event_of(begin).microseconds, to = event_of(end).microseconds;
  *milliseconds = static_cast<float>(to - from) / 1000.0f;
  return ACL_SUCCESS;
}
aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t* time) {
  *time = event_of(event).microseconds;
  return ACL_SUCCESS;
}

// Host functions in a stream.
aclError aclrtSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }
aclError aclrtUnSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }
aclError aclrtProcessReport(int32_t) {
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return ACL_ERROR_RT_REPORT_TIMEOUT;
}
aclError aclrtLaunchCallback(aclrtCallback function, void* data, aclrtCallbackBlockType,
                             aclrtStream stream) {
  return submit(stream, [=] { return function(data), ACL_SUCCESS; });
}
aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void* data) {
  return submit(stream, [=] { return function(data), ACL_SUCCESS; });
}
}
