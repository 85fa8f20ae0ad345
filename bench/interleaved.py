"""Compares contenders that do the same job: interleaved in one process, ratios of paired times.

A round calls every contender once, in an order drawn anew; a ratio is taken within a round, so
that what slows the machine for a while slows both sides of it.
"""

import json
import os
import platform
import random
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mtp_kernels import build_info

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Times:
    """Seconds per call, [rounds] for each contender."""

    seconds: Mapping[str, np.ndarray]

    def median(self, name: str) -> float:
        return float(np.median(self.seconds[name]))

    def ratio(self, peer: str, ours: str) -> tuple[float, float]:
        """How many times longer the peer takes: median of the paired ratios, and its lower bound.

        The bound holds with 97.5% confidence (bootstrap over the rounds).
        """
        ratios = self.seconds[peer] / self.seconds[ours]
        draws = np.random.default_rng(0).choice(ratios, (2000, ratios.size))
        return float(np.median(ratios)), float(np.quantile(np.median(draws, axis=1), 0.025))


def compare(contenders: Mapping[str, Callable[[], Any]], rounds: int, warmup: int = 2) -> Times:
    """Time every contender once per round, after `warmup` rounds that do not count."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    order = random.Random(0)
    for i in range(warmup + rounds):
        order.shuffle(names)
        for name in names:
            start = time.perf_counter()
            contenders[name]()
            if i >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return Times({name: np.array(values) for name, values in seconds.items()})


def read_ceiling(x: torch.Tensor, rounds: int = 15) -> float:
    """Bytes per second at which all threads together can read `x`, by the best of three sums."""
    readers = {
        "float32": x.view(torch.float32).sum,
        "float64": x.view(torch.float64).sum,
        "int64": x.view(torch.int64).sum,
    }
    times = compare(readers, rounds)
    return x.nbytes / min(times.median(name) for name in readers)


def provenance() -> dict[str, Any]:
    """Where and from what a result was made."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), "unknown")
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return {
        "date": date.today().isoformat(),
        "commit": commit.stdout.strip() or "unknown",
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "build": build_info(),
    }


def write(name: str, result: dict[str, Any], markdown: str) -> None:
    """`results/<name>.json` and `.md`."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    (RESULTS / f"{name}.md").write_text(markdown)
