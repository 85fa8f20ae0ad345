"""Starts engine runs in processes of their own; see `worker.py` for what a job is."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

K = 3
SPEC = {"method": "mtp", "num_speculative_tokens": K}
SAMPLED_DRAFTS = SPEC | {"draft_sample_method": "probabilistic"}
MAX_LEN = 224
LAST = 20
"""How many of the workload's requests, the longest, run in the preempted run."""

LAW_PROMPT = "Q: "
LAW = {"v1": (2000, 8), "v2": (200, 3)}
"""Samples per runner for the test of their law, and the length of each."""

NUM_COUPLED = 200

_LETTERS = [32, *range(97, 123)]
VARIANTS = {
    "greedy": {"temperature": 0, "repetition_penalty": 1.3},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "logit_bias": {"logit_bias": {"101": -4.0, "97": 2.5, "32": 1.0}},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 0.7},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "bad_words": {"bad_words": ["e", "th", " s"]},
    "allowed_token_ids": {"allowed_token_ids": _LETTERS},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": [32, 101]},
    "logprobs": {"logprobs": 5},
    "structured_outputs": {"structured_outputs": {"regex": "[a-z]{4,9} = [0-9]{1,4}"}},
    "all": {
        "top_k": 12,
        "top_p": 0.95,
        "min_p": 0.01,
        "logit_bias": {"101": 2.0},
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
        "bad_words": ["a"],
        "allowed_token_ids": _LETTERS,
        "min_tokens": 6,
        "stop_token_ids": [32],
        "logprobs": 5,
    },
}
"""Sampling parameters that must act on rows with drafts as on rows without."""


def variants(runner: str) -> dict[str, dict]:
    """V2 applies grammars with a kernel that Triton's interpreter cannot run."""
    return {
        name: one
        for name, one in VARIANTS.items()
        if (runner, name) != ("v2", "structured_outputs")
    }


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
