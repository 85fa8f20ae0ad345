"""The ops' CUDA kernels on CPU tensors, through tests/cuda_emulation.

The environment variable MTP_EMULATION chooses the build: "" plain, "address" or "thread" for that
sanitizer, whose runtime must be preloaded (`preload`).
"""

import ctypes
import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import mtp_kernels  # noqa: F401  the ops' schemas

ROOT = Path(__file__).parent.parent
SANITIZER = os.environ.get("MTP_EMULATION", "")
OPS = ("draft_pack", "draft_step", "entry", "verify")


def cmake(source: Path, folder: Path, *options: str) -> None:
    """What `source` describes, in `folder`, made anew where a file of it is newer."""
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    env.pop("LD_PRELOAD", None)  # the compiler does not need a sanitizer
    configure = ["cmake", "-G", "Ninja", "-S", str(source), "-B", str(folder), *options]
    for command in (configure, ["cmake", "--build", str(folder)]):
        run = subprocess.run(command, env=env, capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(f"{command[0]} failed:\n{run.stdout[-6000:]}{run.stderr[-6000:]}")


def build(sanitizer: str) -> Path:
    """The library."""
    folder = ROOT / "build" / "cuda_emulation" / (sanitizer or "plain")
    options = [f"-DTORCH_ROOT={Path(torch.__file__).parent}", f"-DEMULATION_SANITIZER={sanitizer}"]
    cmake(ROOT / "tests" / "cuda_emulation", folder, *options)
    return folder / "libcuda_emulation.so"


@functools.cache
def library() -> ctypes.CDLL:
    path = build(SANITIZER)
    declared = torch.library.Library("mtp_emulation", "DEF")
    for name in OPS:
        schema = str(getattr(torch.ops.mtp_kernels, name).default._schema)
        declared.define(re.sub(r"^mtp_kernels::", "", schema))
    loaded = ctypes.CDLL(str(path))
    loaded.declared = declared  # the ops live as long as it
    loaded.emulation_seed.argtypes = [ctypes.c_uint64]
    loaded.emulation_seed(0)
    return loaded


def op(name: str) -> Callable[..., Any]:
    """The op `name` with its CUDA kernel emulated."""

    def call(*args: Any, **kwargs: Any) -> Any:
        library()
        return getattr(torch.ops.mtp_emulation, name)(*args, **kwargs)

    return call


def seed(value: int) -> None:
    """Of the order in which blocks and threads run."""
    library().emulation_seed(value)


def traffic() -> tuple[int, int]:
    """Bytes that __ldg and __stwb read and wrote since the last call: those of rows and gains."""
    read, written = ctypes.c_uint64(), ctypes.c_uint64()
    library().emulation_traffic(ctypes.byref(read), ctypes.byref(written))
    return read.value, written.value


def exact(function: str, bits: list[int]) -> list[int]:
    """A function of csrc/exact.cuh on the bits of floats, or on random words."""
    results = (ctypes.c_uint32 * len(bits))()
    given = (ctypes.c_uint32 * len(bits))(*bits)
    library().emulation_exact(function.encode(), given, ctypes.c_int64(len(bits)), results)
    return list(results)


def philox(seed: int, position: int, purpose: int, lane: int) -> list[int]:
    words = (ctypes.c_uint32 * 4)()
    counter = (ctypes.c_uint64(seed), ctypes.c_uint64(position))
    library().emulation_philox(*counter, ctypes.c_uint32(purpose), ctypes.c_uint32(lane), words)
    return list(words)


def run(kernel: str, x: torch.Tensor, n: int | None = None) -> torch.Tensor:
    """A kernel of cuda_emulation/faults.cpp on float32 x; RuntimeError with what was found."""
    out = torch.zeros_like(x)
    error = ctypes.create_string_buffer(1000)
    failed = library().emulation_run(
        kernel.encode(),
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_int64(x.numel() if n is None else n),
        error,
        ctypes.c_size_t(len(error)),
    )
    if failed:
        raise RuntimeError(error.value.decode())
    return out


def preload(sanitizer: str) -> dict[str, str]:
    """The environment of a process that tests with a sanitizer; the first report ends it.

    FileNotFoundError where the compiler has no such runtime.
    """
    runtime = {"address": "libasan.so", "thread": "libtsan.so"}[sanitizer]

    def found(name: str) -> str:
        command = [os.environ.get("CXX", "c++"), f"-print-file-name={name}"]
        return str(Path(subprocess.check_output(command, text=True).strip()).resolve(strict=True))

    return {
        "MTP_EMULATION": sanitizer,
        # The runtime looks for the C++ library's functions when it starts.
        "LD_PRELOAD": f"{found(runtime)}:{found('libstdc++.so.6')}",
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "TSAN_OPTIONS": "halt_on_error=1",
        "OMP_NUM_THREADS": "1",
    }
