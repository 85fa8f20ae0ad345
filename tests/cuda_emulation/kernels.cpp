// The device code of the ops, compiled as host code; and what Python asks of the emulation.
#include "kernels.h"

#include <algorithm>
#include <string_view>

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
  const auto launch = [&](auto reduce, auto decide) {
    cuda_emulation::launch(reduce, dim3{reduce_blocks}, dim3{kReduceThreads}, 0, c);
    cuda_emulation::launch(decide, dim3{decide_blocks}, dim3{kDecideThreads}, 0, c);
  };
  if (c.method == Method::coupled)
    launch(verify_reduce_kernel<true>, verify_decide_kernel<true>);
  else
    launch(verify_reduce_kernel<false>, verify_decide_kernel<false>);
}

}  // namespace mtp

// For Python.
#pragma GCC visibility push(default)
extern "C" {

void emulation_seed(uint64_t seed) { cuda_emulation::set_seed(seed); }

// A function of exact.cuh, on the bits of n floats or words.
void emulation_exact(const char* name, const uint32_t* from, int64_t n, uint32_t* to) {
  const std::string_view function = name;
  for (int64_t i = 0; i < n; ++i) {
    const float x = __uint_as_float(from[i]);
    const float y = function == "exp2"  ? mtp::exp2_exact<0>(x)
                    : function == "log" ? mtp::log_exact(x)
                                        : mtp::exponential(from[i]);
    to[i] = __float_as_uint(y);
  }
}
void emulation_philox(uint64_t seed, uint64_t position, uint32_t purpose, uint32_t lane,
                      uint32_t* to) {
  const mtp::Words words = mtp::philox(seed, position, static_cast<mtp::Purpose>(purpose), lane);
  std::copy(std::begin(words.x), std::end(words.x), to);
}

// Bytes moved since the last call.
void emulation_traffic(uint64_t* read, uint64_t* written) {
  *read = cuda_emulation::traffic.read;
  *written = cuda_emulation::traffic.written;
  cuda_emulation::traffic = {};
}
}
#pragma GCC visibility pop
