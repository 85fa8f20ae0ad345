"""The GPU half: op tests on CUDA, graph replay, the sanitizer, timings. See `bench/device.sh`.

python bench/device.py --output DIR [--seconds 420] [--dry-run]

What is done is written after every row, so a run that is cut leaves what it has. --dry-run goes
through all of it on a CPU with tiny shapes, the Triton kernels in their interpreter: nothing it
prints means anything.
"""

import argparse
import importlib
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from interleaved import provenance
from suite.test_verify import VERIFY_SAMPLING as VERIFY_ROWS
from suite.test_verify import Batch, ours, straightforward_torch
from torch import Tensor

from mtp_kernels.archs import Feed
from mtp_kernels.drafting import Drafter, RoundBuffers
from mtp_kernels.ops.head_argmax import best_ids

TESTS = Path(__file__).resolve().parent.parent / "tests" / "test_ops.py"
Contenders = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class Case:
    """Contenders that do the same on the same data, and the bytes that must move for it."""

    op: str
    shape: dict[str, int | str]
    num_bytes: int
    contenders: Contenders


class Bench:
    """Times contenders on one device, with graphs and cold caches, until the time is up."""

    def __init__(self, is_dry: bool, output: Path, seconds: float) -> None:
        self.is_dry, self.output = is_dry, output
        self.device = torch.device("cpu" if is_dry else "cuda")
        self.dtype = torch.float16 if is_dry else torch.bfloat16  # see the interpreter's traps
        self._until = time.monotonic() + seconds
        self._flush = torch.empty(1 << (10 if is_dry else 28), dtype=torch.int8, device=self.device)
        self.result: dict[str, Any] = {"where": self._where(), "timings": []}
        output.mkdir(parents=True, exist_ok=True)

    def left(self) -> float:
        return self._until - time.monotonic()

    def op(self, name: str) -> Callable[..., Any]:
        """Ours on this device; in a dry run the Triton launcher, on CPU tensors."""
        if self.is_dry:
            return getattr(importlib.import_module(f"mtp_kernels.kernels.{name}"), name)
        return getattr(torch.ops.mtp_kernels, name)

    def randn(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype).mul_(scale)

    def peers(self, function: Callable[[], Any], requests: int) -> Contenders:
        """The function as it is; for one batch size, since that takes its time, compiled too."""
        if self.is_dry or requests != 64:
            return {"torch": function}
        return {"torch": function, "torch.compile": torch.compile(function)}

    def capture(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """A replay of the function's graph; its outputs are those of the capture."""
        if self.is_dry:
            return function
        function()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
        return graph.replay

    def seconds(self, replay: Callable[[], Any]) -> float:
        """Once, from cold caches."""
        self._flush.zero_()
        if self.is_dry:
            start = time.perf_counter()
            replay()
            return time.perf_counter() - start
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3

    def time(self, case: Case) -> None:
        """Interleaved, medians; a contender that fails is reported with its error."""
        replays, row = {}, {"op": case.op, "shape": case.shape, "bytes": case.num_bytes}
        for name, function in case.contenders.items():
            try:
                replays[name] = self.capture(function)
            except Exception as error:  # the other contenders are still worth their time
                row[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        times: dict[str, list[float]] = {name: [] for name in replays}
        for i in range(2 if self.is_dry else 13):
            for name, replay in replays.items():
                seconds = self.seconds(replay)
                if i > 2 or self.is_dry:
                    times[name].append(seconds)
        row |= {name: statistics.median(values) * 1e6 for name, values in times.items()}
        self.result["timings"].append(row)
        self.write()

    def copy_bandwidth(self) -> float:
        """Bytes read and written per second by a copy of 1 GiB."""
        source = torch.empty(1 << (16 if self.is_dry else 30), dtype=torch.int8, device=self.device)
        target = torch.empty_like(source)
        replay = self.capture(lambda: target.copy_(source))
        return 2 * source.numel() / statistics.median(self.seconds(replay) for _ in range(10))

    def write(self) -> None:
        (self.output / "device.json").write_text(json.dumps(self.result, indent=1) + "\n")
        (self.output / "device.md").write_text(markdown(self.result))

    def _where(self) -> dict[str, Any]:
        where = provenance() | {"dry run": self.is_dry}
        if not self.is_dry:
            query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
            where["gpu"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
            where["cuda"] = torch.version.cuda
        return where


def op_tests(bench: Bench) -> str:
    """The last line of pytest on CUDA tensors."""
    chosen = "scalar and entry and fp32 and matches" if bench.is_dry else "cuda"
    return _pytest([], chosen, min(bench.left(), 200))


def sanitizer(bench: Bench, tool: str) -> str:
    """compute-sanitizer over the ops that index by values."""
    if bench.is_dry:
        return "not in a dry run"
    if shutil.which("compute-sanitizer") is None:
        return "compute-sanitizer not found"
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
    return _pytest(command, "cuda and draft and matches", min(bench.left(), 60))


def _pytest(prefix: list[str], chosen: str, seconds: float) -> str:
    command = [*prefix, sys.executable, "-m", "pytest", "-q", "-x", str(TESTS), "-k", chosen]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"not finished within {seconds:.0f} s"
    lines = run.stdout.strip().splitlines()
    return f"exit {run.returncode}: {lines[-1] if lines else run.stderr[-300:]}"


def graph_replay(bench: Bench) -> str:
    """Case 14: a captured draft round, replayed with other inputs, equals an eager one."""
    drafters = [make_drafter(bench, 8, 3, 64) for _ in range(2)]
    rounds = [Glue(bench, drafter, 8, 3, 64) for drafter in drafters]
    replay = bench.capture(rounds[0].run)
    for seed in range(4):
        for one in rounds:
            one.refill(seed)
        if seed == 0:  # the capture has run on other data
            for name, values in drafters[0]._memory.items():
                if values is not None:
                    values.copy_(drafters[1]._memory[name])
        replay()
        rounds[1].run()
        for name in ("input_ids", "positions", "draft_ids", "hidden"):
            captured, eager = (getattr(drafter.buffers, name) for drafter in drafters)
            if not torch.equal(captured, eager):
                return f"round {seed}: {name} differ"
    return "equal"


def make_drafter(bench: Bench, requests: int, k: int, hidden: int) -> Drafter:
    buffers = RoundBuffers.allocate(
        max_requests=requests,
        max_rows=requests * (k + 1),
        num_drafts=k,
        hidden_size=hidden,
        dtype=bench.dtype,
        device=bench.device,
        kv_groups=1,
    )
    return Drafter(
        num_layers=k, num_drafts=k, feed=Feed.TARGET, num_slots=requests, buffers=buffers
    )


class Glue:
    """A draft round without layers and head: what lies between them."""

    def __init__(self, bench: Bench, drafter: Drafter, requests: int, k: int, hidden: int) -> None:
        rows, device = requests * (k + 1), bench.device
        self.drafter, self.requests, self.rows = drafter, requests, rows
        starts = torch.arange(0, rows + 1, k + 1, device=device)
        self.inputs = {
            "slots": torch.arange(requests, device=device),
            "query_start": starts,
            "num_rejected": torch.zeros(requests, dtype=torch.int64, device=device),
            "target_ids": torch.zeros(rows, dtype=torch.int64, device=device),
            "target_positions": torch.zeros(rows, dtype=torch.int64, device=device),
            "target_hidden": torch.zeros(rows, hidden, dtype=bench.dtype, device=device),
            "next_ids": torch.zeros(requests, dtype=torch.int64, device=device),
            "lookahead_ids": torch.full((requests, k - 1), -1, device=device),
            "row_start": starts,
        }
        self.tables = torch.arange(requests * 8, dtype=torch.int32, device=device).view(-1, 8)
        self.winners = torch.zeros(1, requests, dtype=torch.int64, device=device)
        self.refill(0)

    def refill(self, seed: int) -> None:
        gen = torch.Generator().manual_seed(seed)
        k = self.rows // self.requests - 1

        def put(name: str, values: Tensor) -> None:
            self.inputs[name].copy_(values)

        put("num_rejected", torch.randint(0, k + 1, (self.requests,), generator=gen))
        put("target_ids", torch.randint(0, 50, (self.rows,), generator=gen))
        put("target_positions", torch.arange(self.rows) % (k + 1) + 3 * seed)
        put("target_hidden", torch.randn(self.inputs["target_hidden"].shape, generator=gen))
        put("next_ids", torch.randint(0, 50, (self.requests,), generator=gen))
        self.winners.copy_(torch.randint(0, 50, (1, self.requests), generator=gen))

    def run(self) -> None:
        self.drafter.pack(
            **self.inputs,
            num_rows=self.rows,
            block_tables=[self.tables],
            block_sizes=[16],
            max_len=128,
        )
        self.drafter.draft(
            self.requests,
            self.rows,
            lambda layer, ids, positions, hidden, write_kv: (hidden, hidden),
            lambda step, scored: self.winners[0],
        )


def cases(bench: Bench) -> Iterator[Case]:
    """The most telling shapes first."""
    dry = bench.is_dry
    hiddens = (64,) if dry else (4096, 6144, 7168)
    vocabs = (1000,) if dry else (152_576, 129_280)
    batches = (2,) if dry else (64, 1, 8, 256)
    drafts = (2,) if dry else (3, 1, 7)
    for vocab, requests, k in itertools.product(vocabs, batches, drafts):
        yield from verify_cases(bench, requests, k, vocab)
    for hidden, requests in itertools.product(hiddens, batches):
        yield entry_case(bench, requests * 4, hidden)
        yield head_case(bench, requests, hidden, vocabs[0])
    for hidden, requests, k in itertools.product(hiddens, batches, drafts):
        one = Glue(bench, make_drafter(bench, requests, k, hidden), requests, k, hidden)
        moved = 2 * requests * (k + 1) * hidden * 2
        shape = {"B": requests, "K": k, "H": hidden}
        yield Case("draft glue", shape, moved, {"ours": one.run})


def verify_cases(bench: Bench, requests: int, k: int, vocab: int) -> Iterator[Case]:
    batch = Batch(requests, k, vocab, bench.device)
    for name, (temperature, top_k, top_p) in VERIFY_ROWS.items():
        function = ours(batch, temperature, top_k, top_p)
        if bench.is_dry:
            function = _interpreted(function, bench)
        contenders: Contenders = {"ours": function}
        if top_k is None:
            contenders |= bench.peers(straightforward_torch(batch, temperature), requests)
        shape = {"B": requests, "K": k, "V": vocab, "sampling": name}
        yield Case("verify", shape, batch.logits.nbytes, contenders)


def _interpreted(function: Callable[[], Any], bench: Bench) -> Callable[[], Any]:
    """`function` with the Triton launcher in the op's place."""
    from unittest import mock

    def call() -> Any:
        with mock.patch.object(torch.ops.mtp_kernels, "verify", bench.op("verify")):
            return function()

    return call


def entry_case(bench: Bench, tokens: int, hidden: int) -> Case:
    table, ids = bench.randn(1000, hidden), torch.arange(tokens, device=bench.device) % 1000
    x, gain = bench.randn(tokens, hidden), bench.randn(hidden)
    weight = bench.randn(hidden, 2 * hidden, scale=hidden**-0.5)
    op = bench.op("entry")

    def unfused() -> Tensor:
        halves = [F.rms_norm(F.embedding(ids, table), (hidden,), gain, 1e-6)]
        halves.append(F.rms_norm(x, (hidden,), gain, 1e-6))
        return F.linear(torch.cat(halves, -1), weight)

    contenders: Contenders = {
        "ours": lambda: op(
            x,
            gain,
            gain,
            weight,
            input_ids=ids,
            embed_weight=table,
            enorm_eps=1e-6,
            hnorm_eps=1e-6,
        ),
    } | bench.peers(unfused, tokens // 4)
    moved = weight.nbytes + 3 * x.nbytes
    return Case("entry", {"T": tokens, "H": hidden}, moved, contenders)


def head_case(bench: Bench, tokens: int, hidden: int, vocab: int) -> Case:
    x, weight = bench.randn(tokens, hidden), bench.randn(vocab, hidden, scale=hidden**-0.5)
    op = bench.op("head_argmax")

    def unfused() -> Tensor:
        return F.linear(x, weight).argmax(-1)

    contenders: Contenders = {"ours": lambda: best_ids(*op(x, weight))}
    contenders |= bench.peers(unfused, tokens)
    return Case("head_argmax", {"T": tokens, "H": hidden, "V": vocab}, weight.nbytes, contenders)


def markdown(result: dict[str, Any]) -> str:
    where = result["where"]
    lines = [
        f"{where.get('gpu', 'dry run, no GPU')}; {where['date']}, commit {where['commit']}, torch "
        f"{where['torch']}; copy bandwidth {result.get('copy bandwidth', 0) / 1e9:.0f} GB/s",
        "",
        *(f"- {name}: {text}" for name, text in result.get("checks", {}).items()),
        "",
        "Microseconds, medians, graphs replayed from cold caches. The share is of the copy "
        "bandwidth, for the bytes that must move. torch is what one writes first, which for verify "
        "is also what vLLM does, in our reading.",
        "",
        "| op | shape | ours | share | torch | torch.compile |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["timings"]:
        cells = [row["op"], re.sub(r"[{}']", "", str(row["shape"])), _cell(row.get("ours"))]
        rate = row["bytes"] / row["ours"] * 1e6 if isinstance(row.get("ours"), float) else 0
        cells.append(f"{rate / result['copy bandwidth']:.0%}")
        cells += [_cell(row.get(peer)) for peer in ("torch", "torch.compile")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(value: float | str | None) -> str:
    return f"{value:.1f}" if isinstance(value, float) else value or ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=420, help="stop after (default: 420)")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on a CPU")
    args = parser.parse_args()
    if not args.dry_run and not torch.cuda.is_available():
        print("device.py: torch sees no CUDA device; --dry-run needs none", file=sys.stderr)
        return 1
    if args.dry_run and os.environ.get("TRITON_INTERPRET") != "1":
        print("device.py: --dry-run needs TRITON_INTERPRET=1 in the environment", file=sys.stderr)
        return 1
    bench = Bench(args.dry_run, args.output, args.seconds)
    checks: dict[str, Callable[[], str]] = {
        "op tests": lambda: op_tests(bench),
        "graph replay against eager": lambda: graph_replay(bench),
        "memcheck": lambda: sanitizer(bench, "memcheck"),
        "racecheck": lambda: sanitizer(bench, "racecheck"),
    }
    bench.result["checks"] = {}
    with torch.inference_mode():
        bench.result["copy bandwidth"] = bench.copy_bandwidth()
        for name, check in checks.items():
            try:
                bench.result["checks"][name] = check()
            except Exception as error:  # the rest is still worth its time
                bench.result["checks"][name] = f"{type(error).__name__}: {error}"
            print(f"{name}: {bench.result['checks'][name]}", flush=True)
            bench.write()
        for case in cases(bench):
            if bench.left() <= 0:
                bench.result["cut"] = True
                break
            bench.time(case)
    bench.write()
    print((args.output / "device.md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
