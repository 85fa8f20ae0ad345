// Device code of entry's first stage. Raw pointers, no torch header. Compiled for every listed
// architecture, run on none of them so far: no GPU was at hand. The tests run it as host code, in
// tests/cuda_emulation.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device.cuh"
#include "entry.h"

namespace mtp {

constexpr int kEntryThreads = 256;

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline void from_float(float x, float& to) { to = x; }
__device__ inline void from_float(float x, __half& to) { to = __float2half_rn(x); }
__device__ inline void from_float(float x, __nv_bfloat16& to) { to = __float2bfloat16_rn(x); }

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
__device__ void rms_norm(const T* from, const Norm& norm, int64_t n, T* to, float* partial) {
  float squares = 0;
  for (int64_t i = threadIdx.x; i < n; i += kEntryThreads) {
    const float x = to_float(from[i]);
    squares += x * x;
  }
  const float mean = block_sum(squares, partial) / static_cast<float>(n) + norm.eps;
  const float scale = mean == 0 ? 0.0f : rsqrtf(mean);
  for (int64_t i = threadIdx.x; i < n; i += kEntryThreads) {
    const float gain = to_float(static_cast<const T*>(norm.weight)[i]);
    float x = to_float(from[i]) * scale;
    if (norm.zero_centered) {
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

  const Lookup& lookup = p.embedding.lookup;
  int64_t source = t;
  bool zero_embedding = lookup.positions.data && integer_at(lookup.positions, t) == 0;
  if (lookup.ids.data) {
    const int64_t id = integer_at(lookup.ids, t);
    zero_embedding =
        zero_embedding || id < lookup.vocab_start || id - lookup.vocab_start >= lookup.vocab_rows;
    source = id - lookup.vocab_start;
  }
  if (zero_embedding) {
    for (int64_t i = threadIdx.x; i < n; i += kEntryThreads) from_float(0.0f, embed_half[i]);
  } else {
    const T* embed = static_cast<const T*>(lookup.table) + source * lookup.stride;
    if (p.embedding.embed_norm.weight) {
      rms_norm(embed, p.embedding.embed_norm, n, embed_half, partial);
      embed = embed_half;
    }
    rms_norm(embed, p.embedding.enorm, n, embed_half, partial);
  }
  rms_norm(static_cast<const T*>(p.hidden) + t * p.hidden_stride, p.hnorm, n, hidden_half, partial);
}

}  // namespace mtp
