// Host side of verify on CUDA. Compiled, not yet run: no GPU was at hand.
#include "cuda_host.h"
#include "verify.cuh"
#include "verify_cuda.h"

namespace mtp {
namespace {

void launch(const VerifyCall& c, const Tensor& any) {
  const CurrentStream stream(any);
  const auto reduce =
      c.method == Method::coupled ? verify_reduce_kernel<true> : verify_reduce_kernel<false>;
  reduce<<<verify_reduce_blocks(c), kReduceThreads, 0, stream>>>(c);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  const auto decide =
      c.method == Method::coupled ? verify_decide_kernel<true> : verify_decide_kernel<false>;
  decide<<<verify_decide_blocks(c), kDecideThreads, 0, stream>>>(c);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

STABLE_TORCH_LIBRARY_IMPL(mtp_kernels, CUDA, m) {
  m.impl("verify", TORCH_BOX(&verify_op<&verify_with_scratch<&launch>>));
}

}  // namespace
}  // namespace mtp
