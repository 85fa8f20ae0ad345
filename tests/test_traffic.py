"""The bytes that GPU kernels move: models beside the kernels, the bars they keep, and that they are
what the kernels do in the CUDA emulation and in Triton's interpreter.

entry's own is in test_entry.py. In a process with TRITON_INTERPRET=1 this file counts what Triton
kernels load and store; one of its tests starts such a process.
"""

import os
from typing import Any

import cases
import emulation
import interpreter
import pytest
import torch

pytest.importorskip("triton")

from mtp_kernels.kernels import draft_pack, draft_step, entry, head_argmax, verify

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

B, K, V = 2, 2, 8192


def verify_inputs(dtype: torch.dtype, num_candidates: int | None) -> dict[str, Any]:
    """Drafts in block 0 that are surely accepted; above the cut, 49 groups more."""
    gen = torch.Generator().manual_seed(0)
    ranks = torch.stack([torch.randperm(V // 32, generator=gen) for _ in range(B * (K + 1))])
    logits = (ranks.repeat_interleave(32, 1) / 16 - 40).to(dtype)
    logits[:, :4096] -= 20
    best = torch.randint(0, 4096, (B * (K + 1),), generator=gen)
    logits[torch.arange(B * (K + 1)), best] = 30
    inputs = {
        "logits": logits,
        "draft_ids": best.view(B, K + 1)[:, :K],
        "cu_rows": torch.arange(0, B * (K + 1) + 1, K + 1),
        "positions": torch.arange(B * (K + 1)),
        "temperature": torch.ones(B),
        "seeds": torch.arange(B),
    }
    if num_candidates is not None:
        inputs |= {"top_k": torch.full((B,), num_candidates), "top_p": torch.full((B,), 0.95)}
    return inputs


if INTERPRETED:

    @pytest.mark.parametrize("dtype", [cases.FP32, cases.FP16])
    @pytest.mark.parametrize("num_candidates", [None, 50])
    def test_verify(dtype: torch.dtype, num_candidates: int | None) -> None:
        inputs = verify_inputs(dtype, num_candidates)
        with interpreter.counted() as launches:
            accepted = verify.verify(**inputs)[1]
        assert accepted.tolist() == [K] * B and len(launches) == 2
        moved = sum(launch.moved() for launch in launches)
        if num_candidates:  # the block drawn from holds one of the row's candidates
            moved += B * 32 * dtype.itemsize
        rest = moved - verify.traffic(B, K, V, dtype.itemsize, num_candidates=num_candidates)
        assert 0 <= rest < 100 * B * (K + 1)  # arguments and results

    @pytest.mark.parametrize("dtype", [cases.FP32, cases.FP16])
    def test_head_argmax(dtype: torch.dtype) -> None:
        inputs = cases.head_inputs(cases.HeadRow("", dtype, 70, 96, 1030))
        with interpreter.counted() as launches:
            head_argmax.head_argmax(**inputs)
        (launch,) = launches
        assert launch.moved() == head_argmax.traffic(70, 96, 1030, dtype.itemsize)

else:

    def test_verify_keeps_its_bars() -> None:
        """64 requests of 3 drafts; 128 groups of 32 lanes are the most that are looked at."""
        assert verify.traffic(64, 3, 152_576) <= 98e6
        assert verify.traffic(64, 3, 152_576, num_candidates=128) <= 176e6
        assert sum(verify.cuda_traffic(64, 3, 152_576)) <= 98e6
        assert sum(verify.cuda_traffic(64, 3, 152_576, num_candidates=128)) <= 176e6

    @pytest.mark.parametrize("dtype", [cases.FP32, cases.FP16])
    @pytest.mark.parametrize("num_candidates", [None, 50])
    def test_emulation_of_verify(dtype: torch.dtype, num_candidates: int | None) -> None:
        inputs = verify_inputs(dtype, num_candidates)
        emulation.traffic()
        assert emulation.op("verify")(**inputs)[1].tolist() == [K] * B
        logits, _ = verify.cuda_traffic(B, K, V, dtype.itemsize, num_candidates=num_candidates)
        assert emulation.traffic() == (logits, 0)

    @pytest.mark.parametrize("row", cases.DRAFT_PACK_ROWS, ids=lambda row: row.id)
    def test_emulation_of_draft_pack(row: cases.DraftRow) -> None:
        inputs = cases.draft_pack_inputs(row)
        emulation.traffic()
        emulation.op("draft_pack")(**inputs)
        num_rows, out = inputs["num_rows"], inputs["out_hidden"]
        num_used = int(out[:num_rows].any(1).sum())
        row_bytes = row.hidden_size * row.dtype.itemsize
        assert emulation.traffic() == draft_pack.traffic(num_rows, num_used, row_bytes)

    @pytest.mark.parametrize("row", cases.DRAFT_STEP_ROWS, ids=lambda row: row.id)
    def test_emulation_of_draft_step(row: cases.DraftRow) -> None:
        inputs = cases.draft_step_inputs(row)
        inputs["num_kept"].zero_()
        emulation.traffic()
        emulation.op("draft_step")(**inputs)
        num_kept, step = int(inputs["num_kept"].sum()), inputs["step"]
        row_bytes = row.hidden_size * row.dtype.itemsize
        assert emulation.traffic() == draft_step.traffic(step, num_kept, row_bytes)
        assert num_kept > 0 or step > 0 or row.drafts == 1 or row.requests == 0

    @pytest.mark.parametrize(
        "row", [row for row in cases.ENTRY_ROWS if "packed" not in row.features], ids=lambda x: x.id
    )
    def test_emulation_of_entry(row: cases.EntryRow) -> None:
        inputs = cases.entry_inputs(row)
        hidden = torch.atleast_2d(inputs["hidden"])
        known = torch.ones(len(hidden), dtype=torch.bool)
        if "input_ids" in inputs:
            ids = inputs["input_ids"] - inputs.get("vocab_start", 0)
            known &= (0 <= ids) & (ids < cases.VOCAB)
        if inputs.get("zero_at_position_0"):
            known &= inputs["positions"] != 0
        emulation.traffic()
        emulation.op("entry")(**inputs)
        assert emulation.traffic() == entry.norms_traffic(
            len(hidden),
            int(known.sum()),
            row.hidden_size,
            row.dtype.itemsize,
            embed_norm="embed_norm" in row.features,
        )

    def test_in_triton_s_interpreter() -> None:
        interpreter.run_tests(__file__)
