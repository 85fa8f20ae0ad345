"""The ops, one module each: the docstring, the PyTorch reference and the registration."""

from mtp_kernels.ops import draft_pack, draft_step, entry, head_argmax, verify
from mtp_kernels.ops.entry import pack_projection

NAMES = ("draft_pack", "draft_step", "entry", "head_argmax", "verify")  # of torch.ops.mtp_kernels

__all__ = [
    "NAMES",
    "draft_pack",
    "draft_step",
    "entry",
    "head_argmax",
    "pack_projection",
    "verify",
]
