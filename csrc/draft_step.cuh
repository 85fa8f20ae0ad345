// Device code of draft_step: one launch, a block per request; in step 0 also one per hidden state
// that is remembered. What two blocks of a request read, its row range and its slot, nobody writes
// in this launch. Compiled, not yet run: no GPU was at hand. The tests run it as host code, in
// tests/cuda_emulation.
#pragma once

#include <cmath>

#include "draft.cuh"

namespace mtp {

struct Best {
  float value;
  int64_t id;
};

__device__ inline void take_better(Best& best, float value, int64_t id) {
  if (value > best.value || (value == best.value && id < best.id)) best = {value, id};
}

// The id of request b's highest value, the lowest of equals; the same in every thread.
__device__ inline int64_t block_best_id(const DraftStepParams& p, int64_t b) {
  __shared__ Best of_warp[kDraftThreads / 32];
  Best best{-INFINITY, kNoId};
#pragma unroll 1
  for (int64_t s = threadIdx.x; s < p.slices; s += kDraftThreads) {
    const float value = p.values ? p.values[s * p.values_stride + b] : 0.0f;
    take_better(best, value > -INFINITY ? value : -INFINITY, p.ids.at(s, b));  // NaN: the lowest
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    const float value = __shfl_xor_sync(0xffffffffu, best.value, lanes);
    const long long id = __shfl_xor_sync(0xffffffffu, static_cast<long long>(best.id), lanes);
    take_better(best, value, id);
  }
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = best;
  __syncthreads();
  for (const Best& other : of_warp) take_better(best, other.value, other.id);
  return best.id == kNoId ? 0 : best.id;
}

// All that is remembered of a request but the hidden states.
__device__ inline void remember(const DraftStepParams& p, const StepRows& r) {
  const DraftMemory& m = p.memory;
  const int64_t count = kept_rows(p, r), start = r.last + 1 - count;
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < count; i += kDraftThreads) {
    const int64_t kept = m.past - count + i;
    m.kept_ids[r.slot * m.past + kept] = p.input_ids.at(start + i);
#pragma unroll 1
    for (int64_t axis = 0; axis < p.axes; ++axis)
      m.kept_rope[(r.slot * p.axes + axis) * m.past + kept] = p.rope.at(axis, start + i);
  }
  if (threadIdx.x == 0) {
    m.num_kept[r.slot] = count;
    m.end[r.slot] = p.positions.at(r.last) + 1;
  }
}

// Moves the ids of a request up by one row, and feeds the last.
template <typename Id>
__device__ inline void rotate(Id* input_ids, const StepRows& r, int64_t fed) {
  for (int64_t start = r.first; start < r.last; start += kAhead * kDraftThreads) {
    Id id[kAhead] = {};
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int64_t row = start + j * kDraftThreads + threadIdx.x;
      if (row < r.last) id[j] = input_ids[row + 1];
    }
    __syncthreads();  // all have read, here and in remember, before any writes
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int64_t row = start + j * kDraftThreads + threadIdx.x;
      if (row < r.last) input_ids[row] = id[j];
    }
  }
  // Who has read the last row waited above; of one row only, it was this thread, in remember.
  if (threadIdx.x == 0) input_ids[r.last] = static_cast<Id>(fed);
}

inline unsigned draft_step_blocks(const DraftStepParams& p) {
  return static_cast<unsigned>(p.requests * (p.step == 0 ? 1 + p.memory.past : 1));
}

// Grid (draft_step_blocks), kDraftThreads.
__global__ void __launch_bounds__(kDraftThreads)
    draft_step_kernel(const __grid_constant__ DraftStepParams p) {
  const DraftMemory& m = p.memory;
  const auto requests = static_cast<unsigned>(p.requests);
  const int64_t b = blockIdx.x % requests, part = blockIdx.x / requests;
  const StepRows r = step_rows(p, b, block_ascends(p.row_start, p.requests + 1));
  if (part > 0) {  // the newest row is that of the last part
    const int64_t row = r.last - (m.past - part);
    if (r.slot >= 0 && row >= r.first)
      copy_row(m.kept_hidden.row(r.slot * m.past + part - 1), p.hidden.row(row), p.hidden.bytes);
    return;
  }
  const int64_t drafted = block_best_id(p, b);
  if (threadIdx.x == 0) p.draft_ids.set(b, p.step, r.any ? drafted : -1);
  if (!r.any) return;
  if (p.step == 0 && r.slot >= 0) remember(p, r);
  if (p.step == m.past) return;
  const int64_t fed = fed_id(p, b, drafted);
  if (threadIdx.x == 0 && r.slot >= 0) m.assumed[r.slot * m.past + p.step] = fed;
  if (p.input_ids.are_int64)
    rotate(static_cast<int64_t*>(p.input_ids.data), r, fed);
  else
    rotate(static_cast<int32_t*>(p.input_ids.data), r, fed);
}

}  // namespace mtp
