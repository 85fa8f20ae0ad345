"""The benchmarks run; what they measure here means nothing."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from interleaved import OURS, READ, Rounds, agree, ratio
from report import Result, sweeps, write_report

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "bench"
PNG = b"\x89PNG"

PEERS = {  # of each op, in at least one row
    "entry": {"torch", "torch.compile", "vLLM"},
    "head_argmax": {
        *("ours, unpacked", "ours, pruned", "ours, sampled"),
        *("torch", "torch.compile", "vLLM"),
    },
    "draft_pack": {"torch", "vLLM"},
    "draft_step": {"torch", "vLLM"},
    "verify": {"torch", "torch.compile", "vLLM", "transformers"},
    "draft round": {"ours, pruned", "vLLM"},
}


def _table(script: str) -> list[list[str]]:
    """The cells of the table that a quick run prints, without its head."""
    run = subprocess.run(
        [sys.executable, BENCH / script, "--quick"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return _cells(run.stdout)


def _cells(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_suite_has_every_op_with_its_peers(tmp_path: Path) -> None:
    """The quick mode, which also checks that all contenders give the same."""
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", BENCH / "suite", "--quick"]
    run = subprocess.run(
        [*command, "-p", "no:cacheprovider", "--output", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-3000:]
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    found: dict[str, set[str]] = {}
    for row in rows:
        assert {len(times) for times in row["seconds"].values()} == {3}
        assert all(second > 0 for times in row["seconds"].values() for second in times)
        found.setdefault(row["op"], set()).update(set(row["seconds"]) - {OURS, READ})
    assert found == PEERS
    cells = _cells((tmp_path / "bench.md").read_text())
    assert [row[0] for row in cells] == [row["op"] for row in rows]
    assert (tmp_path / "bench.png").read_bytes().startswith(PNG)


def _result(tokens: int, threads: int, ours: float, peer: Sequence[float] = ()) -> Result:
    seconds = {OURS: [ours] * 3, READ: [0.004] * 3} | ({"vLLM": peer} if peer else {})
    return Result(
        op="entry",
        shape={"T": tokens, "H": 4096},
        threads=threads,
        tiny=False,
        seconds=seconds,
        bytes={OURS: 100_000_000, READ: 200_000_000, "vLLM": 100_000_000},
        operations=tokens * 10**8,
        notes={"vLLM": "a peer"} if peer else {},
    )


def test_report_says_what_was_measured(tmp_path: Path) -> None:
    """Half of the ceiling, a peer 1.5 times slower, a line over T and one over threads."""
    results = [_result(t, 2, max(0.004, 0.001 * t)) for t in (2, 8, 16)]
    results += [_result(1, 2, 0.004, peer=[0.006, 0.008, 0.0056]), _result(1, 1, 0.007)]
    where = {"date": "today", "commit": "none", "cpu": "none", "threads": 2, "cache": 1 << 20}
    where |= dict.fromkeys(["torch", "vllm", "transformers", "python"], "none")
    where["build"] = {"cpu_isa": "none"}
    write_report(results, where, tmp_path)
    text = (tmp_path / "bench.md").read_text()
    assert "| T=1, H=4,096 | 2 | 4 ms | 25.0 GB/s, 50% | 6 ms, 1.50 (>= 1.40) |" in text
    assert "| entry | T | H=4,096, threads=2 | max(4 ms, 1 ms T) |" in text
    assert "| entry | threads | T=1, H=4,096 | 1 ms + 6 ms / threads | two points |" in text
    for name in ("bench.png", "bench_scaling.png"):
        assert (tmp_path / name).read_bytes().startswith(PNG)


def test_what_is_furthest_from_its_line_is_named() -> None:
    times = {1: 1.0, 2: 1.0, 4: 1.3, 8: 2.0, 16: 4.0}
    (sweep,) = sweeps([_result(t, 2, time) for t, time in times.items()])
    assert np.allclose([sweep.a, sweep.b], [1, 0.25], rtol=0.2)
    assert sweep.cells()[-1].startswith("T=4: ") and sweep.cells()[-1].endswith(" above")


def test_a_line_is_fitted_over_other_axes() -> None:
    rows = [_result(1, 2, 1 + 0.5 * b) for b in (1, 2, 7)]
    rows = [replace(row, shape={"B": b}) for row, b in zip(rows, (1, 2, 7), strict=True)]
    (sweep,) = sweeps(rows)
    assert np.allclose([sweep.a, sweep.b], [1, 0.5]) and np.allclose(sweep.errors, 0)


def test_rounds_have_every_contender_once_in_changing_order() -> None:
    called: list[str] = []
    names = [OURS, "a", "b"]
    rounds = Rounds({name: lambda name=name: called.append(name) for name in names})
    assert set(rounds.calls.values()) == {1000}  # of calls that take nothing
    called.clear()
    for _ in range(12):
        rounds.before_ours()
        rounds.ours()
    rounds.finish()
    turns = [called[i] for i in range(0, len(called), 1000)]
    orders = [tuple(turns[i : i + 3]) for i in range(0, len(turns), 3)]
    assert all(sorted(order) == sorted(names) for order in orders)
    assert len(set(orders)) > 3
    assert [len(times) for times in rounds.seconds.values()] == [12, 12]


def test_ratio_is_paired_and_has_a_lower_bound() -> None:
    """Ours and the peer slow down together: the ratio of medians would be another."""
    median, bound = ratio([2.0, 20, 2, 20, 1.5], [1.0, 10, 1, 10, 1])
    assert median == 2 and 1.5 <= bound <= 2


def test_contenders_that_differ_are_refused() -> None:
    def same(ours: int, other: int) -> None:
        assert ours == other

    agree({OURS: lambda: 1, "peer": lambda: 1}, same)
    with pytest.raises(AssertionError, match="peer does not give"):
        agree({OURS: lambda: 1, "peer": lambda: 2}, same)


def test_draft_vocab_runs() -> None:
    """Sizes 16, all that occur, and the whole vocabulary, in real engines."""
    rows = _table("draft_vocab.py")
    lengths = [float(row[2]) for row in rows]
    assert [row[0] for row in rows][::2] == ["16", "320"]
    assert lengths[0] < lengths[1] <= lengths[2]


def test_device_script_goes_through_without_a_device() -> None:
    """Its checks say that they passed, and every op has a time of ours and of a peer."""
    run = subprocess.run(
        [BENCH / "device.sh", "--dry-run"],
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "op tests: exit 0: " in run.stdout
    assert "graph replay against eager: equal" in run.stdout
    assert "timings: complete" in run.stdout
    lines = [line for line in run.stdout.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    ops = {"verify", "entry", "head_argmax", "draft_pack", "draft_step"}
    assert {row[0] for row in rows} == ops
    assert all(float(row[3]) > 0 and float(row[5]) > 0 for row in rows), rows  # Triton's, torch's
