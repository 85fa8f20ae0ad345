"""Every GPU kernel, compiled and not run: what bench/static.py claims of it holds.

That file has the table of kernels, serving configurations and claims, and compiles them, once.
"""

import dataclasses
import importlib.util
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("triton")

FILE = Path(__file__).parents[1] / "bench" / "static.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("static", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["static"] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


static = load()
CASES = [(case.op, case.configuration) for case in static.TABLE]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list]:
    """By op and configuration, in the order of architectures and launches."""
    file = tmp_path_factory.mktemp("static") / "rows.json"
    command = [sys.executable, FILE, "--json", file]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-6000:]
    found = defaultdict(list)
    for row in json.loads(file.read_text()):
        found[row["op"], row["configuration"]].append(static.Row(**row))
    return found


@pytest.mark.parametrize("op, configuration", CASES, ids=[" ".join(case) for case in CASES])
def test_triton_kernels_compile_to_what_is_claimed(
    rows: dict[tuple[str, str], list], op: str, configuration: str
) -> None:
    (case,) = (x for x in static.TABLE if (x.op, x.configuration) == (op, configuration))
    got = rows[op, configuration]
    # All launches, and no others.
    assert [(row.arch, row.kernel) for row in got] == [
        (arch, kernel) for arch in case.archs for kernel in case.kernels
    ]
    assert [(row, faults) for row in got if (faults := static.faults(row))] == []


@pytest.mark.parametrize("file", static.CUDA_FILES)
def test_cuda_kernels_compile_to_what_is_claimed(
    rows: dict[tuple[str, str], list], file: str
) -> None:
    if not static.nvcc():
        pytest.skip("nvcc is not installed: csrc/*.cu cannot be compiled")
    got = rows[file.removesuffix("_cuda.cu"), "CUDA"]
    assert {row.arch for row in got} == set(static.ARCHS)
    assert [(row, faults) for row in got if (faults := static.faults(row))] == []


def test_every_triton_kernel_is_in_the_table() -> None:
    folder = FILE.parents[1] / "mtp_kernels" / "kernels"
    text = "".join(path.read_text() for path in folder.glob("*.py"))
    launched = {name for case in static.TABLE for name in case.kernels}
    assert launched == set(static.kernel_names(text))


@pytest.mark.parametrize(
    "change, fault",
    [
        ({"spills": 3}, "spills expected none, got 3"),
        ({"stack": 8}, "stack expected none, got 8"),
        ({"registers": 81}, "registers expected at most 80, got 81"),
        ({"copies": 0}, "16-byte copies expected at least 1, got 0"),
        ({"mma": {"HMMA": 8}}, "HGMMA expected, got {'HMMA': 8}"),
        ({"programs": 2}, "programs on an SM expected at least 3, got 2"),
    ],
)
def test_a_broken_claim_is_named(change: dict, fault: str) -> None:
    good = static.Row(
        op="head_argmax",
        configuration="4 tokens",
        kernel="head_argmax_kernel",
        arch=90,
        registers=60,
        shared=72 * 1024,
        stack=0,
        spills=0,
        threads=256,
        programs=3,
        mma={"HGMMA": 4},
        loads=0,
        copies=16,
        stores=0,
        inexact=1,
    )
    assert static.faults(good) == []
    assert static.faults(dataclasses.replace(good, **change)) == [fault]


def test_programs_on_an_sm() -> None:
    """By registers, shared memory, threads and blocks."""
    assert static.programs_on_an_sm(90, 256, 129, 0) == 1  # 136 a thread, 8 warps
    assert static.programs_on_an_sm(90, 256, 128, 0) == 2
    assert static.programs_on_an_sm(90, 128, 40, 75 * 1024) == 3
    assert static.programs_on_an_sm(80, 128, 40, 75 * 1024) == 2
    assert static.programs_on_an_sm(100, 1024, 32, 0) == 2
    assert static.programs_on_an_sm(100, 32, 16, 0) == 32
