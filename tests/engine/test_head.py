"""`vllm.head.DraftHead` over heads made by hand: shards, prunings, and heads it cannot fuse."""

from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from mtp_kernels import verification
from mtp_kernels.ops.head_argmax import best_ids
from mtp_kernels.verification import Sampling
from mtp_kernels.vllm import adapter
from mtp_kernels.vllm import head as module
from mtp_kernels.vllm.head import DraftHead

VOCAB, SIZE = 300, 64


def lm_head(weight: torch.Tensor, rank: int = 0, ranks: int = 1, **other) -> SimpleNamespace:
    """A rank's lm_head as vLLM makes it: the vocabulary, padded to 64 per rank, in equal parts."""
    part = -(-VOCAB // (64 * ranks)) * 64
    start = min(rank * part, VOCAB)
    stop = min(start + part, VOCAB)
    rows = torch.full((part, SIZE), torch.nan, dtype=weight.dtype)  # padding must not win
    rows[: stop - start] = weight[start:stop]
    values = {
        "weight": rows,
        "quant_method": UnquantizedLinearMethod(),
        "org_vocab_size": VOCAB,
        "num_embeddings_per_partition": part,
        "num_embeddings_padded": part * ranks,
        "tp_size": 1,  # the test gathers
        "shard_indices": SimpleNamespace(
            org_vocab_start_index=start,
            org_vocab_end_index=stop,
            padded_org_vocab_start_index=rank * part,
        ),
    }
    return SimpleNamespace(**values | other)


def processor(**other) -> SimpleNamespace:
    values = {"head_dtype": None, "scale": 1.0, "soft_cap": None}
    return SimpleNamespace(**values | other)


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(VOCAB, SIZE, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def scored() -> torch.Tensor:
    return torch.randn(9, SIZE, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("vocab", [None, [299, 3, 150, 151, 7], list(range(100))])
def test_ranks_together_choose_the_best(weight, scored, dtype, ranks, vocab) -> None:
    """Also where a rank holds nothing of the pruned vocabulary, and its padding is NaN."""
    weight, scored = weight.to(dtype), scored.to(dtype)
    parts = [
        DraftHead(lm_head(weight, rank, ranks), processor(), vocab).best(scored)
        for rank in range(ranks)
    ]
    assert len({values.shape for values, _ in parts}) == 1  # a gather wants equal parts
    values, ids = (torch.cat(each) for each in zip(*parts, strict=True))
    logits = torch.nn.functional.linear(scored, weight).float()
    if vocab is not None:
        logits[:, [token not in vocab for token in range(VOCAB)]] = -torch.inf
    assert torch.equal(best_ids(values, ids), logits.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [[299, 3, 150, 151, 7], list(range(100))])
def test_sampled_drafts_are_of_the_kept_tokens(weight, scored, dtype, vocab) -> None:
    """What they were sampled from says so: -inf for the others, whose rows are not read."""
    weight, scored = weight.to(dtype), scored.to(dtype)
    nans = weight.clone()
    nans[[token not in vocab for token in range(VOCAB)]] = torch.nan
    head = DraftHead(lm_head(nans), processor(), vocab, writes_logits=True)
    sampling = Sampling(torch.full((9,), 50.0), torch.arange(9))
    drafted, logits = head.sample(scored, torch.arange(9), 1, sampling, "standard")
    assert logits.shape == (9, VOCAB) and set(drafted.tolist()) <= set(vocab)
    wanted = torch.full_like(logits, -torch.inf)
    wanted[:, vocab] = torch.nn.functional.linear(scored, weight)[:, vocab]
    torch.testing.assert_close(logits, wanted)
    values, ids = head.best(scored)
    assert torch.equal(best_ids(values, ids), wanted.argmax(-1))


@pytest.mark.parametrize("ranks", [1, 3])
def test_coupled_race_is_that_of_the_whole_head(weight, scored, ranks: int) -> None:
    sampling = Sampling(torch.full((9,), 0.8), torch.arange(9))
    drafted = {}
    for number in (1, ranks):
        parts = [
            DraftHead(lm_head(weight, rank, number), processor()).sample(
                scored, torch.arange(9), 2, sampling, "coupled"
            )
            for rank in range(number)
        ]
        assert all(logits is None for _, logits in parts)
        drafted[number] = best_ids(
            *(torch.cat(each) for each in zip(*(choice for choice, _ in parts), strict=True))
        )
    assert torch.equal(drafted[1], drafted[ranks])
    logits = torch.nn.functional.linear(scored, weight)
    positions = torch.arange(9) + 2
    wanted = verification.sample(logits, positions, sampling, method="coupled")
    assert torch.equal(drafted[1], wanted)
    assert not torch.equal(wanted, logits.argmax(-1))


@pytest.mark.parametrize(
    ("head", "logits", "words"),
    [
        ({"quant_method": object()}, {}, r"lm_head is quantized \(object\)"),
        ({}, {"head_dtype": torch.float32}, "head_dtype is torch.float32"),
        ({}, {"soft_cap": 30.0}, "scaled or capped"),
        ({}, {"scale": 0.5}, "scaled or capped"),
        ({"bias": torch.zeros(VOCAB)}, {}, "lm_head has a bias"),
    ],
)
def test_what_cannot_be_fused_is_said(
    weight, scored, monkeypatch, caplog, head, logits, words
) -> None:
    """Once, and drafts are then chosen from logits; a pruned vocabulary is refused."""
    made = lm_head(weight.bfloat16(), **head)
    module.warn_once.cache_clear()
    for _ in range(2):
        draft_head = DraftHead(made, processor(**logits))
    assert sum("chosen from written logits" in text for text in caplog.messages) == 1
    assert not draft_head.is_fused and draft_head.describe() == "unfused"
    monkeypatch.setattr(draft_head, "_logits_processor", lambda _, x: x @ weight.T)
    assert torch.equal(draft_head.best(scored), (scored @ weight.T).argmax(-1))
    with pytest.raises(ValueError, match=f"MTP_KERNELS_DRAFT_VOCAB: .*{words}"):
        DraftHead(made, processor(**logits), [1, 2])


def test_the_log_tells_what_is_copied(weight) -> None:
    assert DraftHead(lm_head(weight), processor()).describe() == "fused, 300 of 300 ids"
    packed = DraftHead(lm_head(weight.bfloat16()), processor())
    assert packed.describe() == "fused, 300 of 300 ids, 0.0 MiB of its own"
    pruned = DraftHead(lm_head(weight), processor(), [5, 9])
    assert pruned.describe() == "fused, 2 of 300 ids, 0.0 MiB of its own"


def test_a_vocabulary_is_refused_where_vllm_samples_the_drafts(
    weight, monkeypatch, tmp_path
) -> None:
    """vLLM would draw from all tokens; greedy drafts, and those we sample, keep to the file."""
    file = tmp_path / "ids.txt"
    file.write_text("7\n3\n250\n")
    monkeypatch.setenv("MTP_KERNELS_DRAFT_VOCAB", f"{file}:2")
    model = SimpleNamespace(
        lm_head=lm_head(weight), model=SimpleNamespace(logits_processor=processor())
    )
    for method, samples in ((None, False), ("block", True), ("coupled", True)):
        head = adapter.prepare(model, None, method, samples)
        assert head.describe().startswith("fused, 2 of 300 ids")
    with pytest.raises(ValueError, match="MTP_KERNELS_DRAFT_VOCAB: vLLM samples the drafts here"):
        adapter.prepare(model, None, None, True)
    file.write_text("300\n")
    with pytest.raises(ValueError, match=r"DRAFT_VOCAB=.*:2: .*line 1: expected a token id in \["):
        adapter.prepare(model, None, "block", True)
