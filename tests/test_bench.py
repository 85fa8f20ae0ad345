"""The benchmarks run; what they measure here means nothing."""

import os
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[1] / "bench"


def _table(script: str) -> list[list[str]]:
    """The cells of the table that a quick run prints, without its head."""
    run = subprocess.run(
        [sys.executable, BENCH / script, "--quick"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    lines = [line for line in run.stdout.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_verify_runs_with_its_peers() -> None:
    rows = _table("verify.py")
    assert [row[0] for row in rows] == ["temperature 0.7", "greedy", "top_k 50, top_p 0.95"]
    assert all("(>=" in row[-1] for row in rows)


def test_head_argmax_runs_with_its_peers() -> None:
    rows = _table("head_argmax.py")
    assert [row[1] for row in rows] == ["1", "4", "8", "16"]
    assert all("(>=" in cell for row in rows for cell in row[-5:])


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
