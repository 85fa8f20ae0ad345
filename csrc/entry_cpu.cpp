// Host side of the entry op on CPU; contract and reference: mtp_kernels/ops/entry.py.
#include "entry_cpu.h"

#include "cpu_isa.h"
#include "entry_args.h"

namespace mtp {
namespace {

const EntryCpuKernels& kernels() {
  switch (cpu_isa()) {
#if defined(__x86_64__)
    case CpuIsa::avx512_bf16:
      return entry_cpu_avx512_bf16;
    case CpuIsa::avx512:
      return entry_cpu_avx512;
    case CpuIsa::avx2:
      return entry_cpu_avx2;
#endif
    default:
      return entry_cpu_scalar;
  }
}

void check_ids(const EntryParams& p) {
  for (int64_t t = 0; t < p.rows; ++t) {
    const int64_t id = p.ids_are_int64 ? static_cast<const int64_t*>(p.ids)[t]
                                       : static_cast<const int32_t*>(p.ids)[t];
    if (id < p.vocab_start || id - p.vocab_start >= p.vocab_rows)
      fail("entry: input_ids expected ids in [", p.vocab_start, ", ", p.vocab_start + p.vocab_rows,
           "), got ", id, " at row ", t);
  }
}

Tensor entry_cpu(Tensor hidden, Tensor enorm_weight, Tensor hnorm_weight, Tensor proj_weight,
                 OptionalTensor input_ids, OptionalTensor embed_weight,
                 OptionalTensor inputs_embeds, OptionalTensor proj_bias, OptionalTensor positions,
                 OptionalTensor embed_norm_weight, double enorm_eps, double hnorm_eps,
                 double embed_norm_eps, int64_t gamma_offset, bool hidden_first,
                 bool zero_at_position_0, int64_t vocab_start, bool strict_ids) {
  const EntryArgs args{
      hidden,         enorm_weight, hnorm_weight, proj_weight,        input_ids,   embed_weight,
      inputs_embeds,  proj_bias,    positions,    embed_norm_weight,  enorm_eps,   hnorm_eps,
      embed_norm_eps, gamma_offset, hidden_first, zero_at_position_0, vocab_start, strict_ids};
  EntryParams p = check_entry(args);
  if (strict_ids && p.ids) check_ids(p);

  Tensor out = hidden.dim() == 1 ? torch::stable::new_empty(hidden, {p.out_features})
                                 : torch::stable::new_empty(hidden, {p.rows, p.out_features});
  if (p.rows == 0 || p.out_features == 0) return out;

  const EntryCpuKernels& k = kernels();
  p.normed_stride = (2 * p.hidden_size + kNormedMultiple - 1) / kNormedMultiple * kNormedMultiple;
  Tensor normed = torch::stable::new_empty(
      hidden, {p.rows, p.normed_stride},
      k.normed_is_bf16(p.dtype) ? ScalarType::BFloat16 : ScalarType::Float);
  p.normed = normed.mutable_data_ptr();
  p.out = out.mutable_data_ptr();

  // Grains: about 10 us of work, below which a second thread costs more than it saves.
  const int64_t norm_grain = std::max<int64_t>(1, 65536 / (2 * p.hidden_size));
  torch::stable::parallel_for(0, p.rows, norm_grain,
                              [&](int64_t begin, int64_t end) { k.norm_rows(p, begin, end); });
  const int64_t panels = (p.out_features + kPanel - 1) / kPanel;
  const int64_t panel_work = kPanel * 2 * p.hidden_size * std::min<int64_t>(p.rows, 16);
  torch::stable::parallel_for(0, panels, std::max<int64_t>(1, (1 << 18) / panel_work),
                              [&](int64_t begin, int64_t end) { k.project_panels(p, begin, end); });
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(mtp_kernels, CPU, m) { m.impl("entry", TORCH_BOX(&entry_cpu)); }

}  // namespace
}  // namespace mtp
