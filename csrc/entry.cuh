// Device code of entry's first stage. Raw pointers, no torch header. Compiled for every listed
// architecture, run on none of them so far: no GPU was at hand.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "entry.h"

namespace mtp {

constexpr int kEntryThreads = 256;

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline void from_float(float x, float& to) { to = x; }
__device__ inline void from_float(float x, __half& to) { to = __float2half_rn(x); }
__device__ inline void from_float(float x, __nv_bfloat16& to) { to = __float2bfloat16_rn(x); }

__device__ inline int64_t integer_at(const void* values, bool are_int64, int64_t i) {
  return are_int64 ? static_cast<const int64_t*>(values)[i]
                   : static_cast<const int32_t*>(values)[i];
}

// Sum over the block, the same value in every thread. `partial` holds one float per warp.
__device__ inline float block_sum(float x, float* partial) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  __syncthreads();  // the previous sum has been read
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
  __syncthreads();
  float total = 0;
  for (int warp = 0; warp < kEntryThreads / 32; ++warp) total += partial[warp];
  return total;
}

// to = rmsnorm(from), where from == to is allowed: a thread reads and writes its own elements.
template <typename T>
__device__ void rms_norm(const T* from, const T* weight, float eps, bool zero_centered, int64_t n,
                         T* to, float* partial) {
  float squares = 0;
  for (int64_t i = threadIdx.x; i < n; i += kEntryThreads) {
    const float x = to_float(from[i]);
    squares += x * x;
  }
  const float mean = block_sum(squares, partial) / static_cast<float>(n) + eps;
  const float scale = mean == 0 ? 0.0f : rsqrtf(mean);
  for (int64_t i = threadIdx.x; i < n; i += kEntryThreads) {
    const float gain = to_float(weight[i]);
    float x = to_float(from[i]) * scale;
    if (zero_centered) {
      x *= 1.0f + gain;
    } else {
      T cast;
      from_float(x, cast);
      x = to_float(cast) * gain;
    }
    from_float(x, to[i]);
  }
}

// normed[t] = concat(enorm(embedding), hnorm(hidden)), one block per row: grid (T), kEntryThreads.
template <typename T>
__global__ void __launch_bounds__(kEntryThreads) entry_norm_kernel(EntryParams p) {
  __shared__ float partial[kEntryThreads / 32];
  const int64_t t = blockIdx.x;
  const int64_t n = p.hidden_size;
  T* row = static_cast<T*>(p.normed) + t * p.normed_stride;
  T* embed_half = row + (p.hidden_first ? n : 0);
  T* hidden_half = row + (p.hidden_first ? 0 : n);

  int64_t source = t;
  bool zero_embedding = p.positions && integer_at(p.positions, p.positions_are_int64, t) == 0;
  if (p.ids) {
    const int64_t id = integer_at(p.ids, p.ids_are_int64, t);
    zero_embedding = zero_embedding || id < p.vocab_start || id - p.vocab_start >= p.vocab_rows;
    source = id - p.vocab_start;
  }
  if (zero_embedding) {
    for (int64_t i = threadIdx.x; i < n; i += kEntryThreads) from_float(0.0f, embed_half[i]);
  } else {
    const T* embed = static_cast<const T*>(p.embeds) + source * p.embeds_stride;
    if (p.embed_norm_weight) {
      rms_norm(embed, static_cast<const T*>(p.embed_norm_weight), p.embed_norm_eps, p.zero_centered,
               n, embed_half, partial);
      embed = embed_half;
    }
    rms_norm(embed, static_cast<const T*>(p.enorm_weight), p.enorm_eps, p.zero_centered, n,
             embed_half, partial);
  }
  rms_norm(static_cast<const T*>(p.hidden) + t * p.hidden_stride,
           static_cast<const T*>(p.hnorm_weight), p.hnorm_eps, p.zero_centered, n, hidden_half,
           partial);
}

}  // namespace mtp
