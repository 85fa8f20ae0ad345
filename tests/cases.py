"""Inputs, shape rows and tolerances of every op, shared by the tests and the benchmarks."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mtp_kernels import _C, build_info
from mtp_kernels.ops import head_argmax as head_op
from mtp_kernels.ops.entry import pack_projection

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FP64 = torch.float64  # of copies only

CPU_ISAS: list[str] = build_info()["cpu_isas"]

# (rtol, atol) between two implementations of an op whose outputs are about 1. Both round a normed
# activation to the dtype, so one may differ by an ulp; the sums differ in fp32 order.
TOLERANCES = {BF16: (2**-7, 2**-7), FP16: (2**-10, 2**-10), FP32: (1e-5, 1e-5), FP64: (0, 0)}


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
    """The same values as a slice of a wider tensor whose other columns are NaN, or 55."""
    other = torch.nan if x.is_floating_point() else 55
    wide = torch.full((*x.shape[:-1], x.shape[-1] + gap), other, dtype=x.dtype)
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


def entry_exact(inputs: dict[str, Any]) -> Tensor:
    """The formula of entry for inputs_embeds in fp64, nothing rounded on the way."""

    def norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * gain

    wide = {k: v.double() if isinstance(v, Tensor) else v for k, v in inputs.items()}
    halves = [
        norm(wide["inputs_embeds"], wide["enorm_weight"], wide["enorm_eps"]),
        norm(wide["hidden"], wide["hnorm_weight"], wide["hnorm_eps"]),
    ]
    return torch.cat(halves, dim=-1) @ wide["proj_weight"].T


def _row(
    id: str, dtype: torch.dtype, shape: tuple[int | None, int, int], *features: str, **options: Any
) -> EntryRow:
    return EntryRow(id, dtype, *shape, frozenset(features), options)


# Odd sizes: 2H below one step, not a multiple of any vector, above one block (2048); H above what a
# CUDA block holds of a row (8192, in fp32 4096); H_out below one panel (16), a partial last panel,
# a partial tile.
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
    _row("bf16-long", BF16, (3, 9000, 5), "embed_norm"),
    _row("bf16-long-odd", BF16, (3, 8193, 5), "embed_norm", "strided", gamma_offset=1),
    _row("fp16", FP16, (5, 128, 128), "positions", zero_at_position_0=True),
    _row("fp16-odd", FP16, (7, 71, 37), "bias", "strided", "embed_norm", hidden_first=True),
    _row("fp16-zero-centred", FP16, (4, 33, 17), "embeds", gamma_offset=1),
    _row("fp32", FP32, (5, 128, 128), "embed_norm", "int32"),
    _row("fp32-odd", FP32, (7, 71, 37), "bias", "strided", hidden_first=True),
    _row("fp32-two-blocks", FP32, (18, 1100, 50), "embeds", gamma_offset=1),
    _row("fp32-long", FP32, (2, 4100, 5), "embeds", hidden_first=True),
]


def entry_hidden_inputs(row: EntryRow, seed: int = 0) -> dict[str, Any]:
    """Keyword arguments of torch.ops.mtp_kernels.entry_hidden; three layers unless the row says.

    Every half is cut out of a projection whose other half is NaN.
    """
    gen = torch.Generator().manual_seed(seed)
    h, n = row.hidden_size, row.out_features
    options = dict(row.options)
    num_layers = options.pop("layers", 3)

    def randn(*shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        return (torch.randn(*shape, generator=gen) * scale + mean).to(row.dtype)

    gain_mean = 0.0 if options.get("gamma_offset") else 1.0
    inputs: dict[str, Any] = {
        "hidden": randn(row.tokens, h, scale=3.0),
        "hnorm_weights": [randn(h, scale=0.3, mean=gain_mean) for _ in range(num_layers)],
        "proj_weights": [randn(n, 2 * h, scale=h**-0.5) for _ in range(num_layers)],
        "hnorm_eps": 1e-6,
        **options,
    }
    for proj in inputs["proj_weights"]:
        proj[:, slice(h, None) if options.get("hidden_first") else slice(0, h)] = torch.nan
    if "strided" in row.features:
        inputs["hidden"] = strided_rows(inputs["hidden"])
        inputs["proj_weights"] = [strided_rows(proj) for proj in inputs["proj_weights"]]
    if "packed" in row.features:
        inputs["proj_weights"] = [pack_projection(proj) for proj in inputs["proj_weights"]]
    return inputs


def entry_embed_inputs(row: EntryRow, seed: int = 0) -> dict[str, Any]:
    """Keyword arguments of torch.ops.mtp_kernels.entry_embed, the other half of proj NaN."""
    inputs = entry_inputs(dataclasses.replace(row, features=row.features - {"packed"}), seed)
    h = row.hidden_size
    half = slice(0, h) if row.options.get("hidden_first") else slice(h, None)
    inputs["proj_weight"][:, half] = torch.nan
    if "packed" in row.features:
        inputs["proj_weight"] = pack_projection(inputs["proj_weight"])
    for name in ("hidden", "hnorm_weight", "hnorm_eps"):
        del inputs[name]
    return {"hidden_part": _hidden_part(row, seed), **inputs}


def entry_lookup_inputs(row: EntryRow, seed: int = 0) -> dict[str, Any]:
    """Keyword arguments of torch.ops.mtp_kernels.entry_lookup."""
    inputs = entry_inputs(row, seed)
    gen = torch.Generator().manual_seed(seed)
    projected = torch.randn(VOCAB, row.out_features, generator=gen).to(row.dtype)
    if "strided" in row.features:
        projected = strided_rows(projected)
    kept = ("input_ids", "proj_bias", "positions", *row.options)
    inputs = {name: x for name, x in inputs.items() if name in kept}
    return {"hidden_part": _hidden_part(row, seed), "projected": projected, **inputs}


def _hidden_part(row: EntryRow, seed: int) -> Tensor:
    gen = torch.Generator().manual_seed(seed + 1000)
    hidden_part = torch.randn(row.tokens, row.out_features, generator=gen)
    return strided_rows(hidden_part) if "strided" in row.features else hidden_part


ENTRY_HIDDEN_ROWS = [
    _row("bf16", BF16, (5, 128, 128)),
    _row("bf16-odd", BF16, (7, 71, 37), "strided"),
    _row("bf16-two-blocks", BF16, (3, 2100, 50), layers=2),
    _row("bf16-tiny", BF16, (2, 1, 1), layers=7),
    _row("bf16-many-rows", BF16, (70, 64, 200), "strided", hidden_first=True),
    _row("bf16-empty", BF16, (0, 64, 32)),
    _row("bf16-zero-centred", BF16, (6, 96, 64), gamma_offset=1),
    _row("bf16-packed", BF16, (9, 80, 48), "packed"),
    _row("bf16-packed-two-blocks", BF16, (21, 1100, 80), "packed", hidden_first=True, layers=2),
    _row("fp16", FP16, (5, 128, 128), hidden_first=True, layers=1),
    _row("fp16-odd", FP16, (18, 71, 37), "strided", gamma_offset=1),
    _row("fp32", FP32, (5, 128, 128)),
    _row("fp32-two-blocks", FP32, (18, 2100, 50), "strided", hidden_first=True),
]

ENTRY_EMBED_ROWS = [row for row in ENTRY_ROWS if row.tokens is not None]

ENTRY_LOOKUP_ROWS = [
    _row("bf16", BF16, (5, 64, 128)),
    _row("bf16-odd", BF16, (7, 64, 37), "bias", "int32", "strided"),
    _row("bf16-wide", BF16, (3, 64, 2100), "strided"),
    _row("bf16-many-rows", BF16, (70, 64, 20), "positions", "bias", zero_at_position_0=True),
    _row("bf16-empty", BF16, (0, 64, 32), "bias"),
    _row("bf16-shard", BF16, (40, 64, 32), "int32", vocab_start=20),
    _row("fp16", FP16, (5, 64, 128), "positions", "int32", zero_at_position_0=True),
    _row("fp32", FP32, (9, 64, 1), "bias", "strided"),
]


@dataclass(frozen=True)
class HeadRow:
    """One row of the head_argmax table. features: what is switched on."""

    id: str
    dtype: torch.dtype
    tokens: int
    hidden_size: int
    vocab: int
    features: frozenset[str] = frozenset()
    options: Mapping[str, Any] = field(default_factory=dict)


def head_inputs(row: HeadRow, seed: int = 0) -> dict[str, Any]:
    """Keyword arguments of torch.ops.mtp_kernels.head_argmax. Logits are about 1."""
    gen = torch.Generator().manual_seed(seed)
    t, h, v = row.tokens, row.hidden_size, row.vocab
    has = row.features.__contains__
    hidden = torch.randn(t, h, generator=gen).to(row.dtype)
    weight = (torch.randn(v, h, generator=gen) * h**-0.5).to(row.dtype)
    if has("nan"):
        hidden[0] = torch.nan
        weight[torch.randint(0, v, (v // 3,), generator=gen), 0] = torch.nan
    ints = torch.int32 if has("int32") else torch.int64
    inputs: dict[str, Any] = {"hidden": hidden, "head_weight": weight, **row.options}
    if has("strided"):
        inputs |= {"hidden": strided_rows(hidden), "head_weight": strided_rows(weight)}
    if has("packed"):
        inputs["head_weight"] = pack_projection(weight)
    if has("id_map"):
        inputs["id_map"] = torch.randperm(5 * v, generator=gen)[:v].to(ints)
    if has("sampled"):
        temperature = 0.3 + torch.rand(t, generator=gen)
        temperature[t // 2 : t // 2 + 1] = 1e-6  # one greedy row
        inputs |= {
            "temperature": temperature,
            "seeds": torch.randint(-(2**62), 2**62, (t,), generator=gen),
            "positions": torch.randint(0, 2**31 - 1, (t,), generator=gen).to(ints),
        }
    return inputs


def head_agrees(inputs: Mapping[str, Any], got: list[Tensor], want: list[Tensor]) -> None:
    """Asserts that two results of head_argmax are the same up to rounding.

    An id may differ where the reference's value of it is within the tolerance of its best; those
    must be rare.
    """
    rtol, atol = TOLERANCES[inputs["hidden"].dtype]
    torch.testing.assert_close(got[0], want[0], rtol=rtol, atol=atol)
    arguments = {"vocab_size": None, "vocab_start": 0, "id_map": None, "stream": "draft"}
    arguments |= dict.fromkeys(["temperature", "seeds", "positions"]) | inputs
    values, ids = head_op.values_and_ids(**arguments)
    differing = (got[1] != want[1]).nonzero().tolist()
    for part, row in differing:
        lanes = (ids[row] == got[1][part, row]).nonzero().flatten().tolist()
        assert [lane // head_op.SLICE for lane in lanes] == [part], "not an id of the slice"
        value = values[row, lanes[0]]
        torch.testing.assert_close(value, want[0][part, row], rtol=rtol, atol=atol)
    assert len(differing) <= max(1, got[1].numel() // 100)


def _head_row(
    id: str, dtype: torch.dtype, shape: tuple[int, int, int], features: str = "", **options: Any
) -> HeadRow:
    return HeadRow(id, dtype, *shape, frozenset(features.split()), options)


# V: below one slice (512), a partial last one, one row into a slice. H: below one step, above one
# block (2048). T: above the rows that are done together (16), and those that share a read (64).
HEAD_ROWS = [
    _head_row("bf16", BF16, (5, 128, 1536)),
    _head_row("bf16-odd", BF16, (7, 71, 1021), "strided"),
    _head_row("bf16-tiny", BF16, (2, 1, 1)),
    _head_row("bf16-one-row", BF16, (1, 512, 513)),
    _head_row("bf16-two-blocks", BF16, (3, 2100, 600), "strided"),
    _head_row("bf16-many-rows", BF16, (70, 64, 530), "sampled"),
    _head_row("bf16-empty", BF16, (0, 64, 700), "sampled"),
    _head_row("bf16-padded", BF16, (4, 96, 1600), vocab_size=1000),
    _head_row("bf16-no-vocab", BF16, (2, 32, 600), vocab_size=0),
    _head_row("bf16-sampled", BF16, (6, 96, 1100), "sampled int32", vocab_start=3001),
    _head_row("bf16-map", BF16, (4, 64, 700), "id_map sampled", vocab_size=690, stream="target"),
    _head_row("bf16-nan", BF16, (4, 64, 700), "nan sampled"),
    _head_row("bf16-packed", BF16, (9, 80, 1040), "packed", vocab_size=1030),
    _head_row("bf16-packed-two-blocks", BF16, (21, 2200, 544), "packed sampled id_map int32"),
    _head_row("fp16", FP16, (5, 128, 800), "id_map", vocab_size=799),
    _head_row("fp16-odd", FP16, (18, 71, 523), "strided sampled"),
    _head_row("fp32", FP32, (5, 128, 800), "sampled", vocab_start=2**31),
    _head_row("fp32-two-blocks", FP32, (3, 2100, 530), "strided"),
]


@dataclass(frozen=True)
class VerifyRow:
    """One row of the verify table. features: what is switched on, for some of the requests."""

    id: str
    dtype: torch.dtype
    requests: int
    drafts: int
    vocab: int
    features: frozenset[str] = frozenset()
    options: Mapping[str, Any] = field(default_factory=dict)


def verify_inputs(row: VerifyRow, seed: int = 0) -> dict[str, Any]:
    """Keyword arguments of torch.ops.mtp_kernels.verify. Drafts are often the likeliest token."""
    gen = torch.Generator().manual_seed(seed)
    b, k, v = row.requests, row.drafts, row.vocab
    has = row.features.__contains__

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=gen)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=gen)

    def some(share: float, values: Tensor, otherwise: float) -> Tensor:
        """Values for a share of the requests."""
        return torch.where(uniform(*values.shape) < share, values, otherwise)

    rows = torch.where(uniform(b) < 0.5, k + 1, integers(1, k + 2, b))
    cu_rows = torch.cat([torch.zeros(1, dtype=torch.int64), rows.cumsum(0)])
    num_rows = int(cu_rows[-1])
    logits = torch.randn(num_rows, v, generator=gen) * (1 + 24 * uniform(num_rows, 1))
    if has("ties"):
        logits = logits.round()
    if has("padded"):  # rows that belong to nobody
        logits = torch.cat([logits, torch.full((2, v), torch.nan)])
    likely = logits[:num_rows].argmax(-1)
    draft_ids = integers(0, v, b, k)
    for request in range(b):
        start, count = int(cu_rows[request]), int(rows[request]) - 1
        hit = uniform(count) < 0.9
        best = likely[start : start + count]
        draft_ids[request, :count] = torch.where(hit, best, draft_ids[request, :count])
    if has("bad_drafts"):
        bad = torch.tensor([-1, v, v + 1000, -(2**31)])[integers(0, 4, b, k)]
        draft_ids = torch.where(uniform(b, k) < 0.15, bad, draft_ids)
    if has("bad_rows"):
        for value in (torch.nan, torch.inf, -torch.inf):
            logits[integers(0, num_rows, 1), integers(0, v, 1)] = value
        logits[integers(0, num_rows, 1)] = -torch.inf
    logits = logits.to(row.dtype)
    if has("strided"):
        logits = strided_rows(logits)
    temperature = 0.3 + 1.2 * uniform(b)
    if has("greedy"):
        temperature = some(0.5, temperature, 0.0)
        temperature[: min(b, 1)] = 1e-6
    if has("extreme"):
        temperature = torch.where(uniform(b) < 0.5, 1e-4, 1e4)
    ints = torch.int32 if has("int32") else torch.int64
    inputs: dict[str, Any] = {
        "logits": logits,
        "draft_ids": draft_ids.to(ints),
        "cu_rows": cu_rows.to(ints),
        "positions": integers(0, 2**31 - 1, logits.shape[0]).to(ints),
        "temperature": temperature,
        "seeds": integers(-(2**62), 2**62, b),
    }
    if has("top_k"):
        inputs["top_k"] = some(0.7, integers(0, min(v + 2, 60), b), 0).to(ints)
    if has("top_p"):
        inputs["top_p"] = some(0.7, uniform(b).clamp(min=1e-3), 1.0)
    if has("min_p"):
        inputs["min_p"] = some(0.7, uniform(b) ** 3, 0.0)
        inputs["min_p"][b // 2 : b // 2 + 1] = 1.0
    if has("draft_logits"):
        kind = row.options.get("draft_kind", "logits")
        count = b * k + 3 * has("draft_rows")
        near = torch.randn(count, v, generator=gen) * 3
        first = logits[:1].float().nan_to_num(0, 3, -3).clamp(-9, 9)
        near = torch.where(uniform(count, 1) < 0.5, first + 0.3 * near, near)
        if has("bad_rows") and count:
            near[integers(0, count, 1), integers(0, v, 1)] = torch.nan
        inputs["draft_logits"] = near.softmax(-1) if kind == "probs" else near
        dtype = FP32 if has("draft_fp32") else row.dtype
        inputs["draft_logits"] = inputs["draft_logits"].to(dtype)
        if has("draft_rows"):
            inputs["draft_rows"] = integers(-2, count + 2, b, k).to(ints)
    words = (v + 31) // 32
    if has("mask"):
        mask = integers(-(2**31), 2**31, logits.shape[0], words)
        mask[uniform(logits.shape[0]) < 0.5] = -1
        mask[: 1 if has("bad_rows") else 0] = 0
        inputs["allowed_mask"] = mask.to(torch.int32)
    if has("bias"):
        ids = integers(-1, v, b, 5)
        ids[:, 1:] = torch.where(ids[:, 1:] == ids[:, :1], -1, ids[:, 1:])
        inputs["bias_ids"] = ids.to(torch.int32)
        inputs["bias_values"] = torch.randn(b, 5, generator=gen) * 4
    if has("penalties"):
        inputs |= {
            "penalty_rows": integers(-1, 3, b).to(ints),
            "output_counts": (integers(0, 8, 3, v) - 5).clamp(min=0).to(torch.int32),
            "prompt_mask": integers(-(2**31), 2**31, 3, words).to(torch.int32),
            "presence_penalty": some(0.7, torch.randn(b, generator=gen), 0.0),
            "frequency_penalty": some(0.7, torch.randn(b, generator=gen), 0.0),
            "repetition_penalty": some(0.7, 0.5 + uniform(b), 1.0),
        }
    if row.options.get("method") == "synthetic":
        inputs["synthetic_rates"] = uniform(k)
    return inputs | row.options


def _verify_row(
    id: str, dtype: torch.dtype, shape: tuple[int, int, int], features: str = "", **options: Any
) -> VerifyRow:
    return VerifyRow(id, dtype, *shape, frozenset(features.split()), options)


FILTER_FEATURES = "top_k top_p min_p greedy"
ALL_FEATURES = f"{FILTER_FEATURES} mask bias penalties bad_drafts bad_rows"

# Vocabularies: one token, below a vector, one short of, at, and above a block of 4096.
VERIFY_ROWS = [
    _verify_row("bf16", BF16, (4, 3, 320)),
    _verify_row("bf16-greedy", BF16, (5, 3, 4097), "greedy bad_drafts int32"),
    _verify_row("bf16-filters", BF16, (6, 3, 8193), FILTER_FEATURES),
    _verify_row("bf16-ties", BF16, (6, 2, 999), f"{FILTER_FEATURES} ties strided"),
    _verify_row("bf16-all", BF16, (8, 3, 1000), f"{ALL_FEATURES} padded"),
    _verify_row("bf16-no-drafts", BF16, (5, 0, 4095), f"{FILTER_FEATURES} mask", stream="draft"),
    _verify_row("bf16-empty", BF16, (0, 2, 33)),
    _verify_row("bf16-one-token", BF16, (3, 2, 1), ALL_FEATURES),
    _verify_row("bf16-block", BF16, (6, 4, 500), f"{ALL_FEATURES} padded", method="block"),
    _verify_row("bf16-coupled", BF16, (6, 3, 4099), ALL_FEATURES, method="coupled"),
    _verify_row("bf16-synthetic", BF16, (6, 4, 64), "greedy bad_drafts", method="synthetic"),
    _verify_row("bf16-q", BF16, (6, 3, 4500), "draft_logits greedy top_k"),
    _verify_row("bf16-q-block", BF16, (6, 4, 700), "draft_logits greedy bad_rows", method="block"),
    _verify_row(
        "fp16-q-filtered",
        FP16,
        (6, 3, 300),
        f"{ALL_FEATURES} draft_logits draft_rows draft_fp32",
        draft_kind="filtered_logits",
    ),
    _verify_row(
        "fp32-q-probs-block",
        FP32,
        (6, 3, 31),
        f"{FILTER_FEATURES} draft_logits draft_rows bad_rows",
        draft_kind="probs",
        method="block",
    ),
    _verify_row("fp32-extreme", FP32, (6, 3, 4100), "extreme top_p min_p strided"),
]


def random_verify_row(seed: int) -> VerifyRow:
    """A row with everything drawn at random: 100 requests or fewer."""
    gen = torch.Generator().manual_seed(seed)

    def pick(choices: list[Any]) -> Any:
        return choices[int(torch.randint(0, len(choices), (1,), generator=gen))]

    method = pick(["standard", "block", "coupled", "synthetic"])
    names = f"{ALL_FEATURES} ties padded strided int32 draft_logits draft_rows draft_fp32".split()
    features = frozenset(name for name in names if pick([True, False, False]))
    vocab = pick([1, 2, 7, 31, 64, 320, 999, 4096, 4097, 8193])
    kind = pick(["logits", "filtered_logits", "probs"])
    shape = (pick([80, 100]), pick([0, 1, 1, 2, 3, 5]), vocab)
    options = {"method": method, "draft_kind": kind}
    return VerifyRow(f"random-{seed}", pick([BF16, FP16, FP32]), *shape, features, options)


@dataclass(frozen=True)
class DraftRow:
    """One row of the draft_pack or draft_step table. features: what is switched on."""

    id: str
    dtype: torch.dtype
    requests: int
    drafts: int
    hidden_size: int
    features: frozenset[str] = frozenset()
    options: Mapping[str, Any] = field(default_factory=dict)


NUM_SLOTS = 70
MOST_REQUESTS = 67  # of a round
POISON = -77  # in what is to be written


def _draft_memory(row: DraftRow, axes: int, gen: torch.Generator) -> dict[str, Any]:
    past = row.drafts - 1

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=gen)

    memory: dict[str, Any] = {
        "kept_ids": integers(9, NUM_SLOTS, past),
        "kept_hidden": torch.randn(NUM_SLOTS, past, row.hidden_size, generator=gen).to(row.dtype),
        "num_kept": integers(past + 1, NUM_SLOTS),
        "end": integers(99, NUM_SLOTS),
        "assumed": integers(9, NUM_SLOTS, past),
    }
    if "rope" in row.features:
        memory["kept_rope"] = integers(99, NUM_SLOTS, axes, past)
    return memory


def draft_pack_inputs(row: DraftRow, seed: int = 0) -> dict[str, Any]:
    """Keyword arguments of torch.ops.mtp_kernels.draft_pack; every window from 0 to K - 1 rows."""
    gen = torch.Generator().manual_seed(seed)
    b, k, h, axes = row.requests, row.drafts, row.hidden_size, 3
    has = row.features.__contains__
    ints = torch.int32 if has("int32") else torch.int64

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=gen)

    def starts(lengths: Tensor) -> Tensor:
        return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])

    def out(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.full(shape, POISON, dtype=dtype)

    memory = _draft_memory(row, axes, gen)
    query_lens = integers(1, k + 2, b)
    if has("prefill"):
        query_lens[::3] = integers(10, 30, len(query_lens[::3]))
    rejected = (torch.rand(b, generator=gen) * query_lens).long()
    slots = torch.randperm(NUM_SLOTS, generator=gen)[:b]
    query_start, first_position = starts(query_lens), integers(k, 100, b)
    num_targets = int(query_start[-1])
    target_ids, next_ids = integers(0, 9, num_targets), integers(0, 9, b)
    positions = [torch.arange(n) + p for n, p in zip(query_lens, first_position, strict=True)]
    # Most rounds begin where the last one ended, and confirm some of what that one assumed.
    memory["end"][slots] = torch.where(torch.rand(b, generator=gen) < 0.9, first_position, -1)
    for i in range(b):
        following = target_ids[query_start[i] + 1 : query_start[i + 1] - rejected[i]]
        known = torch.cat([following, next_ids[i : i + 1]])[: integers(0, k, 1)]
        memory["assumed"][slots[i], : len(known)] = known
    if has("padding"):
        slots[integers(0, b, 2)] = torch.tensor([-1, NUM_SLOTS])
        rejected[b // 2] = query_lens[b // 2]  # nothing survives
    row_start = starts(torch.maximum(query_lens, torch.tensor(k)) + integers(0, 2, b))
    num_rows = int(row_start[-1])
    most_rows = num_rows + 5
    inputs: dict[str, Any] = {
        "slots": slots.to(ints),
        "query_start": query_start.to(ints),
        "num_rejected": rejected.to(ints),
        "target_ids": target_ids.to(ints),
        "target_positions": torch.cat([*positions, integers(0, 1, 0)]).to(ints),
        "target_hidden": torch.randn(num_targets + 2, h, generator=gen).to(row.dtype),
        "next_ids": next_ids.to(ints),
        "lookahead_ids": integers(-1, 2, b, k - 1).to(ints),
        "row_start": row_start.to(ints),
        "num_rows": num_rows,
        **memory,
        "out_ids": out(most_rows, dtype=torch.int32),
        "out_positions": out(most_rows),
        "out_hidden": out(most_rows, h, dtype=row.dtype),
        "out_row_start": out(MOST_REQUESTS + 1, dtype=torch.int32),
        "out_seq_lens": out(MOST_REQUESTS, dtype=ints),
        "out_last_row": out(MOST_REQUESTS),
        "out_slots": out(MOST_REQUESTS),
        "out_lookahead": out(MOST_REQUESTS, k - 1),
        "block_tables": [],
        "block_sizes": [],
        **row.options,
    }
    if has("kv"):
        # Tables of two groups, whose ends some rows lie beyond; -1 = no block.
        inputs["block_sizes"] = [16, 5]
        tables = [integers(-1, 1000, b, columns).int() for columns in (7, 15)]
        inputs["block_tables"] = [strided_rows(table) for table in tables]
        inputs["out_kv_slots"] = out(2, most_rows)
    if has("rope"):
        inputs["target_rope"] = integers(0, 99, axes, num_targets).to(ints)
        inputs["out_rope"] = out(axes, most_rows)
    if has("strided"):
        for name in ("target_hidden", "lookahead_ids", "target_rope", "out_hidden", "out_kv_slots"):
            if name in inputs:
                inputs[name] = strided_rows(inputs[name])
    return inputs


def draft_step_inputs(row: DraftRow, seed: int = 0) -> dict[str, Any]:
    """Keyword arguments of torch.ops.mtp_kernels.draft_step; step 0 unless the row says."""
    gen = torch.Generator().manual_seed(seed)
    b, k, h, axes, slices = row.requests, row.drafts, row.hidden_size, 3, 5
    has = row.features.__contains__
    ints = torch.int32 if has("int32") else torch.int64

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=gen)

    counts = integers(k, k + 4, b)
    if has("prefill"):
        counts[::3] = integers(1000, 2500, len(counts[::3]))
    row_start = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    row_start = torch.cat([row_start, row_start[-1:].expand(MOST_REQUESTS - b)])
    used = 1 + (torch.rand(b, generator=gen) * counts).long()
    most_rows = int(row_start[-1]) + 5
    last_row = torch.zeros(MOST_REQUESTS, dtype=torch.int64)
    last_row[:b] = row_start[:b] + used - 1
    slots = torch.full((MOST_REQUESTS,), -1)
    slots[:b] = torch.randperm(NUM_SLOTS, generator=gen)[:b]
    if has("padding"):
        slots[integers(0, b, 2)] = torch.tensor([-1, NUM_SLOTS])
        b += 2  # requests of a captured graph that this round does not have
    values = integers(-3, 3, slices, b).float()
    ids = integers(0, 50, slices, b)
    if has("bad_values"):
        values[values == 0], values[values == 1] = torch.nan, -torch.inf
        values[:, :1], ids[:, :1] = -torch.inf, 2**63 - 1
    inputs: dict[str, Any] = {
        "values": values,
        "ids": ids.to(ints),
        "step": 0,
        "input_ids": integers(0, 50, most_rows).int(),
        "positions": integers(0, 99, most_rows).to(ints),
        "hidden": torch.randn(most_rows, h, generator=gen).to(row.dtype),
        "row_start": row_start.to(ints),
        "last_row": last_row.to(ints),
        "slots": slots.to(ints),
        "lookahead": integers(-1, 1, MOST_REQUESTS, k - 1).to(ints),
        "draft_ids": torch.full((MOST_REQUESTS, k), POISON),
        **_draft_memory(row, axes, gen),
        **row.options,
    }
    if has("sampled"):
        inputs |= {"values": None, "ids": inputs["ids"][:1]}
    if has("rope"):
        inputs["rope"] = integers(0, 99, axes, most_rows).to(ints)
    if has("strided"):
        for name in ("values", "ids", "hidden", "lookahead", "draft_ids", "rope"):
            if inputs.get(name) is not None:
                inputs[name] = strided_rows(inputs[name])
    return inputs


def _draft_row(
    id: str, dtype: torch.dtype, shape: tuple[int, int, int], features: str = "", **options: Any
) -> DraftRow:
    return DraftRow(id, dtype, *shape, frozenset(features.split()), options)


DRAFT_PACK_ROWS = [
    _draft_row("bf16", BF16, (5, 3, 64)),
    _draft_row("bf16-kv", BF16, (9, 3, 40), "kv int32", max_len=98),
    _draft_row("bf16-all", BF16, (12, 4, 33), "kv rope strided padding prefill int32"),
    _draft_row("bf16-many", BF16, (64, 3, 8), "kv padding", max_len=90),
    _draft_row("bf16-one", BF16, (1, 3, 2100), "rope prefill"),
    _draft_row("bf16-one-draft", BF16, (6, 1, 16), "kv rope padding"),
    _draft_row("bf16-empty", BF16, (0, 3, 16), "kv rope"),
    _draft_row("fp16", FP16, (7, 5, 24), "strided"),
    _draft_row("fp32", FP32, (8, 2, 24), "padding prefill"),
    _draft_row("fp64", FP64, (8, 6, 10), "rope padding int32"),
]

DRAFT_STEP_ROWS = [
    _draft_row("bf16", BF16, (5, 3, 64)),
    _draft_row("bf16-middle", BF16, (5, 3, 64), step=1),
    _draft_row("bf16-final", BF16, (5, 3, 64), "padding", step=2),
    _draft_row("bf16-all", BF16, (12, 4, 33), "rope strided padding prefill int32"),
    _draft_row("bf16-many", BF16, (64, 3, 8), "padding bad_values", step=1),
    _draft_row("bf16-one", BF16, (1, 3, 2100), "rope prefill sampled"),
    _draft_row("bf16-one-draft", BF16, (6, 1, 16), "rope padding"),
    _draft_row("bf16-empty", BF16, (0, 3, 16), "rope"),
    _draft_row("fp16", FP16, (7, 5, 24), "strided bad_values"),
    _draft_row("fp32", FP32, (8, 2, 24), "padding sampled strided"),
    _draft_row("fp64", FP64, (8, 6, 10), "rope padding sampled int32"),
]


# ---- Benchmarks -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """One row of a benchmark. Fields of one capital letter are its axes."""

    threads: int | None = None  # None: all
    alone: bool = False  # without peers: it is there to show how cost grows
    tiny: bool = False  # what a call costs by itself; these are the rows of a quick run

    @property
    def shape(self) -> dict[str, int | str]:
        """The axes, and what else tells the rows of an op apart."""
        values = dataclasses.asdict(self)
        return {name: x for name, x in values.items() if name not in BenchRow.__annotations__}

    @property
    def id(self) -> str:
        words = [f"{name}={x}" for name, x in self.shape.items()]
        words += [f"threads={self.threads}"] * (self.threads is not None)
        return "-".join(words).replace(" ", "_")


@dataclass(frozen=True, kw_only=True)
class EntryBench(BenchRow):
    T: int
    H: int


@dataclass(frozen=True, kw_only=True)
class HeadBench(BenchRow):
    T: int
    H: int
    V: int


@dataclass(frozen=True, kw_only=True)
class DraftBench(BenchRow):
    """Of draft_pack and draft_step."""

    B: int
    K: int
    H: int


@dataclass(frozen=True, kw_only=True)
class VerifyBench(BenchRow):
    B: int
    K: int
    V: int
    sampling: str = "temperature 0.7"  # of VERIFY_SAMPLING
    drafts: str = "certain drafts"  # or "sampled drafts", judged against what they were drawn from


@dataclass(frozen=True, kw_only=True)
class RoundBench(BenchRow):
    B: int
    K: int
    H: int
    V: int


BENCH_VOCAB, BENCH_KEPT = 152_576, 32_000  # of MiMo-V2, and of a draft vocabulary for it

VERIFY_SAMPLING: dict[str, tuple[float, int | None, float | None]] = {
    # temperature, top_k, top_p
    "temperature 0.7": (0.7, None, None),
    "greedy": (0.0, None, None),
    "top_k 50, top_p 0.95": (0.7, 50, 0.95),
}

ENTRY_BENCH = [
    EntryBench(T=1, H=64, tiny=True),
    *(EntryBench(T=t, H=4096, alone=t in (8, 32, 128)) for t in (1, 2, 3, 4, 8, 16, 32, 64, 128)),
    EntryBench(T=256, H=4096),
    *(EntryBench(T=t, H=4096, threads=1, alone=True) for t in (4, 64)),
    *(EntryBench(T=t, H=6144) for t in (1, 2, 3, 4, 16, 64, 256)),
]

HEAD_BENCH = [
    HeadBench(T=1, H=64, V=1024, tiny=True),
    *(HeadBench(T=4, H=2048, V=v, alone=True) for v in (19_072, 38_144, 76_288)),
    *(HeadBench(T=t, H=2048, V=BENCH_VOCAB) for t in (1, 4, 16)),
    *(HeadBench(T=t, H=4096, V=BENCH_VOCAB, alone=t in (8, 32)) for t in (1, 4, 8, 16, 32, 64)),
    *(HeadBench(T=t, H=4096, V=BENCH_VOCAB, threads=1, alone=True) for t in (4, 64)),
]

DRAFT_BENCH = [
    DraftBench(B=1, K=3, H=64, tiny=True),
    *(DraftBench(B=b, K=3, H=4096) for b in (1, 4, 16, 64)),
    *(DraftBench(B=64, K=k, H=4096, alone=True) for k in (1, 5, 7)),
    DraftBench(B=64, K=3, H=4096, threads=1, alone=True),
]

VERIFY_BENCH = [
    *(VerifyBench(B=2, K=3, V=512, sampling=name, tiny=True) for name in VERIFY_SAMPLING),
    VerifyBench(B=1, K=3, V=512, drafts="sampled drafts", tiny=True),
    *(VerifyBench(B=64, K=3, V=BENCH_VOCAB, sampling=name) for name in VERIFY_SAMPLING),
    *(
        VerifyBench(B=1, K=3, V=BENCH_VOCAB, sampling=name, drafts="sampled drafts")
        for name in ("temperature 0.7", "top_k 50, top_p 0.95")
    ),
    *(VerifyBench(B=b, K=3, V=BENCH_VOCAB, alone=True) for b in (8, 16, 32, 128)),
    *(VerifyBench(B=64, K=k, V=BENCH_VOCAB, alone=True) for k in (1, 2, 5, 7)),
    *(VerifyBench(B=64, K=3, V=v, alone=True) for v in (19_072, 38_144, 76_288)),
    VerifyBench(B=64, K=3, V=BENCH_VOCAB, threads=1, alone=True),
]

ROUND_BENCH = [
    RoundBench(B=1, K=3, H=64, V=1024, tiny=True),
    *(RoundBench(B=b, K=3, H=4096, V=BENCH_VOCAB) for b in (1, 4, 16)),
]
