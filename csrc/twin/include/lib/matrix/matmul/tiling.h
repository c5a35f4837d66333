// Kernels include this path for the tiling of the matrix interface.
#pragma once
#include <include/adv_api/matmul/tiling.h>
