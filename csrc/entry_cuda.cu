// Host side of the entry op on CUDA: one kernel for the gather and both norms, then torch's linear.
// Compiled, not yet run: no GPU was at hand. Contract and reference: mtp_kernels/ops/entry.py.
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

#include "entry.cuh"
#include "entry_args.h"

namespace mtp {
namespace {

Tensor linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  StableIValue stack[] = {torch::stable::detail::from(input), torch::stable::detail::from(weight),
                          torch::stable::detail::from(bias)};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::linear", "", stack, TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor entry_cuda(Tensor hidden, Tensor enorm_weight, Tensor hnorm_weight, Tensor proj_weight,
                  OptionalTensor input_ids, OptionalTensor embed_weight,
                  OptionalTensor inputs_embeds, OptionalTensor proj_bias, OptionalTensor positions,
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

  const torch::stable::accelerator::DeviceGuard guard(hidden.get_device_index());
  Tensor normed = torch::stable::new_empty(hidden, {p.rows, 2 * p.hidden_size});
  p.normed = normed.mutable_data_ptr();
  p.normed_stride = 2 * p.hidden_size;
  if (p.rows > 0) {
    void* stream = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(
        aoti_torch_get_current_cuda_stream(hidden.get_device_index(), &stream));
    const auto launch = [&](auto kernel) {
      kernel<<<static_cast<unsigned>(p.rows), kEntryThreads, 0,
               static_cast<cudaStream_t>(stream)>>>(p);
    };
    switch (p.dtype) {
      case DType::bf16:
        launch(entry_norm_kernel<__nv_bfloat16>);
        break;
      case DType::fp16:
        launch(entry_norm_kernel<__half>);
        break;
      case DType::fp32:
        launch(entry_norm_kernel<float>);
        break;
    }
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
  Tensor out = linear(normed, proj_weight, proj_bias);
  return hidden.dim() == 1 ? torch::stable::view(out, {p.proj.out_features}) : out;
}

STABLE_TORCH_LIBRARY_IMPL(mtp_kernels, CUDA, m) { m.impl("entry", TORCH_BOX(&entry_cuda)); }

}  // namespace
}  // namespace mtp
