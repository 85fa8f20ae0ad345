"""entry_lookup: `entry_embed` for embeddings that were projected before, a gather and a sum."""

from typing import Any

from torch import Tensor

from mtp_kernels.ops._declare import Expect, declare
from mtp_kernels.ops.entry import MODEL_DTYPES, check_hidden_part, check_lookup, look_up


def entry_lookup(
    hidden_part: Tensor,
    input_ids: Tensor,
    projected: Tensor,
    *,
    proj_bias: Tensor | None = None,
    positions: Tensor | None = None,
    zero_at_position_0: bool = False,
    vocab_start: int = 0,
    strict_ids: bool = False,
) -> Tensor:
    """`out[t] = hidden_part[t] + projected[ids[t]] + bias`.

    hidden_part: [T, H_out] float32, of this layer, from `entry_hidden`; rows may be strided.
    input_ids: [T] int32 or int64.
    projected: [V, H_out] bfloat16, float16 or float32, the model dtype, the table that
        `project_embeddings` makes of the layer's weights; rows may be strided.
    The other arguments are those of `entry`.

    Returns [T, H_out] of the model dtype, a fresh tensor; T = 0 is allowed. The three summands are
    added in fp32, in this order, and rounded once. The table has been rounded before, which
    `entry_embed` does not do to its product. There is no gradient formula.
    """
    _check(**locals())
    rows = look_up(
        "entry_lookup",
        projected,
        input_ids,
        positions,
        zero_at_position_0,
        vocab_start,
        strict_ids,
    )
    out = hidden_part + rows.float()
    if proj_bias is not None:
        out = out + proj_bias.float()
    return out.to(projected.dtype)


def _check(hidden_part: Tensor, projected: Tensor, proj_bias: Tensor | None, **lookup: Any) -> None:
    """The checks of csrc/entry_lookup_cpu.cpp, with the same messages."""
    expect = Expect("entry_lookup", hidden_part)
    rows = check_hidden_part(expect, hidden_part)
    expect.dtype("projected", projected, *MODEL_DTYPES)
    dtype, columns = projected.dtype, hidden_part.shape[1]
    check_lookup(expect, "projected", projected, dtype, columns, rows, **lookup)
    if proj_bias is not None:
        expect.tensor("proj_bias", proj_bias, dtype, columns)


def _fake(**inputs: Any) -> Tensor:
    return entry_lookup(**{**inputs, "strict_ids": False})  # there are no values to check


OP = declare(entry_lookup, fake=_fake, triton="mtp_kernels.kernels.entry_lookup:entry_lookup")
