"""Every op: each implementation against the PyTorch reference, opcheck, torch.compile, dispatch."""

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
        pack_op.OP, pack_op.draft_pack, cases.DRAFT_PACK_ROWS, cases.draft_pack_inputs, "compiled"
    ),
    "draft_step": Op(
        step_op.OP, step_op.draft_step, cases.DRAFT_STEP_ROWS, cases.draft_step_inputs, "compiled"
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
    "verify": Op(
        verify_op.OP, verify_op.verify, cases.VERIFY_ROWS, cases.verify_inputs, "compiled"
    ),
}
ROWS = [pytest.param(op, row, id=f"{name}-{row.id}") for name, op in OPS.items() for row in op.rows]


def as_tuple(outputs: Tensor | tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else outputs or ()


def copied(x: Any, device: str) -> Any:
    """A copy of tensors with the storages and strides they have."""
    if isinstance(x, Tensor):
        whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
        return whole.to(device, copy=True).as_strided(x.size(), x.stride(), x.storage_offset())
    if isinstance(x, dict):
        return {name: copied(value, device) for name, value in x.items()}
    if isinstance(x, list | tuple):
        return type(x)(copied(value, device) for value in x)
    return x


def run(
    op: Op, call: Callable[..., Any], inputs: dict[str, Any], device: str = "cpu"
) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """What a call on copies returns; and what it may have written, in the whole of its storage."""
    inputs = copied(inputs, device)
    returned = as_tuple(call(**inputs))
    written = [inputs.get(x.name) for x in op.call._schema.arguments if x.is_write]
    storages = [
        torch.empty(0, dtype=x.dtype, device=device).set_(x.untyped_storage())
        for x in written
        if x is not None
    ]
    return copied(returned, "cpu"), copied(storages, "cpu")


def runs_on_cuda(inputs: dict[str, Any]) -> bool:
    """Weights packed for a CPU, and errors that would stall the host, are refused there."""
    weights = [inputs.get("proj_weight"), inputs.get("head_weight")]
    weights += inputs.get("proj_weights") or []
    is_packed = any(weight is not None and weight.dim() == 4 for weight in weights)
    return not is_packed and not inputs.get("strict_ids")


CUDA = ["cuda"] if torch.cuda.is_available() else []


@pytest.mark.parametrize("where", [*cases.CPU_ISAS, *CUDA])
@pytest.mark.parametrize("op, row", ROWS)
def test_matches_reference(op: Op, row: Any, where: str) -> None:
    for seed in range(3):
        inputs = op.inputs(row, seed)
        if where == "cuda" and not runs_on_cuda(inputs):
            pytest.skip("refused on CUDA")
        want, want_written = run(op, op.reference, inputs)
        with cases.cpu_isa("scalar" if where == "cuda" else where):
            got, written = run(op, op.call, inputs, "cuda" if where == "cuda" else "cpu")
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


@pytest.mark.parametrize("device", ["cpu", *CUDA])
@pytest.mark.parametrize("op, row", ROWS)
def test_opcheck(op: Op, row: Any, device: str) -> None:
    """Schema (inputs unmodified, outputs fresh), fake against real, dynamic shapes."""
    rtol, atol = cases.TOLERANCES[row.dtype]
    inputs = op.inputs(row)
    if device == "cuda" and not runs_on_cuda(inputs):
        pytest.skip("refused on CUDA")
    torch.library.opcheck(op.call, (), copied(inputs, device), rtol=rtol, atol=atol)


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
    assert (f"csrc/{name}_cuda.cu" if is_compiled else "_declare.py") in owner(name, "CUDA")
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
