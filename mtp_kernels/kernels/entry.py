"""What the entry ops share: finding a token's row, norms of a row, and the projection.

Norms have a launch of their own, a program per row, before one launch projects by all layers: so a
norm is not repeated by every program that multiplies the row, and what is multiplied reaches the
tensor cores by asynchronous copies. The references in ops/entry*.py are the definition.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from mtp_kernels.kernels import dot
from mtp_kernels.kernels.draft_pack import matrix


class Lookup(NamedTuple):
    """A field that is None is compiled out."""

    table: Any
    stride: Any
    ids: Any
    vocab_start: Any
    vocab_rows: Any
    positions: Any


def lookup_of(
    table: Tensor,
    input_ids: Tensor | None,
    positions: Tensor | None,
    zero_at_position_0: bool,
    vocab_start: int,
) -> Lookup:
    masking = positions if zero_at_position_0 else None
    return Lookup(table, table.stride(0), input_ids, vocab_start, table.shape[0], masking)


@triton.jit
def find_row(lookup, t, size):
    """Where the row of token t begins, and how long it is: 0 for a zero embedding."""
    row = t
    known = t >= 0
    if lookup.ids is not None:
        id = tl.load(lookup.ids + t).to(tl.int64)
        row = id - lookup.vocab_start
        known = (id >= lookup.vocab_start) & (row < lookup.vocab_rows)
    if lookup.positions is not None:
        known = known & (tl.load(lookup.positions + t) != 0)
    return lookup.table + tl.where(known, row, 0) * lookup.stride, tl.where(known, size, 0)


@triton.jit
def norm_scale(squares, size, eps):
    """Zero for an all-zero row, which stays zero also with eps 0."""
    mean = tl.sum(squares) / size + eps
    return tl.where(mean == 0, 0.0, tl.rsqrt(mean))


@triton.jit
def apply_norm(x, scale, gain, dtype: tl.constexpr, CENTERED: tl.constexpr):
    """Rounded where RMSNorm does it: before the gain and after it, or only after it."""
    x = x * scale
    if CENTERED:
        x = x * (1.0 + gain)
    else:
        x = x.to(dtype).to(tl.float32) * gain
    return x.to(dtype)


@triton.jit(do_not_specialize=["num_tokens"])
def project_kernel(
    normed,
    weights,
    hidden_part,
    bias,
    out,
    num_tokens,
    size,
    out_features,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid (blocks of tokens, blocks of outputs, layers); neighbours read the same weights."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    rows = tl.program_id(1).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    layer = tl.program_id(2)
    is_token, is_row = tokens < num_tokens, rows < out_features
    weight, weight_stride = weights[0].data, weights[0].stride
    for i in tl.static_range(1, len(weights)):
        weight = tl.where(layer == i, weights[i].data, weight)
        weight_stride = tl.where(layer == i, weights[i].stride, weight_stride)
    first = layer.to(tl.int64) * num_tokens
    value = dot.products(
        normed + first * size, size, weight, weight_stride, rows, tokens, is_row, is_token, size,
        BLOCK_K,
    )  # fmt: skip
    inside = is_row[:, None] & is_token[None, :]
    if hidden_part is not None:
        part = hidden_part.data + tokens[None, :] * hidden_part.stride + rows[:, None]
        value += tl.load(part, mask=inside, other=0.0)
    if bias is not None:
        value += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)[:, None]
    to = out + (first + tokens)[None, :] * out_features + rows[:, None]
    tl.store(to, value.to(out.dtype.element_ty), mask=inside)


def project(
    normed: Tensor,
    weights: Sequence[Tensor],
    out: Tensor,
    hidden_part: Tensor | None = None,
    bias: Tensor | None = None,
) -> None:
    """out[i, t] = weights[i] @ normed[i, t] + hidden_part[t] + bias, in one launch.

    normed: [N, T, H], contiguous. weights: N of [H_out, H]. out: [N, T, H_out], contiguous.
    """
    num_layers, num_tokens, size = normed.shape
    out_features = out.shape[2]
    config = _SKINNY if num_tokens <= 16 else _WIDE
    blocks = (
        triton.cdiv(num_tokens, config["BLOCK_T"]),
        triton.cdiv(out_features, config["BLOCK_V"]),
    )
    project_kernel[(*blocks, num_layers)](
        normed,
        tuple(matrix(weight) for weight in weights),
        matrix(hidden_part),
        bias,
        out,
        num_tokens,
        size,
        out_features,
        enable_fp_fusion=False,
        **config,
    )


def row_config(size: int) -> dict[str, Any]:
    """Of a kernel with a program per row."""
    block = min(triton.next_power_of_2(size), 4096)
    return {"BLOCK": block, "num_warps": 8, "enable_fp_fusion": False}


# Fixed, no autotuning on the serving path. Memory is the limit up to 16 tokens: with 32 outputs a
# program, one layer of 4096 is 128 programs, about one on each SM, with four 8 KB tiles of weights
# on their way.
_SKINNY = {"BLOCK_T": 16, "BLOCK_V": 32, "BLOCK_K": 128, "num_warps": 4, "num_stages": 5}
_WIDE = {"BLOCK_T": 64, "BLOCK_V": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}
