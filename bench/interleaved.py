"""Compares contenders that do the same job: interleaved in one process, ratios of paired times.

A round times every contender once, in an order drawn anew; a ratio is taken within a round, so
that what slows the machine for a while slows both sides of it.
"""

import json
import os
import platform
import random
import subprocess
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mtp_kernels import build_info

RESULTS = Path(__file__).parent / "results"
OURS, READ = "ours", "read"
"""The contender that others are compared with, and the one that only reads the same bytes."""
PRUNED, VLLM = "ours, pruned", "vLLM"
"""A contender that reads fewer bytes, and a peer: these two are compared as well."""
Contenders = dict[str, Callable[[], Any]]
Contest = Callable[..., None]
"""The fixture of bench/suite/conftest.py that times a row."""


class Rounds:
    """Runs ours, which somebody else times, among its peers, which are timed here.

    `before_ours` is called before each call of ours, and `finish` after the last one. A peer that
    takes less than a millisecond is called as often as fills one.
    """

    def __init__(self, contenders: Contenders) -> None:
        self.calls = {name: _calls_per_round(call) for name, call in contenders.items()}
        self.ours = self._repeated(OURS, contenders[OURS])
        self._peers = {
            name: self._repeated(name, call) for name, call in contenders.items() if name != OURS
        }
        self.seconds: dict[str, list[float]] = {name: [] for name in self._peers}
        self._order = random.Random(0)
        self._after_ours: list[str] = []  # whose turn in this round is still to come

    def before_ours(self) -> None:
        """The rest of the round before, and of a new one what comes ahead of ours."""
        self.finish()
        names = [*self._peers, OURS]
        self._order.shuffle(names)
        turn = names.index(OURS)
        self._after_ours = names[turn + 1 :]
        self._run(names[:turn])

    def finish(self) -> None:
        self._run(self._after_ours)
        self._after_ours = []

    def _repeated(self, name: str, call: Callable[[], Any]) -> Callable[[], Any]:
        count = self.calls[name]
        if count == 1:
            return call

        def calls() -> None:
            for _ in range(count):
                call()

        return calls

    def _run(self, names: Sequence[str]) -> None:
        for name in names:
            call = self._peers[name]
            start = time.perf_counter()
            call()
            self.seconds[name].append((time.perf_counter() - start) / self.calls[name])


def _calls_per_round(call: Callable[[], Any], enough: float = 1e-3) -> int:
    """By the faster of two calls; the first one often prepares something."""
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return max(1, min(1000, round(enough / min(seconds))))


def ratio(peer: Sequence[float], ours: Sequence[float]) -> tuple[float, float]:
    """How many times longer the peer takes: median of the paired ratios, and its lower bound.

    The bound holds with 97.5% confidence (bootstrap over the rounds).
    """
    ratios = np.array(peer) / np.array(ours)
    draws = np.random.default_rng(0).choice(ratios, (2000, ratios.size))
    return float(np.median(ratios)), float(np.quantile(np.median(draws, axis=1), 0.025))


def agree(contenders: Contenders, same: Callable[[Any, Any], None]) -> None:
    """Calls each contender once, and `same(ours, its result)`, which raises if they differ."""
    results = {name: call() for name, call in contenders.items()}
    for name, result in results.items():
        try:
            same(results[OURS], result)
        except AssertionError as error:
            raise AssertionError(f"{name} does not give what {OURS} gives: {error}") from error


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """By torch.compile, for the shapes it is first called with."""
    torch.compiler.reset()  # or the eighth shape of one function would run eagerly
    return torch.compile(function, fullgraph=True, dynamic=False)


def reader(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """All threads together read and sum `x`, a contiguous tensor of a multiple of 8 bytes."""
    return x.flatten().view(torch.int64).sum


def cache_bytes() -> int:
    """Size of the last cache before memory; 0 where the system does not say."""
    caches = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    sizes = [text.strip() for text in map(Path.read_text, caches)]
    units = {"K": 2**10, "M": 2**20}
    return max(
        (int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units), default=0
    )


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
        "cache": cache_bytes(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "build": build_info(),
    }


def write(name: str, result: dict[str, Any], markdown: str, folder: Path = RESULTS) -> None:
    """`<name>.json` and `<name>.md`."""
    folder.mkdir(exist_ok=True, parents=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / f"{name}.md").write_text(markdown)
