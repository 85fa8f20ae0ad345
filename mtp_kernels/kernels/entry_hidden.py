"""entry_hidden in two launches: the norms of a row for all layers, and all projections."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtp_kernels.kernels.draft_pack import on_device
from mtp_kernels.kernels.entry import apply_norm, norm_scale, project, row_config
from mtp_kernels.ops import entry_hidden as definition


@triton.jit(do_not_specialize=["num_tokens"])
def entry_hidden_norm_kernel(
    hidden,
    hidden_stride,
    gains,
    normed,
    num_tokens,
    size,
    eps,
    CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (tokens)."""
    t = tl.program_id(0).to(tl.int64)
    hidden += t * hidden_stride
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x = tl.load(hidden + k, mask=k < size, other=0.0).to(tl.float32)
        squares += x * x
    scale = norm_scale(squares, size, eps)
    for start in range(0, size, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x = tl.load(hidden + k, mask=k < size, other=0.0).to(tl.float32)
        for i in tl.static_range(len(gains)):
            gain = tl.load(gains[i] + k, mask=k < size, other=0.0).to(tl.float32)
            y = apply_norm(x, scale, gain, normed.dtype.element_ty, CENTERED)
            tl.store(normed + (i * num_tokens + t) * size + k, y, mask=k < size)


def entry_hidden(
    hidden: Tensor,
    hnorm_weights: Sequence[Tensor],
    proj_weights: Sequence[Tensor],
    *,
    hnorm_eps: float,
    gamma_offset: int = 0,
    hidden_first: bool = False,
) -> Tensor:
    """The op, see ops/entry_hidden.py. On CPU tensors it runs under TRITON_INTERPRET=1."""
    out_features = definition._check(**locals())
    if any(proj.dim() == 4 for proj in proj_weights):
        raise RuntimeError(
            "entry_hidden: proj_weights expected [H_out, 2H] on a GPU, got a packed one"
        )
    num_layers, (num_tokens, size) = len(proj_weights), hidden.shape
    out = hidden.new_empty(num_layers, num_tokens, out_features, dtype=torch.float32)
    if out.numel() == 0:
        return out
    normed = hidden.new_empty(num_layers, num_tokens, size)
    with on_device(hidden):
        entry_hidden_norm_kernel[(num_tokens,)](
            hidden,
            hidden.stride(0),
            tuple(hnorm_weights),
            normed,
            num_tokens,
            size,
            hnorm_eps,
            CENTERED=gamma_offset == 1,
            **row_config(size),
        )
        project(normed, [proj.chunk(2, dim=1)[not hidden_first] for proj in proj_weights], out)
    return out
