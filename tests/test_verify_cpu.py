"""verify on CPU: each instruction set bit for bit, large and far rows, memory."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from torch import Tensor

from mtp_kernels import _C
from mtp_kernels.ops import verify as op

verify = torch.ops.mtp_kernels.verify.default


def assert_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g, w) and g.dtype == w.dtype


def on_every_path(inputs: dict[str, Any]) -> None:
    """The reference's integers, on each instruction set, on one thread and on several."""
    want = op.verify(**inputs)
    for isa in cases.CPU_ISAS:
        for count in (1, 3):
            with cases.cpu_isa(isa), cases.threads(count):
                assert_same(verify(**inputs), want)


def sampling(logits: Tensor, drafts: Tensor, **options: Any) -> dict[str, Any]:
    """Requests with as many rows each, at temperature 0.8."""
    b, k = drafts.shape
    inputs = {
        "logits": logits,
        "draft_ids": drafts,
        "cu_rows": torch.arange(b + 1) * (k + 1),
        "positions": torch.arange(logits.shape[0]),
        "temperature": torch.full((b,), 0.8),
        "seeds": torch.arange(b) * 7919 - 5,
    }
    return inputs | options


# ---- Arithmetic ---------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", cases.CPU_ISAS)
def test_arithmetic_is_that_of_every_backend(isa: str) -> None:
    table = json.loads(Path(__file__).with_name("exact_vectors.json").read_text())
    with cases.cpu_isa(isa):
        for *key, words in table.pop("philox"):
            assert list(_C.philox(*key)) == words
        for function, (bits, results) in table.items():
            assert _C.exact(function, bits) == results, function


def test_arithmetic_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="expected exp2, log or exponential, got 'sin'"):
        _C.exact("sin", [0])


# ---- Decisions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1000, 1001, 1005])
def test_random_requests(seed: int) -> None:
    on_every_path(cases.verify_inputs(cases.random_verify_row(seed), seed))


AWKWARD = {
    "equal": lambda x: torch.zeros_like(x),
    "two values": lambda x: x.sign(),
    "whole numbers": lambda x: (3 * x).round(),
    "both zeros": lambda x: torch.where(x > 1, 0.0, -0.0),
    "subnormal": lambda x: x * 1e-40,
    "close together": lambda x: 1000 + x * 1e-3,
    "far apart": lambda x: x * 5e37,
    "mostly forbidden": lambda x: torch.where(x > 2.5, x, -torch.inf),
    "one by one": lambda x: torch.arange(x.shape[1]).flip(0).expand_as(x) / 64,
}
FILTERS = [  # top_k, top_p, min_p
    (1, 1.0, 0.0),
    (60, 1.0, 0.0),
    (170, 1.0, 0.0),  # more than there are chunks
    (8192, 1.0, 0.0),
    (0, 1e-6, 0.0),
    (0, 0.3, 0.0),
    (0, 0.999, 0.0),
    (0, 1 - 2**-24, 0.0),
    (0, 1.0, 1e-30),
    (0, 1.0, 0.2),
    (0, 1.0, 1.0),
    (8000, 0.9, 1e-4),
    (50, 0.5, 0.0),
    (170, 0.99, 0.1),
]


@pytest.mark.parametrize("kind", AWKWARD)
def test_cuts_of_awkward_logits(kind: str) -> None:
    """Cuts are found without sorting, unlike in the reference: ties, any scale, any width.

    Each filter has two requests, with the last token it keeps and the first it does not as drafts.
    With a q of almost nothing a draft is accepted exactly if it is kept.
    """
    x = torch.randn(8193, generator=torch.Generator().manual_seed(1))[None]
    row = AWKWARD[kind](x)[0].to(cases.FP32)
    temperature = torch.tensor(0.8)
    drafts = []
    for top_k, top_p, min_p in FILTERS:
        cuts = op.Cuts(top_k or None, torch.tensor(top_p), torch.tensor(min_p) if min_p else None)
        cut = op.cut_of(row, op.exact.LOG2_E / temperature, temperature, cuts)
        drafts += [
            torch.where(row >= cut, row, torch.inf).argmin(),
            torch.where(row < cut, row, -torch.inf).argmax(),
        ]
    b = len(drafts)
    top_k, top_p, min_p = (torch.tensor(x) for x in zip(*FILTERS, strict=True))
    inputs = sampling(
        row.expand(2 * b, -1),
        torch.stack(drafts)[:, None],
        draft_logits=torch.full((1, 8193), 1e-30).expand(b, -1),
        draft_kind="probs",
        top_k=top_k.repeat_interleave(2),
        top_p=top_p.repeat_interleave(2),
        min_p=min_p.repeat_interleave(2),
    )
    on_every_path(inputs)


@pytest.mark.parametrize("vocab", [151_936, 152_576])
def test_vocabularies_of_models(vocab: int) -> None:
    gen = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(9, vocab, generator=gen) * 3).to(cases.BF16)
    drafts = logits.view(3, 3, vocab)[:, :2].argmax(-1)
    options = {
        "temperature": torch.tensor([0.7, 0.0, 1.3]),
        "top_k": torch.tensor([0, 0, 3000]),
        "top_p": torch.tensor([1.0, 1.0, 0.9]),
    }
    for method in ("standard", "coupled"):
        on_every_path(sampling(logits, drafts, method=method, **options))
    near = logits.view(3, 3, vocab)[:, :2].reshape(6, vocab) + 0.5
    options["top_p"] = torch.tensor([0.95, 1.0, 1.0])
    on_every_path(sampling(logits, drafts, method="block", draft_logits=near, **options))


# ---- Memory -------------------------------------------------------------------------------------


def test_rows_further_apart_than_32_bits() -> None:
    """Only the pages of the rows are ever touched."""
    stride, vocab = 2**31 + 64, 5000
    storage = torch.empty(2 * stride + vocab, dtype=cases.BF16)
    far = storage.as_strided((3, vocab), (stride, 1))
    far.copy_(torch.randn(3, vocab, generator=torch.Generator().manual_seed(0)) * 4)
    drafts = far[:2].float().argmax(-1)[None]
    for options in ({}, {"temperature": torch.zeros(1)}, {"top_p": torch.tensor([0.9])}):
        want = op.verify(**sampling(far.clone(), drafts, **options))
        assert_same(verify(**sampling(far, drafts, **options)), want)
        q = {"draft_logits": far[:2].clone(), "method": "block"}
        want = op.verify(**sampling(far.clone(), drafts, **options, **q))
        q["draft_logits"] = far[:2]
        assert_same(verify(**sampling(far, drafts, **options, **q)), want)


MEASURE = """
import resource, sys, torch
import mtp_kernels
requests, drafts, vocab = 64, 16, 151_936
torch.set_num_threads(2)
kind, method = sys.argv[1:]
row = torch.randn(vocab, generator=torch.Generator().manual_seed(0)).mul_(2).bfloat16()
rows = row.expand(requests * (drafts + 1), vocab)  # the same memory for all: only extra is seen
options = dict(method=method)
if "q" in kind:
    options["draft_logits"] = row.expand(requests * drafts, vocab)
if "filters" in kind:
    options["top_k"] = torch.full((requests,), 50)
    options["top_p"] = torch.full((requests,), 0.95)
def run(count):
    count_rows = count * (drafts + 1)
    cut = {k: x[:count] if k in ("top_k", "top_p") else x for k, x in options.items()}
    if "q" in kind:
        cut["draft_logits"] = cut["draft_logits"][: count * drafts]
    return torch.ops.mtp_kernels.verify(
        rows[:count_rows], torch.full((count, drafts), int(row.argmax())),
        torch.arange(count + 1) * (drafts + 1), torch.arange(count_rows),
        torch.full((count,), 0.7), torch.arange(count), **cut)
run(1)  # threads, allocator
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(requests)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize(
    "kind, method", [("plain", "standard"), ("q filters", "block"), ("filters", "coupled")]
)
def test_no_copy_of_the_logits(kind: str, method: str) -> None:
    """64 requests with 16 drafts, V = 151,936: 330 MB of bf16 logits, twice that in fp32."""
    command = [sys.executable, "-c", MEASURE, kind, method]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(run.stdout) < 64 * 1024  # KiB
