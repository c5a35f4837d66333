// The logger of the vendor's checks: errors become findings.
#pragma once

#include "twin/machine.h"

#define dlog_debug(module, ...) ((void)0)
#define dlog_info(module, ...) ((void)0)
#define dlog_warn(module, ...) ((void)0)
#define dlog_error(module, ...) ::npu_ops::twin::log(__VA_ARGS__)
