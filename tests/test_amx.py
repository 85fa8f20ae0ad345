"""The AMX kernels on a CPU that need not have AMX: in an emulation, under sanitizers.

The emulation is a second build of the extension, in which AMX's instructions are plain C++ (see
tests/amx_emulation) and "amx" counts as available. The tests of the other files run in it.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import cases
import emulation
import pytest

import mtp_kernels
from mtp_kernels import _C

TESTS = Path(__file__).parent
FILES = ["test_ops.py", "test_entry.py", "test_entry_halves.py", "test_head_argmax.py"]
PACKAGE = Path(mtp_kernels.__file__).parent

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="of x86")


def test_the_extension_has_the_instructions() -> None:
    """Its own build, not the emulation, whatever this machine has."""
    objdump = shutil.which("objdump")
    if objdump is None:
        pytest.skip("no objdump")
    code = subprocess.check_output([objdump, "-d", "--no-show-raw-insn", _C.__file__], text=True)
    for instruction in ("ldtilecfg", "tileloadd", "tdpbf16ps", "tilestored", "tilerelease"):
        assert re.search(rf"\t{instruction}\b", code), instruction
    assert b"emulated AMX" not in Path(_C.__file__).read_bytes()


@pytest.fixture(scope="session")
def emulated_package() -> Path:
    """A folder with this package, but for its extension."""
    folder = TESTS.parent / "build" / "amx_emulation"
    package = folder / "site" / "mtp_kernels"
    package.mkdir(parents=True, exist_ok=True)
    for path in PACKAGE.iterdir():
        link = package / path.name
        if path.suffix != ".so" and not link.is_symlink():
            link.symlink_to(path)
    emulation.cmake(
        TESTS.parent,
        folder / "build",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DMTP_OUTPUT_DIR={package}",
        f"-DMTP_VERSION={mtp_kernels.__version__}",
        "-DMTP_CUDA=OFF",
        "-DMTP_EMULATE_AMX=ON",
        "-DCMAKE_BUILD_TYPE=Debug",  # of all but the emulated kernels: built in half the time
    )
    return package.parent


@pytest.mark.skipif("avx512_bf16" not in cases.CPU_ISAS, reason="AMX needs AVX512-bf16 too")
def test_kernels_in_the_emulation(emulated_package: Path) -> None:
    """All tests of the other files that run the CPU ISA "amx", but two long ones without tiles."""
    try:
        env = emulation.preload("address")
    except FileNotFoundError as missing:
        pytest.skip(f"no sanitizer: {missing}")
    path = os.pathsep.join([str(emulated_package), str(TESTS)])
    # Without capture: a report ends the process before captured output is shown.
    options = ["-q", "-s", "-k", "amx and not law_of_a_sample", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(str(TESTS / file) for file in FILES)],
        env=os.environ | env | {"PYTHONPATH": path},
        cwd=emulated_package,  # where no other mtp_kernels is found first
        capture_output=True,
        text=True,
    )
    output = run.stdout[-6000:] + run.stderr[-6000:]
    assert run.returncode == 0, output
    assert int(re.findall(r"(\d+) passed", output)[0]) >= 250, output
