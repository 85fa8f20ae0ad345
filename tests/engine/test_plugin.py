"""Installing the plugin: what is patched, what is not, and what is said about it."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from mtp_kernels.vllm import verify


def _python(code: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | env, capture_output=True, text=True
    )


def test_entry_point_imports_without_the_library_and_raises_when_called() -> None:
    """vLLM ignores a plugin that cannot be imported; a broken one must stop the engine."""
    code = """
import sys
sys.modules["mtp_kernels._C"] = None
from importlib.metadata import entry_points
(entry,) = entry_points(group="vllm.general_plugins", name="mtp_kernels")
register = entry.load()
assert "vllm" not in sys.modules and "torch" not in sys.modules
register()
"""
    run = _python(code)
    assert run.returncode == 1
    assert "pip install --no-build-isolation -e ." in run.stderr


def test_unsupported_vllm_is_left_alone_with_one_warning() -> None:
    """A symbol that is gone or has other parameters switches its part off, and what needs it."""
    code = """
import dataclasses, logging
from mtp_kernels.vllm import compat, plugin
gone = dataclasses.replace(plugin.PATCHES[2], symbol="EagleProposer.gone")
changed = dataclasses.replace(plugin.PATCHES[3], parameters=("vllm_config", "device"))
plugin.PATCHES = (*plugin.PATCHES[:2], gone, changed, *plugin.PATCHES[4:])
records = []
handler = logging.Handler()
handler.emit = lambda record: records.append(record.getMessage())
compat.logger.addHandler(handler)
plugin.install()
plugin.install()
print([text for text in records if "EagleProposer.gone" in text and "part 'draft' is off" in text])
print([row[:1] + row[2:3] for row in plugin.report()])
from vllm.v1.worker.gpu import model_runner
print("init_speculator is stock:", not hasattr(model_runner.init_speculator, "__wrapped__"))
"""
    run = _python(code)
    assert run.returncode == 0, run.stderr[-3000:]
    warnings, rows, stock = run.stdout.strip().splitlines()[-3:]
    assert "needs draft" not in warnings and warnings.count("EagleProposer.gone") == 1
    assert rows.count("('layers', 'active')") == 2
    assert rows.count("'skipped'") == 2 and "('prefix', 'active')" not in rows
    assert stock == "init_speculator is stock: True"


@pytest.mark.parametrize(
    "disable,active,disabled",
    [
        ("", 21, 0),
        ("draft", 12, 9),
        ("layers,entry", 10, 11),
        ("prefix", 16, 5),
        ("verify", 11, 10),
    ],
)
def test_parts_can_be_disabled(disable: str, active: int, disabled: int) -> None:
    code = """
from mtp_kernels.vllm import plugin
plugin.install()
rows = [status for _, _, status, _ in plugin.report()]
print(rows.count("active"), rows.count("disabled"))
"""
    run = _python(code, MTP_KERNELS_DISABLE=disable)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.split()[-2:] == [str(active), str(disabled)]


@pytest.mark.parametrize(
    "words,env",
    [
        (
            "any of layers,draft,prefix,entry,head,verify, got layer",
            {"MTP_KERNELS_DISABLE": "layer"},
        ),
        ("expected 0 or 1, got 'yes'", {"MTP_KERNELS_REPEAT_LAST_LAYER": "yes"}),
        (
            "MTP_KERNELS_DRAFT_VOCAB=ids.txt:32: [Errno 2] No such file",
            {"MTP_KERNELS_DRAFT_VOCAB": "ids.txt:32"},
        ),
        ("expected token ids, got none", {"MTP_KERNELS_DRAFT_VOCAB": os.devnull}),
        (
            "MTP_KERNELS_ENTRY_TABLE: needs part entry",
            {"MTP_KERNELS_ENTRY_TABLE": "1", "MTP_KERNELS_DISABLE": "entry"},
        ),
        ("expected vllm or coupled, got 'block'", {"MTP_KERNELS_METHOD": "block"}),
        (
            "coupled needs part verify",
            {"MTP_KERNELS_METHOD": "coupled", "MTP_KERNELS_DISABLE": "verify"},
        ),
        (
            "MTP_KERNELS_DRAFT_VOCAB: needs part head",
            {"MTP_KERNELS_DRAFT_VOCAB": "ids.txt:32", "MTP_KERNELS_DISABLE": "draft"},
        ),
    ],
)
def test_bad_environment_is_an_error(words: str, env: dict[str, str]) -> None:
    for call in ("install", "report"):
        run = _python(f"from mtp_kernels.vllm import plugin; plugin.{call}()", **env)
        assert run.returncode == 1 and words in run.stderr


def test_coupled_needs_a_vllm_that_can_be_patched() -> None:
    code = """
import dataclasses
from mtp_kernels.vllm import plugin
gone = dataclasses.replace(plugin.PATCHES[-1], symbol="Sampler.gone")
plugin.PATCHES = (*plugin.PATCHES[:-1], gone)
plugin.install()
"""
    assert _python(code).returncode == 0
    run = _python(code, MTP_KERNELS_METHOD="coupled")
    assert run.returncode == 1 and "coupled needs part verify" in run.stderr


@pytest.mark.parametrize("disable,allowed", [("", True), ("verify", False)])
def test_min_p_and_logit_bias_are_allowed_where_we_verify(disable: str, allowed: bool) -> None:
    """What vLLM has no processors for beside drafts, and so refuses, the op does."""
    code = """
from types import SimpleNamespace
from mtp_kernels.vllm import plugin
plugin.install()
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
for method in ("standard", "block", "some other"):
    for params in (SamplingParams(min_p=0.1), SamplingParams(logit_bias={3: 1.0})):
        try:
            params._validate_spec_decode(SimpleNamespace(rejection_sample_method=method))
            print(params.min_p or params.logit_bias)
        except VLLMValidationError:
            print("refused")
"""
    run = _python(code, MTP_KERNELS_DISABLE=disable)
    words = ["0.1", "{3: 1.0}"] if allowed else ["refused"] * 2
    assert run.stdout.splitlines()[-6:] == [*words, *words, "refused", "refused"], run.stderr


def test_coupled_contradicts_synthetic_acceptance(monkeypatch) -> None:
    config = SimpleNamespace(rejection_sample_method="synthetic")
    assert verify.method_of(config) == "synthetic"
    monkeypatch.setenv("MTP_KERNELS_METHOD", "coupled")
    assert verify.method_of(None) == "coupled"
    with pytest.raises(ValueError, match="coupled contradicts rejection_sample_method='synthetic'"):
        verify.method_of(config)


def test_logits_without_a_law_are_counted_and_said_once_a_minute(caplog) -> None:
    counter = verify.StatusCounter()
    for status in ([0, 0], [1, 0], [3, 2]):
        counter.add(torch.tensor(status, dtype=torch.int32))
    assert counter.total == 3
    assert [record.args for record in caplog.records] == [(1,)]
