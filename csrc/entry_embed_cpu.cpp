// Host side of the entry_embed op on CPU; contract and reference: mtp_kernels/ops/entry_embed.py.
#include "entry_cpu_host.h"

namespace mtp {
namespace {

Tensor entry_embed_cpu(Tensor hidden_part, Tensor enorm_weight, Tensor proj_weight,
                       OptionalTensor input_ids, OptionalTensor embed_weight,
                       OptionalTensor inputs_embeds, OptionalTensor proj_bias,
                       OptionalTensor positions, OptionalTensor embed_norm_weight, double enorm_eps,
                       double embed_norm_eps, int64_t gamma_offset, bool hidden_first,
                       bool zero_at_position_0, int64_t vocab_start, bool strict_ids) {
  const Expect expect("entry_embed", hidden_part);
  const Rows rows = check_hidden_part(expect, hidden_part);
  expect_model_dtype(expect, "enorm_weight", enorm_weight);
  expect.that(enorm_weight.dim() == 1 && enorm_weight.numel() >= 1,
              "enorm_weight expected shape [H >= 1], got ", shape_name(enorm_weight.sizes()));
  check_gamma_offset(expect, gamma_offset);
  const ScalarType dtype = enorm_weight.scalar_type();

  EntryParams p{};
  p.rows = rows.count;
  p.hidden_size = enorm_weight.numel();
  p.dtype = float_dtype(enorm_weight);
  const EmbeddingArgs embedding{{input_ids, positions, zero_at_position_0, vocab_start},
                                embed_weight,
                                inputs_embeds,
                                embed_norm_weight,
                                enorm_weight,
                                enorm_eps,
                                embed_norm_eps};
  p.embedding = check_embedding(expect, embedding, gamma_offset, dtype, p.hidden_size, rows);
  p.proj = check_half(expect, "proj_weight", proj_weight, dtype, p.hidden_size, hidden_first);
  expect.shape("hidden_part", hidden_part, {rows.count, p.proj.out_features});
  if (proj_bias) expect.tensor("proj_bias", *proj_bias, {dtype}, {p.proj.out_features});
  p.proj_bias = data_or_null(proj_bias);
  p.hidden_part = static_cast<const float*>(hidden_part.const_data_ptr());
  p.hidden_part_stride = hidden_part.stride(0);
  if (strict_ids && input_ids) check_ids("entry_embed", p.embedding.lookup, p.rows);

  Tensor out = empty(enorm_weight, {p.rows, p.proj.out_features}, dtype);
  norm_and_project(p, out);
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(mtp_kernels, CPU, m) {
  m.impl("entry_embed", TORCH_BOX(&entry_embed_cpu));
}

}  // namespace
}  // namespace mtp
