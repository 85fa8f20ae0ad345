// The device code of the ops, compiled as host code; and what Python asks of the emulation.
#include "kernels.h"

#include "cuda_emulation.h"
#include "draft_pack.cuh"
#include "draft_step.cuh"
#include "entry.cuh"
#include "verify.cuh"

namespace mtp {

void emulate_draft_pack(const DraftPackParams& p, const KvTables& tables) {
  cuda_emulation::launch(draft_pack_kernel, dim3{draft_pack_blocks(p)}, dim3{kDraftThreads}, 0, p,
                         tables);
}

void emulate_draft_step(const DraftStepParams& p) {
  cuda_emulation::launch(draft_step_kernel, dim3{draft_step_blocks(p)}, dim3{kDraftThreads}, 0, p);
}

void emulate_entry(const EntryParams& p) {
  const auto launch = [&](auto kernel) {
    cuda_emulation::launch(kernel, dim3{static_cast<unsigned>(p.rows)}, dim3{kEntryThreads}, 0, p);
  };
  switch (p.dtype) {
    case DType::bf16:
      return launch(entry_norm_kernel<__nv_bfloat16>);
    case DType::fp16:
      return launch(entry_norm_kernel<__half>);
    case DType::fp32:
      return launch(entry_norm_kernel<float>);
  }
}

void emulate_verify(const VerifyCall& c, unsigned reduce_blocks, unsigned decide_blocks) {
  const auto reduce =
      c.method == Method::coupled ? verify_reduce_kernel<true> : verify_reduce_kernel<false>;
  cuda_emulation::launch(reduce, dim3{reduce_blocks}, dim3{kReduceThreads}, 0, c);
  const auto decide = [&](auto kernel) {
    cuda_emulation::launch(kernel, dim3{decide_blocks}, dim3{kDecideThreads}, 0, c);
  };
  switch (c.method) {
    case Method::standard:
      return decide(verify_decide_kernel<Method::standard>);
    case Method::block:
      return decide(verify_decide_kernel<Method::block>);
    case Method::coupled:
      return decide(verify_decide_kernel<Method::coupled>);
    case Method::synthetic:
      return decide(verify_decide_kernel<Method::synthetic>);
  }
}

}  // namespace mtp

// For Python.
#pragma GCC visibility push(default)
extern "C" {

void emulation_seed(uint64_t seed) { cuda_emulation::set_seed(seed); }

// Bytes moved since the last call.
void emulation_traffic(uint64_t* read, uint64_t* written) {
  *read = cuda_emulation::traffic.read;
  *written = cuda_emulation::traffic.written;
  cuda_emulation::traffic = {};
}
}
#pragma GCC visibility pop
