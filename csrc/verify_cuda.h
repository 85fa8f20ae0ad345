// The op verify on CUDA but for the launches. Contract and reference: mtp_kernels/ops/verify.py.
#pragma once

#include <limits>
#include <type_traits>

#include "verify_args.h"

namespace mtp {

// Places the scratch from an address on; returns its bytes.
inline int64_t place_scratch(VerifyCall& c, uint64_t address) {
  VerifyScratch& s = c.scratch;
  s.blocks = (c.vocab + kBlock - 1) / kBlock;
  s.slots = c.drafts + 1 + (c.draft_logits ? c.drafts : 0);
  const int64_t rows = c.requests * s.slots;
  int64_t bytes = 0;
  const auto place = [&](auto*& array, int64_t count) {
    array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(address + bytes);
    bytes += (count * static_cast<int64_t>(sizeof(*array)) + 15) / 16 * 16;
  };
  place(s.block_laws, rows * s.blocks);
  place(s.laws, rows);
  place(s.chances, c.requests * c.drafts);
  place(s.residual_masses, c.draft_logits ? c.requests * s.blocks : 0);
  if (has_filters(c)) {
    place(s.groups, rows * s.blocks * kFilterGroups);
    place(s.arrived, c.requests);
  }
  return bytes;
}

// launch(call, a tensor of the device) fills the outputs.
template <auto launch>
void verify_with_scratch(const VerifyParams& p, const Tensor& any) {
  if (p.requests == 0) return;
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  if (p.vocab > most - kBlock)
    fail("verify: logits expected at most ", most - kBlock, " columns on CUDA, got ", p.vocab);
  VerifyCall c{p, {}};
  Tensor scratch = empty(any, {place_scratch(c, 0)}, ScalarType::Byte);
  place_scratch(c, reinterpret_cast<uint64_t>(scratch.mutable_data_ptr()));
  if (p.requests * c.scratch.slots * c.scratch.blocks > most)
    fail("verify: blocks of ", kBlock, " logits expected at most ", most, " on CUDA, got ",
         p.requests * c.scratch.slots * c.scratch.blocks);
  launch(c, any);
}

inline unsigned verify_reduce_blocks(const VerifyCall& c) {
  return static_cast<unsigned>(c.requests * c.scratch.slots * c.scratch.blocks);
}
inline unsigned verify_decide_blocks(const VerifyCall& c) {
  return static_cast<unsigned>(c.requests * (c.scratch.groups ? c.scratch.slots : 1));
}

}  // namespace mtp
