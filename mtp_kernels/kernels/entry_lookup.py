"""entry_lookup in one launch: a program per row, or per 4096 of its outputs."""

import triton
import triton.language as tl
from torch import Tensor

from mtp_kernels.kernels.draft_pack import matrix, on_device
from mtp_kernels.kernels.entry import find_row, lookup_of, row_config
from mtp_kernels.ops import entry_lookup as definition


@triton.jit
def entry_lookup_kernel(hidden_part, lookup, bias, out, out_features, BLOCK: tl.constexpr):
    """Grid (tokens, blocks of outputs)."""
    t = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < out_features
    row, length = find_row(lookup, t, out_features)
    value = tl.load(hidden_part.data + t * hidden_part.stride + columns, mask=inside)
    value += tl.load(row + columns, mask=columns < length, other=0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + columns, mask=inside).to(tl.float32)
    tl.store(out + t * out_features + columns, value.to(out.dtype.element_ty), mask=inside)


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
    """The op, see ops/entry_lookup.py. On CPU tensors it runs under TRITON_INTERPRET=1."""
    definition._check(**locals())
    if strict_ids:
        raise RuntimeError(
            "entry_lookup: strict_ids expected False on CUDA, where raising would stall the host"
        )
    num_tokens, out_features = hidden_part.shape
    out = projected.new_empty(num_tokens, out_features)
    if out.numel() == 0:
        return out
    config = row_config(out_features)
    with on_device(hidden_part):
        entry_lookup_kernel[(num_tokens, triton.cdiv(out_features, config["BLOCK"]))](
            matrix(hidden_part),
            lookup_of(projected, input_ids, positions, zero_at_position_0, vocab_start),
            proj_bias,
            out,
            out_features,
            **config,
        )
    return out
