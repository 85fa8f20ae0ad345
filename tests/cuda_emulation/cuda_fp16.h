// Of CUDA's header, what the kernels use.
#pragma once

#include "cuda_emulation.h"

struct __half {
  _Float16 value;
};
inline float __half2float(__half x) { return static_cast<float>(x.value); }
inline __half __float2half_rn(float x) { return {static_cast<_Float16>(x)}; }
inline __half __ushort_as_half(unsigned short bits) { return {std::bit_cast<_Float16>(bits)}; }
