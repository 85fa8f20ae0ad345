// What the parameter structs of the ops share. No torch header here: the per-instruction-set
// objects and the device code include it.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define MTP_HOST_DEVICE __host__ __device__
#else
#define MTP_HOST_DEVICE
#endif

namespace mtp {

enum class DType { bf16, fp16, fp32 };

// int32 or int64 values.
struct IntArray {
  const void* data;
  bool are_int64;
};

}  // namespace mtp
