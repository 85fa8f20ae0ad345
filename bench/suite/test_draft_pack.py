"""draft_pack: the rows of one draft round, in one launch."""

from typing import Any

import torch
from cases import BF16, DRAFT_BENCH, DraftBench, DraftRow, draft_pack_inputs
from interleaved import OURS, VLLM, Contest, agree
from torch import Tensor

from mtp_kernels.ops.draft_pack import draft_pack
from suite import stock

ROWS = DRAFT_BENCH
NOTES = {
    "torch": "the op's PyTorch reference, eager",
    VLLM: "set_inputs_first_pass of its proposer: ids, positions and hidden states, without the "
    "repair rows and the KV slots of ours",
}


def outputs(inputs: dict[str, Any]) -> dict[str, Tensor]:
    return {name: x for name, x in inputs.items() if name.startswith("out_")}


def cloned(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: x.clone() if isinstance(x, Tensor) else x for name, x in inputs.items()}


class Stock:
    """vLLM's proposer before its first pass, on the inputs of draft_pack."""

    def __init__(self, row: DraftBench, inputs: dict[str, Any]) -> None:
        self.inputs, count = inputs, inputs["target_ids"].numel()
        self.proposer = stock.Proposer(None, row.K, max(count, 1), row.H)
        start = inputs["query_start"].int()
        table = torch.zeros(row.B, 1, dtype=torch.int32)
        self.metadata = stock.metadata(start, torch.ones(row.B, dtype=torch.int32), table)
        self.rejected = inputs["num_rejected"].int()
        self.to_sample = start[1:] - 1 - self.rejected
        self.ids, self.next_ids = inputs["target_ids"].int(), inputs["next_ids"].int()

    def __call__(self) -> None:
        self.proposer.set_inputs_first_pass(
            self.ids,
            self.next_ids,
            self.inputs["target_positions"],
            self.inputs["target_hidden"][: self.ids.numel()],
            self.to_sample,
            self.metadata,
            self.rejected,
        )


def check_vllm(row: DraftBench, inputs: dict[str, Any]) -> None:
    """Where nothing was rejected and nothing is remembered, both make the same rows."""
    inputs = cloned(inputs)
    inputs["num_rejected"].zero_()
    inputs["end"].fill_(-1)
    torch.ops.mtp_kernels.draft_pack(**inputs)
    vllm = Stock(row, inputs)
    vllm()
    lengths = inputs["query_start"].diff().tolist()
    pairs = zip(inputs["row_start"].tolist(), lengths, strict=False)
    rows = torch.cat([torch.arange(start, start + length) for start, length in pairs])
    for ours, theirs in (
        ("out_ids", "input_ids"),
        ("out_positions", "positions"),
        ("out_hidden", "hidden_states"),
    ):
        torch.testing.assert_close(
            getattr(vllm.proposer, theirs), inputs[ours][rows], rtol=0, atol=0, msg=theirs
        )


def test_draft_pack(row: DraftBench, contest: Contest) -> None:
    drafts = DraftRow("", BF16, row.B, row.K, row.H, frozenset({"kv"}))
    inputs, others = draft_pack_inputs(drafts), draft_pack_inputs(drafts)

    def ours() -> dict[str, Tensor]:
        torch.ops.mtp_kernels.draft_pack(**inputs)
        return outputs(inputs)

    def reference() -> dict[str, Tensor]:
        draft_pack(**others)
        return outputs(others)

    def same(ours: dict[str, Tensor], other: dict[str, Tensor]) -> None:
        torch.testing.assert_close(other, ours, rtol=0, atol=0)

    contenders = {OURS: ours}
    if not row.alone:
        contenders["torch"] = reference
    agree(contenders, same)
    if not row.alone:
        check_vllm(row, inputs)
        contenders[VLLM] = Stock(row, inputs)
    hidden_bytes = inputs["num_rows"] * row.H * BF16.itemsize
    contest("draft_pack", contenders, moved=2 * hidden_bytes, notes=NOTES)
