"""verify's Triton kernels, run in Triton's interpreter.

In a process of its own, which is this file with an argument: the interpreter must be chosen before
triton is imported. What compilers make of the kernels: test_static.py.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import cases
import interpreter
import pytest
import test_exact
import torch
import verify_cases
from torch import Tensor

from mtp_kernels.ops import _declare
from mtp_kernels.ops import verify as op

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
exact = pytest.importorskip("mtp_kernels.kernels.exact")


# The interpreter


@triton.jit
def exact_kernel(y, exp2, x, log, words, exponential, Y: tl.constexpr, X: tl.constexpr):
    ys, xs = tl.arange(0, Y), tl.arange(0, X)
    tl.store(exp2 + ys, exact.exp2(tl.load(y + ys)))
    tl.store(log + xs, exact.log(tl.load(x + xs)))
    tl.store(exponential + ys, exact.exponential(tl.load(words + ys).to(tl.uint32)))


@triton.jit
def philox_kernel(seed, position, lane, PURPOSE: tl.constexpr, out):
    words = exact.philox(tl.load(seed), tl.load(position), PURPOSE, tl.load(lane))
    for i in tl.static_range(4):
        tl.store(out + i, words[i].to(tl.int64))


def interpret(file: Path) -> None:
    """Outputs of the launcher for all inputs, and of the exact functions for the shared table."""
    from mtp_kernels.kernels.verify import verify

    interpreter.quicken()

    def padded(values: Tensor, fill: float) -> Tensor:
        return torch.cat([values, values.new_full((256 - values.numel(),), fill)])

    table = test_exact.make_table()
    y = padded(test_exact.floats_of(table["exp2"][0]), 0.0)
    x = padded(test_exact.floats_of(table["log"][0]), 1.0)
    words = padded(torch.tensor(table["exponential"][0]), 0)
    exp2, log, exponential = torch.empty(3, 256)
    exact_kernel[(1,)](y, exp2, x, log, words, exponential, Y=256, X=256)
    philox = []
    for seed, position, purpose, lane, _ in table["philox"]:
        out = torch.empty(4, dtype=torch.int64)
        lanes = torch.tensor(lane, dtype=torch.int32)
        philox_kernel[(1,)](
            torch.tensor(seed), torch.tensor(position), lanes, PURPOSE=purpose, out=out
        )
        philox.append(out.tolist())
    outputs = {name: verify(**inputs) for name, inputs in verify_cases.all_inputs()}
    with mock.patch.object(op, "_check_values"):  # as on a GPU
        outputs["unchecked"] = verify(**verify_cases.unchecked()[0])
    # What a CUDA tensor takes through the dispatcher.
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    inputs = cases.verify_inputs(cases.VERIFY_ROWS[2])
    dispatched = op.OP.redispatch(cuda, **inputs)
    torch.save(
        {
            "outputs": outputs,
            "dispatched": dispatched,
            "exact": {"exp2": exp2, "log": log, "exponential": exponential},
            "philox": philox,
        },
        file,
    )


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("triton") / "outputs.pt"
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, __file__, file], env=environment, check=True, timeout=600)
    return torch.load(file)


def test_equals_the_reference(interpreted: dict[str, Any]) -> None:
    """All integers of a few hundred requests."""
    requests, different = 0, []
    for name, inputs in verify_cases.all_inputs():
        with cases.threads(1):
            want = op.verify(**inputs)
        got = interpreted["outputs"][name]
        requests += want[0].shape[0]
        for g, w in zip(got, want, strict=True):
            assert g.dtype == w.dtype and g.shape == w.shape, name
        if not all(torch.equal(g, w) for g, w in zip(got, want, strict=True)):
            different.append(name)
    assert different == []
    assert requests >= 300


def test_a_request_without_rows_gets_no_token(interpreted: dict[str, Any]) -> None:
    want = op.verify(**verify_cases.unchecked()[1])
    got = interpreted["outputs"]["unchecked"]
    for x, wanted, nothing in zip(got, want, (-1, 0, 0), strict=True):
        assert torch.equal(x[::2], wanted) and (x[1::2] == nothing).all()


def test_exact_functions_have_the_reference_bits(interpreted: dict[str, Any]) -> None:
    table = test_exact.make_table()
    for name, got in interpreted["exact"].items():
        want = table[name][1]
        assert test_exact.bits_of(got[: len(want)]) == want, name
    assert interpreted["philox"] == [words for *_, words in table["philox"]]


# Dispatch


def owner(name: str, key: str) -> str:
    lines = torch._C._dispatch_dump_table(f"mtp_kernels::{name}").splitlines()
    return next(line for line in lines if line.startswith(f"{key}: "))


def test_importing_the_package_does_not_import_triton() -> None:
    code = "import sys, mtp_kernels; print('triton' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_cuda_tensors_go_to_the_launcher(interpreted: dict[str, Any]) -> None:
    assert "_declare.py" in owner("verify", "CUDA") and "[kernel]" in owner("verify", "CUDA")
    want = op.verify(**cases.verify_inputs(cases.VERIFY_ROWS[2]))
    for g, w in zip(interpreted["dispatched"], want, strict=True):
        assert torch.equal(g, w)


def test_a_compiled_kernel_is_not_overridden() -> None:
    def compiled_first(x: Tensor) -> Tensor:
        return x + 1

    library = torch.library.Library("mtp_kernels", "IMPL")
    library.impl("compiled_first", lambda x: x + 2, "CUDA")
    call = _declare.declare(compiled_first, triton="not_a_module:function")
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    assert call.redispatch(cuda, torch.zeros(1)).item() == 2


def test_without_triton_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mtp_kernels.kernels.verify", "mtp_kernels.kernels.exact"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    call = _declare._lazy("mtp_kernels.kernels.verify:verify", lambda x: x + 1)
    assert call(1) == 2


if __name__ == "__main__":
    interpret(Path(sys.argv[1]))
