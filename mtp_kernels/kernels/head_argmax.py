"""head_argmax in one launch: a program reads a slice of the head once and leaves its winners.

The reference in ops/head_argmax.py is the definition.
"""

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtp_kernels.kernels import dot, exact
from mtp_kernels.ops import head_argmax as definition

SLICE = tl.constexpr(definition.SLICE)
NO_ID = tl.constexpr(definition.NO_ID)
GREEDY_BELOW = tl.constexpr(definition.GREEDY_BELOW)
INF = tl.constexpr(float("inf"))


@triton.jit
def _noise(ids, seed, position, PURPOSE: tl.constexpr):
    """log(E) of each token, the shape of ids [rows, 1] and seed [1, tokens] together."""
    lanes = (ids >> 2).to(tl.uint32) + tl.zeros(seed.shape, tl.uint32)
    words = exact.philox(seed, position + 1, PURPOSE, lanes)
    which = (ids & 3).to(tl.int32)
    word = tl.where(which == 0, words[0], words[1])
    word = tl.where(which == 2, words[2], word)
    word = tl.where(which == 3, words[3], word)
    return exact.log(exact.exponential(word))


@triton.jit
def head_argmax_kernel(
    hidden,
    weight,
    id_map,
    temperature,
    seeds,
    positions,
    values,
    ids,
    num_tokens,
    size,
    vocab_size,
    vocab_start,
    hidden_stride,
    weight_stride,
    PURPOSE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid (blocks of tokens, slices): programs that read the same weights are neighbours."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = tokens < num_tokens
    part = tl.program_id(1).to(tl.int64)
    if temperature is not None:
        warmth = tl.load(temperature + tokens, mask=is_token, other=0.0)
        seed = tl.load(seeds + tokens, mask=is_token, other=0)
        position = tl.load(positions + tokens, mask=is_token, other=0).to(tl.int64)

    # Ids compete as 32-bit numbers where they can, which halves the registers: as places in the
    # slice, or in the map's own type.
    key_type: tl.constexpr = tl.int32 if id_map is None else id_map.dtype.element_ty
    no_key: tl.constexpr = 2**31 - 1 if key_type == tl.int32 else NO_ID
    best = tl.full((BLOCK_T,), -INF, tl.float32)
    best_key = tl.full((BLOCK_T,), no_key, key_type)
    start = part * SLICE
    for row in range(start, tl.minimum(start + SLICE, vocab_size), BLOCK_V):
        rows = row + tl.arange(0, BLOCK_V).to(tl.int64)
        is_row = rows < vocab_size
        x = dot.products(
            hidden,
            hidden_stride,
            weight,
            weight_stride,
            rows,
            tokens,
            is_row,
            is_token,
            size,
            BLOCK_K,
        )
        x = x.to(hidden.dtype.element_ty).to(tl.float32)  # as the unfused head writes them
        if id_map is None:
            keys = (rows - start).to(tl.int32)
            token_ids = rows + vocab_start
        else:
            keys = tl.load(id_map + rows, mask=is_row, other=0)
            token_ids = keys.to(tl.int64)
        if temperature is not None:
            noise = _noise(token_ids[:, None], seed[None, :], position[None, :], PURPOSE)
            raced = x * tl.div_rn(1.0, warmth)[None, :] - noise
            x = tl.where((warmth < GREEDY_BELOW)[None, :], x, raced)
        wins = is_row[:, None] & (x == x)
        x = tl.where(wins, x, -INF)
        highest = tl.max(x, 0)
        lowest = tl.min(tl.where(wins & (x == highest[None, :]), keys[:, None], no_key), 0)
        is_better = (highest > best) | ((highest == best) & (lowest < best_key))
        best = tl.where(is_better, highest, best)
        best_key = tl.where(is_better, lowest, best_key)
    best_id = best_key.to(tl.int64)
    if id_map is None:
        best_id = tl.where(best_key == no_key, NO_ID, best_id + start + vocab_start)
    to = part * num_tokens + tokens
    tl.store(values + to, best, mask=is_token)
    tl.store(ids + to, best_id, mask=is_token)


def head_argmax(
    hidden: Tensor,
    head_weight: Tensor,
    *,
    vocab_size: int | None = None,
    vocab_start: int = 0,
    id_map: Tensor | None = None,
    temperature: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    stream: str = "draft",
) -> tuple[Tensor, Tensor]:
    """The op, see ops/head_argmax.py. On CPU tensors it runs under TRITON_INTERPRET=1."""
    definition._check(**locals())
    if head_weight.dim() == 4:
        raise RuntimeError("head_argmax: head_weight expected [V, H] on a GPU, got a packed one")
    num_rows, size = head_weight.shape
    num_tokens = hidden.shape[0]
    shape = triton.cdiv(num_rows, SLICE.value), num_tokens
    values = hidden.new_empty(shape, dtype=torch.float32)
    ids = hidden.new_empty(shape, dtype=torch.int64)
    if num_tokens == 0:
        return values, ids
    config = _SAMPLED if temperature is not None else _SKINNY if num_tokens <= 16 else _WIDE
    with torch.cuda.device(hidden.device) if hidden.is_cuda else contextlib.nullcontext():
        head_argmax_kernel[(triton.cdiv(num_tokens, config["BLOCK_T"]), shape[0])](
            hidden,
            head_weight,
            id_map,
            temperature,
            seeds,
            positions,
            values,
            ids,
            num_tokens,
            size,
            num_rows if vocab_size is None else vocab_size,
            vocab_start,
            hidden.stride(0),
            head_weight.stride(0),
            PURPOSE=definition.STREAMS[stream],
            enable_fp_fusion=False,  # the noise has the same bits on every backend
            **config,
        )
    return values, ids


# Fixed, no autotuning on the serving path. Memory is the limit up to 16 tokens: 16 KB tiles, four
# on their way, three programs on an SM: all 298 slices of 152,576 tokens run at once on 132 SMs.
_SKINNY = {"BLOCK_T": 16, "BLOCK_V": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 4}
# Philox takes registers: half the lanes a thread, for two programs on an SM without spills; on
# sm_100, where 128 registers would spill, for one.
_SAMPLED = _SKINNY | {"BLOCK_V": 64, "BLOCK_K": 128}
_WIDE = {"BLOCK_T": 64, "BLOCK_V": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}


def traffic(num_tokens: int, size: int, vocab: int, itemsize: int = 2) -> int:
    """Bytes that a launch without sampling and map moves, where each comes from memory once.

    Programs that read the same weights are neighbours in the grid; the tokens stay in L2.
    """
    winners = triton.cdiv(vocab, SLICE.value) * num_tokens * (4 + 8)
    return (vocab + num_tokens) * size * itemsize + winners
