// Kernels with faults that the emulation must find, and one that uses all of it and has none.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "cuda_emulation.h"

namespace {

constexpr int kThreads = 64;

// Sums of groups of kThreads values, several after another with the same shared array.
__device__ float block_sum(float x, float* shared) {
  shared[threadIdx.x] = x;
  __syncthreads();
  float total = 0;
  for (int i = 0; i < kThreads; ++i) total += shared[i];
  return total;
}

__global__ void sums(const float* in, float* out, int64_t n, bool barrier) {
  __shared__ float shared[kThreads];
  for (int64_t i = threadIdx.x; i < n; i += kThreads) {
    const float sum = block_sum(in[i], shared);
    if (barrier) __syncthreads();  // without: a faster thread writes what a slower one still reads
    out[i] = sum;
  }
}

__global__ void copy(const float* in, float* out, int64_t n) {
  for (int64_t i = threadIdx.x; i < n; i += kThreads) __stwb(out + i, __ldg(in + i));
}

// Reads 16 bytes from where a float is.
__global__ void misaligned(const float* in, float* out, int64_t i) {
  const float4 x = __ldg(reinterpret_cast<const float4*>(in + i));
  out[threadIdx.x] = x.x;
}

__global__ void read_past_shared(float* out, int64_t i) {
  __shared__ float shared[kThreads];
  shared[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = shared[threadIdx.x + i];
}

__global__ void read_past_dynamic(float* out, int64_t i) {
  MTP_DYNAMIC_SHARED(float, shared);
  shared[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = shared[threadIdx.x + i];
}

__global__ void some_skip_the_barrier(float* out) {
  if (threadIdx.x < 40) __syncthreads();
  out[threadIdx.x] = 1;
}

__global__ void two_barriers(float* out) {
  if (threadIdx.x < 40)
    __syncthreads();
  else
    __syncthreads();
  out[threadIdx.x] = 1;
}

__global__ void lane_outside_of_mask(float* out) {
  float x = 1;
  if (threadIdx.x < 8) x = __shfl_sync(0xffu, x, 8);
  out[threadIdx.x] = x;
}

__global__ void half_a_warp(float* out) {
  float x = 1;
  if (threadIdx.x % 32 < 16) x = __shfl_down_sync(0xffffffffu, x, 1);
  out[threadIdx.x] = x;
}

// All threads add to the same element; atomically, or not.
__global__ void add_up(float* out, bool atomic) {
  if (atomic)
    atomicAdd(out, 1.0f);
  else
    *out += 1;
}

// In out[i]: how many of this test's expectations thread i sees fail.
__global__ void everything(float* out) {
  const unsigned lane = threadIdx.x % 32, all = 0xffffffffu;
  const int x = static_cast<int>(threadIdx.x);
  int failures = 0;
  const auto expect = [&](bool ok) { failures += !ok; };
  MTP_DYNAMIC_SHARED(int, counts);
  if (threadIdx.x < 4) counts[threadIdx.x] = 5;
  __syncthreads();
  const int base = x - static_cast<int>(lane);
  expect(__shfl_sync(all, x, 3) == base + 3);
  expect(__shfl_sync(all, x, 3, 8) == base + static_cast<int>(lane / 8 * 8) + 3);
  expect(__shfl_xor_sync(all, x, 5) == (x ^ 5));
  expect(__shfl_down_sync(all, x, 4) == (lane < 28 ? x + 4 : x));
  expect(__shfl_down_sync(all, x, 4, 8) == (lane % 8 < 4 ? x + 4 : x));
  const unsigned odd = 0xaaaaaaaau;
  expect(__ballot_sync(all, lane % 2) == odd);
  if (lane % 2) {  // the two halves do not wait for each other
    expect(__ballot_sync(odd, lane > 1) == (odd & ~2u));
    expect(__any_sync(odd, lane == 3) && !__any_sync(odd, lane == 2));
    expect(__all_sync(odd, lane > 0) && !__all_sync(odd, lane > 1));
    __syncwarp(odd);
  }
  expect(__syncthreads_count(x < 10) == 10);
  expect(__syncthreads_or(x == 7) && !__syncthreads_or(x == 700));
  expect(__syncthreads_and(x < 700) && !__syncthreads_and(x < 7));
  atomicAdd(&counts[0], 2);
  atomicMax(&counts[1], x);
  atomicMin(&counts[2], -x);
  if (atomicCAS(&counts[3], 5, 6) == 5) atomicExch(&counts[3], 7);
  __syncthreads();
  const int last = static_cast<int>(blockDim.x * blockDim.y) - 1;
  expect(counts[0] == 5 + 2 * (last + 1) && counts[1] == std::max(last, 5));
  expect(counts[2] == -last && counts[3] == 7);
  expect(gridDim.x == 3 && gridDim.y == 2 && blockIdx.x < 3 && blockIdx.y < 2);
  out[threadIdx.x] += static_cast<float>(failures);
}

// The order in which the threads of a block come.
__global__ void arrivals(float* out) {
  __shared__ int next;
  if (threadIdx.x == 0) next = 0;
  __syncthreads();
  out[threadIdx.x] = static_cast<float>(atomicAdd(&next, 1));
}

}  // namespace

// Runs one kernel; whether it failed, and then error holds the message.
extern "C" __attribute__((visibility("default"))) int emulation_run(const char* kernel,
                                                                    const float* in, float* out,
                                                                    int64_t n, char* error,
                                                                    size_t error_size) {
  using cuda_emulation::launch;
  const std::string name = kernel;
  const dim3 one{1}, threads{kThreads};
  constexpr size_t bytes = kThreads * sizeof(float);
  try {
    if (name == "sums")
      launch(sums, one, threads, 0, in, out, n, true);
    else if (name == "sums_without_barrier")
      launch(sums, one, threads, 0, in, out, n, false);
    else if (name == "copy")
      launch(copy, one, threads, 0, in, out, n);
    else if (name == "misaligned")
      launch(misaligned, one, threads, 0, in, out, n);
    else if (name == "read_past_shared")
      launch(read_past_shared, one, threads, 0, out, n);
    else if (name == "read_past_dynamic")
      launch(read_past_dynamic, one, threads, bytes, out, n);
    else if (name == "some_skip_the_barrier")
      launch(some_skip_the_barrier, one, threads, 0, out);
    else if (name == "two_barriers")
      launch(two_barriers, one, threads, 0, out);
    else if (name == "lane_outside_of_mask")
      launch(lane_outside_of_mask, one, threads, 0, out);
    else if (name == "half_a_warp")
      launch(half_a_warp, one, threads, 0, out);
    else if (name == "add_up")
      launch(add_up, dim3{3}, threads, 0, out, true);
    else if (name == "add_up_without_atomic")
      launch(add_up, dim3{3}, threads, 0, out, false);
    else if (name == "everything")
      launch(everything, dim3{3, 2}, threads, bytes, out);
    else if (name == "arrivals")
      launch(arrivals, one, threads, 0, out);
    else
      throw std::runtime_error("no kernel " + name);
    return 0;
  } catch (const std::exception& e) {
    std::string(e.what()).copy(error, error_size - 1);
    return 1;
  }
}
