"""Starts engine runs in processes of their own; see `worker.py` for what a job is."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

K = 3
SPEC = {"method": "mtp", "num_speculative_tokens": K}
MAX_LEN = 224
LAST = 20
"""How many of the workload's requests, the longest, run in the preempted run."""


def start_worker(tmp: Path, name: str, job: dict, **env: str) -> Callable[[], list]:
    """Start `worker.py` on a job; the returned function waits for its results."""
    result, log = tmp / f"{name}.json", tmp / f"{name}.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("worker.py")), str(result)],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=out,
            env=os.environ | env,
            text=True,
        )
    process.stdin.write(json.dumps(job))
    process.stdin.close()

    def wait() -> list:
        if status := process.wait(timeout=1500):
            tail = log.read_text()[-6000:]
            raise AssertionError(f"{name}: engine process ended with {status}\n{tail}")
        return json.loads(result.read_text())

    return wait
