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
constexpr int kEntryWords = 4;  // loads of 16 bytes that a thread has in flight

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

// What a block holds of a row: kEntryWords words of 16 bytes in each of its threads.
template <typename T>
struct Strip {
  static constexpr int kLanes = 16 / sizeof(T);
  static constexpr int64_t kSize = kEntryThreads * kEntryWords * kLanes;
  T values[kEntryWords][kLanes];

  // From element `start` of a row of n on; zeros past its end. Which thread has which element does
  // not depend on how the row lies in memory, so neither does a sum.
  __device__ void read(const T* row, int64_t start, int64_t n) {
    if (has_words(row, n)) {
#pragma unroll
      for (int w = 0; w < kEntryWords; ++w) {
        const int64_t i = place(start, w);
        int4 word{};
        if (i < n) word = __ldg(reinterpret_cast<const int4*>(row + i));
        memcpy(values[w], &word, sizeof(word));
      }
    } else {
#pragma unroll
      for (int w = 0; w < kEntryWords; ++w)
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const int64_t i = place(start, w) + lane;
          values[w][lane] = i < n ? __ldg(row + i) : T{};
        }
    }
  }

  __device__ void write(T* row, int64_t start, int64_t n) const {
    if (has_words(row, n)) {
#pragma unroll
      for (int w = 0; w < kEntryWords; ++w) {
        const int64_t i = place(start, w);
        int4 word;
        memcpy(&word, values[w], sizeof(word));
        if (i < n) __stwb(reinterpret_cast<int4*>(row + i), word);
      }
    } else {
#pragma unroll
      for (int w = 0; w < kEntryWords; ++w)
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const int64_t i = place(start, w) + lane;
          if (i < n) __stwb(row + i, values[w][lane]);
        }
    }
  }

  // Of this thread's elements.
  __device__ float squares() const {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kEntryWords; ++w)
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float x = to_float(values[w][lane]);
        sum += x * x;
      }
    return sum;
  }

  __device__ void apply(const Norm& norm, float scale, int64_t start, int64_t n) {
    Strip gains;
    gains.read(static_cast<const T*>(norm.weight), start, n);
#pragma unroll
    for (int w = 0; w < kEntryWords; ++w)
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float gain = to_float(gains.values[w][lane]);
        float x = to_float(values[w][lane]) * scale;
        if (norm.zero_centered) {
          x *= 1.0f + gain;
        } else {
          T cast;
          from_float(x, cast);
          x = to_float(cast) * gain;
        }
        from_float(x, values[w][lane]);
      }
  }

 private:
  __device__ static int64_t place(int64_t start, int w) {
    return start + (w * kEntryThreads + static_cast<int64_t>(threadIdx.x)) * kLanes;
  }
  __device__ static bool has_words(const T* row, int64_t n) {
    return reinterpret_cast<uint64_t>(row) % sizeof(int4) == 0 && n % kLanes == 0;
  }
};

// to = the norms of from, one after the other. A row of one strip is read once; of a longer one
// each strip anew for every pass, of which there is one more than norms.
template <typename T, int kNorms>
__device__ void rms_norms(const T* from, const Norm (&norms)[kNorms], int64_t n, T* to,
                          float* partial) {
  Strip<T> strip;
  float scales[kNorms];
  const auto after = [&](int passed, int64_t start) {  // the strip, after so many norms
    const bool is_held = passed > 0 && n <= strip.kSize;
    if (!is_held) strip.read(from, start, n);
#pragma unroll
    for (int k = 0; k < kNorms; ++k)
      if (k < passed && (!is_held || k == passed - 1)) strip.apply(norms[k], scales[k], start, n);
  };
#pragma unroll
  for (int k = 0; k < kNorms; ++k) {
    float squares = 0;
#pragma unroll 1
    for (int64_t start = 0; start < n; start += strip.kSize) {
      after(k, start);
      squares += strip.squares();
    }
    const float mean = block_sum(squares, partial) / static_cast<float>(n) + norms[k].eps;
    scales[k] = mean == 0 ? 0.0f : rsqrtf(mean);
  }
#pragma unroll 1
  for (int64_t start = 0; start < n; start += strip.kSize) {
    after(kNorms, start);
    strip.write(to, start, n);
  }
}

template <typename T>
__device__ void write_zeros(T* to, int64_t n) {
  const Strip<T> zeros{};
#pragma unroll 1
  for (int64_t start = 0; start < n; start += zeros.kSize) zeros.write(to, start, n);
}

// normed[t] = concat(enorm(embedding), hnorm(hidden)), one block per row: grid (T), kEntryThreads.
// Two blocks on an SM, for 256 rows at once on 132.
template <typename T>
__global__ void __launch_bounds__(kEntryThreads, 2) entry_norm_kernel(EntryParams p) {
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
    write_zeros(embed_half, n);
  } else {
    const T* embed = static_cast<const T*>(lookup.table) + source * lookup.stride;
    if (p.embedding.embed_norm.weight)
      rms_norms(embed, {p.embedding.embed_norm, p.embedding.enorm}, n, embed_half, partial);
    else
      rms_norms(embed, {p.embedding.enorm}, n, embed_half, partial);
  }
  const T* hidden = static_cast<const T*>(p.hidden) + t * p.hidden_stride;
  rms_norms(hidden, {p.hnorm}, n, hidden_half, partial);
}

}  // namespace mtp
