"""head_argmax's Triton kernel: run in Triton's interpreter, and compiled (not run) for three GPUs.

Both happen in processes of their own, which are this file with arguments: the interpreter must be
chosen before triton is imported, and compiling needs a driver that pretends to be a GPU.
"""

import dataclasses
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cases
import pytest
import torch

from mtp_kernels.ops import head_argmax as op

triton = pytest.importorskip("triton")

MMA = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}  # by compute capability


def run_here(*arguments: object, **environment: str) -> None:
    command = [sys.executable, __file__, *map(str, arguments)]
    subprocess.run(command, env=os.environ | environment, check=True, timeout=600)


def all_inputs() -> Iterator[tuple[str, dict[str, Any]]]:
    """The shared rows; bfloat16, whose dot is wrong in the interpreter, as float16."""
    for row in cases.HEAD_ROWS:
        dtype = cases.FP32 if row.dtype == cases.FP32 else cases.FP16
        row = dataclasses.replace(row, dtype=dtype, features=row.features - {"packed"})
        yield from ((f"{row.id}-{seed}", cases.head_inputs(row, seed)) for seed in range(2))
    row = cases.HeadRow("", cases.FP32, 3, 16, 9, frozenset({"sampled"}))
    yield "last-ids", cases.head_inputs(row) | {"vocab_start": 2**34 - 9}
    beyond = 2 ** torch.arange(30, 39) - torch.arange(9)
    yield "ids-beyond", cases.head_inputs(row) | {"id_map": beyond}


def interpret(file: Path) -> None:
    from mtp_kernels.kernels.head_argmax import head_argmax

    outputs = {name: head_argmax(**inputs) for name, inputs in all_inputs()}
    packed = torch.zeros(1, 32, 16, 2, dtype=cases.BF16)
    with pytest.raises(RuntimeError, match="expected \\[V, H\\] on a GPU, got a packed one"):
        head_argmax(torch.zeros(1, 64, dtype=cases.BF16), packed)
    torch.save(outputs, file)


def test_equals_the_reference(tmp_path: Path) -> None:
    run_here("interpret", tmp_path / "outputs.pt", TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    got = torch.load(tmp_path / "outputs.pt")
    for name, inputs in all_inputs():
        want = op.head_argmax(**inputs)
        assert [x.dtype for x in got[name]] == [torch.float32, torch.int64]
        cases.head_agrees(inputs, got[name], want)


CONFIGURATIONS = {  # name -> tokens, whether sampled
    "skinny": (4, False),
    "skinny-sampled": (16, True),
    "wide": (64, False),
    "wide-sampled": (64, True),
}


def serving_inputs(name: str) -> dict[str, Any]:
    """MiMo-V2-Flash's head, bfloat16; memory is never touched."""
    tokens, is_sampled = CONFIGURATIONS[name]
    inputs = {
        "hidden": torch.empty(tokens, 4096, dtype=cases.BF16),
        "head_weight": torch.empty(152_576, 4096, dtype=cases.BF16),
    }
    if is_sampled:
        inputs["temperature"] = torch.ones(tokens)
        inputs["seeds"] = inputs["positions"] = torch.zeros(tokens, dtype=torch.int64)
    return inputs


def compile_all(file: Path) -> None:
    """What ptxas made of the kernel, launched by the launcher, in serving configurations."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from mtp_kernels.kernels import head_argmax as kernels

    class PretendedGpu:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", arch, 32)

        def get_current_device(self) -> int:
            return arch

        def get_current_stream(self, device: int) -> int:
            return 0

    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    kernel = kernels.head_argmax_kernel
    found = {}

    def keep(*args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        compiled = type(kernel).run(kernel, *args, grid=grid, warmup=True, **kwargs)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            cubin.write(compiled.asm["cubin"])
            cubin.flush()
            command = [tools / "cuobjdump", "--dump-resource-usage", "--dump-sass", cubin.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        used = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
        found[arch, name] = {
            "registers": int(used[1]),
            "stack": int(used[2]) + int(used[3]),
            "spills": len(re.findall(r"\b(?:STL|LDL)\b", text)),
            "shared": compiled.metadata.shared,
            "mma": len(re.findall(rf"\b{MMA[arch]}\b", text)),
            "wide_copies": len(re.findall(r"\bLDGSTS\.E\S*\.128", text)),
        }

    driver.set_active(PretendedGpu())
    kernel.run = keep
    for arch in MMA:  # noqa: B007  PretendedGpu and keep read it
        for name in CONFIGURATIONS:
            kernels.head_argmax(**serving_inputs(name))
    torch.save(found, file)


def test_compiles_to_mma_without_spills(tmp_path: Path, record_property: Any) -> None:
    run_here("compile", tmp_path / "kernels.pt")
    found = torch.load(tmp_path / "kernels.pt")
    assert len(found) == len(MMA) * len(CONFIGURATIONS)
    for (arch, name), used in found.items():
        at = f"sm_{arch}, {name}: {used}"
        record_property(f"sm_{arch} {name}", used["registers"])
        assert used["stack"] == used["spills"] == 0, at
        assert used["mma"] > 0 and used["wide_copies"] > 0, at
        if name == "skinny" and arch != 80:  # three programs on an SM
            assert 3 * used["shared"] <= 227 * 1024 and used["registers"] <= 80, at


if __name__ == "__main__":
    {"interpret": interpret, "compile": compile_all}[sys.argv[1]](Path(sys.argv[2]))
