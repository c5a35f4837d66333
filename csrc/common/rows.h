// Walking over the rows of [outer, inner, D] tensors, as npu_ops/core/rows.py makes them, or of
// contiguous tensors of any other number of dimensions.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/check.h"
#include "common/parallel.h"

namespace npu_ops {

// The rows of one tensor: `inner` rows, a step apart, from each outer index.
struct Rows {
  explicit Rows(const Tensor& tensor) {
    if (tensor.dim() != 3) {
      inner = tensor.numel() / tensor.size(-1);
      step = tensor.size(-1);
      return;
    }
    outer = tensor.size(0), outer_step = tensor.stride(0);
    inner = tensor.size(1), step = tensor.stride(1);
    if (inner == 1) {  // longer runs
      std::swap(outer, inner);
      std::swap(outer_step, step);
    }
  }
  int64_t at(int64_t outer, int64_t row) const { return outer * outer_step + row * step; }

  // Calls body(outer, first, count) for rows [begin, end): `count` from `first` on of an outer
  // index.
  template <class Body>
  void runs(int64_t begin, int64_t end, const Body& body) const {
    while (begin < end) {
      const int64_t first = begin % inner, count = std::min(inner - first, end - begin);
      body(begin / inner, first, count);
      begin += count;
    }
  }

  int64_t outer = 1, inner = 1, outer_step = 0, step = 0;
};

// The same for all rows, in parallel. `width` is what a row costs, in elements.
template <class Body>
void parallel_runs(const Rows& rows, int64_t width, const Body& body) {
  parallel(rows.outer * rows.inner, width,
           [&](int64_t begin, int64_t end) { rows.runs(begin, end, body); });
}

// Rows with their elements.
template <class T>
struct RowsOf : Rows {
  RowsOf(const Tensor& tensor, T* elements)
      : Rows(tensor), elements(elements), width(tensor.size(-1)) {}
  T* row(int64_t outer, int64_t index) const { return elements + at(outer, index); }
  T* elements;
  int64_t width;
};

template <class T>
RowsOf<const T> rows_in(const Tensor& tensor) {
  return {tensor, input<T>(tensor)};
}

template <class T>
RowsOf<T> rows_out(const Tensor& tensor) {
  return {tensor, output<T>(tensor)};
}

// Runs body(row, ..., width) in parallel for each row of tensors of one shape.
template <class Body, class T, class... More>
void each_row(const Body& body, const RowsOf<T>& first, const RowsOf<More>&... more) {
  parallel_runs(first, first.width, [&](int64_t outer, int64_t begin, int64_t count) {
    for (int64_t index = begin; index < begin + count; ++index)
      body(first.row(outer, index), more.row(outer, index)..., first.width);
  });
}

}  // namespace npu_ops
