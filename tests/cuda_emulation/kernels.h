// Launches of the ops' kernels in the emulation.
#pragma once

#include "draft.h"
#include "entry.h"
#include "verify.h"

namespace mtp {

void emulate_draft_pack(const DraftPackParams& p, const KvTables& tables);
void emulate_draft_step(const DraftStepParams& p);
void emulate_entry(const EntryParams& p);
// Grids of so many blocks.
void emulate_verify(const VerifyCall& c, unsigned reduce_blocks, unsigned decide_blocks);

}  // namespace mtp
