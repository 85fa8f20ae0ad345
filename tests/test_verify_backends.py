"""verify on every backend: the same integers for 10,000 random requests in 120 launches.

`python tests/test_verify_backends.py FILE SHARD` is the Triton half, in processes of its own:
kernels run in Triton's interpreter only if `TRITON_INTERPRET` is set before triton is imported.
"""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import cases
import emulation
import pytest
import torch
from torch import Tensor

from mtp_kernels.ops import verify as op

LAUNCHES = range(120)
SHARDS = 2

Outputs = list[tuple[Tensor, ...]]


def outputs_of(verify: Callable[..., tuple[Tensor, ...]], launches: range = LAUNCHES) -> Outputs:
    return [verify(**cases.verify_inputs(cases.random_verify_row(seed), seed)) for seed in launches]


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Outputs]:
    """Started first, so that it runs beside the reference; call it for the outputs."""
    files = [tmp_path_factory.mktemp("triton") / f"{shard}.pt" for shard in range(SHARDS)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([sys.executable, __file__, str(file), str(shard)], env=environment)
        for shard, file in enumerate(files)
    ]

    def outputs() -> Outputs:
        assert [process.wait(timeout=1800) for process in processes] == [0] * SHARDS
        shards = [torch.load(file) for file in files]
        return [shards[seed % SHARDS][seed // SHARDS] for seed in LAUNCHES]

    return outputs


@pytest.fixture(scope="module")
def reference(triton: Callable[[], Outputs]) -> Outputs:
    with cases.threads(1):
        return outputs_of(op.verify)


def differing(got: Outputs, want: Outputs) -> list[str]:
    """The launches that differ, which is none: decisions are integers, there are no near ties."""
    return [
        cases.random_verify_row(seed).id
        for seed, g, w in zip(LAUNCHES, got, want, strict=True)
        if not all(torch.equal(x, y) for x, y in zip(g, w, strict=True))
    ]


def test_the_sample_is_large_and_varied(reference: Outputs) -> None:
    rows = [cases.random_verify_row(seed) for seed in LAUNCHES]
    assert sum(row.requests for row in rows) >= 10_000 and len(rows) >= 100
    assert {row.options["method"] for row in rows} == set(op.METHODS)
    accepted = torch.cat([outputs[1] for outputs in reference])
    assert accepted.bincount()[:6].min() > 20  # all lengths occur
    status = torch.cat([outputs[2] for outputs in reference])
    assert set(status.tolist()) >= {0, 1, 2}


def test_cpu_equals_the_reference(reference: Outputs) -> None:
    assert differing(outputs_of(torch.ops.mtp_kernels.verify), reference) == []


def test_cuda_in_the_emulation_equals_cpu() -> None:
    """8 requests of every second launch: an emulated thread takes its time."""
    for seed in LAUNCHES[::2]:
        row = dataclasses.replace(cases.random_verify_row(seed), requests=8)
        got = emulation.op("verify")(**cases.verify_inputs(row, seed))
        want = torch.ops.mtp_kernels.verify(**cases.verify_inputs(row, seed))
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True)), row.id


def test_triton_equals_the_reference(reference: Outputs, triton: Callable[[], Outputs]) -> None:
    assert differing(triton(), reference) == []


if __name__ == "__main__":
    import interpreter

    from mtp_kernels.kernels.verify import verify

    interpreter.quicken()
    file, shard = Path(sys.argv[1]), int(sys.argv[2])
    torch.save(outputs_of(verify, LAUNCHES[shard::SHARDS]), file)
