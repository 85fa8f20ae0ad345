// draft_step on CPU; contract and reference: mtp_kernels/ops/draft_step.py.
#include <limits>
#include <vector>

#include "draft.h"

namespace mtp {
namespace {

struct Args {
  OptionalTensor values;
  Tensor ids;
  int64_t step;
  Tensor input_ids, positions, hidden, row_start, last_row, slots, lookahead, draft_ids;
  Memory memory;
  OptionalTensor rope, kept_rope;
};

void check(const Args& a) {
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

constexpr int64_t kNoId = std::numeric_limits<int64_t>::max();

// The id of each request's highest value, the lowest of equals. Slice by slice, as they lie.
std::vector<int64_t> best_ids(const OptionalTensor& values, const Tensor& all_ids) {
  constexpr float lowest = -std::numeric_limits<float>::infinity();
  const int64_t slices = all_ids.size(0), requests = all_ids.size(1);
  const Ints ids(all_ids);
  std::vector<int64_t> best(requests, kNoId);
  std::vector<float> highest(requests, lowest);
  for (int64_t s = 0; s < slices; ++s) {
    const float* row = nullptr;
    if (values) row = static_cast<const float*>(values->const_data_ptr()) + s * values->stride(0);
    for (int64_t b = 0; b < requests; ++b) {
      const float value = row && row[b] > lowest ? row[b] : lowest;  // NaN too is the lowest
      if (value > highest[b] || (value == highest[b] && ids.at(s, b) < best[b])) {
        highest[b] = value;
        best[b] = ids.at(s, b);
      }
    }
  }
  for (int64_t& id : best) id = id == kNoId ? 0 : id;
  return best;
}

void step(const Args& a) {
  const int64_t requests = a.ids.size(1), num_rows = a.input_ids.numel();
  const int64_t past = a.lookahead.size(1), num_slots = a.memory.end.numel();
  const int64_t axes = a.rope ? a.rope->size(0) : 0;
  const Ints positions(a.positions), row_start(a.row_start), last_row(a.last_row), slots(a.slots),
      lookahead(a.lookahead), rope(a.rope);
  const OutInts input_ids(a.input_ids), draft_ids(a.draft_ids), kept_ids(a.memory.kept_ids),
      num_kept(a.memory.num_kept), end(a.memory.end), assumed(a.memory.assumed),
      kept_rope(a.kept_rope);
  const HiddenRows hidden(a.hidden), kept_hidden(a.memory.kept_hidden);

  const auto remember = [&](int64_t slot, int64_t first, int64_t last) {
    const int64_t count = std::min(last + 1 - first, past), start = last + 1 - count;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t kept = past - count + i;
      kept_ids.set(slot, kept, input_ids.at(start + i));
      for (int64_t axis = 0; axis < axes; ++axis)
        kept_rope.set((slot * axes + axis) * past + kept, rope.at(axis, start + i));
    }
    copy_rows(kept_hidden, (slot + 1) * past - count, hidden, start, count);
    num_kept.set(slot, count);
    end.set(slot, positions.at(last) + 1);
  };

  const std::vector<int64_t> drafted = best_ids(a.values, a.ids);
  const bool in_order = ascends(row_start, requests + 1);
  for (int64_t b = 0; b < requests; ++b) {
    const int64_t first = row_start.at(b), last = last_row.at(b), slot = slots.at(b);
    const bool has_rows =
        in_order && 0 <= first && first <= last && last < std::min(row_start.at(b + 1), num_rows);
    draft_ids.set(b, a.step, has_rows ? drafted[b] : -1);
    if (!has_rows) continue;
    const bool remembered = 0 <= slot && slot < num_slots;
    if (remembered && a.step == 0) remember(slot, first, last);
    if (a.step == past) continue;
    const int64_t known = lookahead.at(b, a.step), fed = known >= 0 ? known : drafted[b];
    if (remembered) assumed.set(slot, a.step, fed);
    for (int64_t row = first; row < last; ++row) input_ids.set(row, input_ids.at(row + 1));
    input_ids.set(last, fed);
  }
}

void draft_step_cpu(OptionalTensor values, Tensor ids, int64_t step_index, Tensor input_ids,
                    Tensor positions, Tensor hidden, Tensor row_start, Tensor last_row,
                    Tensor slots, Tensor lookahead, Tensor draft_ids, Tensor kept_ids,
                    Tensor kept_hidden, Tensor num_kept, Tensor end, Tensor assumed,
                    OptionalTensor rope, OptionalTensor kept_rope) {
  const Memory memory{kept_ids, kept_hidden, num_kept, end, assumed};
  const Args args{values,   ids,   step_index, input_ids, positions, hidden, row_start,
                  last_row, slots, lookahead,  draft_ids, memory,    rope,   kept_rope};
  check(args);
  step(args);
}

STABLE_TORCH_LIBRARY_IMPL(mtp_kernels, CPU, m) { m.impl("draft_step", TORCH_BOX(&draft_step_cpu)); }

}  // namespace
}  // namespace mtp
