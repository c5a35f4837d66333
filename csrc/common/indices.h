// Checks of index values that a kernel uses as memory offsets. They run before the kernel accesses
// any memory. Under torch.compile, they are the only checks of these values.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "common/check.h"

namespace npu_ops {

// An optional int32 or int64 tensor, [rows] or [rows, columns].
class Indices {
 public:
  explicit Indices(const std::optional<Tensor>& tensor) {
    if (!tensor) return;
    STD_TORCH_CHECK(tensor->dim() == 1 || tensor->dim() == 2, "indices: got ", tensor->dim(),
                    " dimensions, needs 1 or 2");
    wide_ = tensor->scalar_type() == ScalarType::Long;
    data_ = tensor->const_data_ptr();
    rows_ = tensor->size(0), row_stride_ = tensor->stride(0);
    by_column_ = tensor->dim() == 2;
    if (by_column_) columns_ = tensor->size(1), column_stride_ = tensor->stride(1);
    given_ = true;
  }
  explicit operator bool() const { return given_; }
  bool by_column() const { return by_column_; }
  int64_t rows() const { return rows_; }
  int64_t columns() const { return columns_; }
  int64_t at(int64_t row, int64_t column = 0) const {
    const int64_t index = row * row_stride_ + column * column_stride_;
    return wide_ ? static_cast<const int64_t*>(data_)[index]
                 : static_cast<const int32_t*>(data_)[index];
  }
  int64_t at_or(int64_t row, int64_t otherwise) const { return given_ ? at(row) : otherwise; }

 private:
  const void* data_ = nullptr;
  int64_t rows_ = 0, columns_ = 1, row_stride_ = 0, column_stride_ = 0;
  bool given_ = false, wide_ = false, by_column_ = false;
};

inline int64_t within(const char* name, int64_t index, int64_t low, int64_t high) {
  STD_TORCH_CHECK(low <= index && index <= high, name, ": got ", index, ", needs ", low, " to ",
                  high);
  return index;
}

// Raises if two sequences write to the same slot, i.e. if an index occurs twice in `places`.
inline void check_distinct(const char* name, std::vector<int64_t> places) {
  std::sort(places.begin(), places.end());
  const auto twice = std::adjacent_find(places.begin(), places.end());
  STD_TORCH_CHECK(twice == places.end(), name, ": got ", twice == places.end() ? 0 : *twice,
                  " twice, needs each at most once");
}

// Checks cu_seqlens and returns its values: the start of each sequence, then the end of the last,
// which is at most `tokens`. Tokens after it belong to no sequence (npu_ops/core/lengths.py).
inline std::vector<int64_t> starts_of(const char* name, const Tensor& tensor, int64_t tokens) {
  const Indices indices(tensor);
  const int64_t count = indices.rows();
  STD_TORCH_CHECK(count > 0, name, ": got no elements, needs 0 first");
  std::vector<int64_t> starts(count);
  for (int64_t n = 0; n < count; ++n) starts[n] = indices.at(n);
  const int64_t first = starts.front(), last = starts.back();
  STD_TORCH_CHECK(first == 0 && last <= tokens, name, ": got ", first, " first and ", last,
                  " last, needs 0 and up to ", tokens, ", the number of tokens");
  for (int64_t n = 1; n < count; ++n)
    STD_TORCH_CHECK(starts[n - 1] <= starts[n], name, ": got ", starts[n - 1], " before ",
                    starts[n], ", needs starts that do not decrease");
  return starts;
}

}  // namespace npu_ops
