// Of CUDA's header, what the kernels use.
#pragma once

#include "cuda_emulation.h"

struct __nv_bfloat16 {
  uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 x) {
  const uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  if (x != x) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
