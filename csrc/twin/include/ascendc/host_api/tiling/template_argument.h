// Kernels include this path for the macros that declare their template arguments.
// ASCENDC_TPL_KERNEL selects them: the vendor's header has others for the host.
#pragma once
#define ASCENDC_TPL_KERNEL
#include <include/utils/tiling/template_argument.h>
