// The op entry on CUDA but for the launch: one kernel for the gather and both norms, then torch's
// linear. Contract and reference: mtp_kernels/ops/entry.py.
#pragma once

#include "entry_args.h"

namespace mtp {

inline Tensor linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  StableIValue stack[] = {torch::stable::detail::from(input), torch::stable::detail::from(weight),
                          torch::stable::detail::from(bias)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "", stack, TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// launch(parameters, a tensor of the device) fills `normed`.
template <auto launch>
Tensor entry_op(Tensor hidden, Tensor enorm_weight, Tensor hnorm_weight, Tensor proj_weight,
                OptionalTensor input_ids, OptionalTensor embed_weight, OptionalTensor inputs_embeds,
                OptionalTensor proj_bias, OptionalTensor positions,
                OptionalTensor embed_norm_weight, double enorm_eps, double hnorm_eps,
                double embed_norm_eps, int64_t gamma_offset, bool hidden_first,
                bool zero_at_position_0, int64_t vocab_start, bool strict_ids) {
  EntryParams p = check_entry({hidden,
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
  if (strict_ids)
    fail("entry: strict_ids expected False on CUDA, where raising would stall the host");
  if (p.proj.packed)
    fail("entry: proj_weight expected shape [H_out, 2H] on CUDA, got a packed one");

  Tensor normed = empty(hidden, {p.rows, 2 * p.hidden_size}, hidden.scalar_type());
  p.normed = normed.mutable_data_ptr();
  p.normed_stride = 2 * p.hidden_size;
  if (p.rows > 0) launch(p, hidden);
  Tensor out = linear(normed, proj_weight, proj_bias);
  return hidden.dim() == 1 ? torch::stable::view(out, {p.proj.out_features}) : out;
}

}  // namespace mtp
