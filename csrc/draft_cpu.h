// What the CPU kernels of draft_pack and draft_step share.
#pragma once

#include <cstring>

#include "draft.h"

namespace mtp {

// Whether none of count values is below the one before it. Only of such starts are the ranges of
// requests disjoint.
inline bool ascends(const Ints& starts, int64_t count) {
  for (int64_t i = 1; i < count; ++i)
    if (starts.at(i) < starts.at(i - 1)) return false;
  return true;
}

inline void copy_rows(const HiddenRows& to, int64_t to_row, const HiddenRows& from,
                      int64_t from_row, int64_t rows) {
  if (to.stride == to.bytes && from.stride == to.bytes)
    std::memcpy(to.row(to_row), from.row(from_row), rows * to.bytes);
  else
    for (int64_t i = 0; i < rows; ++i)
      std::memcpy(to.row(to_row + i), from.row(from_row + i), to.bytes);
}

}  // namespace mtp
