"""The demo's own arithmetic: scoring, the table, and the protocol with its worker processes."""

import json
import sys
from dataclasses import replace

import pytest

from mtp_kernels import demo
from mtp_kernels.demo import Job, Result, Variant, answer_of, format_table, mean_and_stderr

BASELINE = Result(
    token_ids=[[1, 2], [3, 4, 5]],
    texts=["... = 7.\nAnswer: 7\n", "... = 9.\nAnswer: -9\n"],
    seconds=2.0,
    rounds=0,
    accepted=[],
)
JOB = Job("x", prompts=["a"], num_drafts=3, max_tokens=8, max_model_len=64, concurrency=2)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so 3 + 4 = 7.\nAnswer: 7\n", 7),
        ("Answer: -12", -12),
        ("Answer: 7\nQ: and another?\nAnswer: 8", 7),  # what follows is another problem's
        ("7", None),
        ("Answer: seven", None),
        ("", None),
    ],
)
def test_answer_of(text: str, answer: int | None) -> None:
    assert answer_of(text) == answer


def test_stderr_is_that_of_lm_eval() -> None:
    # lm-eval: sample standard deviation / sqrt(n).
    mean, stderr = mean_and_stderr([True, True, True, False])
    assert mean == 0.75
    assert stderr == pytest.approx((3 * 0.25**2 + 0.75**2) ** 0.5 / 3**0.5 / 4**0.5)
    assert mean_and_stderr([True]) == (1.0, 0.0)


def test_summarize() -> None:
    mine = replace(BASELINE, token_ids=[[1, 2], [3, 4, 6]], rounds=4, accepted=[4, 2, 1])
    row = demo.summarize("mine", mine, BASELINE, answers=[7, 9])
    assert row.acceptance == [1.0, 0.5, 0.25]
    assert row.mean_length == 2.75
    assert row.exact_match == 0.5
    assert (row.identical, row.prompts, row.tokens) == (1, 2, 5)
    assert row.tokens_per_second == 2.5


def test_table_says_yes_only_when_every_prompt_is_identical() -> None:
    base = demo.summarize("no drafts", BASELINE, BASELINE, answers=[7, 9])
    same = demo.summarize("same", replace(BASELINE, rounds=1, accepted=[1]), BASELINE, [7, 9])
    header, _, *lines = format_table([base, same, replace(same, identical=1)], 1).splitlines()
    assert "same as 'no drafts'" in header
    assert "yes" not in lines[0]
    assert "yes (2 of 2)" in lines[1]
    assert "no (1 of 2)" in lines[2]
    assert "0.500 +- 0.500" in lines[1]


def test_plot_is_a_png(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    row = demo.summarize("x", replace(BASELINE, rounds=2, accepted=[2, 1]), BASELINE, [7, 9])
    assert demo.plot([row], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_run_variant_reads_progress_and_result(tmp_path, monkeypatch) -> None:
    worker = f"""
import json, os, sys
job = json.load(sys.stdin)
assert job["num_drafts"] == 3
print("engine says", os.environ["MTP_KERNELS_DISABLE"])
with os.fdopen(int(sys.argv[1]), "w") as pipe:
    print(json.dumps(dict(tokens=5, finished=1)), file=pipe)
    print({json.dumps(demo.asdict(BASELINE))!r}, file=pipe)
"""
    monkeypatch.setattr(demo, "_WORKER", worker)
    seen: list[tuple[int, int]] = []
    log = tmp_path / "log"
    variant = Variant("stock", drafts=True, disable="layers")
    result = demo.run_variant(variant, JOB, log, lambda *progress: seen.append(progress))
    assert result == BASELINE
    assert seen == [(5, 1)]
    assert log.read_text() == "engine says layers\n"


@pytest.mark.parametrize("code", ["import sys; sys.exit('no such model')", "pass"])
def test_a_failed_engine_shows_the_end_of_its_log(tmp_path, monkeypatch, code: str) -> None:
    monkeypatch.setattr(demo, "_WORKER", code)
    with pytest.raises(RuntimeError, match="stock: the engine ended") as error:
        demo.run_variant(Variant("stock", drafts=True), JOB, tmp_path / "log", print)
    assert ("no such model" in str(error.value)) == ("sys.exit" in code)


def test_importing_the_demo_imports_no_vllm() -> None:
    code = "import sys, mtp_kernels.demo; sys.exit('vllm' in sys.modules)"
    assert demo.subprocess.run([sys.executable, "-c", code]).returncode == 0
