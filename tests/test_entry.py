"""entry: the cases it must not fail, its checks, its numerics.

In a process with TRITON_INTERPRET=1 this file tests the Triton kernel, else the reference and the
CPU kernels; one of its tests starts such a process. The interpreter's bfloat16 dot is wrong, so
there it is float16.
"""

import dataclasses
import importlib
import mmap
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases
import emulation
import interpreter
import pytest
import torch
from torch import Tensor

from mtp_kernels.ops import entry as entry_op
from mtp_kernels.ops import pack_projection

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Every CPU path; the reference, which is also the fallback of other devices; the CUDA kernel.
PATHS = ["triton"] if INTERPRETED else [*cases.CPU_ISAS, "reference", "emulation"]
SHORT_DTYPES = [cases.FP16] if INTERPRETED else [cases.BF16, cases.FP16]
DTYPES = [*SHORT_DTYPES, cases.FP32]
SHORT = DTYPES[0]  # of 16 bits
not_interpreted = pytest.mark.skipif(INTERPRETED, reason="of the CPU kernels")

entry = torch.ops.mtp_kernels.entry.default


@pytest.fixture(params=PATHS)
def run(request: pytest.FixtureRequest) -> Callable[..., Tensor]:
    if request.param == "reference":
        return entry_op.entry
    if request.param == "emulation":
        return emulated
    if request.param == "triton":
        return importlib.import_module("mtp_kernels.kernels.entry").entry

    def on_isa(**inputs: Any) -> Tensor:
        with cases.cpu_isa(request.param):
            return entry(**inputs)

    return on_isa


def emulated(**inputs: Any) -> Tensor:
    is_refused = inputs.get("strict_ids") or inputs["proj_weight"].dim() == 4
    try:
        out = emulation.op("entry")(**inputs)
    except RuntimeError as error:
        if is_refused and "on CUDA" in str(error):
            pytest.skip("not on CUDA")
        raise
    assert not is_refused
    return out


def inputs_of(*features: str, dtype: torch.dtype = SHORT, tokens: int | None = 7) -> dict:
    row = cases.EntryRow("", dtype, tokens, 32, 48, frozenset(features))
    inputs = cases.entry_inputs(row)
    if inputs.get("input_ids") is not None:
        inputs["input_ids"] = inputs["input_ids"].clamp(0, cases.VOCAB - 1)
    return inputs


def same(a: Tensor, b: Tensor) -> None:
    assert not a.isnan().any()
    torch.testing.assert_close(a, b, rtol=0, atol=0)


# ---- Position 0 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("embed_norm", [False, True])
def test_position_0_masks_the_embedding(
    run: Callable[..., Tensor], dtype: torch.dtype, eps: float, embed_norm: bool
) -> None:
    inputs = inputs_of("embeds", *["embed_norm"] * embed_norm, dtype=dtype)
    inputs |= {"enorm_eps": eps, "hnorm_eps": eps, "embed_norm_eps": eps}
    # A first request, a second one starting in the middle of the batch, two padding rows.
    inputs["positions"] = torch.tensor([0, 1, 2, 0, 1, 0, 0])
    masked = inputs["positions"] == 0
    inputs["inputs_embeds"][masked] = torch.nan  # exactly 0 means: not multiplied by 0

    got = run(**inputs, zero_at_position_0=True)

    zeroed = inputs["inputs_embeds"].masked_fill(masked.unsqueeze(-1), 0)
    same(got, run(**inputs | {"inputs_embeds": zeroed}))
    h = inputs["hidden"].shape[-1]
    no_embedding_weights = inputs["proj_weight"].clone()
    no_embedding_weights[:, :h] = 0
    only_hidden = run(**inputs | {"inputs_embeds": zeroed, "proj_weight": no_embedding_weights})
    same(got[masked], only_hidden[masked])


def test_position_0_is_untouched_without_the_flag(run: Callable[..., Tensor]) -> None:
    inputs = inputs_of()
    positions = torch.zeros(7, dtype=torch.int64)
    same(run(**inputs, positions=positions), run(**inputs))
    masked = run(**inputs, positions=positions, zero_at_position_0=True)
    assert (masked != run(**inputs)).any()


# ---- Order of the halves ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden_first", [False, True])
def test_halves_and_their_norms_are_not_swapped(
    run: Callable[..., Tensor], dtype: torch.dtype, hidden_first: bool
) -> None:
    h = 4
    eye, none = torch.eye(h), torch.zeros(h, h)
    embed = torch.tensor([[1.0, -2.0, 3.0, 0.5]])
    hidden = torch.tensor([[-4.0, 1.0, 2.0, 8.0]])
    enorm, hnorm = torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([0.5, -1.0, 0.25, 3.0])
    inputs = {
        "hidden": hidden.to(dtype),
        "inputs_embeds": embed.to(dtype),
        "enorm_weight": enorm.to(dtype),
        "hnorm_weight": hnorm.to(dtype),
        "enorm_eps": 3.0,  # distinct, so that swapped ones show
        "hnorm_eps": 0.0,
        "hidden_first": hidden_first,
    }

    def norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
        return x * (x.pow(2).mean() + eps).rsqrt() * gain

    halves = [norm(embed, enorm, 3.0), norm(hidden, hnorm, 0.0)]
    if hidden_first:
        halves.reverse()
    rtol, atol = cases.TOLERANCES[dtype]
    for proj, want in zip([(eye, none), (none, eye)], halves, strict=True):
        got = run(**inputs, proj_weight=torch.cat(proj, dim=1).to(dtype))
        torch.testing.assert_close(got.float(), want, rtol=rtol, atol=atol)


# ---- Ids outside of the table -------------------------------------------------------------------


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("start", [0, 5])
def test_ids_outside_of_the_table_are_zero_embeddings(
    run: Callable[..., Tensor], ids_dtype: torch.dtype, start: int
) -> None:
    """A 10-row table, or the shard [5, 10) of it; anything read beside it would be NaN."""
    inputs = inputs_of(tokens=6)
    guarded = torch.full((30, 32), torch.nan, dtype=SHORT)
    rows = 10 - start
    guarded[10 : 10 + rows] = inputs["embed_weight"][start:10]
    ids = torch.tensor([9, 10, 127631530, -1, 4, -(2**31)], dtype=ids_dtype)
    inputs |= {"embed_weight": guarded[10 : 10 + rows], "input_ids": ids, "vocab_start": start}

    embeds = torch.zeros(6, 32, dtype=SHORT)
    embeds[0] = guarded[10 + 9 - start]
    if start == 0:
        embeds[4] = guarded[14]
    want = {k: v for k, v in inputs.items() if k not in ("input_ids", "embed_weight")}
    same(run(**inputs), run(**want, inputs_embeds=embeds))


def test_far_ids_do_not_wrap_around(run: Callable[..., Tensor]) -> None:
    inputs = inputs_of(tokens=2)
    known = run(**inputs | {"input_ids": torch.tensor([0, 1])})
    far = run(**inputs | {"input_ids": torch.tensor([2**32, -(2**63)])})
    assert not far.isnan().any() and (far != known).any(dim=1).all()


def test_strict_ids_name_the_id_and_its_row(run: Callable[..., Tensor]) -> None:
    inputs = inputs_of(tokens=4)
    inputs |= {"input_ids": torch.tensor([9, 12, 127631530, -1]), "strict_ids": True}
    inputs |= {"embed_weight": inputs["embed_weight"][:10], "vocab_start": 4}
    message = r"input_ids expected ids in \[4, 14\), got 127631530 at row 2"
    if INTERPRETED:
        message = "strict_ids expected False on CUDA, where raising would stall the host"
    with pytest.raises(RuntimeError, match=f"^entry: {message}"):
        run(**inputs)
    if INTERPRETED:
        return
    inputs["input_ids"] = torch.tensor([4, 5, 12, 13])
    same(run(**inputs), run(**inputs | {"strict_ids": False}))


# ---- Shapes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False] if INTERPRETED else [False, True])
def test_one_vector_equals_one_row(run: Callable[..., Tensor], packed: bool) -> None:
    inputs = inputs_of("bias", *["packed"] * packed, tokens=1)
    want = run(**inputs)
    assert want.shape == (1, 48)
    for ids in (inputs["input_ids"], inputs["input_ids"][0]):  # [1] and []
        got = run(**inputs | {"hidden": inputs["hidden"][0], "input_ids": ids})
        assert got.shape == (48,)
        same(got, want[0])


def test_no_rows(run: Callable[..., Tensor]) -> None:
    inputs = inputs_of("bias", tokens=0)
    assert run(**inputs).shape == (0, 48)
    embeds = inputs_of("embeds", tokens=0)
    positions = torch.zeros(0, dtype=torch.int32)
    assert run(**embeds, positions=positions, zero_at_position_0=True).shape == (0, 48)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", [(), ("embeds",)])
def test_rows_of_a_wider_tensor(
    run: Callable[..., Tensor], dtype: torch.dtype, features: tuple[str, ...]
) -> None:
    same(
        run(**inputs_of("strided", *features, dtype=dtype)),
        run(**inputs_of(*features, dtype=dtype)),
    )


def test_every_second_row_and_a_repeated_row(run: Callable[..., Tensor]) -> None:
    inputs = inputs_of("embeds", tokens=8)
    every_second = {k: v[::2] if k in ("hidden", "inputs_embeds") else v for k, v in inputs.items()}
    same(run(**every_second), run(**inputs)[::2])
    repeated = inputs | {"hidden": inputs["hidden"][:1].expand(8, -1)}
    same(run(**repeated)[0], run(**inputs)[0])


# ---- Numerics -----------------------------------------------------------------------------------

INVARIANCE = [
    pytest.param(cases.EntryRow("", dtype, 64, 1100, out, frozenset(features)), id=id)
    for id, dtype, out, features in [
        ("bf16", cases.BF16, 131, {"bias"}),
        ("bf16-packed", cases.BF16, 144, {"packed"}),
        ("fp16", cases.FP16, 131, {"embed_norm"}),
        ("fp32", cases.FP32, 131, set()),
    ]
]


@not_interpreted
@pytest.mark.parametrize("isa", cases.CPU_ISAS)
@pytest.mark.parametrize("row", INVARIANCE)
def test_a_row_alone_equals_the_row_in_a_batch(row: cases.EntryRow, isa: str) -> None:
    """Bit for bit, for any batch around it, and at any place in it."""
    inputs = cases.entry_inputs(row)
    per_row = {k: inputs[k] for k in ("hidden", "input_ids")}
    with cases.cpu_isa(isa):
        whole = entry(**inputs)
        for begin, end in [*((t, t + 1) for t in range(64)), (0, 2), (3, 6), (1, 18), (30, 63)]:
            part = entry(**inputs | {k: v[begin:end] for k, v in per_row.items()})
            same(part, whole[begin:end])


@not_interpreted
@pytest.mark.parametrize("isa", cases.CPU_ISAS)
@pytest.mark.parametrize("row", INVARIANCE)
def test_any_number_of_threads_gives_the_same_bits(row: cases.EntryRow, isa: str) -> None:
    inputs = cases.entry_inputs(row)
    with cases.cpu_isa(isa), cases.threads(1):
        want = entry(**inputs)
    for count in (2, 3, 5):
        with cases.cpu_isa(isa), cases.threads(count):
            same(entry(**inputs), want)


def rms(x: Tensor, want: Tensor) -> float:
    return float((x.double() - want).pow(2).mean().sqrt())


@not_interpreted
@pytest.mark.parametrize("isa", cases.CPU_ISAS)
@pytest.mark.parametrize(
    "dtype, packed", [(cases.BF16, False), (cases.BF16, True), (cases.FP16, False)]
)
def test_error_is_at_most_that_of_the_unfused_model(
    dtype: torch.dtype, packed: bool, isa: str
) -> None:
    """Root mean square error against fp64, at most 1.5 times that of norms, cat and linear."""
    for seed in range(3):
        row = cases.EntryRow("", dtype, 16, 1024, 256, frozenset({"embeds"}))
        inputs = cases.entry_inputs(row, seed)
        want = cases.entry_exact(inputs)
        unfused = entry_op.entry(**inputs)
        if packed:
            inputs["proj_weight"] = pack_projection(inputs["proj_weight"])
        with cases.cpu_isa(isa):
            got = entry(**inputs)
        assert rms(got, want) <= 1.5 * rms(unfused, want)


def test_large_values_and_infinities(run: Callable[..., Tensor]) -> None:
    """float16 and bfloat16 conversions at their edges, through an identity projection."""
    for dtype in SHORT_DTYPES:
        # Norm 1, gains that make the products subnormal, large, overflowing, infinite and NaN.
        gains = torch.tensor(
            [6e-8, -3e-6, 5e-5, 1.0, -65504.0, 40000.0, torch.inf, torch.nan], dtype=dtype
        )
        inputs = {
            "hidden": torch.ones(1, 8, dtype=dtype),
            "inputs_embeds": torch.zeros(1, 8, dtype=dtype),
            "enorm_weight": torch.ones(8, dtype=dtype),
            "hnorm_weight": gains,
            "enorm_eps": 0.0,
            "hnorm_eps": 0.0,
        }
        for i in range(8):  # one column at a time: inf * 0 is NaN
            one = inputs | {"hnorm_weight": torch.where(torch.arange(8) == i, gains, 0)}
            proj = torch.zeros(1, 16, dtype=dtype)
            proj[0, 8 + i] = 1
            got = run(**one, proj_weight=proj)
            torch.testing.assert_close(got, gains[i].reshape(1, 1), rtol=0, atol=0, equal_nan=True)


def test_packing_is_undone_by_unpacking() -> None:
    weight = torch.randn(48, 70).to(cases.BF16)
    packed = pack_projection(weight)
    assert packed.shape == (3, 35, 16, 2) and packed.is_contiguous()
    assert packed[1, 4, 7].tolist() == weight[23, 8:10].tolist()
    same(entry_op.unpack_projection(packed), weight)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="of Linux")
def test_a_large_packed_weight_asks_for_huge_pages() -> None:
    packed = pack_projection(torch.randn(1024, 2048).to(cases.BF16))
    flags = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= packed.data_ptr() < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            flags = line.split()[1:]
    assert flags is not None and "hg" in flags
    same(entry_op.unpack_projection(packed[:1]), entry_op.unpack_projection(packed)[:16])


@pytest.mark.parametrize(
    "weight, got",
    [
        (torch.zeros(20, 8, dtype=cases.BF16), r"bfloat16 \[20, 8\]"),
        (torch.zeros(16, 7, dtype=cases.BF16), r"bfloat16 \[16, 7\]"),
        (torch.zeros(16, 8), r"float32 \[16, 8\]"),
    ],
)
def test_what_cannot_be_packed(weight: Tensor, got: str) -> None:
    with pytest.raises(ValueError, match=f"multiple of 16.*{got}"):
        pack_projection(weight)


# ---- Checks -------------------------------------------------------------------------------------


def bf16(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=cases.BF16)


def int64(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int64)


NO_IDS = {"input_ids": None, "embed_weight": None}
PROJ = "proj_weight expected shape [H_out, 64] or packed [H_out/16, 32, 16, 2], got"
ONE_OF = "expected exactly one of input_ids and inputs_embeds, got"
BAD = [  # what is changed in a good call with T = 7, H = 32, H_out = 48; the message
    (
        {"hidden": torch.zeros(7, 32).double()},
        "hidden expected dtype bfloat16 or float16 or float32, got float64",
    ),
    ({"hidden": bf16(1, 7, 32)}, "hidden expected shape [T, H] or [H], got [1, 7, 32]"),
    ({"hidden": bf16(32, 7).T}, "hidden expected last stride 1, got 7"),
    ({"hidden": bf16(7, 31)}, "enorm_weight expected shape [31], got [32]"),
    ({"enorm_weight": torch.zeros(32)}, "enorm_weight expected dtype bfloat16, got float32"),
    ({"hnorm_weight": bf16(33)}, "hnorm_weight expected shape [32], got [33]"),
    ({"hnorm_weight": bf16(64)[::2]}, "hnorm_weight expected last stride 1, got 2"),
    ({"proj_weight": torch.zeros(48, 64)}, "proj_weight expected dtype bfloat16, got float32"),
    ({"proj_weight": bf16(48, 32)}, f"{PROJ} [48, 32]"),
    ({"proj_weight": bf16(64, 48).T}, "proj_weight expected last stride 1, got 48"),
    ({"proj_weight": bf16(3, 32, 2, 16)}, f"{PROJ} [3, 32, 2, 16]"),
    (
        {"proj_weight": bf16(3, 16, 32, 2).transpose(1, 2)},
        "packed proj_weight expected a contiguous tensor",
    ),
    ({"proj_bias": bf16(47)}, "proj_bias expected shape [48], got [47]"),
    ({"inputs_embeds": bf16(7, 32)}, f"{ONE_OF} both"),
    (NO_IDS, f"{ONE_OF} neither"),
    ({"embed_weight": None}, "embed_weight expected a table for input_ids, got None"),
    (
        {"input_ids": None, "inputs_embeds": bf16(7, 32)},
        "embed_weight expected None, got a table beside inputs_embeds",
    ),
    ({"input_ids": int64(6)}, "input_ids expected shape [7], got [6]"),
    ({"input_ids": torch.zeros(7)}, "input_ids expected dtype int32 or int64, got float32"),
    ({"input_ids": int64(14)[::2]}, "input_ids expected last stride 1, got 2"),
    ({"embed_weight": bf16(50, 31)}, "embed_weight expected shape [V >= 1, 32], got [50, 31]"),
    ({"embed_weight": bf16(0, 32)}, "embed_weight expected shape [V >= 1, 32], got [0, 32]"),
    (
        NO_IDS | {"inputs_embeds": bf16(6, 32)},
        "inputs_embeds expected shape [7, 32], got [6, 32]",
    ),
    ({"embed_norm_weight": bf16(31)}, "embed_norm_weight expected shape [32], got [31]"),
    ({"positions": int64(8)}, "positions expected shape [7], got [8]"),
    ({"zero_at_position_0": True}, "positions expected a tensor with zero_at_position_0, got None"),
    ({"enorm_eps": -1e-3}, "enorm_eps expected a finite number >= 0, got -0.001"),
    ({"hnorm_eps": torch.nan}, "hnorm_eps expected a finite number >= 0, got nan"),
    ({"gamma_offset": 2}, "gamma_offset expected 0 or 1, got 2"),
    ({"hidden": bf16(7, 0)}, "hidden expected H >= 1, got [7, 0]"),
    ({"vocab_start": -1}, "vocab_start expected a number >= 0, got -1"),
    (
        {"enorm_weight": torch.ones(32, dtype=torch.bool)},
        "enorm_weight expected dtype bfloat16, got bool",
    ),
]


@pytest.mark.parametrize("change, message", BAD, ids=[message for _, message in BAD])
def test_bad_input_is_named(run: Callable[..., Tensor], change: dict, message: str) -> None:
    with pytest.raises(RuntimeError) as error:
        run(**inputs_of(dtype=cases.BF16) | change)
    assert str(error.value).splitlines()[0] == f"entry: {message}"


def test_tensors_of_another_device_are_named() -> None:
    inputs = inputs_of()
    inputs["hnorm_weight"] = inputs["hnorm_weight"].to("meta")
    with pytest.raises(RuntimeError, match="hnorm_weight expected device cpu, got meta"):
        entry_op.entry(**inputs)


# ---- Triton -------------------------------------------------------------------------------------

if INTERPRETED:
    kernels = importlib.import_module("mtp_kernels.kernels.entry")

    def for_here(row: cases.EntryRow) -> cases.EntryRow:
        dtype = cases.FP16 if row.dtype == cases.BF16 else row.dtype
        return dataclasses.replace(row, dtype=dtype, features=row.features - {"packed"})

    # The shared rows, and more than the 64 tokens that two programs share.
    ROWS = [for_here(row) for row in cases.ENTRY_ROWS]
    ROWS += [
        cases.EntryRow("fp16-wide", cases.FP16, 130, 200, 70, frozenset({"bias", "strided"})),
        cases.EntryRow("fp16-wide-norms", cases.FP16, 65, 96, 150, frozenset({"embed_norm"})),
    ]

    @pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
    def test_triton_matches_the_reference(row: cases.EntryRow) -> None:
        """Within twice the tolerance, as activations are rounded elsewhere: errors add up."""
        rtol, atol = (2 * x for x in cases.TOLERANCES[row.dtype])
        for seed in range(2):
            inputs = cases.entry_inputs(row, seed)
            got, want = kernels.entry(**inputs), entry_op.entry(**inputs)
            torch.testing.assert_close(got, want, rtol=rtol, atol=atol)

    @pytest.mark.parametrize("dtype, tokens", [(cases.FP16, 16), (cases.FP16, 65), (cases.FP32, 3)])
    @pytest.mark.parametrize("scale", [1.0, 2.0**11, 2.0**-13])
    def test_triton_error_is_at_most_that_of_the_unfused_model(
        dtype: torch.dtype, tokens: int, scale: float
    ) -> None:
        """And less: it rounds an activation once. Also where x times gain leaves float16's range.

        Root mean square error against fp64. Measured: 0.82 of it in float16, 0.46 in float32.
        """
        for seed in range(2):
            row = cases.EntryRow("", dtype, tokens, 1024, 128, frozenset({"embeds"}))
            inputs = cases.entry_inputs(row, seed) | {"enorm_eps": 0.0, "hnorm_eps": 0.0}
            inputs["hidden"] *= scale
            inputs["hnorm_weight"] *= max(scale, 1.0) ** 0.5
            inputs["proj_weight"][:, 1024:] /= max(scale, 1.0) ** 0.5
            want = cases.entry_exact(inputs)
            assert rms(kernels.entry(**inputs), want) <= rms(entry_op.entry(**inputs), want)

    def test_triton_rounds_like_its_model_which_is_accurate_in_bfloat16() -> None:
        """The bfloat16 dot needs a GPU; what is rounded where can be modelled."""

        def model(inputs: dict[str, Any]) -> Tensor:
            total = torch.zeros(())
            halves = inputs["proj_weight"].float().chunk(2, dim=1)
            for x, norm, half in zip(("inputs_embeds", "hidden"), "eh", halves, strict=True):
                gain, x = inputs[f"{norm}norm_weight"], inputs[x].float()
                mean = x.pow(2).mean(-1, keepdim=True) + inputs[f"{norm}norm_eps"]
                y = (x * gain.float()).to(gain.dtype).float()
                total = total + y @ half.T * mean.rsqrt()
            return total.to(inputs["hidden"].dtype)

        for seed in range(3):
            row = cases.EntryRow("", cases.FP16, 16, 1024, 128, frozenset({"embeds"}))
            inputs = cases.entry_inputs(row, seed)
            got, want = kernels.entry(**inputs), model(inputs)
            torch.testing.assert_close(got, want, rtol=2**-10, atol=2**-14)
            assert (got == want).double().mean() > 0.99
            inputs = cases.entry_inputs(dataclasses.replace(row, dtype=cases.BF16), seed)
            want = cases.entry_exact(inputs)
            assert rms(model(inputs), want) <= rms(entry_op.entry(**inputs), want)

    @pytest.mark.parametrize("tokens, out_features", [(5, 70), (40, 2100), (130, 150)])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_traffic_is_what_the_programs_load_and_store(
        dtype: torch.dtype, tokens: int, out_features: int
    ) -> None:
        inputs = cases.entry_inputs(cases.EntryRow("", dtype, tokens, 96, out_features))
        inputs["embed_weight"] = torch.randn(tokens, 96).to(dtype)
        inputs["input_ids"] = torch.arange(tokens)
        with interpreter.counted() as launches:
            kernels.entry(**inputs)
        (launch,) = launches
        sizes = tokens, 96, out_features, dtype.itemsize
        assert launch.asked_for() == kernels.traffic(*sizes, shared=False)
        assert launch.moved() == kernels.traffic(*sizes)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("sizes", [(1, 2, 5, 16), (17, 33, 64), (65, 128, 130)])
    @pytest.mark.parametrize("features", [(), ("embed_norm",)])
    def test_triton_row_does_not_depend_on_the_batch(
        dtype: torch.dtype, sizes: tuple[int, ...], features: tuple[str, ...]
    ) -> None:
        """Bit for bit, within a configuration."""
        row = cases.EntryRow("", dtype, sizes[-1], 200, 70, frozenset(features))
        inputs = cases.entry_inputs(row)
        whole = kernels.entry(**inputs)
        for count in sizes[:-1]:
            last = {k: inputs[k][-count:] for k in ("hidden", "input_ids")}
            same(kernels.entry(**inputs | last), whole[-count:])

    @pytest.mark.parametrize("itemsize", [2, 4])
    @pytest.mark.parametrize("out_features", [1, 1024, 2048, 4096, 20_000])
    def test_triton_batches_of_a_configuration_run_the_same_code(
        itemsize: int, out_features: int
    ) -> None:
        """Which a difference of a few last bits in fp32 would not show in float16."""
        for sizes in (range(1, 17), range(17, 65), range(65, 300)):
            configs = [kernels.entry_config(t, out_features, itemsize) for t in sizes]
            assert all(config == configs[0] for config in configs)
            row_blocks, programs = configs[0].grid(1, out_features)[1:]
            assert programs == 1 or row_blocks <= kernels._arrivals(CPU, 0, False).numel()

    CPU = torch.device("cpu")

    def test_counters_serve_one_launch_after_the_other() -> None:
        """They are left even, for the next launch to find the later program by the parity."""
        inputs = inputs_of()
        want = kernels.entry(**inputs)
        counters = kernels._arrivals(CPU, 0, False)
        assert counters[:2].tolist() != [0, 0] and (counters % 2 == 0).all()
        same(kernels.entry(**inputs), want)

    def test_a_captured_launch_has_counters_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("_ARRIVALS", "_SPARE_ARRIVALS"):
            monkeypatch.setattr(kernels, name, {})
        before = kernels._arrivals(CPU, 0, True)  # nothing is kept of a capture
        eager = [kernels._arrivals(CPU, stream, False) for stream in (0, 7, 0)]
        assert eager[0].data_ptr() == eager[2].data_ptr()
        captured = [kernels._arrivals(CPU, 0, True) for _ in range(300)]
        assert len({x.data_ptr() for x in [before, *eager, *captured]}) == 1 + 2 + 300
        assert all(x.shape == (128,) and not x.any() for x in captured)

    def test_triton_refuses_packed_projections() -> None:
        message = "^entry: proj_weight expected \\[H_out, 2H\\] on a GPU, got a packed one"
        with pytest.raises(RuntimeError, match=message):
            kernels.entry(**inputs_of("packed", dtype=cases.BF16))

else:

    def test_triton_moves_little_more_than_the_weights() -> None:
        """All inputs and the output once: less than any model with a prologue of norms."""
        pytest.importorskip("triton")
        from mtp_kernels.kernels.entry import traffic

        assert round(traffic(256, 4096, 4096) / 1e6, 1) <= 73.4
        assert traffic(256, 4096, 4096) < traffic(256, 4096, 4096, shared=False)
        weights = 2 * 4096 * 4096 * 2
        assert traffic(1, 4096, 4096) < 1.002 * weights and traffic(16, 4096, 4096) < 1.02 * weights

    def test_triton_in_its_interpreter() -> None:
        """All tests of this file that an implementation can pass or fail."""
        pytest.importorskip("triton")
        interpreter.run_tests(__file__)
