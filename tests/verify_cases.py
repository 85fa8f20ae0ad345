"""Inputs of verify beside the rows of cases.py, for the GPU kernels: what made a wrong one fail."""

from collections.abc import Iterator
from typing import Any

import cases
import torch
from cases import BF16, FP16, FP32, VerifyRow
from torch import Tensor

from mtp_kernels.ops import verify as op


def row(
    id: str, dtype: torch.dtype, shape: tuple[int, int, int], features: str = "", **options: Any
) -> VerifyRow:
    return VerifyRow(id, dtype, *shape, frozenset(features.split()), options)


FILTERS = cases.FILTER_FEATURES
EVERYTHING = f"{cases.ALL_FEATURES} draft_logits draft_rows padded"

# Beside the shared rows: every method with every kind of draft, vocabularies around a block.
ROWS = [
    *(
        row(f"{method}-{kind}-{vocab}", dtype, (5, 3, vocab), features, **options)
        for method in op.METHODS
        for kind, vocab, dtype, features in [
            ("logits", 4097, BF16, "draft_logits ties bad_drafts"),
            ("logits", 33, FP16, f"{EVERYTHING} ties strided"),
            ("filtered_logits", 8193, BF16, f"{FILTERS} draft_logits ties int32"),
            ("filtered_logits", 7, FP32, EVERYTHING),
            ("probs", 1, BF16, EVERYTHING),
            ("probs", 4097, FP32, f"{FILTERS} draft_logits bad_rows draft_rows"),
        ]
        for options in [{"method": method, "draft_kind": kind}]
    ),
    row("no-drafts-coupled", BF16, (4, 0, 8193), FILTERS, method="coupled", stream="draft"),
    row("no-drafts-but-logits", BF16, (4, 0, 33), "draft_logits", draft_kind="probs"),
    row("two-sizes-of-groups", BF16, (2, 1, 262_145), "top_k top_p draft_logits"),
]


def many_above_the_cut() -> dict[str, dict[str, Any]]:
    """Filters that keep more lanes than the second launch gathers: it reads the rows again."""
    found = {}
    settings = {
        "top_k": ([300, 1000, 4000, 9000], None, None),
        "top_p": (None, [0.5, 0.9, 0.99, 1 - 2**-24], None),
        "min_p": (None, None, [1e-2, 1e-3, 1e-6, 1.0]),
        "all": ([4000, 500, 0, 8000], [0.99, 1.0, 0.95, 0.5], [1e-6, 0.0, 1e-4, 1e-9]),
    }
    for name, (top_k, top_p, min_p) in settings.items():
        for dtype in (BF16, FP16, FP32):
            gen = torch.Generator().manual_seed(len(found))
            logits = torch.randn(8, 8193, generator=gen)
            logits[:, :4096] -= 20 * (name == "all")  # a block with little
            logits[1] = 2.5  # all tied
            logits[3] = logits[3].round()
            logits[5, 100:] = -torch.inf
            found[f"many-{name}-{dtype}"] = {
                "logits": logits.to(dtype),
                "draft_ids": torch.randint(0, 8193, (4, 1), generator=gen),
                "cu_rows": torch.arange(0, 9, 2),
                "positions": torch.arange(8),
                "temperature": torch.tensor([1.0, 0.5, 3.0, 1.5]),
                "seeds": torch.arange(4),
                "top_k": None if top_k is None else torch.tensor(top_k),
                "top_p": None if top_p is None else torch.tensor(top_p),
                "min_p": None if min_p is None else torch.tensor(min_p),
                "method": "coupled" if dtype == FP16 else "standard",
            }
    return found


def on_the_edge() -> dict[str, dict[str, Any]]:
    """One case for each thing that random rows do not show. Each made a wrong kernel fail."""
    x = torch.randn(4, 70, generator=torch.Generator().manual_seed(3))
    base = {
        "draft_ids": torch.tensor([[3], [5]]),
        "cu_rows": torch.tensor([0, 2, 4]),
        "positions": torch.tensor([0, 1, 2**31 - 2, 2**31 - 1]),
        "temperature": torch.tensor([0.8, 1.2]),
        "seeds": torch.tensor([-1, 2**63 - 1]),
    }
    filters = {"top_k": torch.tensor([1, 40]), "top_p": torch.tensor([0.3, 0.9])}

    def sampled(logits: Tensor, **options: Any) -> dict[str, Any]:
        """Requests without drafts, one a row."""
        count = logits.shape[0]
        return {
            "logits": logits,
            "draft_ids": torch.empty(count, 0, dtype=torch.int64),
            "cu_rows": torch.arange(count + 1),
            "positions": torch.arange(count),
            "temperature": torch.ones(count),
            "seeds": torch.arange(count),
        } | options

    # The offset of row 3 does not fit 32 bits, its stride does.
    stride = 2**30 + 16
    far = torch.empty(3 * stride + 70, dtype=BF16).as_strided((4, 70), (stride, 1))
    far.copy_(x)
    # 1e-5 is not below itself; all are tied, so that only greedy takes the first.
    border = torch.full((12,), 1e-5)
    border[::3] = border[::3].nextafter(torch.zeros(4))
    # A cut between two neighbours of bfloat16: only the other is kept.
    neighbours = torch.full((6, 500), 1.0)
    neighbours[3:] *= -1
    neighbours[:3, 77], neighbours[3:, 77] = 1.0078125, -0.99609375
    # Kept lanes in blocks whose highest logits lie apart: 39 against one that weighs 20.
    apart = torch.zeros(12, 8193)
    apart[:, torch.arange(39) * 100] = 4.0
    apart[:, 5000] = 7.0
    # Drafts whose likelihoods differ a little: the block rule keeps a share of p between 0 and 1.
    gen = torch.Generator().manual_seed(4)
    near = torch.randn(2, 400, 30, generator=gen)
    return {
        "far-rows": base | {"logits": far},
        "signed-zeros": base | {"logits": x.sign() * 0.0} | filters,
        "hot": base | {"logits": x, "temperature": torch.tensor([3e38, 1e30])},
        "large": base | {"logits": x * 3e38, "temperature": torch.tensor([1e-5, 1.0])} | filters,
        "block-keeps-a-share": {
            "logits": near[0],
            "draft_ids": torch.randint(0, 30, (100, 3), generator=gen),
            "cu_rows": torch.arange(0, 401, 4),
            "positions": torch.arange(400),
            "temperature": torch.ones(100),
            "seeds": torch.arange(100),
            "draft_logits": near[1, :300],
            "method": "block",
        },
        "border-of-greedy": sampled(torch.zeros(12, 70), temperature=border),
        "cut-between-neighbours": sampled(neighbours.to(BF16), min_p=torch.full((6,), 0.998)),
        "blocks-apart": sampled(apart, top_k=torch.full((12,), 40)),
        "nothing-left": base
        | {
            "logits": torch.full((4, 70), -9e9).index_fill_(1, torch.tensor([3, 5]), 0.0),
            "allowed_mask": torch.tensor([[8, 0, 0], [-1] * 3, [32, 0, 0], [-1] * 3]).int(),
            "synthetic_rates": torch.zeros(1),
            "method": "synthetic",
        },
    }


def unchecked() -> tuple[dict[str, Any], dict[str, Any]]:
    """What only a GPU takes: request 1 has no rows, request 3 more than there are. And for its
    requests 0 and 2, which are as good as any, the same without those two."""
    inputs = cases.verify_inputs(row("", BF16, (2, 2, 320), "top_k top_p"))
    start, middle, end = inputs["cu_rows"].tolist()
    more = dict(inputs)
    more["cu_rows"] = torch.tensor([start, middle, middle, end, end + 1])
    for name in ("draft_ids", "temperature", "seeds", "top_k", "top_p"):
        more[name] = inputs[name].repeat_interleave(2, 0)
    return more, inputs


def all_inputs() -> Iterator[tuple[str, dict[str, Any]]]:
    for row in ROWS:
        yield row.id, cases.verify_inputs(row)
    for row in cases.VERIFY_ROWS:
        for seed in (1, 2):
            yield f"{row.id}-{seed}", cases.verify_inputs(row, seed)
    yield from many_above_the_cut().items()
    yield from on_the_edge().items()
