// In a CPU build, AscendC's headers include this file for the instructions. They are in csrc/twin.
#pragma once

#include <csignal>
#include <cstdio>
#include <cstring>

#include "twin/arithmetic.h"
#include "twin/control.h"
#include "twin/conversion.h"
#include "twin/machine.h"
#include "twin/moves.h"
#include "twin/queues.h"
#include "twin/rearrangement.h"
#include "twin/reductions.h"
#include "twin/selection.h"
#include "twin/types.h"

namespace npu_ops::twin {
// The result of an instruction that the twin does not emulate. The headers use it as a number.
struct Nothing {
  template <class T>
  operator T() const {
    return T();
  }
};
template <class T>
uint64_t operator>>(Nothing, T) {
  return 0;
}
template <class T>
uint64_t operator&(Nothing, T) {
  return 0;
}
}  // namespace npu_ops::twin
#include <missing_instructions.h>  // generated when the library is built

// The vendor's checks print a sentence and raise a signal: both become a finding.
#define raise(signal) ::npu_ops::twin::vendor_check_failed(__FILE__, __LINE__)
