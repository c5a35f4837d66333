// Helpers to launch kernels that work on rows: they describe tensors [outer, inner, width] as rows.
#pragma once

#include <initializer_list>

#include "common/ascendc_launch.h"
#include "common/rows_tiling.h"

namespace npu_ops {

// Returns one group with all rows of an [outer, inner, width] tensor; cut_rows sets the other
// fields.
inline RowsTiling rows_of(const Tensor& tensor) {
  RowsTiling rows{};
  rows.rows = tensor.size(0) * tensor.size(1);
  rows.inner = tensor.size(1);
  rows.groups = 1;
  rows.width = static_cast<int32_t>(tensor.size(2));
  return rows;
}

// Returns the strides and dtype of the rows of an [outer, inner, width] tensor. A dimension of size
// 1 gets the stride that makes all rows one run.
inline RowTensor row_tensor(const Tensor& tensor, const char* argument) {
  RowTensor made{0, tensor.stride(0), tensor.stride(1), element_type(tensor, argument)};
  if (tensor.size(1) == 1) made.inner = made.outer;
  if (tensor.size(0) == 1) made.outer = tensor.size(1) * made.inner;
  return made;
}

// Like rows_of for one group. With several groups, the tensor is [rows, groups, width], and group g
// is tensor[:, g].
inline RowsTiling grouped_rows_of(const Tensor& tensor, int32_t groups) {
  RowsTiling rows = rows_of(tensor);
  if (groups == 1) return rows;
  rows.rows = tensor.size(0);
  rows.inner = 1;
  rows.groups = groups;
  return rows;
}

inline RowTensor grouped_row_tensor(const Tensor& tensor, int32_t groups, const char* argument) {
  if (groups == 1) return row_tensor(tensor, argument);
  const int64_t apart = tensor.stride(0);
  return {tensor.stride(1), apart, apart, element_type(tensor, argument)};
}

// Returns the bytes per tile element of two tiles of each tensor (double buffering). A null pointer
// counts nothing.
inline int64_t doubled(std::initializer_list<const Tensor*> tensors) {
  int64_t bytes = 0;
  for (const Tensor* tensor : tensors) bytes += tensor ? 2 * tensor->element_size() : 0;
  return bytes;
}

}  // namespace npu_ops
