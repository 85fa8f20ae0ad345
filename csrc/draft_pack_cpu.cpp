// draft_pack on CPU; contract and reference: mtp_kernels/ops/draft_pack.py.
#include <limits>
#include <vector>

#include "draft.h"

namespace mtp {
namespace {

struct Args {
  Tensor slots, query_start, num_rejected, target_ids, target_positions, target_hidden, next_ids,
      lookahead_ids, row_start;
  int64_t num_rows;
  Memory memory;
  Tensor out_ids, out_positions, out_hidden, out_row_start, out_seq_lens, out_last_row, out_slots,
      out_lookahead;
  std::vector<Tensor> block_tables;
  std::vector<int64_t> block_sizes;
  std::optional<int64_t> max_len;
  OptionalTensor out_kv_slots, target_rope, kept_rope, out_rope;
};

void check(const Args& a) {
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

// Of one request: the repair window, then its surviving rows, then unused ones.
struct Rows {
  int64_t slot;            // -1 = padding
  int64_t start;           // in the buffers
  int64_t count;           // reserved, of which
  int64_t window;          // come first and
  int64_t num_new;         // follow
  int64_t first;           // surviving row, in the target's tensors
  int64_t first_position;  // of that row
};

void pack(const Args& a) {
  const int64_t requests = a.slots.numel(), targets = a.target_ids.numel(), num_rows = a.num_rows;
  const int64_t past = a.memory.assumed.size(1), num_slots = a.memory.end.numel();
  const int64_t axes = a.out_rope ? a.out_rope->size(0) : 0;
  const int64_t max_len = a.max_len.value_or(std::numeric_limits<int64_t>::max());
  const Ints slots(a.slots), query_start(a.query_start), num_rejected(a.num_rejected),
      target_ids(a.target_ids), target_positions(a.target_positions), next_ids(a.next_ids),
      lookahead_ids(a.lookahead_ids), row_start(a.row_start), kept_ids(a.memory.kept_ids),
      num_kept(a.memory.num_kept), end(a.memory.end), assumed(a.memory.assumed);
  const OutInts out_ids(a.out_ids), out_positions(a.out_positions), out_row_start(a.out_row_start),
      out_seq_lens(a.out_seq_lens), out_last_row(a.out_last_row), out_slots(a.out_slots),
      out_lookahead(a.out_lookahead);
  const Ints target_rope(a.target_rope), kept_rope(a.kept_rope);
  const OutInts out_rope(a.out_rope), out_kv_slots(a.out_kv_slots);
  const std::vector<Ints> tables(a.block_tables.begin(), a.block_tables.end());
  const HiddenRows target_hidden(a.target_hidden), kept_hidden(a.memory.kept_hidden);
  const HiddenRows out_hidden(a.out_hidden);

  const bool in_order = ascends(row_start, requests + 1);
  const auto first_row = [&](int64_t b) {
    return in_order ? std::clamp<int64_t>(row_start.at(b), 0, num_rows) : num_rows;
  };

  const auto plan = [&](int64_t b) {
    const auto query = [&](int64_t i) {
      return std::clamp<int64_t>(query_start.at(i), 0, targets);
    };
    Rows r{};
    r.start = first_row(b);
    r.count = first_row(b + 1) - r.start;
    r.first = query(b);
    const int64_t rejected = std::max<int64_t>(0, num_rejected.at(b));
    r.num_new = std::clamp<int64_t>(query(b + 1) - r.first - rejected, 0, r.count);
    r.slot = -1;
    if (r.num_new == 0) return r;
    r.first_position = target_positions.at(r.first);
    if (slots.at(b) < 0 || slots.at(b) >= num_slots) return r;
    r.slot = slots.at(b);
    if (end.at(r.slot) != r.first_position) return r;
    // How many of the tokens assumed last round are confirmed by the tokens known now.
    int64_t confirmed = 0;
    for (; confirmed < std::min(past, r.num_new); ++confirmed) {
      const bool is_last = confirmed == r.num_new - 1;
      const int64_t known = is_last ? next_ids.at(b) : target_ids.at(r.first + 1 + confirmed);
      if (known != assumed.at(r.slot, confirmed)) break;
    }
    const int64_t wanted = std::min(past - confirmed, num_kept.at(r.slot));
    r.window = std::clamp<int64_t>(wanted, 0, r.count - r.num_new);
    return r;
  };

  const auto kv_slot = [&](int64_t b, size_t group, int64_t position) -> int64_t {
    if (position < 0 || position >= max_len) return -1;
    const int64_t size = a.block_sizes[group], column = position / size;
    if (column >= a.block_tables[group].size(1)) return -1;
    const int64_t block = tables[group].at(b, column);
    return block < 0 ? -1 : block * size + position % size;
  };

  const auto write = [&](int64_t b, const Rows& r) {
    const int64_t used = r.window + r.num_new;
    out_seq_lens.set(b, r.count ? r.first_position - r.window + r.count : 0);
    out_last_row.set(b, r.count ? r.start + std::max<int64_t>(used, 1) - 1 : 0);
    out_slots.set(b, r.slot);
    for (int64_t i = 0; i < past; ++i) out_lookahead.set(b, i, lookahead_ids.at(b, i));
    for (int64_t i = 0; i < r.count; ++i) {
      const int64_t row = r.start + i, behind = i - r.window, position = r.first_position + behind;
      int64_t id = 0;
      if (behind < 0)
        id = kept_ids.at(r.slot, past + behind);
      else if (behind < r.num_new - 1)
        id = target_ids.at(r.first + behind + 1);
      else if (i < used)
        id = next_ids.at(b);
      out_ids.set(row, id);
      out_positions.set(row, position);
      for (int64_t axis = 0; axis < axes; ++axis) {
        int64_t rope = 0;
        if (behind < 0)
          rope = kept_rope.at((r.slot * axes + axis) * past + past + behind);
        else if (i < used)
          rope = target_rope.at(axis, r.first + behind);
        out_rope.set(axis, row, rope);
      }
      for (size_t group = 0; group < tables.size(); ++group)
        out_kv_slots.set(group, row, r.slot >= 0 && i < used ? kv_slot(b, group, position) : -1);
    }
    if (r.window)
      copy_rows(out_hidden, r.start, kept_hidden, (r.slot + 1) * past - r.window, r.window);
    copy_rows(out_hidden, r.start + r.window, target_hidden, r.first, r.num_new);
    for (int64_t i = used; i < r.count; ++i)
      std::memset(out_hidden.row(r.start + i), 0, out_hidden.bytes);
  };

  const auto clear = [&](int64_t from, int64_t to) {  // rows of no request
    for (int64_t row = from; row < to; ++row) {
      out_ids.set(row, 0);
      out_positions.set(row, 0);
      for (int64_t axis = 0; axis < axes; ++axis) out_rope.set(axis, row, 0);
      for (size_t group = 0; group < tables.size(); ++group) out_kv_slots.set(group, row, -1);
      std::memset(out_hidden.row(row), 0, out_hidden.bytes);
    }
  };

  for (int64_t b = 0; b <= a.out_slots.numel(); ++b)
    out_row_start.set(b, b <= requests ? first_row(b) : num_rows);
  for (int64_t b = requests; b < a.out_slots.numel(); ++b) {
    out_seq_lens.set(b, 0);
    out_last_row.set(b, 0);
    out_slots.set(b, -1);
    for (int64_t i = 0; i < past; ++i) out_lookahead.set(b, i, -1);
  }
  for (size_t group = 0; group < tables.size(); ++group)
    for (int64_t row = num_rows; row < a.out_ids.numel(); ++row) out_kv_slots.set(group, row, -1);
  if (requests == 0) return;
  clear(0, first_row(0));
  clear(first_row(requests), num_rows);
  // Below about 256 KB a second thread costs more than it saves.
  const int64_t request_bytes = out_hidden.bytes * (num_rows / requests + 1);
  const int64_t grain = std::max<int64_t>(1, (1 << 18) / std::max<int64_t>(request_bytes, 1));
  torch::stable::parallel_for(0, requests, grain, [&](int64_t from, int64_t to) {
    for (int64_t b = from; b < to; ++b) write(b, plan(b));
  });
}

void draft_pack_cpu(Tensor slots, Tensor query_start, Tensor num_rejected, Tensor target_ids,
                    Tensor target_positions, Tensor target_hidden, Tensor next_ids,
                    Tensor lookahead_ids, Tensor row_start, int64_t num_rows, Tensor kept_ids,
                    Tensor kept_hidden, Tensor num_kept, Tensor end, Tensor assumed, Tensor out_ids,
                    Tensor out_positions, Tensor out_hidden, Tensor out_row_start,
                    Tensor out_seq_lens, Tensor out_last_row, Tensor out_slots,
                    Tensor out_lookahead, std::vector<Tensor> block_tables,
                    std::vector<int64_t> block_sizes, std::optional<int64_t> max_len,
                    OptionalTensor out_kv_slots, OptionalTensor target_rope,
                    OptionalTensor kept_rope, OptionalTensor out_rope) {
  const Memory memory{kept_ids, kept_hidden, num_kept, end, assumed};
  const Args args{slots,         query_start,  num_rejected,  target_ids,    target_positions,
                  target_hidden, next_ids,     lookahead_ids, row_start,     num_rows,
                  memory,        out_ids,      out_positions, out_hidden,    out_row_start,
                  out_seq_lens,  out_last_row, out_slots,     out_lookahead, block_tables,
                  block_sizes,   max_len,      out_kv_slots,  target_rope,   kept_rope,
                  out_rope};
  check(args);
  pack(args);
}

STABLE_TORCH_LIBRARY_IMPL(mtp_kernels, CPU, m) { m.impl("draft_pack", TORCH_BOX(&draft_pack_cpu)); }

}  // namespace
}  // namespace mtp
