"""Installing the plugin: what is patched, what is not, and what is said about it."""

import os
import subprocess
import sys

import pytest


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
from mtp_kernels.vllm import plugin
gone = dataclasses.replace(plugin.PATCHES[2], symbol="EagleProposer.gone")
changed = dataclasses.replace(plugin.PATCHES[3], parameters=("vllm_config", "device"))
plugin.PATCHES = (*plugin.PATCHES[:2], gone, changed, *plugin.PATCHES[4:])
records = []
handler = logging.Handler()
handler.emit = lambda record: records.append(record.getMessage())
plugin.logger.addHandler(handler)
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
    [("", 10, 0), ("draft", 2, 8), ("layers,entry", 0, 10), ("prefix", 5, 5)],
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
    "variable,value,words",
    [
        ("MTP_KERNELS_DISABLE", "layer", "expected any of layers,draft,prefix,entry, got layer"),
        ("MTP_KERNELS_REPEAT_LAST_LAYER", "yes", "expected 0 or 1, got 'yes'"),
    ],
)
def test_bad_environment_is_an_error(variable: str, value: str, words: str) -> None:
    for call in ("install", "report"):
        run = _python(f"from mtp_kernels.vllm import plugin; plugin.{call}()", **{variable: value})
        assert run.returncode == 1 and words in run.stderr
