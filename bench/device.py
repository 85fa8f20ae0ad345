"""The GPU half: op tests on CUDA, graph replay, the sanitizer, timings. See `bench/device.sh`.

python bench/device.py --output DIR [--seconds 420] [--dry-run]

What is done is written after every row, so a run that is cut leaves what it has. --dry-run goes
through all of it on a CPU with tiny shapes, the Triton kernels in their interpreter: nothing it
prints means anything.
"""

import argparse
import contextlib
import copy
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from interleaved import provenance
from suite.test_verify import VERIFY_SAMPLING as VERIFY_ROWS
from suite.test_verify import Batch, ours, straightforward_torch, vllm_sampler
from torch import Tensor

from mtp_kernels import ops
from mtp_kernels.archs import Feed
from mtp_kernels.cli import op_implementations
from mtp_kernels.drafting import Drafter, RoundBuffers
from mtp_kernels.kernels import draft_pack, draft_step, entry, head_argmax, verify
from mtp_kernels.ops.head_argmax import best_ids

TESTS = Path(__file__).resolve().parent.parent / "tests" / "test_ops.py"
VLLM = importlib.util.find_spec("vllm") is not None
LANGUAGES = ("CUDA C++", "Triton")  # of our kernels
PEERS = ("torch", "torch.compile", "vLLM")
Contenders = dict[str, Callable[[], Any]]
RUNNING: set[int] = set()  # process groups of tests, which must not outlive this process

# Not full products: every size is in a row with what is most usual of the others. That row is the
# first: torch.compile, which takes its time, is only timed there.
BATCHES = [(64, 3), (1, 3), (8, 3), (256, 3), (64, 1), (64, 7)]  # B, K
VOCABS, HIDDENS = (152_576, 129_280), (4096, 6144, 7168)


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

    def kernels(self, name: str) -> dict[str, Callable[..., Any]]:
        """The op's by language, that of the dispatcher first; in a dry run Triton's alone."""
        kernels = {"Triton": getattr(importlib.import_module(f"mtp_kernels.kernels.{name}"), name)}
        if not self.is_dry and op_implementations()[name]["cuda"] == "compiled":
            kernels = {"CUDA C++": getattr(torch.ops.mtp_kernels, name)} | kernels
        return kernels

    def op(self, name: str) -> Callable[..., Any]:
        return next(iter(self.kernels(name).values()))

    def randn(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype).mul_(scale)

    def peers(self, function: Callable[[], Any], is_first: bool) -> Contenders:
        """The function as it is; of an op's first row compiled too."""
        if self.is_dry or not is_first:
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
        where["triton"] = importlib.metadata.version("triton")
        if not self.is_dry:
            query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
            where["gpu"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
            where["cuda"] = torch.version.cuda
            where["vllm"] = importlib.metadata.version("vllm") if VLLM else None
        return where


def op_tests(bench: Bench) -> str:
    """Each op's tests on CUDA, opcheck among them, in a process of its own: Triton takes long."""
    if bench.is_dry:
        return _pytest([], "scalar and entry and fp32 and matches", bench.left())
    seconds = min(bench.left(), 200)
    with ThreadPoolExecutor() as pool:
        ran = pool.map(lambda op: _pytest([], f"cuda and {op}-", seconds), ops.NAMES)
        return "; ".join(f"{op} {text}" for op, text in zip(ops.NAMES, ran, strict=True))


def sanitizer(bench: Bench, tool: str) -> str:
    """compute-sanitizer over small cases of the ops; it sees the bounds of every tensor."""
    if bench.is_dry:
        return "not in a dry run"
    nvcc = shutil.which("nvcc")
    beside = [str(Path(nvcc).resolve().parent)] if nvcc else []
    places = [os.environ.get("PATH", ""), *beside, "/usr/local/cuda/bin"]
    found = shutil.which("compute-sanitizer", path=os.pathsep.join(places))
    if found is None:
        return "compute-sanitizer not found"
    command = [found, "--tool", tool, "--error-exitcode", "9"]
    small = "draft_pack-bf16-kv or draft_step-bf16-all or entry-bf16-odd or verify-bf16-filters"
    env = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return _pytest(command, f"cuda and matches and ({small})", min(bench.left(), 120), env)


def _pytest(
    prefix: list[str], chosen: str, seconds: float, env: dict[str, str] | None = None
) -> str:
    """The last line of what it prints, and the tests that failed."""
    command = [*prefix, sys.executable, "-m", "pytest", "-q", str(TESTS), "-k", chosen]
    command += ["-p", "no:cacheprovider"]
    with tempfile.TemporaryFile("w+") as output:
        run = subprocess.Popen(
            command,
            env=os.environ | (env or {}),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # to end all of it
        )
        RUNNING.add(run.pid)
        try:
            end = f"exit {run.wait(seconds)}"
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
            end = f"not finished within {seconds:.0f} s"
        RUNNING.discard(run.pid)
        output.seek(0)
        lines = output.read().strip().splitlines() or ["no output"]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return " | ".join([f"{end}: {lines[-1]}", *failed[:5]])


def graph_replay(bench: Bench) -> str:
    """Captured calls, replayed with other inputs, equal eager ones."""
    found = [draft_replay(bench)]
    for name, function, inputs in [
        entry_call(bench, 8, 64),
        head_call(bench, 8, 64, 1000),
        verify_call(bench, 4, 3, 5000),
    ]:
        outputs: list[Any] = []
        replay = bench.capture(lambda f=function, out=outputs: out.append(f()))
        for seed in range(3):
            for x in inputs:
                x.copy_(x.roll(1, 0))
            replay()
            for captured, eager in zip(outputs[-1], function(), strict=True):
                if not torch.equal(captured, eager):
                    found.append(f"{name}, round {seed}: differs")
    return "; ".join(text for text in found if text) or "equal"


def draft_replay(bench: Bench) -> str:
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
                return f"draft round {seed}: {name} differ"
    return ""


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
            lambda layer, ids, positions, hidden, rows, write_kv: (hidden[rows],) * 2,
            lambda step, scored: self.winners[0],
        )

    def calls(self) -> dict[str, dict[str, Any]]:
        """The arguments of the round's first launch of each draft op, by name."""
        seen: dict[str, dict[str, Any]] = {}
        with contextlib.ExitStack() as stack:
            for module in (ops.draft_pack, ops.draft_step):
                name, op = module.OP._schema.name.split("::")[1], module.OP

                def record(*args: Any, name: str = name, op: Any = op, **kwargs: Any) -> Any:
                    names = [x.name for x in op._schema.arguments]
                    seen.setdefault(name, dict(zip(names, args, strict=False)) | kwargs)
                    return op(*args, **kwargs)

                stack.enter_context(mock.patch.object(module, "OP", record))
            self.run()
        return seen


def cases(bench: Bench) -> Iterator[Case]:
    """The most telling rows first: of each op one, then the other sizes."""
    batches = [(2, 2)] if bench.is_dry else BATCHES
    vocabs, hiddens = ((1000,), (64,)) if bench.is_dry else (VOCABS, HIDDENS)
    rows = [(b, k, hiddens[0], vocabs[0]) for b, k in batches]
    sizes = [(h, vocabs[0]) for h in hiddens[1:]] + [(hiddens[0], v) for v in vocabs[1:]]
    rows += [(*batches[0], h, v) for h, v in sizes]
    for i, (requests, k, hidden, vocab) in enumerate(rows):
        is_first = i == 0
        if hidden == hiddens[0]:
            yield from verify_cases(bench, requests, k, vocab, is_first)
        if vocab == vocabs[0]:
            yield entry_case(bench, requests * (k + 1), hidden, is_first)
            yield from draft_cases(bench, requests, k, hidden, is_first)
        if k == batches[0][1]:
            yield head_case(bench, requests, hidden, vocab, is_first)


Call = tuple[str, Callable[[], tuple[Any, ...]], list[Tensor]]  # name, outputs, inputs to change


def verify_call(bench: Bench, requests: int, k: int, vocab: int) -> Call:
    batch = Batch(requests, k, vocab, bench.device)
    function = _using("verify", bench.op("verify"), ours(batch, 0.7, 50, 0.95))

    def outputs() -> tuple[Tensor, ...]:
        verified = function()
        return verified.token_ids, verified.num_accepted

    return "verify", outputs, [batch.logits, batch.draft_ids, batch.seeds]


def verify_cases(bench: Bench, requests: int, k: int, vocab: int, is_first: bool) -> Iterator[Case]:
    batch = Batch(requests, k, vocab, bench.device)
    for name, (temperature, top_k, top_p) in VERIFY_ROWS.items():
        function = ours(batch, temperature, top_k, top_p)
        contenders: Contenders = {
            language: _using("verify", op, function)
            for language, op in bench.kernels("verify").items()
        }
        plain = straightforward_torch(batch, temperature)
        if top_k is not None and top_p is not None:
            plain = filtering_torch(batch, temperature, top_k, top_p)
        contenders |= bench.peers(plain, is_first)
        if VLLM and not bench.is_dry:
            contenders["vLLM"] = vllm_sampler(batch, temperature, top_k, top_p)
        groups = None if top_k is None else 128
        moved = verify.traffic(requests, k, vocab, num_candidates=groups)
        shape = {"B": requests, "K": k, "V": vocab, "sampling": name}
        yield Case("verify", shape, moved, contenders)


def _using(name: str, op: Callable[..., Any], function: Callable[[], Any]) -> Callable[[], Any]:
    """`function` with `op` in the place of torch.ops.mtp_kernels.<name>."""

    def call() -> Any:
        with mock.patch.object(torch.ops.mtp_kernels, name, op):
            return function()

    return call


def filtering_torch(batch: Batch, temperature: float, top_k: int, top_p: float) -> Callable:
    """All rows sorted and cut, then judged."""
    filtered = copy.copy(batch)
    judge = straightforward_torch(filtered, 1.0)

    def run() -> Any:
        x, order = (batch.logits.float() / temperature).sort(-1)
        x = x.masked_fill(x < x[:, -top_k, None], -torch.inf)
        cut = x.softmax(-1).cumsum(-1) <= 1 - top_p
        cut[:, -1] = False
        filtered.logits = torch.empty_like(x).scatter_(1, order, x.masked_fill(cut, -torch.inf))
        return judge()

    return run


def draft_cases(bench: Bench, requests: int, k: int, hidden: int, is_first: bool) -> Iterator[Case]:
    """Of a round in which nothing was rejected; draft_step: its first, which remembers."""
    glue = Glue(bench, make_drafter(bench, requests, k, hidden), requests, k, hidden)
    glue.inputs["num_rejected"].zero_()
    row_bytes = hidden * bench.dtype.itemsize
    moved = {
        "draft_pack": draft_pack.traffic(glue.rows, glue.rows, row_bytes),
        "draft_step": draft_step.traffic(0, requests * (k - 1), row_bytes),
    }
    shape = {"B": requests, "K": k, "H": hidden}
    for name, arguments in glue.calls().items():
        reference = getattr(getattr(ops, name), name)
        contenders: Contenders = {
            language: lambda op=op, arguments=arguments: op(**arguments)
            for language, op in bench.kernels(name).items()
        }
        contenders |= bench.peers(lambda op=reference, x=arguments: op(**x), is_first)
        yield Case(name, shape, sum(moved[name]), contenders)


def entry_inputs(bench: Bench, tokens: int, hidden: int) -> dict[str, Any]:
    gain = bench.randn(hidden)
    return {
        "hidden": bench.randn(tokens, hidden),
        "enorm_weight": gain,
        "hnorm_weight": gain,
        "proj_weight": bench.randn(hidden, 2 * hidden, scale=hidden**-0.5),
        "input_ids": torch.arange(tokens, device=bench.device) % 1000,
        "embed_weight": bench.randn(1000, hidden),
        "enorm_eps": 1e-6,
        "hnorm_eps": 1e-6,
    }


def entry_call(bench: Bench, tokens: int, hidden: int) -> Call:
    inputs, op = entry_inputs(bench, tokens, hidden), bench.op("entry")
    return "entry", lambda: (op(**inputs),), [inputs["hidden"], inputs["input_ids"]]


def entry_case(bench: Bench, tokens: int, hidden: int, is_first: bool) -> Case:
    inputs = entry_inputs(bench, tokens, hidden)
    gain, weight = inputs["hnorm_weight"], inputs["proj_weight"]

    def unfused(norm: Callable[[Tensor], Tensor]) -> Tensor:
        embeds = F.embedding(inputs["input_ids"], inputs["embed_weight"])
        return F.linear(torch.cat([norm(embeds), norm(inputs["hidden"])], -1), weight)

    contenders: Contenders = {
        language: lambda op=op: op(**inputs) for language, op in bench.kernels("entry").items()
    }
    contenders |= bench.peers(
        lambda: unfused(lambda x: F.rms_norm(x, (hidden,), gain, 1e-6)), is_first
    )
    if VLLM and not bench.is_dry:
        from vllm import _custom_ops

        def vllm_norm(x: Tensor) -> Tensor:
            out = torch.empty_like(x)
            _custom_ops.rms_norm(out, x, gain, 1e-6)
            return out

        contenders["vLLM"] = lambda: unfused(vllm_norm)
    moved = entry.traffic(tokens, hidden, hidden)
    return Case("entry", {"T": tokens, "H": hidden}, moved, contenders)


def head_call(bench: Bench, tokens: int, hidden: int, vocab: int) -> Call:
    x, weight = bench.randn(tokens, hidden), bench.randn(vocab, hidden, scale=hidden**-0.5)
    op = bench.op("head_argmax")
    return "head_argmax", lambda: (best_ids(*op(x, weight)),), [x]


def head_case(bench: Bench, tokens: int, hidden: int, vocab: int, is_first: bool) -> Case:
    x, weight = bench.randn(tokens, hidden), bench.randn(vocab, hidden, scale=hidden**-0.5)
    contenders: Contenders = {
        language: lambda op=op: best_ids(*op(x, weight))
        for language, op in bench.kernels("head_argmax").items()
    }
    contenders |= bench.peers(lambda: F.linear(x, weight).argmax(-1), is_first)
    moved = head_argmax.traffic(tokens, hidden, vocab)
    return Case("head_argmax", {"T": tokens, "H": hidden, "V": vocab}, moved, contenders)


def markdown(result: dict[str, Any]) -> str:
    where = result["where"]
    lines = [
        f"{where.get('gpu') or 'dry run, no GPU'}; {where['date']}, commit {where['commit']}, "
        f"torch {where['torch']}, triton {where['triton']}; copy bandwidth "
        f"{result.get('copy bandwidth', 0) / 1e9:.0f} GB/s",
        "",
        *(f"- {name}: {text}" for name, text in result.get("checks", {}).items()),
        "",
        "Microseconds, medians, graphs replayed from cold caches. The share is of the copy "
        "bandwidth, for the bytes that must move, by the faster of ours. torch is what one writes "
        "first, and of draft_pack and draft_step the reference. "
        + (
            f"vLLM is {where['vllm']}'s kernels."
            if where.get("vllm")
            else "vLLM is not installed: torch is its sequence of operations too, in our reading."
        ),
        "",
        "| op | shape | " + " | ".join([*LANGUAGES, "share", *PEERS]) + " |",
        "|---" * (3 + len(LANGUAGES) + len(PEERS)) + "|",
    ]
    for row in result["timings"]:
        best = min((row[x] for x in LANGUAGES if isinstance(row.get(x), float)), default=0)
        share = f"{row['bytes'] / best * 1e6 / result['copy bandwidth']:.0%}" if best else ""
        cells = [row["op"], re.sub(r"[{}']", "", str(row["shape"]))]
        cells += [_cell(row.get(x)) for x in LANGUAGES]
        cells.append(share if row["bytes"] else "")
        cells += [_cell(row.get(x)) for x in PEERS]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(value: float | str | None) -> str:
    return f"{value:.1f}" if isinstance(value, float) else value or ""


def timings(bench: Bench) -> str:
    for case in cases(bench):
        if bench.left() <= 0:
            return "cut: the time was up"
        bench.time(case)
    return "complete"


def _of(check: Callable[[], str]) -> str:
    try:
        return check()
    except Exception as error:  # the rest is still worth its time
        return f"{type(error).__name__}: {error}"


def end(number: int, _: Any) -> None:
    """When the time is up: `timeout` reaches this process alone."""
    for group in RUNNING:
        os.killpg(group, signal.SIGKILL)
    os._exit(128 + number)


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
    signal.signal(signal.SIGTERM, end)
    bench = Bench(args.dry_run, args.output, args.seconds)
    checks: dict[str, Callable[[], str]] = {
        "op tests": lambda: op_tests(bench),
        "memcheck": lambda: sanitizer(bench, "memcheck"),
        "racecheck": lambda: sanitizer(bench, "racecheck"),
        "synccheck": lambda: sanitizer(bench, "synccheck"),
    }
    bench.result["checks"] = {}
    with torch.inference_mode():
        bench.result["copy bandwidth"] = bench.copy_bandwidth()
        with ThreadPoolExecutor() as pool:  # most are processes of their own
            running = {name: pool.submit(check) for name, check in checks.items()}
            bench.result["checks"]["graph replay against eager"] = _of(lambda: graph_replay(bench))
            for name, check in running.items():
                bench.result["checks"][name] = _of(check.result)
        for name, text in bench.result["checks"].items():
            print(f"{name}: {text}", flush=True)
        bench.write()
        bench.result["checks"]["timings"] = _of(lambda: timings(bench))
    bench.write()
    print((args.output / "device.md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
