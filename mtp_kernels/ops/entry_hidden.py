"""entry_hidden: the half of `entry` that no drafted token changes, of all layers at once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mtp_kernels.ops._declare import Expect, declare
from mtp_kernels.ops.entry import (
    MODEL_DTYPES,
    check_gamma_offset,
    check_half,
    check_norm,
    project_half,
    rms_norm,
)


def entry_hidden(
    hidden: Tensor,
    hnorm_weights: Sequence[Tensor],
    proj_weights: Sequence[Tensor],
    *,
    hnorm_eps: float,
    gamma_offset: int = 0,
    hidden_first: bool = False,
) -> Tensor:
    """`out[i, t] = hidden half of proj[i] @ rmsnorm(hidden[t])`, for layers with the same input.

    hidden: [T, H] bfloat16, float16 or float32, the model dtype; rows may be strided.
    hnorm_weights: N of [H], the gain of each layer's hidden norm.
    proj_weights: N of [H_out, 2H], the projections as `entry` takes them: rows may be strided, or
        packed by `pack_projection`, then with an even H. Only the hidden half is read.
    hnorm_eps: added to the mean square, >= 0.
    gamma_offset: 0, or 1 for zero-centred gains (gain = 1 + weight).
    hidden_first: the hidden half are the first H inputs of a projection, not the last.

    Returns [N, T, H_out] float32, a fresh tensor: 4 N T H_out bytes, and about as much memory for
    the normed activations while it runs. T = 0 is allowed. `out[i]` is the hidden_part of layer i
    for `entry_embed` and `entry_lookup`.

    A row's mean square is computed once for all layers. Norms are rounded as in `entry`, and the
    products summed in fp32. Where `entry` sums those of both halves in one go, here each half is
    summed on its own and the sums are added: another order, of fp32 rounding, before the one
    rounding to the model dtype. On CPU a row's result does not depend on the other rows, the other
    layers nor the number of threads, bit for bit. There is no gradient formula.
    """
    _check(**locals())
    parts = [
        project_half(rms_norm(hidden, gain, hnorm_eps, gamma_offset), proj, not hidden_first)
        for gain, proj in zip(hnorm_weights, proj_weights, strict=True)
    ]
    return torch.stack(parts)


def _check(
    hidden: Tensor,
    hnorm_weights: Sequence[Tensor],
    proj_weights: Sequence[Tensor],
    hnorm_eps: float,
    gamma_offset: int,
    hidden_first: bool,
) -> int:
    """The checks of csrc/entry_hidden_cpu.cpp, with the same messages. Returns H_out."""
    expect = Expect("entry_hidden", hidden)
    expect.dtype("hidden", hidden, *MODEL_DTYPES)
    expect.that(
        hidden.dim() == 2 and hidden.shape[1] >= 1,
        f"hidden expected shape [T, H >= 1], got {list(hidden.shape)}",
    )
    expect.unit_stride("hidden", hidden)
    check_gamma_offset(expect, gamma_offset)
    expect.that(len(proj_weights) > 0, "proj_weights expected one per layer, got none")
    expect.that(
        len(hnorm_weights) == len(proj_weights),
        f"hnorm_weights expected {len(proj_weights)}, one for each of proj_weights, "
        f"got {len(hnorm_weights)}",
    )
    dtype, size = hidden.dtype, hidden.shape[1]
    wanted = None
    for i, (gain, proj) in enumerate(zip(hnorm_weights, proj_weights, strict=True)):
        check_norm(expect, f"hnorm_weights[{i}]", gain, "hnorm_eps", hnorm_eps, dtype, size)
        got = check_half(expect, f"proj_weights[{i}]", proj, dtype, size)
        wanted = got if wanted is None else wanted
        expect.that(got == wanted, f"proj_weights[{i}] expected H_out = {wanted}, got {got}")
    assert wanted is not None
    return wanted


OP = declare(entry_hidden, triton="mtp_kernels.kernels.entry_hidden:entry_hidden")
