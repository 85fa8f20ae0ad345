"""What was built, what is packaged, and the command that tells."""

import ctypes
import os
import re
import subprocess
import sys
import tarfile
import types
from pathlib import Path

import cases
import pytest

import mtp_kernels
from mtp_kernels import cli

ROOT = Path(__file__).parent.parent


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env}
    )


def test_build_info_tells_what_it_was_built_for() -> None:
    info = mtp_kernels.build_info()
    assert info["version"] == mtp_kernels.__version__
    assert info["torch_target"] == "2.11"
    assert re.fullmatch(r"(gcc|clang) \d+\..*", info["compiler"])
    assert info["build_type"] == "Release"
    assert info["cuda_compiled"] or not info["cuda"]
    assert bool(info["cuda_archs"]) == info["cuda_compiled"]


def linux_grants_tiles() -> bool:
    """arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)."""
    return ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0


def test_cpu_isas_are_those_of_the_machine() -> None:
    flags = set()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            flags = set(line.split())
    needs = {
        "scalar": set(),
        "avx2": {"avx2", "fma", "f16c"},
        "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx2", "fma", "f16c"},
        "avx512_bf16": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16"},
        "amx": {"avx512_bf16", "amx_tile", "amx_bf16"},
    }
    here = [isa for isa, wanted in needs.items() if wanted <= flags]
    if "amx" in here and not linux_grants_tiles():
        here.remove("amx")
    assert here == cases.CPU_ISAS
    assert mtp_kernels.build_info()["cpu_isa"] == os.environ.get(
        "MTP_KERNELS_ISA", cases.CPU_ISAS[-1]
    )


def test_environment_variable_narrows_the_isa() -> None:
    code = "import mtp_kernels; print(mtp_kernels.build_info()['cpu_isa'])"
    assert python(code, MTP_KERNELS_ISA="scalar").stdout == "scalar\n"


def test_unknown_isa_is_an_error_that_lists_the_known_ones() -> None:
    run = python("import mtp_kernels", MTP_KERNELS_ISA="avx3")
    known = ", ".join(cases.CPU_ISAS)
    assert f"MTP_KERNELS_ISA: CPU ISA expected one of {known}, got 'avx3'" in run.stderr
    assert run.returncode == 1


def test_missing_extension_names_the_build_command() -> None:
    run = python("import sys; sys.modules['mtp_kernels._C'] = None; import mtp_kernels")
    assert run.returncode == 1
    assert "ImportError: mtp_kernels._C cannot be loaded" in run.stderr
    assert "pip install --no-build-isolation -e ." in run.stderr


def test_extension_carries_no_path_of_the_build_machine() -> None:
    from mtp_kernels import _C

    binary = Path(_C.__file__).read_bytes()
    assert b"csrc/entry_cpu.cpp" in binary
    assert str(ROOT).encode() not in binary


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names in the source distribution, made from a copy so that the checkout stays clean."""
    out = tmp_path_factory.mktemp("sdist")
    egg_base = tmp_path_factory.mktemp("egg")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(egg_base)]
    subprocess.run([*command, "sdist", "-d", str(out)], check=True, cwd=ROOT, capture_output=True)
    with tarfile.open(next(out.glob("*.tar.gz"))) as tar:
        return {name.split("/", 1)[1] for name in tar.getnames() if "/" in name}


def test_sdist_has_everything_a_build_needs(sdist: set[str]) -> None:
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").iterdir()}
    assert len(sources) >= 10
    assert sources | {"CMakeLists.txt", "setup.py", "pyproject.toml"} <= sdist
    assert "mtp_kernels/ops/entry.py" in sdist
    assert not [name for name in sdist if name.endswith((".so", ".pyc"))]


# ---- mtp-kernels doctor -------------------------------------------------------------------------


def test_doctor_names_the_implementation_of_each_op(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.op_implementations()["entry"] == {
        "cpu": "compiled",
        "cuda": "compiled" if mtp_kernels.build_info()["cuda"] else "Triton",
    }
    assert cli.op_implementations()["head_argmax"] == {"cpu": "compiled", "cuda": "Triton"}
    cli.main(["doctor"])
    out = capsys.readouterr().out
    assert re.search(r"entry +cpu: compiled, cuda: ", out)
    assert f"CPU ISA in use   {mtp_kernels.build_info()['cpu_isa']}" in out
    assert re.search(rf"mtp-kernels +{re.escape(mtp_kernels.__version__)}", out)


def test_doctor_fails_when_something_should_work_and_does_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mtp_kernels, "__version__", "0.0.0")
    assert cli.main(["doctor"]) == 1
    assert "PROBLEM: _C was built for version" in capsys.readouterr().out


def test_doctor_reports_a_plugin_that_cannot_be_imported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "version", lambda package: mtp_kernels.__version__)  # all installed
    monkeypatch.delattr("mtp_kernels.vllm.plugin", raising=False)
    monkeypatch.setitem(sys.modules, "mtp_kernels.vllm.plugin", None)
    assert cli.main(["doctor"]) == 1
    assert "PROBLEM: the plugin cannot be examined: ModuleNotFound" in capsys.readouterr().out


@pytest.mark.parametrize(
    "status, code", [("active", 0), ("would patch", 0), ("disabled", 0), ("skipped", 1)]
)
def test_doctor_lists_what_is_patched_in_vllm(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, status: str, code: int
) -> None:
    plugin = types.ModuleType("mtp_kernels.vllm.plugin")
    plugin.report = lambda: [("layers", "vllm.some.Symbol", status, "why")]  # type: ignore
    monkeypatch.setattr("mtp_kernels.vllm.plugin", plugin, raising=False)
    monkeypatch.setattr(cli, "version", lambda package: mtp_kernels.__version__)
    monkeypatch.setitem(sys.modules, "mtp_kernels.vllm.plugin", plugin)
    assert cli.main(["doctor"]) == code
    out = capsys.readouterr().out
    assert f"layers           {status}: vllm.some.Symbol (why)" in out
    assert ("PROBLEM: layers: vllm.some.Symbol is not patched: why" in out) == (code == 1)
