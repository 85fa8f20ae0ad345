"""entry_hidden, entry_embed, entry_lookup: the cases they must not fail, on each implementation.

In a process with TRITON_INTERPRET=1 this file tests the Triton kernels, else the references and the
CPU kernels; one of its tests starts such a process. The interpreter's bfloat16 dot is wrong, so
there it is float16.
"""

import dataclasses
import importlib
import os
from collections.abc import Callable
from typing import Any

import cases
import interpreter
import pytest
import torch
from torch import Tensor

from mtp_kernels import ops
from mtp_kernels.ops import pack_projection, project_embeddings

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PATHS = ["triton"] if INTERPRETED else [*cases.CPU_ISAS, "reference"]
DTYPES = [cases.FP16, cases.FP32] if INTERPRETED else [cases.BF16, cases.FP16, cases.FP32]
SHORT = DTYPES[0]  # of 16 bits
OPS = ("entry_hidden", "entry_embed", "entry_lookup")
TOKEN_OPS = OPS[1:]
not_interpreted = pytest.mark.skipif(INTERPRETED, reason="of the CPU kernels")

Call = Callable[..., Tensor]


def implementation(path: str, op: str) -> Call:
    if path == "triton":
        return getattr(importlib.import_module(f"mtp_kernels.kernels.{op}"), op)
    return getattr(getattr(ops, op), op if path == "reference" else "OP")


@pytest.fixture(params=PATHS)
def run(request: pytest.FixtureRequest) -> Call:
    """run(op, **inputs), by one implementation."""

    def call(op: str, **inputs: Any) -> Tensor:
        with cases.cpu_isa(request.param if request.param in cases.CPU_ISAS else "scalar"):
            return implementation(request.param, op)(**inputs)

    return call


def for_here(row: cases.EntryRow) -> cases.EntryRow:
    """The row as the implementations of this process can have it."""
    if not INTERPRETED:
        return row
    dtype = cases.FP16 if row.dtype == cases.BF16 else row.dtype
    return dataclasses.replace(row, dtype=dtype, features=row.features - {"packed"})


def rows_of(op: str) -> list[cases.EntryRow]:
    return [for_here(row) for row in getattr(cases, f"{op.upper()}_ROWS")]


def inputs_of(op: str, *features: str, dtype: torch.dtype = SHORT, tokens: int = 7) -> dict:
    """A good call with T = 7, H = 32, H_out = 48, all ids known."""
    row = cases.EntryRow("", dtype, tokens, 32, 48, frozenset(features))
    inputs = getattr(cases, f"{op}_inputs")(row)
    if inputs.get("input_ids") is not None:
        inputs["input_ids"] = inputs["input_ids"].clamp(0, cases.VOCAB - 1)
    return inputs


def same(got: Tensor, want: Tensor) -> None:
    assert not got.isnan().any()
    torch.testing.assert_close(got, want, rtol=0, atol=0)


# ---- Against entry ------------------------------------------------------------------------------


def split(inputs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What entry_hidden and entry_embed get of entry's arguments."""
    hidden = {"hidden": inputs["hidden"], "hnorm_eps": inputs["hnorm_eps"]}
    hidden |= {f"{name}s": [inputs[name]] for name in ("hnorm_weight", "proj_weight")}
    shared = ("gamma_offset", "hidden_first")
    hidden |= {name: inputs[name] for name in shared if name in inputs}
    only_hidden = ("hidden", "hnorm_weight", "hnorm_eps")
    return hidden, {name: x for name, x in inputs.items() if name not in only_hidden}


@pytest.mark.parametrize("row", rows_of("entry_embed"), ids=lambda row: row.id)
def test_the_halves_add_up_to_entry(run: Call, row: cases.EntryRow) -> None:
    for seed in range(2):
        inputs = cases.entry_inputs(row, seed)
        hidden, embed = split(inputs)
        parts = run("entry_hidden", **hidden)
        got = run("entry_embed", hidden_part=parts[0], **embed)
        assert parts.dtype == torch.float32 and got.dtype == row.dtype
        rtol, atol = cases.TOLERANCES[row.dtype]
        torch.testing.assert_close(got, ops.entry.entry(**inputs), rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden_first", [False, True])
def test_integers_are_exact(run: Call, dtype: torch.dtype, hidden_first: bool) -> None:
    """Rows of +-1, whose norm is 1, small gains and weights: nothing needs to be rounded."""
    gen = torch.Generator().manual_seed(0)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=gen)

    t, h, n, layers = 9, 40, 35, 3
    hidden, embeds = (integers(0, 2, t, h) * 2 - 1 for _ in range(2))
    hnorms, projs = integers(-2, 3, layers, h), integers(-1, 2, layers, n, 2 * h)
    enorm, bias = integers(-2, 3, h), integers(-9, 10, n)
    hidden_half, embed_half = projs.chunk(2, dim=2)[:: 1 if hidden_first else -1]
    want_parts = torch.einsum("th,lh,lnh->ltn", hidden, hnorms, hidden_half)

    parts = run(
        "entry_hidden",
        hidden=hidden.to(dtype),
        hnorm_weights=list(hnorms.to(dtype)),
        proj_weights=list(projs.to(dtype)),
        hnorm_eps=0.0,
        hidden_first=hidden_first,
    )
    same(parts, want_parts.float())
    for i in range(layers):
        product = embeds * enorm @ embed_half[i].T
        got = run(
            "entry_embed",
            hidden_part=parts[i],
            enorm_weight=enorm.to(dtype),
            proj_weight=projs[i].to(dtype),
            inputs_embeds=embeds.to(dtype),
            proj_bias=bias.to(dtype),
            enorm_eps=0.0,
            hidden_first=hidden_first,
        )
        want = (want_parts[i] + product + bias).to(dtype)
        same(got, want)
        looked_up = run(
            "entry_lookup",
            hidden_part=parts[i],
            input_ids=torch.arange(t - 1, -1, -1),
            projected=product.flip(0).to(dtype),
            proj_bias=bias.to(dtype),
        )
        same(looked_up, want)


def test_each_layer_is_that_layer_alone(run: Call) -> None:
    """Layers of different strides, one of them packed where that is possible."""
    inputs = inputs_of("entry_hidden", tokens=20)
    gains, projs = inputs["hnorm_weights"], inputs["proj_weights"]
    projs[1] = cases.strided_rows(projs[1])
    if not INTERPRETED:
        projs[2] = pack_projection(projs[2])
    together = run("entry_hidden", **inputs)
    assert together.shape == (3, 20, 48)
    for i in range(3):
        one = inputs | {"hnorm_weights": gains[i : i + 1], "proj_weights": projs[i : i + 1]}
        same(together[i : i + 1], run("entry_hidden", **one))
    assert (together[0] != together[1]).any() and (together[1] != together[2]).any()


# ---- Zero embeddings ----------------------------------------------------------------------------


def without_embedding(inputs: dict[str, Any], dtype: torch.dtype) -> Tensor:
    return (inputs["hidden_part"] + inputs["proj_bias"].float()).to(dtype)


@pytest.mark.parametrize("op", TOKEN_OPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_position_0_masks_the_embedding(run: Call, op: str, dtype: torch.dtype, eps: float) -> None:
    features = ["bias", "embed_norm"] if eps else ["bias"]
    inputs = inputs_of(op, *features, dtype=dtype)
    if op == "entry_embed":
        inputs |= {"enorm_eps": eps, "embed_norm_eps": eps}
    inputs["input_ids"] = torch.arange(7)
    # A first request, a second one starting in the middle of the batch, two padding rows.
    positions = torch.tensor([0, 1, 2, 0, 1, 0, 0])
    masked = positions == 0
    table = "embed_weight" if op == "entry_embed" else "projected"
    unmasked = run(op, **inputs, positions=positions)
    same(unmasked, run(op, **inputs))
    inputs[table][:7][masked] = torch.nan  # exactly 0 means: not multiplied by 0
    got = run(op, **inputs, positions=positions, zero_at_position_0=True)
    same(got[masked], without_embedding(inputs, dtype)[masked])
    same(got[~masked], unmasked[~masked])
    same(run(op, **inputs, positions=positions.int(), zero_at_position_0=True), got)


@pytest.mark.parametrize("op", TOKEN_OPS)
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("start", [0, 5])
def test_ids_outside_of_the_table_are_zero_embeddings(
    run: Call, op: str, ids_dtype: torch.dtype, start: int
) -> None:
    """A 10-row table, or the shard [5, 10) of it; anything read beside it would be NaN."""
    inputs = inputs_of(op, "bias", tokens=6)
    name = "embed_weight" if op == "entry_embed" else "projected"
    whole = inputs[name]
    guarded = torch.full((30, whole.shape[1]), torch.nan, dtype=SHORT)
    rows = 10 - start
    guarded[10 : 10 + rows] = whole[start:10]
    ids = torch.tensor([9, 10, 127631530, -1, 4, -(2**31)], dtype=ids_dtype)
    shard = {name: guarded[10 : 10 + rows], "input_ids": ids, "vocab_start": start}
    got = run(op, **inputs | shard)
    known = run(op, **inputs | {"input_ids": torch.tensor([9, 9, 9, 9, 4, 9])})
    is_known = torch.tensor([True, False, False, False, start == 0, False])
    same(got, torch.where(is_known[:, None], known, without_embedding(inputs, SHORT)))


@pytest.mark.parametrize("op", TOKEN_OPS)
def test_far_ids_do_not_wrap_around(run: Call, op: str) -> None:
    inputs = inputs_of(op, "bias", tokens=3)
    for start in (0, 1):
        ids = torch.tensor([2**32 + 1, -(2**63), 2**63 - 1])
        far = run(op, **inputs | {"input_ids": ids, "vocab_start": start})
        same(far, without_embedding(inputs, SHORT))


@pytest.mark.parametrize("op", TOKEN_OPS)
def test_strict_ids_name_the_id_and_its_row(run: Call, op: str) -> None:
    inputs = inputs_of(op, tokens=4)
    name = "embed_weight" if op == "entry_embed" else "projected"
    ids = torch.tensor([9, 12, 127631530, -1])
    inputs |= {name: inputs[name][:10], "vocab_start": 4, "input_ids": ids}
    message = r"input_ids expected ids in \[4, 14\), got 127631530 at row 2"
    if INTERPRETED:
        message = "strict_ids expected False on CUDA, where raising would stall the host"
    with pytest.raises(RuntimeError, match=f"^{op}: {message}"):
        run(op, **inputs, strict_ids=True)
    if not INTERPRETED:
        inputs["input_ids"] = torch.tensor([4, 5, 12, 13])
        same(run(op, **inputs, strict_ids=True), run(op, **inputs))


# ---- Shapes -------------------------------------------------------------------------------------


def test_no_rows(run: Call) -> None:
    assert run("entry_hidden", **inputs_of("entry_hidden", tokens=0)).shape == (3, 0, 48)
    for op in TOKEN_OPS:
        positions = torch.zeros(0, dtype=torch.int32)
        inputs = inputs_of(op, "bias", tokens=0)
        assert run(op, **inputs, positions=positions, zero_at_position_0=True).shape == (0, 48)
    assert run("entry_embed", **inputs_of("entry_embed", "embeds", tokens=0)).shape == (0, 48)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_wider_tensor(run: Call, op: str, dtype: torch.dtype) -> None:
    same(run(op, **inputs_of(op, "strided", dtype=dtype)), run(op, **inputs_of(op, dtype=dtype)))


@pytest.mark.parametrize("op", OPS)
def test_every_second_row_and_a_repeated_row(run: Call, op: str) -> None:
    inputs = inputs_of(op, "embeds" if op == "entry_embed" else "", tokens=8)
    per_row = {"hidden", "hidden_part", "inputs_embeds"} & inputs.keys()
    every_second = {name: inputs[name][::2] for name in per_row}
    if "input_ids" in inputs:
        every_second["input_ids"] = inputs["input_ids"][::2].contiguous()
    whole = run(op, **inputs)
    same(run(op, **inputs | every_second), whole[..., ::2, :])
    repeated = {name: inputs[name][:1].expand(8, -1) for name in per_row}
    same(run(op, **inputs | repeated)[..., 0, :], whole[..., 0, :])


# Enough outputs for several threads; a lookup takes more of them.
INVARIANCE = [
    pytest.param(
        op,
        cases.EntryRow("", dtype, 70, 700, out + 1408 * (op == "entry_lookup"), features),
        id=f"{op}-{id}",
    )
    for op in OPS
    for id, dtype, out, features in [
        ("bf16", cases.BF16, 99, frozenset({"bias"})),
        ("bf16-packed", cases.BF16, 112, frozenset({"packed"})),
        ("fp16", cases.FP16, 99, frozenset({"embed_norm"})),
        ("fp32", cases.FP32, 99, frozenset()),
    ]
]


@not_interpreted
@pytest.mark.parametrize("isa", cases.CPU_ISAS)
@pytest.mark.parametrize("op, row", INVARIANCE)
def test_a_row_alone_equals_the_row_in_a_batch(op: str, row: cases.EntryRow, isa: str) -> None:
    """Bit for bit, for any batch around it, and at any place in it."""
    inputs = getattr(cases, f"{op}_inputs")(row)
    per_row = {k: inputs[k] for k in {"hidden", "hidden_part", "input_ids"} & inputs.keys()}
    call = implementation(isa, op)
    with cases.cpu_isa(isa):
        whole = call(**inputs)
        for begin, end in [
            *((t, t + 1) for t in range(0, 70, 6)),
            (0, 2),
            (3, 6),
            (1, 18),
            (30, 69),
        ]:
            part = call(**inputs | {k: x[begin:end] for k, x in per_row.items()})
            same(part, whole[..., begin:end, :])


@not_interpreted
@pytest.mark.parametrize("isa", cases.CPU_ISAS)
@pytest.mark.parametrize("op, row", INVARIANCE)
def test_any_number_of_threads_gives_the_same_bits(op: str, row: cases.EntryRow, isa: str) -> None:
    inputs = getattr(cases, f"{op}_inputs")(row)
    call = implementation(isa, op)
    with cases.cpu_isa(isa), cases.threads(1):
        want = call(**inputs)
    for count in (2, 3, 5):
        with cases.cpu_isa(isa), cases.threads(count):
            same(call(**inputs), want)


# ---- Numerics and the table ---------------------------------------------------------------------


@not_interpreted
@pytest.mark.parametrize("isa", cases.CPU_ISAS)
@pytest.mark.parametrize(
    "dtype, packed", [(cases.BF16, False), (cases.BF16, True), (cases.FP16, False)]
)
def test_error_is_at_most_that_of_the_unfused_model(
    dtype: torch.dtype, packed: bool, isa: str
) -> None:
    """Root mean square error against fp64, in terms of that of norms, cat and linear.

    Split, it stays the same, as the result is rounded once. The table rounds half of the sum too,
    which adds half to three squared errors, of two roundings in a norm and one of the result.
    """
    for seed in range(3):
        row = cases.EntryRow("", dtype, 64, 1024, 256, frozenset({"embeds"}))
        inputs = cases.entry_inputs(row, seed)
        want = cases.entry_exact(inputs)
        unfused = ops.entry.entry(**inputs)
        if packed:
            inputs["proj_weight"] = pack_projection(inputs["proj_weight"])
        hidden, embed = split(inputs)
        with cases.cpu_isa(isa):
            (part,) = ops.entry_hidden.OP(**hidden)
            got = ops.entry_embed.OP(part, **embed)
            embeds = embed.pop("inputs_embeds")
            table = project_embeddings(embeds, **embed, chunk_rows=10)
            looked_up = ops.entry_lookup.OP(part, torch.arange(64), table)

        def rms(x: Tensor, want: Tensor = want) -> float:
            return float((x.double() - want).pow(2).mean().sqrt())

        assert rms(got) <= 1.02 * rms(unfused)
        assert rms(got) < rms(looked_up) <= 1.1 * rms(unfused)


WITH_TABLE = [row for row in rows_of("entry_embed") if "embeds" not in row.features]


@not_interpreted
@pytest.mark.parametrize("row", WITH_TABLE, ids=lambda row: row.id)
def test_a_table_row_is_what_entry_embed_adds(row: cases.EntryRow) -> None:
    """Bit for bit, whatever the chunks; and a lookup is entry_embed up to the table's rounding."""
    inputs = cases.entry_embed_inputs(row)
    per_token = ("hidden_part", "input_ids", "positions", "zero_at_position_0", "vocab_start")
    lookup = {k: x for k, x in inputs.items() if k in (*per_token, "proj_bias")}
    weights = {k: x for k, x in inputs.items() if k not in lookup}
    embeds = weights["embed_weight"]
    nothing = torch.zeros(len(embeds), row.out_features)
    want = ops.entry_embed.OP(
        nothing, **{k: x for k, x in weights.items() if k != "embed_weight"}, inputs_embeds=embeds
    )
    for chunk_rows in (7, 4096):
        table = project_embeddings(**weights, chunk_rows=chunk_rows)
        assert table.is_contiguous() and table.dtype == row.dtype
        same(table, want)
    rtol, atol = cases.TOLERANCES[row.dtype]
    torch.testing.assert_close(
        ops.entry_lookup.OP(projected=table, **lookup),
        ops.entry_embed.OP(**inputs),
        rtol=rtol,
        atol=2 * atol,  # two roundings
    )


# ---- Checks -------------------------------------------------------------------------------------


def bf16(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=cases.BF16)


def int64(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int64)


def projs(second: Tensor) -> dict[str, list[Tensor]]:
    return {"proj_weights": [bf16(48, 64), second, bf16(48, 64)]}


def gains(second: Tensor) -> dict[str, list[Tensor]]:
    return {"hnorm_weights": [bf16(32), second, bf16(32)]}


PROJ = "expected shape [H_out, 64] or packed [H_out/16, 32, 16, 2], got"
ONE_OF = "expected exactly one of input_ids and inputs_embeds, got"
EMBEDS = {"input_ids": None, "embed_weight": None}
BAD = {  # what is changed in a good call with T = 7, H = 32, H_out = 48, N = 3; the message
    "entry_hidden": [
        (
            {"hidden": torch.zeros(7, 32).double()},
            "hidden expected dtype bfloat16 or float16 or float32, got float64",
        ),
        ({"hidden": bf16(32)}, "hidden expected shape [T, H >= 1], got [32]"),
        ({"hidden": bf16(7, 0)}, "hidden expected shape [T, H >= 1], got [7, 0]"),
        ({"hidden": bf16(32, 7).T}, "hidden expected last stride 1, got 7"),
        ({"gamma_offset": 2}, "gamma_offset expected 0 or 1, got 2"),
        (
            {"hnorm_weights": [], "proj_weights": []},
            "proj_weights expected one per layer, got none",
        ),
        (
            {"hnorm_weights": [bf16(32)] * 2},
            "hnorm_weights expected 3, one for each of proj_weights, got 2",
        ),
        (gains(bf16(33)), "hnorm_weights[1] expected shape [32], got [33]"),
        (
            gains(torch.zeros(32)),
            "hnorm_weights[1] expected dtype bfloat16, got float32",
        ),
        ({"hnorm_eps": -1.0}, "hnorm_eps expected a finite number >= 0, got -1"),
        (projs(bf16(48, 32)), f"proj_weights[1] {PROJ} [48, 32]"),
        (projs(bf16(3, 32, 2, 16)), f"proj_weights[1] {PROJ} [3, 32, 2, 16]"),
        (projs(bf16(64, 48).T), "proj_weights[1] expected last stride 1, got 48"),
        (projs(bf16(47, 64)), "proj_weights[1] expected H_out = 48, got 47"),
        (
            {
                "hidden": bf16(7, 31),
                "hnorm_weights": [bf16(31)],
                "proj_weights": [bf16(3, 31, 16, 2)],
            },
            "packed proj_weights[0] expected an even H, got 31",
        ),
    ],
    "entry_embed": [
        ({"hidden_part": bf16(7, 48)}, "hidden_part expected dtype float32, got bfloat16"),
        (
            {"hidden_part": torch.zeros(3, 7, 48)},
            "hidden_part expected shape [T, H_out], got [3, 7, 48]",
        ),
        (
            {"hidden_part": torch.zeros(48, 7).T},
            "hidden_part expected last stride 1, got 7",
        ),
        (
            {"hidden_part": torch.zeros(7, 47)},
            "hidden_part expected shape [7, 48], got [7, 47]",
        ),
        (
            {"enorm_weight": int64(32)},
            "enorm_weight expected dtype bfloat16 or float16 or float32, got int64",
        ),
        ({"enorm_weight": bf16(1, 32)}, "enorm_weight expected shape [H >= 1], got [1, 32]"),
        ({"enorm_weight": bf16(64)[::2]}, "enorm_weight expected last stride 1, got 2"),
        ({"gamma_offset": -1}, "gamma_offset expected 0 or 1, got -1"),
        ({"proj_weight": bf16(48, 32)}, f"proj_weight {PROJ} [48, 32]"),
        (
            {"proj_weight": bf16(3, 16, 32, 2).transpose(1, 2)},
            "packed proj_weight expected a contiguous tensor",
        ),
        ({"proj_bias": bf16(47)}, "proj_bias expected shape [48], got [47]"),
        ({"inputs_embeds": bf16(7, 32)}, f"{ONE_OF} both"),
        (EMBEDS, f"{ONE_OF} neither"),
        (
            {"embed_weight": None},
            "embed_weight expected a table for input_ids, got None",
        ),
        (
            {"input_ids": None, "inputs_embeds": bf16(7, 32)},
            "embed_weight expected None, got a table beside inputs_embeds",
        ),
        ({"input_ids": int64(6)}, "input_ids expected shape [7], got [6]"),
        ({"input_ids": int64(14)[::2]}, "input_ids expected last stride 1, got 2"),
        (
            {"embed_weight": bf16(50, 31)},
            "embed_weight expected shape [V >= 1, 32], got [50, 31]",
        ),
        (
            EMBEDS | {"inputs_embeds": bf16(32)},
            "inputs_embeds expected shape [7, 32], got [32]",
        ),
        ({"embed_norm_weight": bf16(31)}, "embed_norm_weight expected shape [32], got [31]"),
        ({"enorm_eps": torch.nan}, "enorm_eps expected a finite number >= 0, got nan"),
        ({"embed_norm_eps": -1.0}, "embed_norm_eps expected a finite number >= 0, got -1"),
        ({"positions": int64(8)}, "positions expected shape [7], got [8]"),
        (
            {"zero_at_position_0": True},
            "positions expected a tensor with zero_at_position_0, got None",
        ),
        ({"vocab_start": -1}, "vocab_start expected a number >= 0, got -1"),
    ],
    "entry_lookup": [
        (
            {"hidden_part": torch.zeros(48)},
            "hidden_part expected shape [T, H_out], got [48]",
        ),
        (
            {"projected": int64(50, 48)},
            "projected expected dtype bfloat16 or float16 or float32, got int64",
        ),
        (
            {"projected": bf16(50, 47)},
            "projected expected shape [V >= 1, 48], got [50, 47]",
        ),
        (
            {"projected": bf16(0, 48)},
            "projected expected shape [V >= 1, 48], got [0, 48]",
        ),
        ({"projected": bf16(48, 50).T}, "projected expected last stride 1, got 50"),
        ({"input_ids": torch.zeros(7)}, "input_ids expected dtype int32 or int64, got float32"),
        ({"proj_bias": torch.zeros(48)}, "proj_bias expected dtype bfloat16, got float32"),
        ({"positions": int64(7, 1)}, "positions expected shape [7], got [7, 1]"),
        ({"vocab_start": -5}, "vocab_start expected a number >= 0, got -5"),
    ],
}


@pytest.mark.parametrize(
    "op, change, message",
    [pytest.param(op, *row, id=f"{op}-{row[1]}") for op, rows in BAD.items() for row in rows],
)
@pytest.mark.parametrize("path", ["triton"] if INTERPRETED else ["cpu", "reference"])
def test_bad_input_is_named(path: str, op: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError) as error:
        implementation(path, op)(**inputs_of(op, dtype=cases.BF16) | change)
    assert str(error.value).splitlines()[0] == f"{op}: {message}"


def test_tensors_of_another_device_are_named() -> None:
    for op, name in [("entry_embed", "embed_weight"), ("entry_lookup", "projected")]:
        inputs = inputs_of(op)
        inputs[name] = inputs[name].to("meta")
        with pytest.raises(RuntimeError, match=f"^{op}: {name} expected device cpu, got meta"):
            implementation("reference", op)(**inputs)


# ---- Triton -------------------------------------------------------------------------------------

if INTERPRETED:

    @pytest.mark.parametrize(
        "op, row", [pytest.param(op, row, id=f"{op}-{row.id}") for op in OPS for row in rows_of(op)]
    )
    def test_triton_matches_the_reference(op: str, row: cases.EntryRow) -> None:
        rtol, atol = cases.TOLERANCES[row.dtype]
        for seed in range(2):
            inputs = getattr(cases, f"{op}_inputs")(row, seed)
            got, want = (implementation(path, op)(**inputs) for path in ("triton", "reference"))
            torch.testing.assert_close(got, want, rtol=rtol, atol=atol)

    def test_packed_projections_are_for_the_cpu() -> None:
        for op, name in [("entry_hidden", "proj_weights"), ("entry_embed", "proj_weight")]:
            inputs = inputs_of(op, "packed", dtype=cases.BF16)
            message = f"^{op}: {name} expected \\[H_out, 2H\\] on a GPU, got a packed one"
            with pytest.raises(RuntimeError, match=message):
                implementation("triton", op)(**inputs)

else:

    def test_triton_in_its_interpreter() -> None:
        """All tests of this file that an implementation can pass or fail."""
        pytest.importorskip("triton")
        interpreter.run_tests(__file__)
