"""Kernels for multi-token prediction (MTP). Importing this registers `torch.ops.mtp_kernels.*`.

`MTP_KERNELS_ISA` (amx, avx512_bf16, avx512, avx2 or scalar) makes the CPU kernels use a narrower
instruction set than the machine has.
"""

import os
from importlib.metadata import version

import torch  # noqa: F401  loads the libraries that _C links against

try:
    from mtp_kernels import _C
except ImportError as error:
    raise ImportError(
        f"mtp_kernels._C cannot be loaded ({error}); build it with: "
        "pip install --no-build-isolation -e . (in a checkout), or pip install mtp-kernels"
    ) from error

from mtp_kernels import ops

__version__ = version("mtp-kernels")
__all__ = ["build_info", "ops"]

if isa := os.environ.get("MTP_KERNELS_ISA"):
    try:
        _C.set_cpu_isa(isa)
    except ValueError as error:
        raise ValueError(f"MTP_KERNELS_ISA: {error}") from None

build_info = _C.build_info
