// Parameters of draft_pack and draft_step, and what their CPU and CUDA kernels both work out of
// them. No torch header here: the device code includes it.
#pragma once

#include "params.h"

namespace mtp {

MTP_HOST_DEVICE inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
MTP_HOST_DEVICE inline int64_t most(int64_t a, int64_t b) { return a < b ? b : a; }
MTP_HOST_DEVICE inline int64_t clamp(int64_t x, int64_t low, int64_t high) {
  return least(most(x, low), high);
}

// [n] or [rows, n] values of int32 or int64; or none, which may not be read.
struct Ints {
  void* data = nullptr;
  int64_t row_stride = 0;
  bool are_int64 = false;

  MTP_HOST_DEVICE int64_t at(int64_t i) const {
    return are_int64 ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
  MTP_HOST_DEVICE int64_t at(int64_t row, int64_t i) const { return at(row * row_stride + i); }
};

// The same, to be written.
struct OutInts : Ints {
  MTP_HOST_DEVICE void set(int64_t i, int64_t value) const {
    if (are_int64)
      static_cast<int64_t*>(data)[i] = value;
    else
      static_cast<int32_t*>(data)[i] = static_cast<int32_t>(value);
  }
  MTP_HOST_DEVICE void set(int64_t row, int64_t i, int64_t value) const {
    set(row * row_stride + i, value);
  }
};

// Hidden states [rows, H] of any dtype, or contiguous [slots, K - 1, H] as one list of rows.
struct HiddenRows {
  char* data;
  int64_t bytes, stride;

  MTP_HOST_DEVICE char* row(int64_t i) const { return data + i * stride; }
};

// What draft_step remembers of each slot for the next round's draft_pack.
struct DraftMemory {
  int64_t slots, past;     // S, K - 1
  int64_t* kept_ids;       // [S, K - 1], the newest last
  HiddenRows kept_hidden;  // [S * (K - 1), H]
  int64_t* num_kept;       // [S]
  int64_t* end;            // [S]
  int64_t* assumed;        // [S, K - 1]
  int64_t* kept_rope;      // [S, A, K - 1], nullptr without RoPE positions

  MTP_HOST_DEVICE bool has(int64_t slot) const { return 0 <= slot && slot < slots; }
};

// ---- draft_pack ---------------------------------------------------------------------------------

// Of one KV-cache group.
struct KvTable {
  const int32_t* blocks;  // [>= B, columns]
  int64_t stride, columns, block_size;
};

// As many as a CUDA kernel takes.
constexpr int kMostGroups = 32;
struct KvTables {
  KvTable group[kMostGroups];
};

struct DraftPackParams {
  int64_t requests, targets, rows;   // B, Tq, num_rows
  int64_t most_requests, most_rows;  // M, R
  int64_t axes, groups, max_len;     // A, G
  Ints slots, query_start, num_rejected, target_ids, target_positions, next_ids, lookahead_ids,
      row_start, target_rope;
  HiddenRows target_hidden;
  DraftMemory memory;
  OutInts out_ids, out_positions, out_row_start, out_seq_lens, out_last_row, out_slots,
      out_lookahead, out_kv_slots, out_rope;
  HiddenRows out_hidden;
};

// Of one request: the repair window, then its surviving rows, then unused ones.
struct RequestRows {
  int64_t slot;            // -1 = padding
  int64_t start;           // in the buffers
  int64_t count;           // reserved, of which
  int64_t window;          // come first and
  int64_t num_new;         // follow
  int64_t first;           // surviving row, in the target's tensors
  int64_t first_position;  // of that row

  MTP_HOST_DEVICE int64_t used() const { return window + num_new; }
};

// row_start[b], for b to B, as taken; in_order: none of them is below the one before it.
MTP_HOST_DEVICE inline int64_t first_row(const DraftPackParams& p, int64_t b, bool in_order) {
  return in_order && b <= p.requests ? clamp(p.row_start.at(b), 0, p.rows) : p.rows;
}

MTP_HOST_DEVICE inline RequestRows request_rows(const DraftPackParams& p, int64_t b,
                                                bool in_order) {
  const DraftMemory& m = p.memory;
  RequestRows r{};
  r.start = first_row(p, b, in_order);
  r.count = first_row(p, b + 1, in_order) - r.start;
  r.first = clamp(p.query_start.at(b), 0, p.targets);
  const int64_t stop = clamp(p.query_start.at(b + 1), 0, p.targets);
  r.num_new = clamp(stop - r.first - most(p.num_rejected.at(b), 0), 0, r.count);
  r.slot = -1;
  if (r.num_new == 0) return r;
  r.first_position = p.target_positions.at(r.first);
  const int64_t slot = p.slots.at(b);
  if (!m.has(slot)) return r;
  r.slot = slot;
  if (m.end[slot] != r.first_position) return r;
  // How many of the tokens assumed last round are confirmed by the tokens known now. Without an
  // exit, so that no load waits for the one before.
  const int64_t compared = least(m.past, r.num_new), next_id = p.next_ids.at(b);
  int64_t confirmed = 0;
  bool agrees = true;
  for (int64_t i = 0; i < compared; ++i) {
    const int64_t known = i == r.num_new - 1 ? next_id : p.target_ids.at(r.first + 1 + i);
    agrees &= known == m.assumed[slot * m.past + i];
    confirmed += agrees;
  }
  const int64_t wanted = least(m.past - confirmed, m.num_kept[slot]);
  r.window = clamp(wanted, 0, r.count - r.num_new);
  return r;
}

// Of request b's i-th row.
MTP_HOST_DEVICE inline int64_t row_id(const DraftPackParams& p, int64_t b, const RequestRows& r,
                                      int64_t i) {
  const int64_t behind = i - r.window, past = p.memory.past;
  if (behind < 0) return p.memory.kept_ids[r.slot * past + past + behind];
  if (behind < r.num_new - 1) return p.target_ids.at(r.first + behind + 1);
  return i < r.used() ? p.next_ids.at(b) : 0;
}

MTP_HOST_DEVICE inline int64_t row_rope(const DraftPackParams& p, int64_t axis,
                                        const RequestRows& r, int64_t i) {
  const int64_t behind = i - r.window, past = p.memory.past;
  if (behind < 0) return p.memory.kept_rope[(r.slot * p.axes + axis) * past + past + behind];
  return i < r.used() ? p.target_rope.at(axis, r.first + behind) : 0;
}

MTP_HOST_DEVICE inline int64_t row_kv_slot(const DraftPackParams& p, const KvTable& table,
                                           int64_t b, const RequestRows& r, int64_t i) {
  const int64_t position = r.first_position + i - r.window;
  if (r.slot < 0 || i >= r.used() || position < 0 || position >= p.max_len) return -1;
  const int64_t column = position / table.block_size;
  if (column >= table.columns) return -1;
  const int64_t block = table.blocks[b * table.stride + column];
  return block < 0 ? -1 : (block - column) * table.block_size + position;
}

// What is per request; b to M - 1, of which those from B on are not in the round.
MTP_HOST_DEVICE inline void write_request(const DraftPackParams& p, int64_t b,
                                          const RequestRows& r) {
  const bool inside = b < p.requests, reserved = inside && r.count > 0;
  p.out_seq_lens.set(b, reserved ? r.first_position - r.window + r.count : 0);
  p.out_last_row.set(b, reserved ? r.start + most(r.used(), 1) - 1 : 0);
  p.out_slots.set(b, inside ? r.slot : -1);
  for (int64_t i = 0; i < p.memory.past; ++i)
    p.out_lookahead.set(b, i, inside ? p.lookahead_ids.at(b, i) : -1);
}

// ---- draft_step ---------------------------------------------------------------------------------

struct DraftStepParams {
  int64_t slices, requests, step;  // S, B
  int64_t most_rows, axes;         // R, A
  const float* values;             // [S, B] or nullptr
  int64_t values_stride;
  Ints ids, positions, row_start, last_row, slots, lookahead, rope;
  OutInts input_ids, draft_ids;
  HiddenRows hidden;
  DraftMemory memory;
};

constexpr int64_t kNoId = INT64_MAX;

// The rows first to last of a request, and the slot that remembers it, -1 = none.
struct StepRows {
  int64_t first, last, slot;
  bool any;
};

// in_order: none of the first B + 1 of row_start is below the one before it.
MTP_HOST_DEVICE inline StepRows step_rows(const DraftStepParams& p, int64_t b, bool in_order) {
  StepRows r{p.row_start.at(b), p.last_row.at(b), p.slots.at(b), in_order};
  r.any = in_order && 0 <= r.first && r.first <= r.last &&
          r.last < least(p.row_start.at(b + 1), p.most_rows);
  if (!r.any || !p.memory.has(r.slot)) r.slot = -1;
  return r;
}

// How many of the last rows are kept.
MTP_HOST_DEVICE inline int64_t kept_rows(const DraftStepParams& p, const StepRows& r) {
  return least(r.last + 1 - r.first, p.memory.past);
}

// The token that the next layer is fed in a request's last row.
MTP_HOST_DEVICE inline int64_t fed_id(const DraftStepParams& p, int64_t b, int64_t drafted) {
  const int64_t known = p.lookahead.at(b, p.step);
  return known >= 0 ? known : drafted;
}

}  // namespace mtp
