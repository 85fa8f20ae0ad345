"""draft_step: what lies between two MTP layers, in one launch."""

from collections.abc import Callable
from typing import Any

import torch
from cases import BENCH_VOCAB, BF16, DRAFT_BENCH, DraftBench, DraftRow, draft_step_inputs
from interleaved import OURS, VLLM, Contest, agree
from torch import Tensor

from mtp_kernels.ops.draft_step import OP, draft_step
from mtp_kernels.ops.head_argmax import SLICE
from suite import stock

ROWS = DRAFT_BENCH
SLICES = BENCH_VOCAB // SLICE  # winners of the head, of which this op takes the best
NOTES = {
    "torch": "the op's PyTorch reference, eager",
    VLLM: "the C++ kernel and the copies into buffers of its draft loop, in our reading: one row "
    "a request; it neither chooses the token nor remembers anything for a repair",
}
WRITTEN = "input_ids draft_ids kept_ids kept_hidden num_kept end assumed".split()


def vllm_step(row: DraftBench, drafted: Tensor, hidden: Tensor) -> Callable[[], Tensor]:
    """drafted: [B], hidden: [B, H], of the layer before. Returns the ids that the next is fed."""
    proposer = stock.Proposer(None, row.K, row.B, row.H)
    blocks = stock.MAX_LEN // stock.BLOCK
    table = torch.arange(row.B * blocks, dtype=torch.int32).view(row.B, blocks)
    start = torch.arange(row.B + 1, dtype=torch.int32)
    metadata = stock.metadata(start, torch.full((row.B,), 100, dtype=torch.int32), table)
    positions = torch.full((row.B,), 99)

    def step() -> Tensor:
        ids = drafted.int()
        proposer._update_positions_dependent_metadata(
            positions, metadata, row.B, row.B, stock.BLOCK
        )
        proposer.input_ids[: row.B] = ids
        proposer.hidden_states[: row.B] = hidden
        return proposer.input_ids[: row.B]

    return step


def test_draft_step(row: DraftBench, contest: Contest) -> None:
    drafts = DraftRow("", BF16, row.B, row.K, row.H)
    inputs, others = draft_step_inputs(drafts), draft_step_inputs(drafts)
    gen = torch.Generator().manual_seed(1)
    values = torch.randn(SLICES, row.B, generator=gen)
    winners = {"values": values, "ids": torch.randint(0, BENCH_VOCAB, values.shape, generator=gen)}

    def run(step: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Tensor]:
        step(**arguments | winners)
        return {name: arguments[name] for name in WRITTEN}

    def same(ours: dict[str, Tensor], other: dict[str, Tensor]) -> None:
        torch.testing.assert_close(other, ours, rtol=0, atol=0)

    contenders: dict[str, Callable[[], Any]] = {OURS: lambda: run(OP, inputs)}
    if not row.alone:
        contenders["torch"] = lambda: run(draft_step, others)
    agree(contenders, same)
    if not row.alone:
        best = winners["ids"].gather(0, values.argmax(0, keepdim=True))[0]
        torch.testing.assert_close(inputs["draft_ids"][: row.B, 0], best, rtol=0, atol=0)
        contenders[VLLM] = vllm_step(row, best, inputs["hidden"][: row.B])
        torch.testing.assert_close(contenders[VLLM]().long(), best, rtol=0, atol=0)
    rows = int(inputs["num_kept"][inputs["slots"][: row.B]].sum())  # that step 0 has remembered
    moved = 2 * rows * row.H * BF16.itemsize + sum(x.nbytes for x in winners.values())
    contest("draft_step", contenders, moved=moved, notes=NOTES)
