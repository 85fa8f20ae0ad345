// The arguments of draft_pack and draft_step, checked and turned into parameters; for the CPU and
// CUDA host code. Checks with the same messages are in mtp_kernels/ops/draft_pack.py,
// draft_step.py.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "common.h"
#include "draft.h"

namespace mtp {

struct MemoryArgs {
  Tensor kept_ids, kept_hidden, num_kept, end, assumed;
};

inline void expect_ints(const Expect& expect, const char* name, const Tensor& tensor,
                        std::initializer_list<int64_t> shape) {
  expect.tensor(name, tensor, {ScalarType::Int, ScalarType::Long}, shape);
}

inline void expect_contiguous(const Expect& expect, const char* name, const Tensor& tensor,
                              ScalarType dtype, std::initializer_list<int64_t> shape) {
  expect.tensor(name, tensor, {dtype}, shape);
  expect.that(tensor.is_contiguous(), name, " expected a contiguous tensor");
}

inline void check_memory(const Expect& expect, const MemoryArgs& m, int64_t past,
                         const Tensor& hidden) {
  const int64_t slots = m.end.numel();
  expect.that(slots >= 1, "end expected at least one slot, got none");
  expect_contiguous(expect, "kept_ids", m.kept_ids, ScalarType::Long, {slots, past});
  expect_contiguous(expect, "kept_hidden", m.kept_hidden, hidden.scalar_type(),
                    {slots, past, hidden.size(hidden.dim() - 1)});
  expect_contiguous(expect, "num_kept", m.num_kept, ScalarType::Long, {slots});
  expect_contiguous(expect, "end", m.end, ScalarType::Long, {slots});
  expect_contiguous(expect, "assumed", m.assumed, ScalarType::Long, {slots, past});
}

// Of checked tensors. What an op does not write is only read through these too.
inline void* read_pointer(const Tensor& tensor) {
  return const_cast<void*>(tensor.const_data_ptr());
}

inline Ints ints_of(const Tensor& tensor, void* data) {
  return {data, tensor.dim() == 2 ? tensor.stride(0) : 0, tensor.scalar_type() == ScalarType::Long};
}
inline Ints read_ints(const Tensor& tensor) { return ints_of(tensor, read_pointer(tensor)); }
inline Ints read_ints(const OptionalTensor& tensor) { return tensor ? read_ints(*tensor) : Ints{}; }
inline OutInts written_ints(const Tensor& tensor) {
  return {ints_of(tensor, tensor.mutable_data_ptr())};
}
inline OutInts written_ints(const OptionalTensor& tensor) {
  return tensor ? written_ints(*tensor) : OutInts{};
}

inline HiddenRows hidden_rows(const Tensor& tensor, void* data) {
  const int64_t element = static_cast<int64_t>(tensor.element_size());
  const int64_t bytes = tensor.size(tensor.dim() - 1) * element;
  return {static_cast<char*>(data), bytes, tensor.dim() == 2 ? tensor.stride(0) * element : bytes};
}

inline DraftMemory draft_memory(const MemoryArgs& m, const OptionalTensor& kept_rope,
                                bool written) {
  const auto pointer = [=](const Tensor& tensor) {
    return written ? tensor.mutable_data_ptr() : read_pointer(tensor);
  };
  const auto ids = [&](const Tensor& tensor) { return static_cast<int64_t*>(pointer(tensor)); };
  return {m.end.numel(),   m.assumed.size(1),
          ids(m.kept_ids), hidden_rows(m.kept_hidden, pointer(m.kept_hidden)),
          ids(m.num_kept), ids(m.end),
          ids(m.assumed),  kept_rope ? ids(*kept_rope) : nullptr};
}

// ---- draft_pack ---------------------------------------------------------------------------------

struct DraftPackArgs {
  Tensor slots, query_start, num_rejected, target_ids, target_positions, target_hidden, next_ids,
      lookahead_ids, row_start;
  int64_t num_rows;
  MemoryArgs memory;
  Tensor out_ids, out_positions, out_hidden, out_row_start, out_seq_lens, out_last_row, out_slots,
      out_lookahead;
  std::vector<Tensor> block_tables;
  std::vector<int64_t> block_sizes;
  std::optional<int64_t> max_len;
  OptionalTensor out_kv_slots, target_rope, kept_rope, out_rope;
};

inline void check_draft_pack(const DraftPackArgs& a) {
  const Expect expect("draft_pack", a.slots);
  expect.that(a.memory.assumed.dim() == 2, "assumed expected shape [S, K - 1], got ",
              shape_name(a.memory.assumed.sizes()));
  const int64_t requests = a.slots.numel(), past = a.memory.assumed.size(1);
  const int64_t targets = a.target_ids.numel();
  const int64_t most_requests = a.out_last_row.numel(), most_rows = a.out_ids.numel();
  expect_ints(expect, "slots", a.slots, {requests});
  expect_ints(expect, "query_start", a.query_start, {requests + 1});
  expect_ints(expect, "num_rejected", a.num_rejected, {requests});
  expect_ints(expect, "target_ids", a.target_ids, {targets});
  expect_ints(expect, "target_positions", a.target_positions, {targets});
  expect_ints(expect, "next_ids", a.next_ids, {requests});
  expect_ints(expect, "lookahead_ids", a.lookahead_ids, {requests, past});
  expect_ints(expect, "row_start", a.row_start, {requests + 1});
  expect_ints(expect, "out_ids", a.out_ids, {most_rows});
  expect_ints(expect, "out_positions", a.out_positions, {most_rows});
  expect_ints(expect, "out_row_start", a.out_row_start, {most_requests + 1});
  expect_ints(expect, "out_seq_lens", a.out_seq_lens, {most_requests});
  expect_ints(expect, "out_last_row", a.out_last_row, {most_requests});
  expect_ints(expect, "out_slots", a.out_slots, {most_requests});
  expect_ints(expect, "out_lookahead", a.out_lookahead, {most_requests, past});
  expect.that(targets >= 1 || requests == 0,
              "target_ids expected a row for the requests, got none");
  expect.that(requests <= most_requests, "slots expected at most ", most_requests, ", got ",
              requests);
  const int64_t most = requests ? most_rows : 0;
  expect.that(0 <= a.num_rows && a.num_rows <= most, "num_rows expected at most ", most, ", got ",
              a.num_rows);
  expect.device("target_hidden", a.target_hidden);
  expect.that(a.target_hidden.dim() == 2 && a.target_hidden.size(0) >= targets,
              "target_hidden expected shape [>= ", targets, ", H], got ",
              shape_name(a.target_hidden.sizes()));
  expect.unit_stride("target_hidden", a.target_hidden);
  expect.tensor("out_hidden", a.out_hidden, {a.target_hidden.scalar_type()},
                {most_rows, a.target_hidden.size(1)});
  check_memory(expect, a.memory, past, a.target_hidden);

  expect.that(a.target_rope.has_value() == a.kept_rope.has_value() &&
                  a.target_rope.has_value() == a.out_rope.has_value(),
              "target_rope, kept_rope and out_rope expected all or none");
  if (a.target_rope) {
    expect.that(a.target_rope->dim() == 2, "target_rope expected shape [A, Tq], got ",
                shape_name(a.target_rope->sizes()));
    const int64_t axes = a.target_rope->size(0);
    expect_ints(expect, "target_rope", *a.target_rope, {axes, targets});
    expect_ints(expect, "out_rope", *a.out_rope, {axes, most_rows});
    expect_contiguous(expect, "kept_rope", *a.kept_rope, ScalarType::Long,
                      {a.memory.end.numel(), axes, past});
  }

  const auto groups = static_cast<int64_t>(a.block_tables.size());
  expect.that(a.block_sizes.size() == a.block_tables.size() && (a.out_kv_slots || groups == 0),
              "block_sizes and out_kv_slots expected one for each of ", groups, " block_tables");
  if (a.out_kv_slots) expect_ints(expect, "out_kv_slots", *a.out_kv_slots, {groups, most_rows});
  for (int64_t g = 0; g < groups; ++g) {
    const Tensor& table = a.block_tables[g];
    expect.device("block_tables", table);
    expect.dtype("block_tables", table, {ScalarType::Int});
    expect.that(table.dim() == 2 && table.size(0) >= requests && table.size(1) >= 1,
                "block_tables expected shape [>= ", requests, ", C >= 1], got ",
                shape_name(table.sizes()));
    expect.unit_stride("block_tables", table);
    expect.that(a.block_sizes[g] >= 1, "block_sizes expected a number >= 1, got ",
                a.block_sizes[g]);
  }
}

// Of checked arguments; the tables apart, because there is no limit to how many there are.
inline DraftPackParams draft_pack_params(const DraftPackArgs& a) {
  DraftPackParams p{};
  p.requests = a.slots.numel();
  p.targets = a.target_ids.numel();
  p.rows = a.num_rows;
  p.most_requests = a.out_last_row.numel();
  p.most_rows = a.out_ids.numel();
  p.axes = a.out_rope ? a.out_rope->size(0) : 0;
  p.groups = static_cast<int64_t>(a.block_tables.size());
  p.max_len = a.max_len.value_or(std::numeric_limits<int64_t>::max());
  p.slots = read_ints(a.slots);
  p.query_start = read_ints(a.query_start);
  p.num_rejected = read_ints(a.num_rejected);
  p.target_ids = read_ints(a.target_ids);
  p.target_positions = read_ints(a.target_positions);
  p.next_ids = read_ints(a.next_ids);
  p.lookahead_ids = read_ints(a.lookahead_ids);
  p.row_start = read_ints(a.row_start);
  p.target_rope = read_ints(a.target_rope);
  p.target_hidden = hidden_rows(a.target_hidden, read_pointer(a.target_hidden));
  p.memory = draft_memory(a.memory, a.kept_rope, false);
  p.out_ids = written_ints(a.out_ids);
  p.out_positions = written_ints(a.out_positions);
  p.out_row_start = written_ints(a.out_row_start);
  p.out_seq_lens = written_ints(a.out_seq_lens);
  p.out_last_row = written_ints(a.out_last_row);
  p.out_slots = written_ints(a.out_slots);
  p.out_lookahead = written_ints(a.out_lookahead);
  p.out_kv_slots = written_ints(a.out_kv_slots);
  p.out_rope = written_ints(a.out_rope);
  p.out_hidden = hidden_rows(a.out_hidden, a.out_hidden.mutable_data_ptr());
  return p;
}

inline std::vector<KvTable> kv_tables(const DraftPackArgs& a) {
  std::vector<KvTable> tables;
  for (size_t g = 0; g < a.block_tables.size(); ++g) {
    const Tensor& table = a.block_tables[g];
    tables.push_back({static_cast<const int32_t*>(table.const_data_ptr()), table.stride(0),
                      table.size(1), a.block_sizes[g]});
  }
  return tables;
}

// For a CUDA kernel, whose arguments have a fixed size.
inline KvTables limited_tables(const std::vector<KvTable>& tables) {
  if (tables.size() > kMostGroups)
    fail("draft_pack: block_tables expected at most ", kMostGroups, " on CUDA, got ",
         tables.size());
  KvTables limited{};
  std::copy(tables.begin(), tables.end(), limited.group);
  return limited;
}

// The op: run(parameters, tables, a tensor of the device).
template <auto run>
void draft_pack_op(Tensor slots, Tensor query_start, Tensor num_rejected, Tensor target_ids,
                   Tensor target_positions, Tensor target_hidden, Tensor next_ids,
                   Tensor lookahead_ids, Tensor row_start, int64_t num_rows, Tensor kept_ids,
                   Tensor kept_hidden, Tensor num_kept, Tensor end, Tensor assumed, Tensor out_ids,
                   Tensor out_positions, Tensor out_hidden, Tensor out_row_start,
                   Tensor out_seq_lens, Tensor out_last_row, Tensor out_slots, Tensor out_lookahead,
                   std::vector<Tensor> block_tables, std::vector<int64_t> block_sizes,
                   std::optional<int64_t> max_len, OptionalTensor out_kv_slots,
                   OptionalTensor target_rope, OptionalTensor kept_rope, OptionalTensor out_rope) {
  const MemoryArgs memory{kept_ids, kept_hidden, num_kept, end, assumed};
  const DraftPackArgs args{
      slots,         query_start,   num_rejected,  target_ids,   target_positions, target_hidden,
      next_ids,      lookahead_ids, row_start,     num_rows,     memory,           out_ids,
      out_positions, out_hidden,    out_row_start, out_seq_lens, out_last_row,     out_slots,
      out_lookahead, block_tables,  block_sizes,   max_len,      out_kv_slots,     target_rope,
      kept_rope,     out_rope};
  check_draft_pack(args);
  run(draft_pack_params(args), kv_tables(args), slots);
}

// ---- draft_step ---------------------------------------------------------------------------------

struct DraftStepArgs {
  OptionalTensor values;
  Tensor ids;
  int64_t step;
  Tensor input_ids, positions, hidden, row_start, last_row, slots, lookahead, draft_ids;
  MemoryArgs memory;
  OptionalTensor rope, kept_rope;
};

inline void check_draft_step(const DraftStepArgs& a) {
  const Expect expect("draft_step", a.ids);
  expect.that(a.ids.dim() == 2 && a.ids.size(0) >= 1 && (a.values || a.ids.size(0) == 1),
              "ids expected shape ", a.values ? "[S >= 1, B]" : "[1, B]", ", got ",
              shape_name(a.ids.sizes()));
  expect.that(a.draft_ids.dim() == 2 && a.draft_ids.size(1) >= 1,
              "draft_ids expected shape [M, K >= 1], got ", shape_name(a.draft_ids.sizes()));
  const int64_t slices = a.ids.size(0), requests = a.ids.size(1);
  const int64_t most_requests = a.draft_ids.size(0), drafts = a.draft_ids.size(1);
  const int64_t most_rows = a.input_ids.numel(), past = drafts - 1;
  expect.that(requests <= most_requests, "ids expected B <= ", most_requests, ", got ",
              shape_name(a.ids.sizes()));
  expect.that(0 <= a.step && a.step < drafts, "step expected 0 to ", past, ", got ", a.step);
  if (a.values) expect.tensor("values", *a.values, {ScalarType::Float}, {slices, requests});
  expect_ints(expect, "ids", a.ids, {slices, requests});
  expect_ints(expect, "input_ids", a.input_ids, {most_rows});
  expect_ints(expect, "positions", a.positions, {most_rows});
  expect_ints(expect, "row_start", a.row_start, {most_requests + 1});
  expect_ints(expect, "last_row", a.last_row, {most_requests});
  expect_ints(expect, "slots", a.slots, {most_requests});
  expect_ints(expect, "lookahead", a.lookahead, {most_requests, past});
  expect_ints(expect, "draft_ids", a.draft_ids, {most_requests, drafts});
  expect.that(most_rows >= 1, "input_ids expected at least one row, got none");
  expect.that(a.hidden.dim() == 2, "hidden expected shape [", most_rows, ", H], got ",
              shape_name(a.hidden.sizes()));
  expect.tensor("hidden", a.hidden, {a.hidden.scalar_type()}, {most_rows, a.hidden.size(1)});
  check_memory(expect, a.memory, past, a.hidden);
  expect.that(a.rope.has_value() == a.kept_rope.has_value(),
              "rope and kept_rope expected both or neither");
  if (a.rope) {
    expect.that(a.rope->dim() == 2, "rope expected shape [A, R], got ",
                shape_name(a.rope->sizes()));
    expect_ints(expect, "rope", *a.rope, {a.rope->size(0), most_rows});
    expect_contiguous(expect, "kept_rope", *a.kept_rope, ScalarType::Long,
                      {a.memory.end.numel(), a.rope->size(0), past});
  }
}

// Of checked arguments.
inline DraftStepParams draft_step_params(const DraftStepArgs& a) {
  DraftStepParams p{};
  p.slices = a.ids.size(0);
  p.requests = a.ids.size(1);
  p.step = a.step;
  p.most_rows = a.input_ids.numel();
  p.axes = a.rope ? a.rope->size(0) : 0;
  p.values = static_cast<const float*>(data_or_null(a.values));
  p.values_stride = a.values ? a.values->stride(0) : 0;
  p.ids = read_ints(a.ids);
  p.positions = read_ints(a.positions);
  p.row_start = read_ints(a.row_start);
  p.last_row = read_ints(a.last_row);
  p.slots = read_ints(a.slots);
  p.lookahead = read_ints(a.lookahead);
  p.rope = read_ints(a.rope);
  p.input_ids = written_ints(a.input_ids);
  p.draft_ids = written_ints(a.draft_ids);
  p.hidden = hidden_rows(a.hidden, read_pointer(a.hidden));
  p.memory = draft_memory(a.memory, a.kept_rope, true);
  return p;
}

// The op: run(parameters, a tensor of the device).
template <auto run>
void draft_step_op(OptionalTensor values, Tensor ids, int64_t step_index, Tensor input_ids,
                   Tensor positions, Tensor hidden, Tensor row_start, Tensor last_row, Tensor slots,
                   Tensor lookahead, Tensor draft_ids, Tensor kept_ids, Tensor kept_hidden,
                   Tensor num_kept, Tensor end, Tensor assumed, OptionalTensor rope,
                   OptionalTensor kept_rope) {
  const MemoryArgs memory{kept_ids, kept_hidden, num_kept, end, assumed};
  const DraftStepArgs args{values,   ids,   step_index, input_ids, positions, hidden, row_start,
                           last_row, slots, lookahead,  draft_ids, memory,    rope,   kept_rope};
  check_draft_step(args);
  run(draft_step_params(args), ids);
}

}  // namespace mtp
