// Kernels include this path for the matrix interface.
#pragma once
#include <include/adv_api/matmul/matmul_intf.h>
