"""What the MTP layers are worth: one held-out set, three ways to decode it, one table.

Every row is a real vLLM engine in a process of its own: without drafts, with vLLM's own MTP
(`MTP_KERNELS_DISABLE=layers,verify`), and with this package. Greedy in bfloat16, so all three must
give the same text; what differs is how many drafts are accepted.
"""

import argparse
import contextlib
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "tiny_mimo_v2"
CLEAR_LINE = "\r\033[K"
LOG_TAIL = 25  # lines of an engine's log that a failure shows

# `python -m mtp_kernels.demo` would import this module under a second name.
_WORKER = "from mtp_kernels.demo import work; work()"


@dataclass(frozen=True)
class Variant:
    """One row of the table."""

    name: str
    drafts: bool
    disable: str = ""
    """Value of MTP_KERNELS_DISABLE."""


VARIANTS = (
    Variant("no drafts", drafts=False),
    Variant("stock vLLM MTP", drafts=True, disable="layers,verify"),
    Variant("mtp_kernels", drafts=True),
)


@dataclass(frozen=True)
class Job:
    """What a worker is told."""

    checkpoint: str
    prompts: list[str]
    num_drafts: int
    """0: no speculative decoding."""
    max_tokens: int
    max_model_len: int
    concurrency: int
    """Requests that are decoded together, at most."""


@dataclass(frozen=True)
class Result:
    """What a worker measured."""

    token_ids: list[list[int]]
    texts: list[str]
    seconds: float
    """From the first request to the last token, after a warm-up."""
    rounds: int
    accepted: list[int]
    """Accepted drafts at positions 1..K, over all rounds."""


@dataclass(frozen=True)
class Row:
    """A line of the table, as it is also written to the JSON file."""

    name: str
    acceptance: list[float]
    mean_length: float
    """Tokens per round: accepted drafts + 1."""
    exact_match: float
    exact_match_stderr: float
    identical: int
    """Prompts whose tokens are those of the first row."""
    prompts: int
    tokens: int
    tokens_per_second: float


def answer_of(text: str) -> int | None:
    """The number after the first "Answer:", None if there is none."""
    found = re.search(r"Answer: (-?\d+)", text)
    return int(found[1]) if found else None


def mean_and_stderr(hits: Sequence[bool]) -> tuple[float, float]:
    """Mean of 0/1 outcomes and its standard error (sample variance, as lm-eval computes it)."""
    n, mean = len(hits), sum(hits) / len(hits)
    return mean, math.sqrt(mean * (1 - mean) / max(n - 1, 1))


def summarize(name: str, result: Result, baseline: Result, answers: Sequence[int]) -> Row:
    """The table's line of `result`; `baseline` is the row without drafts."""
    pairs = zip(result.texts, answers, strict=True)
    exact, stderr = mean_and_stderr([answer_of(text) == answer for text, answer in pairs])
    tokens = sum(map(len, result.token_ids))
    same = zip(result.token_ids, baseline.token_ids, strict=True)
    return Row(
        name=name,
        acceptance=[count / result.rounds for count in result.accepted],
        mean_length=1 + sum(result.accepted) / max(result.rounds, 1),
        exact_match=exact,
        exact_match_stderr=stderr,
        identical=sum(mine == theirs for mine, theirs in same),
        prompts=len(result.texts),
        tokens=tokens,
        tokens_per_second=tokens / result.seconds,
    )


def format_table(rows: Sequence[Row], num_drafts: int) -> str:
    """The rows as aligned text; the first one is the row without drafts."""
    head = [
        "",
        f"accepted at 1..{num_drafts}",
        "mean length",
        "exact match",
        f"same as '{rows[0].name}'",
        "tokens/s",
    ]
    lines = [head]
    for row in rows:
        same = "yes" if row.identical == row.prompts else "no"
        lines.append(
            [
                row.name,
                " / ".join(f"{rate:.3f}" for rate in row.acceptance) or "-",
                f"{row.mean_length:.2f}",
                f"{row.exact_match:.3f} +- {row.exact_match_stderr:.3f}",
                "-" if row is rows[0] else f"{same} ({row.identical} of {row.prompts})",
                f"{row.tokens_per_second:.0f}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(text)


def plot(rows: Sequence[Row], path: Path) -> bool:
    """Write acceptance by draft position as a PNG; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for row in rows:
        if row.acceptance:
            positions = range(1, len(row.acceptance) + 1)
            label = f"{row.name}: {row.mean_length:.2f} tokens per round"
            axes.plot(positions, row.acceptance, marker="o", label=label)
            axes.set_xticks(positions)
    axes.set(
        xlabel="draft position",
        ylabel="accepted, of all rounds",
        ylim=(0, 1.03),
        title="Acceptance by draft position",
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left")
    figure.savefig(path, dpi=150)
    return True


def cpu_name() -> str:
    """The processor's model name, where the system tells it."""
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^model name\s*: (.+)$", cpuinfo, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def run_variant(
    variant: Variant, job: Job, log: Path, report: Callable[[int, int], None]
) -> Result:
    """Run one engine in a process of its own; its output goes to `log`.

    `report(tokens, finished)` is called as the generation goes on.

    Raises:
        RuntimeError: the engine failed; the text has the end of the log.
    """
    env = os.environ | {
        "MTP_KERNELS_DISABLE": variant.disable,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    read_end, write_end = os.pipe()
    with log.open("w") as log_file, os.fdopen(read_end) as messages:
        worker = subprocess.Popen(
            [sys.executable, "-c", _WORKER, str(write_end)],
            stdin=subprocess.PIPE,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            pass_fds=[write_end],
            env=env,
            text=True,
            start_new_session=True,  # so that vLLM's own processes can be ended with it
        )
        os.close(write_end)
        result = None
        try:
            with worker.stdin as stdin:
                json.dump(asdict(job), stdin)
            for line in messages:
                message = json.loads(line)
                if "token_ids" in message:
                    result = Result(**message)
                else:
                    report(message["tokens"], message["finished"])
            returncode = worker.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
    if result is None or returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL:])
        raise RuntimeError(
            f"{variant.name}: the engine ended with exit code {returncode}; "
            f"the end of {log}:\n{tail}"
        )
    return result


def work() -> None:
    """A worker: a :class:`Job` on stdin, messages to the pipe whose number is the argument."""
    pipe = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    job = Job(**json.load(sys.stdin))

    def send(message: dict[str, Any]) -> None:
        pipe.write(json.dumps(message) + "\n")

    from vllm import LLM, SamplingParams

    llm = LLM(
        model=job.checkpoint,
        dtype="bfloat16",
        max_model_len=job.max_model_len,
        max_num_seqs=job.concurrency,
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config=(
            {"method": "mtp", "num_speculative_tokens": job.num_drafts} if job.num_drafts else None
        ),
    )
    sampling = SamplingParams(temperature=0, max_tokens=job.max_tokens)
    llm.generate(job.prompts[:1], sampling, use_tqdm=False)  # the first call allocates and tunes
    before = _counters(llm)

    engine = llm.llm_engine
    tokens = [[] for _ in job.prompts]
    texts = [""] * len(job.prompts)
    started = reported = time.monotonic()
    for index, prompt in enumerate(job.prompts):
        engine.add_request(str(index), prompt, sampling)
    finished = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            index = int(output.request_id)
            tokens[index] = list(output.outputs[0].token_ids)
            texts[index] = output.outputs[0].text
            finished += output.finished
        if time.monotonic() - reported > 0.5:
            reported = time.monotonic()
            send({"tokens": sum(map(len, tokens)), "finished": finished})
    seconds = time.monotonic() - started

    rounds, *accepted = (now - then for now, then in zip(_counters(llm), before, strict=True))
    send(asdict(Result(tokens, texts, seconds, rounds, accepted)))


def _counters(llm: Any) -> list[int]:
    """Draft rounds so far, then accepted drafts per position; [0] without drafts."""
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    if "vllm:spec_decode_num_drafts" not in metrics:
        return [0]
    rounds = metrics["vllm:spec_decode_num_drafts"].value
    return [rounds, *metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The demo's options."""
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=EXAMPLE / "checkpoint",
        help="model folder (default: %(default)s)",
    )
    parser.add_argument(
        "--problems",
        type=Path,
        default=EXAMPLE / "heldout_arithmetic.jsonl",
        help='lines of {"prompt", "answer"} (default: %(default)s)',
    )
    parser.add_argument("--prompts", type=int, default=64, help="how many (default: 64)")
    parser.add_argument(
        "--drafts", type=int, default=3, metavar="K", help="drafts per round (default: 3)"
    )
    parser.add_argument("--max-tokens", type=int, default=160, help="per prompt (default: 160)")
    parser.add_argument("--max-model-len", type=int, default=512, help="(default: 512)")
    parser.add_argument(
        "--concurrency", type=int, default=8, help="requests decoded together (default: 8)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("build/demo"),
        help="folder for logs, plot and numbers (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo; returns the exit code: 1 when an engine failed."""
    for path in (args.checkpoint / "config.json", args.problems):
        if not path.is_file():
            print(f"demo: {path} not found (it is in the source repository)", file=sys.stderr)
            return 1
    if min(args.prompts, args.drafts, args.concurrency) < 1:
        print("demo: --prompts, --drafts and --concurrency must be at least 1", file=sys.stderr)
        return 1
    problems = [json.loads(line) for line in args.problems.read_text().splitlines()]
    problems = problems[: args.prompts]
    args.output.mkdir(parents=True, exist_ok=True)
    print(
        f"{len(problems)} held-out arithmetic problems, greedy, bfloat16, K={args.drafts}, "
        f"{args.concurrency} at a time; {len(VARIANTS)} engines, one after the other; "
        f"logs in {args.output}/"
    )

    results: list[Result] = []
    rows: list[Row] = []
    for number, variant in enumerate(VARIANTS, start=1):
        log = args.output / f"{variant.name.replace(' ', '_')}.log"
        job = Job(
            checkpoint=str(args.checkpoint),
            prompts=[problem["prompt"] for problem in problems],
            num_drafts=args.drafts if variant.drafts else 0,
            max_tokens=args.max_tokens,
            max_model_len=args.max_model_len,
            concurrency=args.concurrency,
        )
        progress = _Progress(f"[{number}/{len(VARIANTS)}] {variant.name}", len(problems))
        try:
            results.append(run_variant(variant, job, log, progress.show))
        except RuntimeError as error:
            progress.end("failed")
            print(error, file=sys.stderr)
            return 1
        answers = [problem["answer"] for problem in problems]
        rows.append(summarize(variant.name, results[-1], results[0], answers))
        progress.end(f"{rows[-1].tokens} tokens in {results[-1].seconds:.1f} s")

    print("\n" + format_table(rows, args.drafts) + "\n")
    numbers = args.output / "demo.json"
    machine = f"{os.cpu_count()} cores of {cpu_name()}"
    record = {
        "date": date.today().isoformat(),
        "machine": machine,
        "checkpoint": str(args.checkpoint),
        "num_drafts": args.drafts,
        "dtype": "bfloat16",
        "concurrency": args.concurrency,
        "rows": [asdict(row) for row in rows],
    }
    numbers.write_text(json.dumps(record, indent=2) + "\n")
    picture = args.output / "acceptance.png"
    if plot(rows, picture):
        print(f"Plot: {picture}   numbers: {numbers}   machine: {machine}")
    else:
        print(f"Numbers: {numbers}   (no plot: matplotlib missing, extra [demo])")
    if any(row.identical != row.prompts for row in rows):
        print(
            "Outputs differ. In bfloat16 a near tie of two logits may fall either way when rows "
            "are batched otherwise; anything more than a few prompts is a fault."
        )
    return 0


class _Progress:
    """One line per engine, rewritten in place on a terminal; elsewhere its beginning and end."""

    def __init__(self, title: str, prompts: int) -> None:
        self.title, self.prompts, self.live = title, prompts, sys.stdout.isatty()
        self._write("starting vLLM ...", end="" if self.live else "\n")

    def _write(self, text: str, end: str) -> None:
        print((CLEAR_LINE if self.live else "") + f"{self.title}: {text}", end=end, flush=True)

    def show(self, tokens: int, finished: int) -> None:
        if self.live:
            self._write(f"{tokens} tokens, {finished} of {self.prompts} prompts done", end="")

    def end(self, text: str) -> None:
        self._write(text, end="\n")


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(_parser)
    sys.exit(run(_parser.parse_args()))
