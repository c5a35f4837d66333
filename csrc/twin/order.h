// Which accesses of one core happen before which: a vector clock for each pipe.
//
// The scalar pipe issues everything, so an instruction comes after what the scalar pipe has waited
// for. Otherwise pipes run side by side, and only events (6.6.3) and barriers (6.6.2) order them.
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
  // The next instruction of a pipe; returns its tick.
  uint32_t issue(pipe_t pipe);

  // Whether the current instruction of `pipe` comes after tick `tick` of `before`.
  bool after(pipe_t pipe, pipe_t before, uint32_t tick) const {
    return pipe == before || clocks_[pipe][before] >= tick;
  }

  // Whether a barrier of its own pipe separates the current instruction from tick `tick`.
  bool past_barrier(pipe_t pipe, uint32_t tick) const { return barriers_[pipe] >= tick; }

  // What bisheng inserts: the current instruction of `pipe` waits for tick `tick` of `before`.
  void wait_for(pipe_t pipe, pipe_t before, uint32_t tick) {
    clocks_[pipe][before] = std::max(clocks_[pipe][before], tick);
  }

  bool set(pipe_t from, pipe_t to, int id);   // false: it is set already
  bool wait(pipe_t from, pipe_t to, int id);  // false: nobody set it
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
