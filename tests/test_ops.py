"""Every op: each implementation against the PyTorch reference, opcheck, torch.compile, dispatch."""

import copy
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import cases
import pytest
import torch
from torch import Tensor

import mtp_kernels
from mtp_kernels.ops import _declare
from mtp_kernels.ops import draft_pack as pack_op
from mtp_kernels.ops import draft_step as step_op
from mtp_kernels.ops import entry as entry_op
from mtp_kernels.ops import entry_embed as embed_op
from mtp_kernels.ops import entry_hidden as hidden_op
from mtp_kernels.ops import entry_lookup as lookup_op
from mtp_kernels.ops import head_argmax as head_op
from mtp_kernels.ops import verify as verify_op


class Op(NamedTuple):
    call: torch._ops.OpOverload
    reference: Callable[..., Any]
    rows: list[Any]
    inputs: Callable[..., dict[str, Any]]
    cuda: str  # what a CUDA tensor runs: "triton", or "compiled" in a build with CUDA
    agree: Callable[..., None] | None = None  # instead of equal integers


OPS = {
    "draft_pack": Op(
        pack_op.OP, pack_op.draft_pack, cases.DRAFT_PACK_ROWS, cases.draft_pack_inputs, "triton"
    ),
    "draft_step": Op(
        step_op.OP, step_op.draft_step, cases.DRAFT_STEP_ROWS, cases.draft_step_inputs, "triton"
    ),
    "entry": Op(entry_op.OP, entry_op.entry, cases.ENTRY_ROWS, cases.entry_inputs, "compiled"),
    "entry_embed": Op(
        embed_op.OP,
        embed_op.entry_embed,
        cases.ENTRY_EMBED_ROWS,
        cases.entry_embed_inputs,
        "triton",
    ),
    "entry_hidden": Op(
        hidden_op.OP,
        hidden_op.entry_hidden,
        cases.ENTRY_HIDDEN_ROWS,
        cases.entry_hidden_inputs,
        "triton",
    ),
    "entry_lookup": Op(
        lookup_op.OP,
        lookup_op.entry_lookup,
        cases.ENTRY_LOOKUP_ROWS,
        cases.entry_lookup_inputs,
        "triton",
    ),
    "head_argmax": Op(
        head_op.OP,
        head_op.head_argmax,
        cases.HEAD_ROWS,
        cases.head_inputs,
        "triton",
        cases.head_agrees,
    ),
    "verify": Op(verify_op.OP, verify_op.verify, cases.VERIFY_ROWS, cases.verify_inputs, "triton"),
}
ROWS = [pytest.param(op, row, id=f"{name}-{row.id}") for name, op in OPS.items() for row in op.rows]


def as_tuple(outputs: Tensor | tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else outputs or ()


def run(
    op: Op, call: Callable[..., Any], inputs: dict[str, Any]
) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """What a call on copies returns; and what it may have written, in the whole of its storage."""
    inputs = copy.deepcopy(inputs)
    returned = as_tuple(call(**inputs))
    written = [inputs.get(x.name) for x in op.call._schema.arguments if x.is_write]
    storages = [
        torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()) for x in written if x is not None
    ]
    return returned, storages


@pytest.mark.parametrize("isa", cases.CPU_ISAS)
@pytest.mark.parametrize("op, row", ROWS)
def test_matches_reference(op: Op, row: Any, isa: str) -> None:
    for seed in range(3):
        inputs = op.inputs(row, seed)
        want, want_written = run(op, op.reference, inputs)
        with cases.cpu_isa(isa):
            got, written = run(op, op.call, inputs)
        torch.testing.assert_close(written, want_written, rtol=0, atol=0, equal_nan=True)
        pairs = list(zip(got, want, strict=True))
        for g, w in pairs:
            assert g.dtype == w.dtype and g.shape == w.shape
        if op.agree:
            op.agree(inputs, got, want)
            continue
        rtol, atol = cases.TOLERANCES[row.dtype]
        for g, w in pairs:
            exact = {} if w.is_floating_point() else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(g, w, **{"rtol": rtol, "atol": atol} | exact)


@pytest.mark.parametrize("op, row", ROWS)
def test_opcheck(op: Op, row: Any) -> None:
    """Schema (inputs unmodified, outputs fresh), fake against real, dynamic shapes."""
    rtol, atol = cases.TOLERANCES[row.dtype]
    torch.library.opcheck(op.call, (), op.inputs(row), rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", OPS)
def test_compiles_to_one_graph(name: str) -> None:
    op = OPS[name]
    inputs = op.inputs(op.rows[0])

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(**x: Any) -> tuple[Tensor, ...]:
        return tuple(out * 2 for out in as_tuple(op.call(**x)))

    want, want_written = run(op, op.call, inputs)
    got, written = run(op, compiled, inputs)
    torch.testing.assert_close(got, tuple(out * 2 for out in want), rtol=0, atol=0)
    torch.testing.assert_close(written, want_written, rtol=0, atol=0, equal_nan=True)


def owner(name: str, key: str) -> str:
    lines = torch._C._dispatch_dump_table(f"mtp_kernels::{name}").splitlines()
    return next(line for line in lines if line.startswith(f"{key}: "))


@pytest.mark.parametrize("name", OPS)
def test_who_owns_each_dispatch_key(name: str) -> None:
    """Compiled beats Triton beats the reference."""
    assert f"csrc/{name}_cpu.cpp" in owner(name, "CPU")
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    op = f"mtp_kernels::{name}"
    is_compiled = OPS[name].cuda == "compiled" and mtp_kernels.build_info()["cuda"]
    assert has_kernel(op, "CUDA")
    assert ("_declare.py" in owner(name, "CUDA")) == (not is_compiled)
    assert has_kernel(op, "Meta") and has_kernel(op, "CompositeExplicitAutograd")


def test_a_device_without_kernel_runs_the_reference_and_says_so_once() -> None:
    def no_kernel(x: Tensor) -> Tensor:
        return x + 1

    op = _declare.declare(no_kernel)
    x = torch.zeros(2)
    with pytest.warns(UserWarning, match="mtp_kernels::no_kernel has no cpu kernel"):
        assert op(x).tolist() == [1, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        op(x)
