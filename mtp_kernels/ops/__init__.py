"""The ops, one module each: the docstring, the PyTorch reference and the registration."""

from mtp_kernels.ops import (
    draft_pack,
    draft_step,
    entry,
    entry_embed,
    entry_hidden,
    entry_lookup,
    head_argmax,
    verify,
)
from mtp_kernels.ops.entry import pack_projection
from mtp_kernels.ops.entry_embed import project_embeddings

NAMES = (  # of torch.ops.mtp_kernels
    "draft_pack",
    "draft_step",
    "entry",
    "entry_embed",
    "entry_hidden",
    "entry_lookup",
    "head_argmax",
    "verify",
)

__all__ = [
    "NAMES",
    "draft_pack",
    "draft_step",
    "entry",
    "entry_embed",
    "entry_hidden",
    "entry_lookup",
    "head_argmax",
    "pack_projection",
    "project_embeddings",
    "verify",
]
