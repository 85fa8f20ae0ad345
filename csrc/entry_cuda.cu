// Host side of the entry op on CUDA. Compiled, not yet run: no GPU was at hand.
#include "cuda_host.h"
#include "entry.cuh"
#include "entry_cuda.h"

namespace mtp {
namespace {

void normalize(const EntryParams& p, const Tensor& any) {
  const CurrentStream stream(any);
  const auto launch = [&](auto kernel) {
    kernel<<<static_cast<unsigned>(p.rows), kEntryThreads, 0, stream>>>(p);
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

STABLE_TORCH_LIBRARY_IMPL(mtp_kernels, CUDA, m) {
  m.impl("entry", TORCH_BOX(&entry_op<&normalize>));
}

}  // namespace
}  // namespace mtp
