"""entry_embed: the half of `entry` that depends on the token, added to what `entry_hidden` made."""

from typing import Any

import torch
from torch import Tensor

from mtp_kernels.ops._declare import Expect, declare
from mtp_kernels.ops.entry import (
    MODEL_DTYPES,
    check_embedding,
    check_gamma_offset,
    check_half,
    check_hidden_part,
    normed_embedding,
    project_half,
)


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
    """`out[t] = hidden_part[t] + embedding half of proj @ rmsnorm(embed[ids[t]]) + bias`.

    hidden_part: [T, H_out] float32, of this layer, from `entry_hidden`; rows may be strided.
    enorm_weight: [H] bfloat16, float16 or float32, the model dtype; gain of the embedding norm.
    proj_weight: [H_out, 2H], the layer's projection as `entry` takes it: rows may be strided, or
        packed by `pack_projection`, then with an even H. Only the embedding half is read.
    The other arguments are those of `entry`.

    Returns [T, H_out] of the model dtype, a fresh tensor; T = 0 is allowed. The three summands are
    added in fp32, in this order, and rounded once, so the result is that of `entry` but for the
    order of its sum. On CPU a row's result does not depend on the other rows nor on the number of
    threads, bit for bit. There is no gradient formula.
    """
    _check(**locals())
    product = project_half(normed_embedding("entry_embed", **locals()), proj_weight, hidden_first)
    out = hidden_part + product
    if proj_bias is not None:
        out = out + proj_bias.float()
    return out.to(enorm_weight.dtype)


@torch.no_grad()
def project_embeddings(
    embed_weight: Tensor,
    enorm_weight: Tensor,
    proj_weight: Tensor,
    *,
    enorm_eps: float,
    embed_norm_weight: Tensor | None = None,
    embed_norm_eps: float = 1e-6,
    gamma_offset: int = 0,
    hidden_first: bool = False,
    chunk_rows: int = 4096,
) -> Tensor:
    """The table of `entry_lookup`: what `entry_embed` adds for each id, rounded to the model dtype.

    embed_weight: [V, H], rows may be strided. The other arguments are those of `entry_embed`.
    chunk_rows: rows done together; a chunk needs temporary memory of about twice its size.

    Returns [V, H_out], for one layer: its V times H_out elements are the price of the lookup.
    """
    packed = proj_weight.dim() == 4
    out_features = proj_weight.shape[0] * (proj_weight.shape[2] if packed else 1)
    nothing = embed_weight.new_zeros(1, out_features, dtype=torch.float32)
    table = embed_weight.new_empty(embed_weight.shape[0], out_features)
    for rows, to in zip(embed_weight.split(chunk_rows), table.split(chunk_rows), strict=True):
        to.copy_(
            OP(
                nothing.expand(len(rows), -1),
                enorm_weight,
                proj_weight,
                inputs_embeds=rows,
                embed_norm_weight=embed_norm_weight,
                enorm_eps=enorm_eps,
                embed_norm_eps=embed_norm_eps,
                gamma_offset=gamma_offset,
                hidden_first=hidden_first,
            )
        )
    return table


def _check(
    hidden_part: Tensor,
    enorm_weight: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor | None,
    gamma_offset: int,
    hidden_first: bool,
    **embedding: Any,
) -> None:
    """The checks of csrc/entry_embed_cpu.cpp, with the same messages."""
    expect = Expect("entry_embed", hidden_part)
    rows = check_hidden_part(expect, hidden_part)
    expect.dtype("enorm_weight", enorm_weight, *MODEL_DTYPES)
    expect.that(
        enorm_weight.dim() == 1 and enorm_weight.numel() >= 1,
        f"enorm_weight expected shape [H >= 1], got {list(enorm_weight.shape)}",
    )
    check_gamma_offset(expect, gamma_offset)
    dtype, size = enorm_weight.dtype, enorm_weight.numel()
    check_embedding(expect, dtype, size, rows, enorm_weight=enorm_weight, **embedding)
    out_features = check_half(expect, "proj_weight", proj_weight, dtype, size)
    expect.shape("hidden_part", hidden_part, rows.count, out_features)
    if proj_bias is not None:
        expect.tensor("proj_bias", proj_bias, dtype, out_features)


def _fake(**inputs: Any) -> Tensor:
    return entry_embed(**{**inputs, "strict_ids": False})  # there are no values to check


OP = declare(entry_embed, fake=_fake, triton="mtp_kernels.kernels.entry_embed:entry_embed")
