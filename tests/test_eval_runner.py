"""The parts of the lm-eval runner that need neither a server nor lm-eval."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

RUNNER = Path(__file__).parent.parent / "examples" / "tiny_mimo_v2" / "eval" / "run.py"


@pytest.fixture(scope="module")
def run() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tiny_eval", RUNNER)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def score(run: ModuleType):
    values = {"flexible-extract": (0.75, 0.25), "strict-match": (0.5, 0.29)}
    return run.Score("w/o mtp", False, values, ["a", "b", "c", "d"], 1.0)


def test_tokens_per_round_from_metrics(run: ModuleType) -> None:
    metrics = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 20.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 50.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 20.0
"""
    assert run.tokens_per_round(metrics) == 3.5
    assert run.tokens_per_round("vllm:num_requests_running 0.0\n") == 1.0


def test_table_and_verdict(run: ModuleType, score) -> None:
    other = replace(score, serving="mtp3", texts=["a", "b", "c", "x"], tokens_per_round=3.8)
    table = run.format_table([score, other]).splitlines()
    assert table[2].startswith("| w/o mtp | off | flexible-extract | 4 | exact_match | 0.7500 |")
    assert table[4].endswith("| 3 of 4 | 3.80 |")
    assert run.verdict([score, other]).startswith("The scores do not differ. Async scheduling was")
    worse = replace(other, async_scheduling=True, values={**other.values, "strict-match": (0, 0)})
    assert run.verdict([score, worse]) == "Scores differ: mtp3."


def test_results_of_lm_eval_are_read(run: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "tiny_mimo_v2"
    folder.mkdir()
    results = {f"exact_match,{name}": 0.5 for name in run.FILTERS}
    results |= {f"exact_match_stderr,{name}": 0.1 for name in run.FILTERS}
    for stamp, factor in (("2026-01-01", 0), ("2026-01-02", 1)):
        scaled = {key: value * factor for key, value in results.items()}
        file = folder / f"results_{stamp}.json"
        file.write_text(json.dumps({"results": {run.TASK: scaled}}))
        os.utime(file, (factor, factor))
    samples = [{"doc_id": i, "resps": [[text]]} for i, text in ((1, "b"), (0, "a"), (1, "b"))]
    lines = "\n".join(map(json.dumps, samples))
    (folder / f"samples_{run.TASK}_2026-01-02.jsonl").write_text(lines)
    assert run.read_scores(tmp_path) == dict.fromkeys(run.FILTERS, (0.5, 0.1))
    assert run.read_texts(tmp_path) == ["a", "b"]


def test_stop_ends_a_server_that_ignores_it_and_its_children(run: ModuleType, monkeypatch) -> None:
    code = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""
    monkeypatch.setattr(run, "STOP_TIMEOUT", 0.2)
    server = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
    )
    child = Path("/proc") / server.stdout.readline().decode().strip()
    run.stop(server)
    assert server.returncode == -9

    def alive() -> bool:
        return child.exists() and (child / "stat").read_text().split()[2] not in "ZX"

    deadline = time.monotonic() + 10  # a killed process ends soon, not at once
    while alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive()
