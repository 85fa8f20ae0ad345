// Host side of draft_pack on CUDA. Compiled, not yet run: no GPU was at hand. Contract and
// reference: mtp_kernels/ops/draft_pack.py.
#include "cuda_host.h"
#include "draft_args.h"
#include "draft_pack.cuh"

namespace mtp {
namespace {

void pack(const DraftPackParams& p, const std::vector<KvTable>& tables, const Tensor& any) {
  const KvTables limited = limited_tables(tables);
  const CurrentStream stream(any);
  draft_pack_kernel<<<draft_pack_blocks(p), kDraftThreads, 0, stream>>>(p, limited);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

STABLE_TORCH_LIBRARY_IMPL(mtp_kernels, CUDA, m) {
  m.impl("draft_pack", TORCH_BOX(&draft_pack_op<&pack>));
}

}  // namespace
}  // namespace mtp
