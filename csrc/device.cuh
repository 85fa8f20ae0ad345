// What the device code of several ops shares.
#pragma once

#include "params.h"

namespace mtp {

__device__ inline int64_t integer_at(const IntArray& values, int64_t i) {
  return values.are_int64 ? static_cast<const int64_t*>(values.data)[i]
                          : static_cast<const int32_t*>(values.data)[i];
}

}  // namespace mtp
