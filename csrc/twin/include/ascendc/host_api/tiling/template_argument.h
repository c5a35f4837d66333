// Where kernels find the macros that declare their template arguments. The header has others for
// the host.
#pragma once
#define ASCENDC_TPL_KERNEL
#include <include/utils/tiling/template_argument.h>
