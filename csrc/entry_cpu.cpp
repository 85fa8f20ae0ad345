// Host side of the entry op on CPU; contract and reference: mtp_kernels/ops/entry.py.
#include "cpu_isa.h"
#include "entry_cpu_host.h"

namespace mtp {

const EntryCpuKernels& entry_cpu_kernels() {
  switch (cpu_isa()) {
#if defined(__x86_64__)
    case CpuIsa::amx:
      return entry_cpu_amx;
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

namespace {

Tensor entry_cpu(Tensor hidden, Tensor enorm_weight, Tensor hnorm_weight, Tensor proj_weight,
                 OptionalTensor input_ids, OptionalTensor embed_weight,
                 OptionalTensor inputs_embeds, OptionalTensor proj_bias, OptionalTensor positions,
                 OptionalTensor embed_norm_weight, double enorm_eps, double hnorm_eps,
                 double embed_norm_eps, int64_t gamma_offset, bool hidden_first,
                 bool zero_at_position_0, int64_t vocab_start, bool strict_ids) {
  const EntryParams p = check_entry({hidden,
                                     hnorm_weight,
                                     proj_weight,
                                     proj_bias,
                                     {{input_ids, positions, zero_at_position_0, vocab_start},
                                      embed_weight,
                                      inputs_embeds,
                                      embed_norm_weight,
                                      enorm_weight,
                                      enorm_eps,
                                      embed_norm_eps},
                                     hnorm_eps,
                                     gamma_offset,
                                     hidden_first});
  if (strict_ids && input_ids) check_ids("entry", p.embedding.lookup, p.rows);

  const ScalarType dtype = hidden.scalar_type();
  Tensor out = hidden.dim() == 1 ? empty(hidden, {p.proj.out_features}, dtype)
                                 : empty(hidden, {p.rows, p.proj.out_features}, dtype);
  norm_and_project(p, out);
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(mtp_kernels, CPU, m) { m.impl("entry", TORCH_BOX(&entry_cpu)); }

}  // namespace
}  // namespace mtp
