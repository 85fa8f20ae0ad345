"""The ops, one module each: the docstring, the PyTorch reference and the registration."""

from mtp_kernels.ops.entry import entry, pack_projection

__all__ = ["entry", "pack_projection"]
