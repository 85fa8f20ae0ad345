// Device code of draft_pack: one launch, a block per row, and some for what is per request. Every
// block works out its request's window anew, from a dozen integers that nobody writes in this
// launch, so blocks need not wait for each other. Compiled, not yet run: no GPU was at hand. The
// tests run it as host code, in tests/cuda_emulation.
#pragma once

#include "draft.cuh"

namespace mtp {

__device__ inline void write_row(const DraftPackParams& p, const KvTables& tables, int64_t row) {
  // The request is the first that ends beyond the row.
  int64_t ended = 0;
  bool descends = false;
  for (int64_t first = 0; first < p.requests; first += kDraftThreads) {
    const int64_t b = first + threadIdx.x;
    bool ends = false;
    if (b < p.requests) {
      const int64_t stop = p.row_start.at(b + 1);
      ends = stop <= row;
      descends |= stop < p.row_start.at(b);
    }
    ended += __syncthreads_count(ends);
  }
  const bool in_order = !__syncthreads_or(descends);
  const int64_t b = least(ended, p.requests - 1);
  const RequestRows r = request_rows(p, b, in_order);
  const int64_t i = row - r.start, behind = i - r.window;
  const bool owned = 0 <= i && i < r.count, used = owned && i < r.used();

  const char* hidden = nullptr;
  if (used)
    hidden = behind < 0 ? p.memory.kept_hidden.row((r.slot + 1) * p.memory.past + behind)
                        : p.target_hidden.row(r.first + behind);
  copy_row(p.out_hidden.row(row), hidden, p.out_hidden.bytes);
  if (threadIdx.x == 0) {
    p.out_ids.set(row, owned ? row_id(p, b, r, i) : 0);
    p.out_positions.set(row, owned ? r.first_position + behind : 0);
  }
#pragma unroll 1
  for (int64_t axis = threadIdx.x; axis < p.axes; axis += kDraftThreads)
    p.out_rope.set(axis, row, owned ? row_rope(p, axis, r, i) : 0);
#pragma unroll 1
  for (int64_t group = threadIdx.x; group < p.groups; group += kDraftThreads)
    p.out_kv_slots.set(group, row, owned ? row_kv_slot(p, tables.group[group], b, r, i) : -1);
}

// Of request b, of those that the round does not have, and of row b past the last one.
__device__ inline void write_beside_rows(const DraftPackParams& p, int64_t b) {
  const bool in_order = block_ascends(p.row_start, p.requests + 1);
  if (b <= p.most_requests) p.out_row_start.set(b, first_row(p, b, in_order));
  if (b < p.most_requests)
    write_request(p, b, b < p.requests ? request_rows(p, b, in_order) : RequestRows{});
  if (p.rows + b < p.most_rows)
#pragma unroll 1
    for (int64_t group = 0; group < p.groups; ++group) p.out_kv_slots.set(group, p.rows + b, -1);
}

inline unsigned draft_pack_blocks(const DraftPackParams& p) {
  const int64_t others = most(p.most_requests + 1, p.groups ? p.most_rows - p.rows : 0);
  return static_cast<unsigned>(p.rows + (others + kDraftThreads - 1) / kDraftThreads);
}

// Grid (draft_pack_blocks), kDraftThreads.
__global__ void __launch_bounds__(kDraftThreads)
    draft_pack_kernel(const __grid_constant__ DraftPackParams p,
                      const __grid_constant__ KvTables tables) {
  const int64_t block = blockIdx.x;
  if (block < p.rows)
    write_row(p, tables, block);
  else
    write_beside_rows(p, (block - p.rows) * kDraftThreads + threadIdx.x);
}

}  // namespace mtp
