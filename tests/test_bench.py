"""The benchmarks run; what they measure here means nothing."""

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[1] / "bench"


def test_verify_runs_with_its_peers() -> None:
    run = subprocess.run(
        [sys.executable, BENCH / "verify.py", "--quick"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    table = [line for line in run.stdout.splitlines() if line.startswith("|")]
    assert [line.split("|")[1].strip() for line in table[2:]] == [
        "temperature 0.7",
        "greedy",
        "top_k 50, top_p 0.95",
    ]
    assert all("(>=" in line for line in table[2:])
