"""head_argmax's Triton kernel, run in Triton's interpreter.

In a process of its own, which is this file with an argument: the interpreter must be chosen before
triton is imported. What compilers make of the kernel: test_static.py.
"""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cases
import pytest
import torch

from mtp_kernels.ops import head_argmax as op

pytest.importorskip("triton")


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
    file = tmp_path / "outputs.pt"
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, __file__, file], env=environment, check=True, timeout=600)
    got = torch.load(file)
    for name, inputs in all_inputs():
        want = op.head_argmax(**inputs)
        assert [x.dtype for x in got[name]] == [torch.float32, torch.int64]
        cases.head_agrees(inputs, got[name], want)


if __name__ == "__main__":
    interpret(Path(sys.argv[1]))
