// The order of one core's accesses: a vector clock for each pipe.
//
// The scalar pipe issues all instructions, so an instruction comes after everything that the scalar
// pipe has waited for. Otherwise pipes run in parallel; only events and barriers order them (CCE
// intrinsic guide, 6.6.3 and 6.6.2).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <tuple>

#include "types.h"

namespace npu_ops::twin {

constexpr int kPipes = 11;

class Order {
 public:
  // Starts the next instruction of a pipe, and returns its tick (its number in the pipe).
  uint32_t issue(pipe_t pipe);

  // Returns whether the current instruction of `pipe` comes after tick `tick` of pipe `before`.
  bool after(pipe_t pipe, pipe_t before, uint32_t tick) const {
    return pipe == before || clocks_[pipe][before] >= tick;
  }

  // Returns whether a barrier of its own pipe is between tick `tick` and the current instruction.
  bool past_barrier(pipe_t pipe, uint32_t tick) const { return barriers_[pipe] >= tick; }

  // Adds the wait that bisheng inserts: the current instruction of `pipe` waits for a tick of
  // `before`.
  void wait_for(pipe_t pipe, pipe_t before, uint32_t tick) {
    clocks_[pipe][before] = std::max(clocks_[pipe][before], tick);
  }

  bool set(pipe_t from, pipe_t to, int id);   // false: it is set already
  bool wait(pipe_t from, pipe_t to, int id);  // false: it was not set
  void barrier(pipe_t pipe);

  using Event = std::tuple<pipe_t, pipe_t, int>;
  using Clock = std::array<uint32_t, kPipes>;
  const std::map<Event, Clock>& pending() const { return events_; }

 private:
  std::array<Clock, kPipes> clocks_{};
  Clock barriers_{};
  std::map<Event, Clock> events_;
};

}  // namespace npu_ops::twin
