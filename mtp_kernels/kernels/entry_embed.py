"""entry_embed in two launches: the gather and norms of a row, and the projection with its sums."""

import triton
import triton.language as tl
from torch import Tensor

from mtp_kernels.kernels.draft_pack import on_device
from mtp_kernels.kernels.entry import (
    apply_norm,
    find_row,
    lookup_of,
    norm_scale,
    project,
    row_config,
)
from mtp_kernels.ops import entry_embed as definition


@triton.jit
def _load(row, length, k, size, scale, gain, CENTERED: tl.constexpr):
    """Of an embedding, normed if there is a gain, as fp32."""
    x = tl.load(row + k, mask=k < length, other=0.0)
    if gain is not None:
        weight = tl.load(gain + k, mask=k < size, other=0.0).to(tl.float32)
        x = apply_norm(x.to(tl.float32), scale, weight, row.dtype.element_ty, CENTERED)
    return x.to(tl.float32)


@triton.jit
def entry_embed_norm_kernel(
    lookup,
    embed_norm_weight,
    enorm_weight,
    normed,
    size,
    embed_norm_eps,
    enorm_eps,
    CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (tokens)."""
    t = tl.program_id(0).to(tl.int64)
    row, length = find_row(lookup, t, size)
    first_scale = 1.0
    if embed_norm_weight is not None:
        squares = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, size, BLOCK):
            x = _load(row, length, start + tl.arange(0, BLOCK), size, 1.0, None, CENTERED)
            squares += x * x
        first_scale = norm_scale(squares, size, embed_norm_eps)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x = _load(row, length, k, size, first_scale, embed_norm_weight, CENTERED)
        squares += x * x
    scale = norm_scale(squares, size, enorm_eps)
    for start in range(0, size, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x = _load(row, length, k, size, first_scale, embed_norm_weight, CENTERED)
        gain = tl.load(enorm_weight + k, mask=k < size, other=0.0).to(tl.float32)
        y = apply_norm(x, scale, gain, normed.dtype.element_ty, CENTERED)
        tl.store(normed + t * size + k, y, mask=k < size)


def entry_embed(
    hidden_part: Tensor,
    enorm_weight: Tensor,
    proj_weight: Tensor,
    *,
    input_ids: Tensor | None = None,
    embed_weight: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    proj_bias: Tensor | None = None,
    positions: Tensor | None = None,
    embed_norm_weight: Tensor | None = None,
    enorm_eps: float,
    embed_norm_eps: float = 1e-6,
    gamma_offset: int = 0,
    hidden_first: bool = False,
    zero_at_position_0: bool = False,
    vocab_start: int = 0,
    strict_ids: bool = False,
) -> Tensor:
    """The op, see ops/entry_embed.py. On CPU tensors it runs under TRITON_INTERPRET=1."""
    definition._check(**locals())
    if strict_ids:
        raise RuntimeError(
            "entry_embed: strict_ids expected False on CUDA, where raising would stall the host"
        )
    if proj_weight.dim() == 4:
        raise RuntimeError(
            "entry_embed: proj_weight expected [H_out, 2H] on a GPU, got a packed one"
        )
    (num_tokens, out_features), size = hidden_part.shape, enorm_weight.numel()
    out = enorm_weight.new_empty(num_tokens, out_features)
    if out.numel() == 0:
        return out
    table = inputs_embeds if embed_weight is None else embed_weight
    normed = enorm_weight.new_empty(num_tokens, size)
    with on_device(hidden_part):
        entry_embed_norm_kernel[(num_tokens,)](
            lookup_of(table, input_ids, positions, zero_at_position_0, vocab_start),
            embed_norm_weight,
            enorm_weight,
            normed,
            size,
            embed_norm_eps,
            enorm_eps,
            CENTERED=gamma_offset == 1,
            **row_config(size),
        )
        half = proj_weight.chunk(2, dim=1)[hidden_first]
        project(normed[None], [half], out[None], hidden_part, proj_bias)
    return out
