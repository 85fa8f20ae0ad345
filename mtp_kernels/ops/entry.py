"""entry: the first step of an MTP layer, from a token and a hidden state to the layer's input."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtp_kernels.ops._declare import Expect, declare

PANEL = 16  # output features side by side in a packed weight


def entry(
    hidden: Tensor,
    enorm_weight: Tensor,
    hnorm_weight: Tensor,
    proj_weight: Tensor,
    *,
    input_ids: Tensor | None = None,
    embed_weight: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    proj_bias: Tensor | None = None,
    positions: Tensor | None = None,
    embed_norm_weight: Tensor | None = None,
    enorm_eps: float,
    hnorm_eps: float,
    embed_norm_eps: float = 1e-6,
    gamma_offset: int = 0,
    hidden_first: bool = False,
    zero_at_position_0: bool = False,
    vocab_start: int = 0,
    strict_ids: bool = False,
) -> Tensor:
    """`out[t] = proj @ concat(rmsnorm(embed[ids[t]]), rmsnorm(hidden[t])) + bias`.

    hidden: [T, H] bfloat16, float16 or float32, the model dtype; rows may be strided. Or [H].
    enorm_weight, hnorm_weight: [H], gains of the embedding norm and the hidden norm.
    proj_weight: [H_out, 2H], rows may be strided; or what `pack_projection` made of it.
    input_ids: [T] int32 or int64, with embed_weight: [V, H], rows may be strided.
    inputs_embeds: [T, H], instead of input_ids and embed_weight; rows may be strided.
    proj_bias: [H_out].
    positions: [T] int32 or int64, read only with zero_at_position_0.
    embed_norm_weight: [H], gain of one more norm on the embedding, before the embedding norm.
    enorm_eps, hnorm_eps, embed_norm_eps: added to the mean square, >= 0.
    gamma_offset: 0, or 1 for zero-centred gains (gain = 1 + weight); for all norms.
    hidden_first: concat(hidden, embedding) instead of concat(embedding, hidden).
    zero_at_position_0: rows at position 0 get a zero embedding.
    vocab_start: embed_weight holds ids [vocab_start, vocab_start + V).
    strict_ids: an id outside the table is an error naming it, instead of a zero embedding (reads
        ids on the host; not on CUDA).

    Returns [T, H_out] ([H_out] for hidden [H]), a fresh tensor. T = 0 is allowed. Everything but
    integers and `eps` has the model dtype. A zero embedding stays zero through its norms, also with
    eps 0.

    Norms are computed in fp32 and rounded to the model dtype where RMSNorm rounds: before the gain,
    and after it (gamma_offset 1: only after it, as Gemma's does). Products are summed in fp32. On
    CPU a row's result does not depend on the other rows nor on the number of threads, bit for bit.
    For inference, under `torch.no_grad`: there is no gradient formula. The CUDA kernel is compiled
    in our builds but has not been run on a GPU yet.
    """
    single = _check(**locals())
    rows = hidden.unsqueeze(0) if single else hidden
    if inputs_embeds is not None:
        embeds = inputs_embeds.reshape(rows.shape)
        zero_rows = torch.zeros(rows.shape[0], dtype=torch.bool, device=rows.device)
    else:
        assert input_ids is not None and embed_weight is not None  # by _check
        index = input_ids.reshape(-1).to(torch.int64) - vocab_start
        zero_rows = (index < 0) | (index >= embed_weight.shape[0])
        if strict_ids and bool(zero_rows.any()):
            row = int(zero_rows.nonzero()[0])
            raise RuntimeError(
                f"entry: input_ids expected ids in [{vocab_start}, "
                f"{vocab_start + embed_weight.shape[0]}), got {int(index[row]) + vocab_start} "
                f"at row {row}"
            )
        embeds = embed_weight[index.masked_fill(zero_rows, 0)]
    if zero_at_position_0:
        assert positions is not None  # by _check
        zero_rows = zero_rows | (positions.reshape(-1) == 0)
    embeds = embeds.masked_fill(zero_rows.unsqueeze(-1), 0)

    if embed_norm_weight is not None:
        embeds = _rms_norm(embeds, embed_norm_weight, embed_norm_eps, gamma_offset)
    halves = [
        _rms_norm(embeds, enorm_weight, enorm_eps, gamma_offset),
        _rms_norm(rows, hnorm_weight, hnorm_eps, gamma_offset),
    ]
    if hidden_first:
        halves.reverse()
    if proj_weight.dim() == 4:
        proj_weight = unpack_projection(proj_weight)
    out = F.linear(torch.cat(halves, dim=-1), proj_weight, proj_bias)
    return out.squeeze(0) if single else out


def pack_projection(weight: Tensor) -> Tensor:
    """Rearrange a weight once, so that `entry` or `head_argmax` on CPU reads it as one stream.

    weight: [N, K] bfloat16, a projection or an lm_head, N a multiple of 16 and K even.
    Returns a fresh [N/16, K/2, 16, 2]: pairs of inputs, for 16 output features side by side.
    """
    ok = weight.dim() == 2 and weight.dtype == torch.bfloat16
    if not ok or weight.shape[0] % PANEL or weight.shape[1] % 2:
        raise ValueError(
            "pack_projection: weight expected bfloat16 [multiple of 16, multiple of 2], got "
            f"{weight.dtype} {list(weight.shape)}"
        )
    panels = weight.reshape(-1, PANEL, weight.shape[1] // 2, 2)
    return panels.detach().transpose(1, 2).clone(memory_format=torch.contiguous_format)


def unpack_projection(packed: Tensor) -> Tensor:
    """The inverse of `pack_projection`: [N/16, K/2, 16, 2] to [N, K]."""
    return packed.transpose(1, 2).reshape(-1, 2 * packed.shape[1])


def _rms_norm(x: Tensor, weight: Tensor, eps: float, gamma_offset: int) -> Tensor:
    wide = x.float()
    mean = wide.pow(2).mean(-1, keepdim=True) + eps
    normed = wide * torch.rsqrt(mean).masked_fill(mean == 0, 0)  # 0 * inf would be NaN
    if gamma_offset:
        return (normed * (1 + weight.float())).to(x.dtype)
    return normed.to(x.dtype) * weight


def _check(
    hidden: Tensor,
    enorm_weight: Tensor,
    hnorm_weight: Tensor,
    proj_weight: Tensor,
    input_ids: Tensor | None,
    embed_weight: Tensor | None,
    inputs_embeds: Tensor | None,
    proj_bias: Tensor | None,
    positions: Tensor | None,
    embed_norm_weight: Tensor | None,
    enorm_eps: float,
    hnorm_eps: float,
    embed_norm_eps: float,
    gamma_offset: int,
    zero_at_position_0: bool,
    vocab_start: int,
    **_: Any,
) -> bool:
    """The checks of csrc/entry_args.h, with the same messages. Returns whether hidden is [H]."""
    expect = Expect("entry", hidden)
    expect.dtype("hidden", hidden, torch.bfloat16, torch.float16, torch.float32)
    expect.that(
        hidden.dim() in (1, 2), f"hidden expected shape [T, H] or [H], got {list(hidden.shape)}"
    )
    expect.that(hidden.shape[-1] >= 1, f"hidden expected H >= 1, got {list(hidden.shape)}")
    expect.unit_stride("hidden", hidden)
    single = hidden.dim() == 1
    dtype, size = hidden.dtype, hidden.shape[-1]
    rows = 1 if single else hidden.shape[0]

    def per_row(name: str, x: Tensor) -> None:
        expect.device(name, x)
        expect.dtype(name, x, torch.int32, torch.int64)
        if not (single and x.dim() == 0):
            expect.shape(name, x, rows)
            expect.unit_stride(name, x)

    expect.tensor("enorm_weight", enorm_weight, dtype, size)
    expect.tensor("hnorm_weight", hnorm_weight, dtype, size)

    expect.device("proj_weight", proj_weight)
    expect.dtype("proj_weight", proj_weight, dtype)
    shape = list(proj_weight.shape)
    packed = len(shape) == 4
    expect.that(
        shape[1:] == ([size, PANEL, 2] if packed else [2 * size]),
        f"proj_weight expected shape [H_out, {2 * size}] or packed [H_out/16, {size}, 16, 2], "
        f"got {shape}",
    )
    if packed:
        expect.dtype("packed proj_weight", proj_weight, torch.bfloat16)
        expect.that(proj_weight.is_contiguous(), "packed proj_weight expected a contiguous tensor")
    else:
        expect.unit_stride("proj_weight", proj_weight)
    out_features = shape[0] * (PANEL if packed else 1)
    if proj_bias is not None:
        expect.tensor("proj_bias", proj_bias, dtype, out_features)

    has_ids = input_ids is not None
    expect.that(
        has_ids != (inputs_embeds is not None),
        "expected exactly one of input_ids and inputs_embeds, got "
        + ("both" if has_ids else "neither"),
    )
    expect.that(
        has_ids == (embed_weight is not None),
        "embed_weight expected a table for input_ids, got None"
        if has_ids
        else "embed_weight expected None, got a table beside inputs_embeds",
    )
    if input_ids is not None and embed_weight is not None:
        per_row("input_ids", input_ids)
        expect.device("embed_weight", embed_weight)
        expect.dtype("embed_weight", embed_weight, dtype)
        table = list(embed_weight.shape)
        expect.that(
            len(table) == 2 and table[0] >= 1 and table[1] == size,
            f"embed_weight expected shape [V >= 1, {size}], got {table}",
        )
        expect.unit_stride("embed_weight", embed_weight)
    elif inputs_embeds is not None:
        flat = single and inputs_embeds.dim() == 1
        expect.tensor("inputs_embeds", inputs_embeds, dtype, *([size] if flat else [rows, size]))
    if embed_norm_weight is not None:
        expect.tensor("embed_norm_weight", embed_norm_weight, dtype, size)
    if positions is not None:
        per_row("positions", positions)
    expect.that(
        positions is not None or not zero_at_position_0,
        "positions expected a tensor with zero_at_position_0, got None",
    )
    for name, eps in (
        ("enorm_eps", enorm_eps),
        ("hnorm_eps", hnorm_eps),
        ("embed_norm_eps", embed_norm_eps),
    ):
        expect.that(
            math.isfinite(eps) and eps >= 0, f"{name} expected a finite number >= 0, got {eps:g}"
        )
    expect.that(vocab_start >= 0, f"vocab_start expected a number >= 0, got {vocab_start}")
    expect.that(gamma_offset in (0, 1), f"gamma_offset expected 0 or 1, got {gamma_offset}")
    return single


def _fake(**inputs: Any) -> Tensor:
    return entry(**{**inputs, "strict_ids": False})  # there are no values to check


OP = declare(entry, fake=_fake)
