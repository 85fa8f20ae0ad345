// draft_pack on CPU; contract and reference: mtp_kernels/ops/draft_pack.py.
#include "draft_args.h"
#include "draft_cpu.h"

namespace mtp {
namespace {

void pack(const DraftPackParams& p, const std::vector<KvTable>& tables, const Tensor&) {
  const bool in_order = ascends(p.row_start, p.requests + 1);

  const auto write = [&](int64_t b) {
    const RequestRows r = request_rows(p, b, in_order);
    write_request(p, b, r);
    for (int64_t i = 0; i < r.count; ++i) {
      const int64_t row = r.start + i;
      p.out_ids.set(row, row_id(p, b, r, i));
      p.out_positions.set(row, r.first_position + i - r.window);
      for (int64_t axis = 0; axis < p.axes; ++axis)
        p.out_rope.set(axis, row, row_rope(p, axis, r, i));
      for (int64_t group = 0; group < p.groups; ++group)
        p.out_kv_slots.set(group, row, row_kv_slot(p, tables[group], b, r, i));
    }
    if (r.window)
      copy_rows(p.out_hidden, r.start, p.memory.kept_hidden,
                (r.slot + 1) * p.memory.past - r.window, r.window);
    copy_rows(p.out_hidden, r.start + r.window, p.target_hidden, r.first, r.num_new);
    for (int64_t i = r.used(); i < r.count; ++i)
      std::memset(p.out_hidden.row(r.start + i), 0, p.out_hidden.bytes);
  };

  const auto clear = [&](int64_t from, int64_t to) {  // rows of no request
    for (int64_t row = from; row < to; ++row) {
      p.out_ids.set(row, 0);
      p.out_positions.set(row, 0);
      for (int64_t axis = 0; axis < p.axes; ++axis) p.out_rope.set(axis, row, 0);
      for (int64_t group = 0; group < p.groups; ++group) p.out_kv_slots.set(group, row, -1);
      std::memset(p.out_hidden.row(row), 0, p.out_hidden.bytes);
    }
  };

  for (int64_t b = 0; b <= p.most_requests; ++b) p.out_row_start.set(b, first_row(p, b, in_order));
  for (int64_t b = p.requests; b < p.most_requests; ++b) write_request(p, b, {});
  for (int64_t group = 0; group < p.groups; ++group)
    for (int64_t row = p.rows; row < p.most_rows; ++row) p.out_kv_slots.set(group, row, -1);
  if (p.requests == 0) return;
  clear(0, first_row(p, 0, in_order));
  clear(first_row(p, p.requests, in_order), p.rows);
  // Below about 256 KB a second thread costs more than it saves.
  const int64_t request_bytes = p.out_hidden.bytes * (p.rows / p.requests + 1);
  const int64_t grain = most(1, (1 << 18) / most(request_bytes, 1));
  torch::stable::parallel_for(0, p.requests, grain, [&](int64_t from, int64_t to) {
    for (int64_t b = from; b < to; ++b) write(b);
  });
}

STABLE_TORCH_LIBRARY_IMPL(mtp_kernels, CPU, m) {
  m.impl("draft_pack", TORCH_BOX(&draft_pack_op<&pack>));
}

}  // namespace
}  // namespace mtp
