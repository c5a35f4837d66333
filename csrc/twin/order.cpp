#include "order.h"

#include <algorithm>

namespace npu_ops::twin {
namespace {

void join(Order::Clock& clock, const Order::Clock& other) {
  for (int i = 0; i < kPipes; ++i) clock[i] = std::max(clock[i], other[i]);
}

}  // namespace

uint32_t Order::issue(pipe_t pipe) {
  join(clocks_[pipe], clocks_[PIPE_S]);
  return ++clocks_[pipe][pipe];
}

bool Order::set(pipe_t from, pipe_t to, int id) {
  join(clocks_[from], clocks_[PIPE_S]);
  return events_.emplace(Event(from, to, id), clocks_[from]).second;
}

bool Order::wait(pipe_t from, pipe_t to, int id) {
  const auto found = events_.find(Event(from, to, id));
  if (found == events_.end()) return false;
  join(clocks_[to], clocks_[PIPE_S]);
  join(clocks_[to], found->second);
  // The event may come from a pipe that has waited for instructions of pipe `to`. These are
  // finished, as after a barrier.
  barriers_[to] = std::max(barriers_[to], found->second[to]);
  events_.erase(found);
  return true;
}

void Order::barrier(pipe_t pipe) {
  if (pipe != PIPE_ALL) {
    barriers_[pipe] = clocks_[pipe][pipe];
    return;
  }
  Clock all{};
  for (const Clock& clock : clocks_) join(all, clock);
  clocks_.fill(all);
  barriers_ = all;
}

}  // namespace npu_ops::twin
