// CUDA device code as host C++20: included before a .cuh file, it stands for what nvcc predefines.
//
// Each CUDA thread is a fiber, all on one thread of the host; the blocks of a grid run one after
// another. In which order blocks and threads run is shuffled by a seed. What real hardware leaves
// undefined and this reports: a barrier or warp function that not all of its threads reach, or that
// they reach at different places of the source, and lanes read outside of the mask.
//
// AddressSanitizer sees the bounds of every tensor and shared array. ThreadSanitizer knows each
// fiber as a thread that only barriers, warp functions and atomics order with the others.
//
// Not covered: tensor cores, TMA, cp.async, clusters and cooperative groups, streams, textures;
// memory ordering (fences do nothing, atomics are acquire-release); races between blocks, but for
// results that depend on their order; the speed of anything, but for the bytes that __ldg and
// __stwb move; device math functions, whose last bits may differ. Shared arrays are not undefined
// at the start of a block, but hold what the block before left.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <source_location>

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define __grid_constant__
#define __forceinline__ inline
#define __shared__ static

// Dynamic shared memory. Where nvcc compiles: `extern __shared__ type name[]`.
#define MTP_DYNAMIC_SHARED(type, name) \
  type* const name = static_cast<type*>(cuda_emulation::dynamic_shared())

#define threadIdx (cuda_emulation::self().thread)
#define blockIdx (cuda_emulation::self().block)
#define blockDim (cuda_emulation::self().block_dim)
#define gridDim (cuda_emulation::self().grid_dim)

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

namespace cuda_emulation {

using Site = std::source_location;

struct Self {
  dim3 thread, block, block_dim, grid_dim;
};
const Self& self();
void* dynamic_shared();

// What a barrier tells each of its threads of the predicates of all.
struct Votes {
  int count, threads;
};
Votes block_barrier(bool predicate, const Site& site);

// Waits for the lanes of the mask, each of which brings a word; returns the words of all 32.
const uint64_t* warp_exchange(unsigned mask, uint64_t word, const Site& site);
unsigned lane();
[[noreturn]] void fail(const char* what, const Site& site);

// Bytes that __ldg and __stwb have moved.
struct Traffic {
  uint64_t read, written;
};
extern Traffic traffic;
void count(uint64_t read, uint64_t written);

void set_seed(uint64_t seed);
void run(dim3 grid, dim3 block, size_t dynamic_bytes, void (*body)(void*), void* argument);

// kernel<<<grid, block, dynamic_bytes>>>(args...), finished on return. Throws std::runtime_error.
template <typename Kernel, typename... Args>
void launch(Kernel kernel, dim3 grid, dim3 block, size_t dynamic_bytes, const Args&... args) {
  auto body = [&] { kernel(args...); };
  run(
      grid, block, dynamic_bytes, [](void* self) { (*static_cast<decltype(body)*>(self))(); },
      &body);
}

template <typename T>
T shuffle(unsigned mask, T value, unsigned source, const Site& site) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  const uint64_t* words = warp_exchange(mask, word, site);
  if (!(mask >> source & 1)) fail("reads a lane that is not in the mask", site);
  std::memcpy(&value, &words[source], sizeof(T));
  return value;
}

// The lanes of the mask whose predicate holds.
inline unsigned ballot(unsigned mask, bool predicate, const Site& site) {
  const uint64_t* words = warp_exchange(mask, predicate, site);
  unsigned lanes = 0;
  for (unsigned i = 0; i < 32; ++i)
    if (mask >> i & 1) lanes |= static_cast<unsigned>(words[i]) << i;
  return lanes;
}

}  // namespace cuda_emulation

#define MTP_SITE const cuda_emulation::Site& site = cuda_emulation::Site::current()

inline void __syncthreads(MTP_SITE) { cuda_emulation::block_barrier(false, site); }
inline int __syncthreads_count(int predicate, MTP_SITE) {
  return cuda_emulation::block_barrier(predicate != 0, site).count;
}
inline int __syncthreads_or(int predicate, MTP_SITE) {
  return cuda_emulation::block_barrier(predicate != 0, site).count > 0;
}
inline int __syncthreads_and(int predicate, MTP_SITE) {
  const cuda_emulation::Votes votes = cuda_emulation::block_barrier(predicate != 0, site);
  return votes.count == votes.threads;
}

inline void __syncwarp(unsigned mask = 0xffffffffu, MTP_SITE) {
  cuda_emulation::warp_exchange(mask, 0, site);
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, MTP_SITE) {
  const unsigned first = cuda_emulation::lane() & ~(width - 1u);
  return cuda_emulation::shuffle(mask, value, first + (source & (width - 1)), site);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, MTP_SITE) {
  const unsigned lane = cuda_emulation::lane(), source = lane ^ lanes;
  const bool inside = source < (lane & ~(width - 1u)) + width;
  return cuda_emulation::shuffle(mask, value, inside ? source : lane, site);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, MTP_SITE) {
  const unsigned lane = cuda_emulation::lane(), source = lane + delta;
  const bool inside = source < (lane & ~(width - 1u)) + width;
  return cuda_emulation::shuffle(mask, value, inside ? source : lane, site);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, MTP_SITE) {
  const unsigned lane = cuda_emulation::lane(), first = lane & ~(width - 1u);
  return cuda_emulation::shuffle(mask, value, lane < first + delta ? lane : lane - delta, site);
}
inline int __reduce_min_sync(unsigned mask, int value, MTP_SITE) {
  const uint64_t* words = cuda_emulation::warp_exchange(mask, static_cast<unsigned>(value), site);
  for (unsigned i = 0; i < 32; ++i)
    if (mask >> i & 1) value = std::min(value, static_cast<int>(words[i]));
  return value;
}
inline unsigned __ballot_sync(unsigned mask, int predicate, MTP_SITE) {
  return cuda_emulation::ballot(mask, predicate != 0, site);
}
inline int __any_sync(unsigned mask, int predicate, MTP_SITE) {
  return cuda_emulation::ballot(mask, predicate != 0, site) != 0;
}
inline int __all_sync(unsigned mask, int predicate, MTP_SITE) {
  return cuda_emulation::ballot(mask, predicate != 0, site) == mask;
}
#undef MTP_SITE

// Compare-and-swap until it holds, as hardware does where it lacks the operation.
template <typename T, typename Change>
T cuda_emulation_atomic(T* to, Change change) {
  T old, wanted;
  __atomic_load(to, &old, __ATOMIC_ACQUIRE);
  do {
    wanted = change(old);
  } while (
      !__atomic_compare_exchange(to, &old, &wanted, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
  return old;
}
template <typename T>
T atomicAdd(T* to, T value) {
  return cuda_emulation_atomic(to, [=](T old) { return static_cast<T>(old + value); });
}
template <typename T>
T atomicMax(T* to, T value) {
  return cuda_emulation_atomic(to, [=](T old) { return old < value ? value : old; });
}
template <typename T>
T atomicMin(T* to, T value) {
  return cuda_emulation_atomic(to, [=](T old) { return value < old ? value : old; });
}
template <typename T>
T atomicExch(T* to, T value) {
  return cuda_emulation_atomic(to, [=](T) { return value; });
}
template <typename T>
T atomicCAS(T* to, T compare, T value) {
  return cuda_emulation_atomic(to, [=](T old) { return old == compare ? value : old; });
}
inline void __threadfence() {}

// Reads of what nobody writes in the launch, and ordinary writes, both counted.
template <typename T>
T __ldg(const T* from) {
  cuda_emulation::count(sizeof(T), 0);
  return *from;
}
template <typename T>
void __stwb(T* to, T value) {
  cuda_emulation::count(0, sizeof(T));
  *to = value;
}

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

// Arithmetic that is rounded as said and never fused.
inline float __fmul_rn(float x, float y) { return x * y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fadd_rd(float x, float y) {
  const float sum = x + y, of_y = sum - x;
  const float lost = (x - (sum - of_y)) + (y - of_y);  // exact
  return lost < 0 ? std::nextafter(sum, -INFINITY) : sum;
}
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline int __popc(unsigned x) { return std::popcount(x); }
