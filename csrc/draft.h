// What the CPU kernels of draft_pack and draft_step share: integers of either width, and what is
// remembered of each slot from one round to the next.
#pragma once

#include <algorithm>
#include <cstring>

#include "common.h"

namespace mtp {

// A checked [n] or [rows, n] tensor of int32 or int64; or none, which may not be read.
class Ints {
 public:
  explicit Ints(const Tensor& tensor) : Ints(tensor, const_cast<void*>(tensor.const_data_ptr())) {}
  explicit Ints(const OptionalTensor& tensor) : Ints(tensor ? Ints(*tensor) : Ints()) {}

  int64_t at(int64_t i) const {
    return wide_ ? static_cast<const int64_t*>(data_)[i] : static_cast<const int32_t*>(data_)[i];
  }
  int64_t at(int64_t row, int64_t i) const { return at(row * row_stride_ + i); }

 protected:
  Ints() = default;
  Ints(const Tensor& tensor, void* data)
      : data_(data),
        wide_(tensor.scalar_type() == ScalarType::Long),
        row_stride_(tensor.dim() == 2 ? tensor.stride(0) : 0) {}

  void* data_ = nullptr;
  bool wide_ = false;
  int64_t row_stride_ = 0;
};

// The same, to be written.
class OutInts : public Ints {
 public:
  explicit OutInts(const Tensor& tensor) : Ints(tensor, tensor.mutable_data_ptr()) {}
  explicit OutInts(const OptionalTensor& tensor) : OutInts(tensor ? OutInts(*tensor) : OutInts()) {}

  void set(int64_t i, int64_t value) const {
    if (wide_)
      static_cast<int64_t*>(data_)[i] = value;
    else
      static_cast<int32_t*>(data_)[i] = static_cast<int32_t>(value);
  }
  void set(int64_t row, int64_t i, int64_t value) const { set(row * row_stride_ + i, value); }

 private:
  OutInts() = default;
};

// Whether none of count values is below the one before it. Only of such starts are the ranges of
// requests disjoint.
inline bool ascends(const Ints& starts, int64_t count) {
  for (int64_t i = 1; i < count; ++i)
    if (starts.at(i) < starts.at(i - 1)) return false;
  return true;
}

// Checked hidden states [rows, H], or contiguous [slots, K - 1, H] as one list of rows.
struct HiddenRows {
  explicit HiddenRows(const Tensor& tensor)
      : data(static_cast<char*>(tensor.data_ptr())),
        bytes(tensor.size(tensor.dim() - 1) * tensor.element_size()),
        stride(tensor.dim() == 2 ? tensor.stride(0) * tensor.element_size() : bytes) {}

  char* row(int64_t i) const { return data + i * stride; }

  char* data;
  int64_t bytes, stride;
};

inline void copy_rows(const HiddenRows& to, int64_t to_row, const HiddenRows& from,
                      int64_t from_row, int64_t rows) {
  if (to.stride == to.bytes && from.stride == to.bytes)
    std::memcpy(to.row(to_row), from.row(from_row), rows * to.bytes);
  else
    for (int64_t i = 0; i < rows; ++i)
      std::memcpy(to.row(to_row + i), from.row(from_row + i), to.bytes);
}

struct Memory {
  Tensor kept_ids, kept_hidden, num_kept, end, assumed;
};

inline void expect_ints(const Expect& expect, const char* name, const Tensor& tensor,
                        std::initializer_list<int64_t> shape) {
  expect.tensor(name, tensor, {ScalarType::Int, ScalarType::Long}, shape);
}

inline void expect_contiguous(const Expect& expect, const char* name, const Tensor& tensor,
                              ScalarType dtype, std::initializer_list<int64_t> shape) {
  expect.tensor(name, tensor, {dtype}, shape);
  expect.that(tensor.is_contiguous(), name, " expected a contiguous tensor");
}

inline void check_memory(const Expect& expect, const Memory& m, int64_t past,
                         const Tensor& hidden) {
  const int64_t slots = m.end.numel();
  expect.that(slots >= 1, "end expected at least one slot, got none");
  expect_contiguous(expect, "kept_ids", m.kept_ids, ScalarType::Long, {slots, past});
  expect_contiguous(expect, "kept_hidden", m.kept_hidden, hidden.scalar_type(),
                    {slots, past, hidden.size(hidden.dim() - 1)});
  expect_contiguous(expect, "num_kept", m.num_kept, ScalarType::Long, {slots});
  expect_contiguous(expect, "end", m.end, ScalarType::Long, {slots});
  expect_contiguous(expect, "assumed", m.assumed, ScalarType::Long, {slots, past});
}

}  // namespace mtp
