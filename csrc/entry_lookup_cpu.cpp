// Host side of the entry_lookup op on CPU; contract and reference: mtp_kernels/ops/entry_lookup.py.
#include "entry_cpu_host.h"

namespace mtp {
namespace {

Tensor entry_lookup_cpu(Tensor hidden_part, Tensor input_ids, Tensor projected,
                        OptionalTensor proj_bias, OptionalTensor positions, bool zero_at_position_0,
                        int64_t vocab_start, bool strict_ids) {
  const Expect expect("entry_lookup", hidden_part);
  const Rows rows = check_hidden_part(expect, hidden_part);
  expect_model_dtype(expect, "projected", projected);
  const ScalarType dtype = projected.scalar_type();

  EntryLookupParams p{};
  p.out_features = hidden_part.size(1);
  p.dtype = float_dtype(projected);
  p.hidden_part = static_cast<const float*>(hidden_part.const_data_ptr());
  p.hidden_part_stride = hidden_part.stride(0);
  p.lookup = check_lookup(expect, {input_ids, positions, zero_at_position_0, vocab_start},
                          "projected", projected, dtype, p.out_features, rows);
  if (proj_bias) expect.tensor("proj_bias", *proj_bias, {dtype}, {p.out_features});
  p.bias = data_or_null(proj_bias);
  if (strict_ids) check_ids("entry_lookup", p.lookup, rows.count);

  Tensor out = empty(projected, {rows.count, p.out_features}, dtype);
  if (p.out_features == 0) return out;
  p.out = out.mutable_data_ptr();
  torch::stable::parallel_for(
      0, rows.count, row_grain(p.out_features),
      [&](int64_t begin, int64_t end) { entry_cpu_kernels().look_up(p, begin, end); });
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(mtp_kernels, CPU, m) {
  m.impl("entry_lookup", TORCH_BOX(&entry_lookup_cpu));
}

}  // namespace
}  // namespace mtp
