"""entry in one launch; and what the entry ops share: a token's row, its norms, the projection.

entry multiplies rows that are not normed yet by their gain only, sums their squares on the way, and
scales the sums of products afterwards. A halves' op has norms in a launch of their own, a program
per row, before one launch projects by all layers: so a norm is not repeated by every program that
multiplies the row. The references in ops/entry*.py are the definition.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtp_kernels.kernels import dot
from mtp_kernels.kernels.draft_pack import matrix, on_device
from mtp_kernels.ops import entry as definition


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
def find_row(lookup, t, size, is_token=None):
    """Where the row of token t begins, and how long it is: 0 for a zero embedding.

    t: a token, or many of them, of which those where is_token may be read.
    """
    row = t
    known = t >= 0
    if is_token is not None:
        known = known & is_token
    if lookup.ids is not None:
        id = tl.load(lookup.ids + t, mask=is_token).to(tl.int64)
        row = id - lookup.vocab_start
        known = known & (id >= lookup.vocab_start) & (row < lookup.vocab_rows)
    if lookup.positions is not None:
        known = known & (tl.load(lookup.positions + t, mask=is_token) != 0)
    return lookup.table + tl.where(known, row, 0) * lookup.stride, tl.where(known, size, 0)


@triton.jit
def norm_scale(squares, size, eps):
    return inverse_root(tl.sum(squares) / size + eps)


@triton.jit
def inverse_root(mean):
    """Zero for an all-zero row, which stays zero also with eps 0."""
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


# ---- entry ---------------------------------------------------------------------------------------


class Norm(NamedTuple):
    gain: Any
    eps: Any


@triton.jit
def _gain(norm, k, size, CENTERED: tl.constexpr):
    gain = tl.load(norm.gain + k, mask=k < size, other=0.0).to(tl.float32)
    return 1.0 + gain if CENTERED else gain


@triton.jit
def _operand(x, dtype: tl.constexpr):
    """fp32 as a factor of a product of the model dtype.

    What is not normed yet can leave float16's range, but not that of TF32, which has as many bits.
    """
    if dtype == tl.float16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0xFFF + ((bits >> 13) & 1)) & -8192  # to 10 bits of mantissa, ties to even
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    else:
        return x.to(dtype)


@triton.jit
def _squares(x):
    """Summed over what one thread holds of a row, 16 bytes: [BT, BK / 8]."""
    return tl.sum(tl.reshape(x * x, (x.shape[0], x.shape[1] // 8, 8)), 2)


@triton.jit
def _half(row, known, pre_norm, norm, weight, is_row, size, CENTERED: tl.constexpr,
          BLOCK_K: tl.constexpr):  # fmt: skip
    """Half of the projection @ the norm of x, in fp32 [BV, BT], in one pass over x.

    row: [BT], where a token's x begins; weight: [BV], where a row's half begins. Weights go to
    shared memory ahead of time, x and gains to registers, a tile ahead.
    """
    dtype: tl.constexpr = row.dtype.element_ty
    precision: tl.constexpr = "tf32" if dtype == tl.float16 else "ieee"
    total = tl.zeros((weight.shape[0], row.shape[0]), tl.float32)
    squares = tl.zeros((row.shape[0], BLOCK_K // 8), tl.float32)
    pre_squares = squares
    k = tl.arange(0, BLOCK_K)
    x = tl.load(row[:, None] + k[None, :], known[:, None] & (k < size)[None, :], 0.0)
    gain = _gain(norm, k, size, CENTERED)
    pre_gain = gain if pre_norm is None else _gain(pre_norm, k, size, CENTERED)
    for start in range(0, size, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        w = tl.load(weight[:, None] + k[None, :], is_row[:, None] & (k < size)[None, :], 0.0)
        wide = x.to(tl.float32)
        if pre_norm is not None:
            pre_squares += _squares(wide)
            wide = wide * pre_gain[None, :]
        squares += _squares(wide)
        y = _operand(wide * gain[None, :], dtype)
        k += BLOCK_K
        x = tl.load(row[:, None] + k[None, :], known[:, None] & (k < size)[None, :], 0.0)
        gain = _gain(norm, k, size, CENTERED)
        if pre_norm is not None:
            pre_gain = _gain(pre_norm, k, size, CENTERED)
        total = tl.dot(w.to(y.dtype), tl.trans(y), total, input_precision=precision)
    mean = tl.sum(squares, 1) / size
    scale = tl.full((row.shape[0],), 1.0, tl.float32)
    if pre_norm is not None:
        scale = inverse_root(tl.sum(pre_squares, 1) / size + pre_norm.eps)
        mean = mean * scale * scale
    return total * (scale * inverse_root(mean + norm.eps))[None, :]


@triton.jit(do_not_specialize=["num_tokens"])
def entry_kernel(
    hidden,
    lookup,
    embed_norm,
    enorm,
    hnorm,
    weight,
    bias,
    out,
    partial,
    arrivals,
    num_tokens,
    size,
    out_features,
    CENTERED: tl.constexpr,
    HIDDEN_FIRST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid (blocks of tokens, blocks of outputs, 1): neighbours read the same weights.

    Or (.., .., 2), with partial and arrivals: a program per half of the projection. The later one
    adds both, to the same bits in either order. arrivals: even before and after.
    """
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    rows = tl.program_id(1).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    part = tl.program_id(2)
    is_token, is_row = tokens < num_tokens, rows < out_features
    begin = weight.data + rows * weight.stride
    embed_begin = begin + size if HIDDEN_FIRST else begin
    hidden_begin = begin if HIDDEN_FIRST else begin + size
    value = tl.zeros((BLOCK_V, BLOCK_T), tl.float32)
    if partial is None or part == 0:
        row, length = find_row(lookup, tokens, size, is_token)
        value = _half(
            row, length > 0, embed_norm, enorm, embed_begin, is_row, size, CENTERED, BLOCK_K
        )
    if partial is None or part == 1:
        row = hidden.data + tokens * hidden.stride
        value += _half(row, is_token, None, hnorm, hidden_begin, is_row, size, CENTERED, BLOCK_K)
    inside = is_row[:, None] & is_token[None, :]
    places = tokens[None, :] * out_features + rows[:, None]
    if partial is not None:
        count = num_tokens.to(tl.int64) * out_features
        tl.store(partial + part * count + places, value, mask=inside)
        tl.debug_barrier()  # the stores of all threads are before the one that counts
        block = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        is_later = tl.atomic_add(arrivals + block, 1) % 2 == 1
        inside = tl.where(is_later, inside, False)
        tl.debug_barrier()
        other = partial + (1 - part) * count + places
        value += tl.load(other, inside, 0.0, cache_modifier=".cg")
    if bias is not None:
        value += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)[:, None]
    tl.store(out + places, value.to(out.dtype.element_ty), mask=inside)


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
    """The op, see ops/entry.py. On CPU tensors it runs under TRITON_INTERPRET=1.

    A row's result does not depend on the other rows, nor on T within a configuration: up to 16
    tokens, up to 64, more. A normed activation is rounded to the model dtype once, after the gain
    and before the scale, where the unfused model rounds it twice. bfloat16 needs |x gain| < 3e38.
    """
    single = definition._check(**locals())
    if strict_ids:
        raise RuntimeError(
            "entry: strict_ids expected False on CUDA, where raising would stall the host"
        )
    if proj_weight.dim() == 4:
        raise RuntimeError("entry: proj_weight expected [H_out, 2H] on a GPU, got a packed one")
    rows = torch.atleast_2d(hidden)
    (num_tokens, size), out_features = rows.shape, proj_weight.shape[0]
    out = rows.new_empty(num_tokens, out_features)
    config = entry_config(num_tokens, out_features, hidden.itemsize)
    if out.numel() > 0:
        table = inputs_embeds if embed_weight is None else embed_weight
        assert table is not None  # by _check
        pre_norm = None if embed_norm_weight is None else Norm(embed_norm_weight, embed_norm_eps)
        with on_device(hidden):
            partial = arrivals = None
            if config.programs == 2:
                partial = rows.new_empty(2, num_tokens, out_features, dtype=torch.float32)
                arrivals = _arrivals(hidden.device, *_current_stream(hidden.device))
            entry_kernel[config.grid(num_tokens, out_features)](
                matrix(rows),
                lookup_of(
                    torch.atleast_2d(table), input_ids, positions, zero_at_position_0, vocab_start
                ),
                pre_norm,
                Norm(enorm_weight, enorm_eps),
                Norm(hnorm_weight, hnorm_eps),
                matrix(proj_weight),
                proj_bias,
                out,
                partial,
                arrivals,
                num_tokens,
                size,
                out_features,
                CENTERED=gamma_offset == 1,
                HIDDEN_FIRST=hidden_first,
                enable_fp_fusion=True,  # of sums of squares, to the same bits in every program
                **config.options,
            )
    return out.squeeze(0) if single else out


class EntryConfig(NamedTuple):
    """How entry is launched; programs: 2, one per half of the projection, or 1 for both."""

    options: dict[str, Any]
    programs: int = 1

    def grid(self, num_tokens: int, out_features: int) -> tuple[int, int, int]:
        return (
            triton.cdiv(num_tokens, self.options["BLOCK_T"]),
            triton.cdiv(out_features, self.options["BLOCK_V"]),
            self.programs,
        )


def entry_config(num_tokens: int, out_features: int, itemsize: int) -> EntryConfig:
    """Fixed, no autotuning on the serving path. What it says of programs is of 4096 outputs."""
    if itemsize == 4:  # exact fp32 products are no work for tensor cores: 128 programs
        return EntryConfig(_entry_options((16, 32, 64), 4, 5))
    if num_tokens > 64:
        # Compute is the limit. 128 programs for 256 tokens, one on an SM.
        return EntryConfig(_entry_options((128, 64, 64), 8, 5))
    # Memory is the limit: 128 programs, one on an SM, with 32 to 64 KB of weights on their way. A
    # program for both halves would leave half of the SMs idle, or be narrow and read x twice as
    # often.
    block_v, stages = (64, 5) if out_features > 2048 else (32, 9)
    block_t, block_k = (64, 64) if num_tokens > 16 else (16, 128)
    programs = 2 if triton.cdiv(out_features, block_v) < _MOST_BLOCKS else 1
    return EntryConfig(_entry_options((block_t, block_v, block_k), 4, stages), programs)


def _entry_options(blocks: tuple[int, int, int], warps: int, stages: int) -> dict[str, Any]:
    names = ("BLOCK_T", "BLOCK_V", "BLOCK_K")
    return dict(zip(names, blocks, strict=True)) | {"num_warps": warps, "num_stages": stages}


_MOST_BLOCKS = 128  # of outputs, that two programs share; others are enough by themselves
_ARRIVALS: dict[tuple[torch.device, int], Tensor] = {}
_SPARE_ARRIVALS: dict[torch.device, list[Tensor]] = {}


def _arrivals(device: torch.device, stream: int, is_capturing: bool) -> Tensor:
    """Counters of the programs of one launch: a stream's own, as its launches follow each other.

    A captured launch has its own, zeroed before the capture while there are any, as nobody knows
    what its graph will run beside; then ones that the graph zeroes itself, in one more node.
    """
    if is_capturing:
        if spare := _SPARE_ARRIVALS.get(device):
            return spare.pop()
        return torch.zeros(_MOST_BLOCKS, dtype=torch.int32, device=device)
    if (device, stream) not in _ARRIVALS:
        counters = torch.zeros(256, _MOST_BLOCKS, dtype=torch.int32, device=device)
        _ARRIVALS[device, stream], *spare = counters
        _SPARE_ARRIVALS.setdefault(device, spare)
    return _ARRIVALS[device, stream]


def _current_stream(device: torch.device) -> tuple[int, bool]:
    """The stream that launches go to, and whether a graph captures it."""
    if device.type != "cuda":
        return 0, False
    return torch.cuda.current_stream(device).cuda_stream, torch.cuda.is_current_stream_capturing()


def traffic(
    num_tokens: int, size: int, out_features: int, itemsize: int = 2, *, shared: bool = True
) -> int:
    """Bytes that a launch of entry, with ids of 8 bytes and no bias, moves to and from memory.

    shared: what several programs read comes from memory once. Programs that read the same weights
    are neighbours in the grid, and the activations stay in L2: 4 MB for 256 tokens of 4096. Else
    all that the programs ask for, which L2 serves.
    """
    config = entry_config(num_tokens, out_features, itemsize)
    token_blocks, row_blocks, programs = config.grid(num_tokens, out_features)
    weights, gains = 2 * size * out_features * itemsize, 2 * size * itemsize
    rows = 2 * num_tokens * size * itemsize + 8 * num_tokens
    if not shared:
        weights, gains, rows = (
            weights * token_blocks,
            gains * token_blocks * row_blocks,
            rows * row_blocks,
        )
    out = num_tokens * out_features
    partial = 3 * out * 4 if programs == 2 else 0  # both write theirs, one reads the other's
    return weights + gains + rows + partial + out * itemsize


def norms_traffic(
    num_tokens: int, num_known: int, size: int, itemsize: int = 2, *, embed_norm: bool = False
) -> tuple[int, int]:
    """Bytes of rows and gains that a launch of csrc/entry.cuh's kernel asks for, and writes.

    num_known: tokens whose embedding is not zero. A row of at most 16 KB is read once; a longer one
    once per norm and once more, each time with the gains of all norms up to there.
    """

    def half(norms: int) -> int:
        is_held = size * itemsize <= 16384
        return 1 + norms if is_held else 1 + norms + norms * (norms + 1) // 2

    rows = num_tokens * half(1) + num_known * half(2 if embed_norm else 1)
    return rows * size * itemsize, 2 * num_tokens * size * itemsize
