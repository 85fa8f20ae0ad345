// The ops as CPU ops of a library of their own: the host code of the CUDA ops, with the launches
// emulated. tests/emulation.py declares their schemas.
#include "draft_args.h"
#include "entry_cuda.h"
#include "kernels.h"
#include "verify_cuda.h"

namespace mtp {
namespace {

void pack(const DraftPackParams& p, const std::vector<KvTable>& tables, const Tensor&) {
  emulate_draft_pack(p, limited_tables(tables));
}

void step(const DraftStepParams& p, const Tensor&) {
  if (p.requests > 0) emulate_draft_step(p);
}

void normalize(const EntryParams& p, const Tensor&) { emulate_entry(p); }

void verify(const VerifyCall& c, const Tensor&) {
  emulate_verify(c, verify_reduce_blocks(c), verify_decide_blocks(c));
}

STABLE_TORCH_LIBRARY_IMPL(mtp_emulation, CPU, m) {
  m.impl("draft_pack", TORCH_BOX(&draft_pack_op<&pack>));
  m.impl("draft_step", TORCH_BOX(&draft_step_op<&step>));
  m.impl("entry", TORCH_BOX(&entry_op<&normalize>));
  m.impl("verify", TORCH_BOX(&verify_op<&verify_with_scratch<&verify>>));
}

}  // namespace
}  // namespace mtp
