"""Inputs, shape rows and tolerances of every op, shared by the tests and the benchmarks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mtp_kernels import _C, build_info
from mtp_kernels.ops.entry import pack_projection

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

CPU_ISAS: list[str] = build_info()["cpu_isas"]

# (rtol, atol) between two implementations of an op whose outputs are about 1. Both round a normed
# activation to the dtype, so one may differ by an ulp; the sums differ in fp32 order.
TOLERANCES = {BF16: (2**-7, 2**-7), FP16: (2**-10, 2**-10), FP32: (1e-5, 1e-5)}


@contextlib.contextmanager
def cpu_isa(name: str) -> Iterator[None]:
    """Run the CPU kernels with a narrower instruction set."""
    before = build_info()["cpu_isa"]
    _C.set_cpu_isa(name)
    try:
        yield
    finally:
        _C.set_cpu_isa(before)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def strided_rows(x: Tensor, gap: int = 3) -> Tensor:
    """The same values as a slice of a wider tensor whose other columns are NaN."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + gap), torch.nan, dtype=x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


@dataclass(frozen=True)
class EntryRow:
    """One row of the entry table. tokens None: hidden is [H]. features: what is switched on."""

    id: str
    dtype: torch.dtype
    tokens: int | None
    hidden_size: int
    out_features: int
    features: frozenset[str] = frozenset()
    options: Mapping[str, Any] = field(default_factory=dict)


VOCAB = 50


def entry_inputs(row: EntryRow, seed: int = 0) -> dict[str, Any]:
    """Keyword arguments of torch.ops.mtp_kernels.entry."""
    gen = torch.Generator().manual_seed(seed)
    t, h, n = row.tokens, row.hidden_size, row.out_features
    lead = [] if t is None else [t]

    def randn(*shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        return (torch.randn(*shape, generator=gen) * scale + mean).to(row.dtype)

    ids_dtype = torch.int32 if "int32" in row.features else torch.int64
    gain_mean = 0.0 if row.options.get("gamma_offset") else 1.0
    inputs: dict[str, Any] = {
        "hidden": randn(*lead, h, scale=3.0),
        "enorm_weight": randn(h, scale=0.3, mean=gain_mean),
        "hnorm_weight": randn(h, scale=0.3, mean=gain_mean),
        "proj_weight": randn(n, 2 * h, scale=(2 * h) ** -0.5),
        "enorm_eps": 1e-5,
        "hnorm_eps": 1e-6,
        **row.options,
    }
    if "embeds" in row.features:
        inputs["inputs_embeds"] = randn(*lead, h, scale=0.05)
    else:
        inputs["embed_weight"] = randn(VOCAB, h, scale=0.05)
        # A few ids outside of the table among them.
        inputs["input_ids"] = torch.randint(-3, VOCAB + 3, lead, generator=gen).to(ids_dtype)
    if "bias" in row.features:
        inputs["proj_bias"] = randn(n)
    if "embed_norm" in row.features:
        inputs["embed_norm_weight"] = randn(h, scale=0.3, mean=gain_mean)
    if "positions" in row.features:
        inputs["positions"] = torch.randint(0, 3, lead, generator=gen).to(ids_dtype)
    if "strided" in row.features:
        for name in ("hidden", "proj_weight", "embed_weight", "inputs_embeds"):
            if name in inputs:
                inputs[name] = strided_rows(inputs[name])
    if "packed" in row.features:
        inputs["proj_weight"] = pack_projection(inputs["proj_weight"])
    return inputs


def _row(
    id: str, dtype: torch.dtype, shape: tuple[int | None, int, int], *features: str, **options: Any
) -> EntryRow:
    return EntryRow(id, dtype, *shape, frozenset(features), options)


# Odd sizes: 2H below one step, not a multiple of any vector, above one block (2048); H_out below
# one panel (16), a partial last panel, a partial tile.
ENTRY_ROWS = [
    _row("bf16", BF16, (5, 128, 128)),
    _row("bf16-odd", BF16, (7, 71, 37), "bias", "int32"),
    _row("bf16-two-blocks", BF16, (3, 1100, 50), "strided"),
    _row("bf16-tiny", BF16, (2, 1, 1), "bias"),
    _row("bf16-many-rows", BF16, (33, 64, 200), "positions", zero_at_position_0=True),
    _row("bf16-empty", BF16, (0, 64, 32)),
    _row("bf16-one-vector", BF16, (None, 64, 32), "positions", zero_at_position_0=True),
    _row("bf16-embeds", BF16, (6, 96, 64), "embeds", "bias", "strided", hidden_first=True),
    _row("bf16-zero-centred", BF16, (6, 96, 64), "embed_norm", gamma_offset=1),
    _row("bf16-packed", BF16, (9, 80, 48), "packed", "bias"),
    _row("bf16-packed-two-blocks", BF16, (21, 1100, 80), "packed", hidden_first=True),
    _row("bf16-shard", BF16, (40, 64, 32), vocab_start=20),
    _row("fp16", FP16, (5, 128, 128), "positions", zero_at_position_0=True),
    _row("fp16-odd", FP16, (7, 71, 37), "bias", "strided", "embed_norm", hidden_first=True),
    _row("fp16-zero-centred", FP16, (4, 33, 17), "embeds", gamma_offset=1),
    _row("fp32", FP32, (5, 128, 128), "embed_norm", "int32"),
    _row("fp32-odd", FP32, (7, 71, 37), "bias", "strided", hidden_first=True),
    _row("fp32-two-blocks", FP32, (18, 1100, 50), "embeds", gamma_offset=1),
]
