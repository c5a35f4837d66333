// Where kernels for devices find the matrix interface.
#pragma once
#include <include/adv_api/matmul/matmul_intf.h>
