"""The ops, one module each: the docstring, the PyTorch reference and the registration."""

from mtp_kernels.ops import entry, verify
from mtp_kernels.ops.entry import pack_projection

NAMES = ("entry", "verify")  # of torch.ops.mtp_kernels

__all__ = ["NAMES", "entry", "pack_projection", "verify"]
