"""The API over the verify op: what it adds to the op."""

from dataclasses import replace

import pytest
import torch
from cases import VERIFY_ROWS, VerifyRow, verify_inputs
from torch import Tensor

from mtp_kernels import verification
from mtp_kernels.ops import verify as op
from mtp_kernels.verification import Drafts, Penalties, Sampling


def _sampling(inputs: dict) -> Sampling:
    penalties = None
    if "penalty_rows" in inputs:
        penalties = Penalties(
            rows=inputs["penalty_rows"],
            output_counts=inputs["output_counts"],
            prompt_mask=inputs["prompt_mask"],
            presence=inputs["presence_penalty"],
            frequency=inputs["frequency_penalty"],
            repetition=inputs["repetition_penalty"],
        )
    names = ("temperature", "seeds", "top_k", "top_p", "min_p", "bias_ids", "bias_values")
    return Sampling(**{name: inputs.get(name) for name in names}, penalties=penalties)


@pytest.mark.parametrize("row", VERIFY_ROWS, ids=lambda row: row.id)
def test_processed_logits_are_the_law_that_tokens_are_drawn_from(row: VerifyRow) -> None:
    inputs = verify_inputs(row)
    given = {name: None for name in op.verify.__annotations__ if name != "return"}
    given |= {"draft_kind": "logits", "stream": "target"} | inputs
    arguments = (inputs["logits"], inputs["cu_rows"], inputs["draft_ids"], _sampling(inputs))
    before = inputs["logits"].clone()
    adjusted = verification.adjusted_logits(*arguments, inputs.get("allowed_mask"))
    processed = verification.processed_logits(*arguments, inputs.get("allowed_mask"))
    assert torch.equal(before.nan_to_num(), inputs["logits"].nan_to_num())
    bounds = inputs["cu_rows"].tolist()
    for b in range(row.requests):
        request = op.Request(b, **given)
        for i, at in enumerate(range(bounds[b], bounds[b + 1])):
            logits, law = request._logits(i), request.target(i)
            torch.testing.assert_close(adjusted[at], logits, rtol=0, atol=0, equal_nan=True)
            if not law.is_finite:
                continue
            is_kept = law.weights.view(-1)[: row.vocab] > 0
            if inputs["temperature"][b] < verification.GREEDY_BELOW:
                assert torch.equal(processed[at], logits)
            else:  # a token may weigh nothing and still be above the cut
                assert not (is_kept & (processed[at] == -torch.inf)).any()
                chances = law.lanes().view(-1)[: row.vocab]
                assert (processed[at].softmax(-1) - chances).abs().max() < 1e-6


def _two_rounds(p: Tensor, q: Tensor, count: int, fresh_seeds: bool) -> Tensor:
    """The first two tokens of `count` texts under `block`, every token p, every draft q."""
    vocab, num_drafts = p.numel(), 2
    texts = torch.full((count, 2 + num_drafts), -1)
    length = torch.zeros(count, dtype=torch.int64)
    while (todo := (length < 2).nonzero()[:, 0]).numel():
        num, first = todo.numel(), length[todo]
        sampling = Sampling(temperature=torch.ones(num), seeds=todo)
        seeds = verification.round_seeds(todo, first) if fresh_seeds else todo
        drafting = replace(sampling, seeds=seeds)
        law, draft_law = p.log().expand(3 * num, -1), q.log().expand(2 * num, -1)
        ids = [
            verification.sample(draft_law[:num], first + i, drafting, stream="draft")
            for i in range(num_drafts)
        ]
        verified = verification.verify(
            law,
            torch.arange(num + 1) * 3,
            (first[:, None] + torch.arange(3)).flatten(),
            Drafts(torch.stack(ids, 1), draft_law),
            sampling,
            method="block",
        )
        for i in range(num_drafts + 1):
            has = verified.token_ids[:, i] >= 0
            texts[todo[has], first[has] + i] = verified.token_ids[has, i]
        length[todo] += verified.num_accepted + 1
    assert texts.max() < vocab
    return texts[:, :2]


@pytest.mark.parametrize("fresh_seeds", [True, False])
def test_drafts_for_block_need_seeds_per_round(fresh_seeds: bool) -> None:
    """The second token's chi-square against p; 27.6 is exceeded once in 1e6 by chance."""
    p, q = torch.tensor([0.18, 0.47, 0.35]), torch.tensor([0.25, 0.03, 0.72])
    count = 200_000
    second = _two_rounds(p, q, count, fresh_seeds)[:, 1].bincount(minlength=3)
    statistic = float(((second - count * p) ** 2 / (count * p)).sum())
    assert (statistic < 27.6) is fresh_seeds, statistic


def test_slow_paths_check_like_the_op() -> None:
    logits, cu_rows = torch.zeros(4, 8), torch.tensor([0, 2, 4])
    ids = torch.zeros(2, 1, dtype=torch.int64)
    sampling = verification.Sampling(torch.ones(2), torch.arange(2))
    for slow in (verification.adjusted_logits, verification.processed_logits):
        for bad, text in (
            ({"cu_rows": torch.tensor([2, 1, 0])}, "cu_rows expected to start at 0, got 2"),
            ({"allowed_mask": torch.zeros(1, 1, dtype=torch.int32)}, "allowed_mask expected shape"),
            (
                {"sampling": verification.Sampling(torch.ones(5), torch.arange(2))},
                "temperature expected shape",
            ),
        ):
            inputs = {"cu_rows": cu_rows, "sampling": sampling} | bad
            with pytest.raises(RuntimeError, match=text):
                slow(logits=logits, draft_ids=ids, **inputs)
        nobody = verification.Sampling(torch.zeros(0), torch.zeros(0, dtype=torch.int64))
        got = slow(logits, torch.tensor([0]), ids[:0], nobody)
        assert torch.equal(got, logits)
        tables = verification.Penalties(
            rows=torch.tensor([0, -1]),
            output_counts=torch.zeros(0, 8, dtype=torch.int32),
            prompt_mask=torch.zeros(0, 1, dtype=torch.int32),
            presence=torch.ones(2),
            frequency=torch.ones(2),
            repetition=torch.ones(2),
        )
        assert torch.equal(slow(logits, cu_rows, ids, replace(sampling, penalties=tables)), logits)


def test_pack_bits_wants_flags() -> None:
    with pytest.raises(ValueError, match="flags: expected bool"):
        verification.pack_bits(torch.tensor([2, 1, 0]))
