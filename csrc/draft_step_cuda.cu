// Host side of draft_step on CUDA. Compiled, not yet run: no GPU was at hand. Contract and
// reference: mtp_kernels/ops/draft_step.py.
#include "cuda_host.h"
#include "draft_args.h"
#include "draft_step.cuh"

namespace mtp {
namespace {

void step(const DraftStepParams& p, const Tensor& any) {
  if (p.requests == 0) return;
  const CurrentStream stream(any);
  draft_step_kernel<<<draft_step_blocks(p), kDraftThreads, 0, stream>>>(p);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

STABLE_TORCH_LIBRARY_IMPL(mtp_kernels, CUDA, m) {
  m.impl("draft_step", TORCH_BOX(&draft_step_op<&step>));
}

}  // namespace
}  // namespace mtp
