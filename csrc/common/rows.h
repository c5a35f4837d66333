// Loops over the rows of [outer, inner, D] tensors, as npu_ops/core/rows.py makes them, of [rows,
// D] tensors, or of contiguous tensors with any other number of dimensions.
#pragma once

#include <algorithm>
#include <cstdint>
#include <tuple>

#include "common/check.h"
#include "common/parallel.h"
#include "common/widen.h"

namespace npu_ops {

// The rows of one tensor: for each outer index, `inner` rows that are `step` elements apart.
struct Rows {
  explicit Rows(const Tensor& tensor) {
    if (tensor.dim() != 3) {
      inner = tensor.numel() / tensor.size(-1);
      step = tensor.dim() == 2 ? tensor.stride(0) : tensor.size(-1);
      return;
    }
    outer = tensor.size(0), outer_step = tensor.stride(0);
    inner = tensor.size(1), step = tensor.stride(1);
    if (inner == 1) {  // so that all rows are one run, instead of one run per row
      std::swap(outer, inner);
      std::swap(outer_step, step);
    }
  }
  int64_t at(int64_t outer, int64_t row) const { return outer * outer_step + row * step; }

  // Splits rows [begin, end) into runs that share an outer index, and calls body(outer, first,
  // count) for each: `count` rows from inner index `first` on.
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

// Rows with their elements; writable unless T is const.
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

// One thread's access to the rows of a tensor, which Row (widen.h) converts if needed.
template <class T>
struct RowBuffer {
  explicit RowBuffer(const RowsOf<T>& rows) : rows(rows), row(rows.width) {}
  auto* begin(int64_t outer, int64_t index) {
    if constexpr (std::is_const_v<T>)
      return row.read(rows.row(outer, index), rows.width);
    else
      return row.to(rows.row(outer, index));
  }
  void end(int64_t outer, int64_t index) {
    if constexpr (!std::is_const_v<T>) row.written(rows.row(outer, index), rows.width);
  }
  const RowsOf<T>& rows;
  Row<std::remove_const_t<T>> row;
};

// Runs body(index, row...) for rows [begin, end) of tensors of one shape. index: the row's inner
// index. Row may convert an fp16 row, so that body gets a float pointer.
template <class Body, class... T>
void each_row_of(int64_t begin, int64_t end, const Body& body, const RowsOf<T>&... rows) {
  std::tuple<RowBuffer<T>...> all{RowBuffer<T>(rows)...};
  std::apply(
      [&](auto& first, auto&... more) {
        first.rows.runs(begin, end, [&](int64_t outer, int64_t from, int64_t count) {
          for (int64_t index = from; index < from + count; ++index) {
            body(index, first.begin(outer, index), more.begin(outer, index)...);
            first.end(outer, index);
            (more.end(outer, index), ...);
          }
        });
      },
      all);
}

// Runs body(row, ..., width) in parallel for each row of tensors of one shape.
template <class Body, class T, class... More>
void each_row(const Body& body, const RowsOf<T>& first, const RowsOf<More>&... more) {
  parallel(first.outer * first.inner, first.width, [&](int64_t begin, int64_t end) {
    each_row_of(
        begin, end, [&](int64_t, auto*... row) { body(row..., first.width); }, first, more...);
  });
}

}  // namespace npu_ops
