// draft_step on CPU; contract and reference: mtp_kernels/ops/draft_step.py.
#include "draft_args.h"
#include "draft_cpu.h"

namespace mtp {
namespace {

// The id of each request's highest value, the lowest of equals. Slice by slice, as they lie.
std::vector<int64_t> best_ids(const DraftStepParams& p) {
  constexpr float lowest = -std::numeric_limits<float>::infinity();
  std::vector<int64_t> best(p.requests, kNoId);
  std::vector<float> highest(p.requests, lowest);
  for (int64_t s = 0; s < p.slices; ++s) {
    const float* row = p.values ? p.values + s * p.values_stride : nullptr;
    for (int64_t b = 0; b < p.requests; ++b) {
      const float value = row && row[b] > lowest ? row[b] : lowest;  // NaN too is the lowest
      if (value > highest[b] || (value == highest[b] && p.ids.at(s, b) < best[b])) {
        highest[b] = value;
        best[b] = p.ids.at(s, b);
      }
    }
  }
  for (int64_t& id : best) id = id == kNoId ? 0 : id;
  return best;
}

void remember(const DraftStepParams& p, const StepRows& r) {
  const DraftMemory& m = p.memory;
  const int64_t count = kept_rows(p, r), start = r.last + 1 - count;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t kept = m.past - count + i;
    m.kept_ids[r.slot * m.past + kept] = p.input_ids.at(start + i);
    for (int64_t axis = 0; axis < p.axes; ++axis)
      m.kept_rope[(r.slot * p.axes + axis) * m.past + kept] = p.rope.at(axis, start + i);
  }
  copy_rows(m.kept_hidden, (r.slot + 1) * m.past - count, p.hidden, start, count);
  m.num_kept[r.slot] = count;
  m.end[r.slot] = p.positions.at(r.last) + 1;
}

void step(const DraftStepParams& p, const Tensor&) {
  const std::vector<int64_t> drafted = best_ids(p);
  const bool in_order = ascends(p.row_start, p.requests + 1);
  for (int64_t b = 0; b < p.requests; ++b) {
    const StepRows r = step_rows(p, b, in_order);
    p.draft_ids.set(b, p.step, r.any ? drafted[b] : -1);
    if (!r.any) continue;
    if (r.slot >= 0 && p.step == 0) remember(p, r);
    if (p.step == p.memory.past) continue;
    const int64_t fed = fed_id(p, b, drafted[b]);
    if (r.slot >= 0) p.memory.assumed[r.slot * p.memory.past + p.step] = fed;
    for (int64_t row = r.first; row < r.last; ++row) p.input_ids.set(row, p.input_ids.at(row + 1));
    p.input_ids.set(r.last, fed);
  }
}

STABLE_TORCH_LIBRARY_IMPL(mtp_kernels, CPU, m) {
  m.impl("draft_step", TORCH_BOX(&draft_step_op<&step>));
}

}  // namespace
}  // namespace mtp
