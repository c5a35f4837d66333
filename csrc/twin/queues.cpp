// Tracks and checks the state of each buffer: free, allocated, queued or dequeued.
#include "queues.h"

#include <cstring>

#include "core.h"

using namespace npu_ops::twin;

namespace {

// Returns the buffer that begins at an address. Reports an address of the unified buffer at which
// no buffer begins.
Buffer* buffer_at(const char* operation, uint64_t address) {
  if (!core || !core->buffer.holds(address)) return nullptr;
  issue(operation, PIPE_S);
  const auto found = core->buffer.buffers.find(address);
  if (found != core->buffer.buffers.end()) return &found->second;
  report(true, "queue", "the tensor does not come from a buffer of TPipe");
  return nullptr;
}

}  // namespace

void AscendCBufInit(uint8_t, int scratch, uint32_t count, uint64_t address, uint64_t bytes) {
  if (!core || !core->buffer.holds(address)) return;
  for (uint32_t i = 0; i < count; ++i)
    core->buffer.buffers[address + i * bytes] = {bytes, scratch != 0, Buffer::kFree};
}

// Newly allocated memory counts as unwritten.
void AscendCBufAlloc(uint8_t, uint8_t, uint64_t address, uint64_t) {
  Buffer* buffer = buffer_at("AllocTensor", address);
  if (!buffer) return;
  buffer->state = Buffer::kAllocated;
  core->buffer.forget(address, buffer->bytes);
  std::memset(reinterpret_cast<void*>(address), 0xCD, buffer->bytes);
}

void AscendCBufEnque(uint8_t, uint8_t, uint8_t, uint64_t address) {
  if (Buffer* buffer = buffer_at("EnQue", address)) buffer->state = Buffer::kQueued;
}

void AscendCBufDeque(uint8_t, uint8_t, uint8_t, uint64_t address) {
  if (Buffer* buffer = buffer_at("DeQue", address)) buffer->state = Buffer::kDequeued;
}

void AscendCBufFree(uint8_t, uint8_t, uint64_t address, uint64_t) {
  Buffer* buffer = buffer_at("FreeTensor", address);
  if (!buffer) return;
  if (buffer->state == Buffer::kFree) report(true, "queue", "the tensor is freed already");
  buffer->state = Buffer::kFree;
}

// These functions need no check.
void AscendCBufAbsAddr(uint8_t, uint64_t, uint64_t) {}
void AscendCBufGet(uint8_t, uint8_t, uint64_t, uint64_t) {}
void AscendCQueCreate(uint8_t, uint8_t, uint8_t) {}
void AscendCTBufPoolInit(uint8_t, uint64_t, uint32_t, uint64_t) {}
void AscendCUpdateTbufPoolStatus(uint64_t, bool) {}
void AscendCTBufPoolResetCheck(uint8_t, uint64_t, uint64_t, uint64_t) {}
void AscendCRecordPoolHierarchy(uint64_t, uint64_t) {}
