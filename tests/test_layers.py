"""The layers depend on each other in one direction: what importing one must not import."""

import subprocess
import sys

import pytest

# module -> modules it must not bring along
LAYERS = {
    "mtp_kernels": [
        "vllm",
        "triton",
        "mtp_kernels.drafting",
        "mtp_kernels.vllm",
        "mtp_kernels.cli",
    ],
    "mtp_kernels.ops": ["vllm", "triton", "mtp_kernels.drafting", "mtp_kernels.archs"],
    "mtp_kernels.archs": ["vllm", "triton", "mtp_kernels.drafting", "mtp_kernels.vllm"],
    "mtp_kernels.drafting": ["vllm", "triton", "mtp_kernels.vllm", "mtp_kernels.cli"],
    "mtp_kernels.verification": ["vllm", "triton", "mtp_kernels.drafting", "mtp_kernels.vllm"],
    "mtp_kernels.draft_vocab": ["vllm", "triton", "transformers", "mtp_kernels.vllm"],
    "mtp_kernels.cli": ["vllm", "triton", "transformers", "mtp_kernels.vllm"],
    "mtp_kernels.vllm": ["vllm", "triton"],
    "mtp_kernels.vllm.plugin": ["vllm", "triton"],
}


def imported(module: str) -> set[str]:
    code = f"import sys, {module}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


@pytest.mark.parametrize("module", LAYERS)
def test_layer_imports_nothing_above_it(module: str) -> None:
    modules = imported(module)
    assert module in modules
    assert not modules & set(LAYERS[module])
