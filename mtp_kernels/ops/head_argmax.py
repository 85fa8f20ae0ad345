"""head_argmax: from hidden states to the best token of each slice of the vocabulary."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtp_kernels.ops import _exact as exact
from mtp_kernels.ops._declare import Expect, declare
from mtp_kernels.ops.entry import PANEL, unpack_projection
from mtp_kernels.ops.verify import GREEDY_BELOW, STREAMS

SLICE = 512
"""Rows of head_weight that have one winner."""
NO_ID = torch.iinfo(torch.int64).max
"""The id of a winner where there is none: it loses every tie."""
NOISE_IDS = 1 << 34
"""Token ids that have noise of their own: four words of each 32-bit lane."""


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
    """The argmax of `hidden @ head_weight.T` per slice of 512 rows of head_weight, or a sample.

    `best_ids` makes tokens of the result. With a vocabulary split over ranks, concatenate the
    ranks' results along S first.

    hidden: [T, H] bfloat16, float16 or float32, the model dtype; rows may be strided.
    head_weight: [V, H], rows may be strided; or what `pack_projection` made of it.
    vocab_size: rows of head_weight from here on are padding, which never wins. None: V.
    vocab_start: row i is token vocab_start + i; 0 to 2^34 - V.
    id_map: [V] int32 or int64, row i is token id_map[i], in any order (a pruned vocabulary); then
        vocab_start is 0.
    temperature: [T] float32; below 1e-5: argmax, as without it.
    seeds: [T] int64; positions: [T] int32 or int64, of each row's input token; what it decides is
        one further. Given with temperature, or not at all.
    stream: "draft" or "target", which random words the sample is drawn with.

    Returns fresh tensors, S = ceil(V / 512): values [S, T] float32, ids [S, T] int64. Ties go to
    the lowest id. A slice whose logits are all padding or NaN has value -inf and the largest int64
    as id. T = 0 is allowed. Values are not checked; an id outside of [0, 2^34) in id_map has the
    noise of the one that equals it modulo 2^34.

    A logit is summed in fp32 and rounded to the model dtype, as the unfused head would write it; it
    is never written. Sampling is an exponential race in the log domain: a value is `logit * (1 /
    temperature) - log(E)`, E the exponential variate of the Philox word that seed, position and
    token id give (`_exact`). So values of different slices and shards compare, and a token's noise
    depends neither on the sharding nor on the pruning. On CPU a row's result does not depend on the
    other rows nor on the number of threads, bit for bit.
    """
    _check(**locals())
    values, ids = values_and_ids(
        hidden, head_weight, vocab_size, vocab_start, id_map, temperature, seeds, positions, stream
    )
    padding = hidden.shape[0], -values.shape[1] % SLICE
    values = torch.cat([values, values.new_full(padding, -torch.inf)], 1).unflatten(1, (-1, SLICE))
    ids = torch.cat([ids, ids.new_full(padding, NO_ID)], 1).unflatten(1, (-1, SLICE))
    best = values.amax(-1, keepdim=True)
    winners = torch.where(values == best, ids, NO_ID).amin(-1)
    return best.squeeze(-1).T.contiguous(), winners.T.contiguous()


def best_ids(values: Tensor, ids: Tensor) -> Tensor:
    """The token of each row: the id of the highest value, the lowest of equals; 0 if there is none.

    values: [S, T] float32, ids: [S, T] int64, from `head_argmax`. Returns [T] int64.
    """
    best = values.amax(0)
    winners = torch.where(values == best, ids, NO_ID).amin(0)
    return winners.masked_fill(winners == NO_ID, 0)


def values_and_ids(
    hidden: Tensor,
    head_weight: Tensor,
    vocab_size: int | None,
    vocab_start: int,
    id_map: Tensor | None,
    temperature: Tensor | None,
    seeds: Tensor | None,
    positions: Tensor | None,
    stream: str,
) -> tuple[Tensor, Tensor]:
    """What competes: [T, V] values, and their ids; -inf and NO_ID for what may not win."""
    if head_weight.dim() == 4:
        head_weight = unpack_projection(head_weight)
    row = torch.arange(head_weight.shape[0], device=hidden.device)
    ids = row + vocab_start if id_map is None else id_map.to(torch.int64)
    values = F.linear(hidden, head_weight).float()
    if temperature is not None:
        assert seeds is not None and positions is not None  # by _check
        decided = positions.to(torch.int64)[:, None] + 1
        lane = (ids % NOISE_IDS) >> 2
        words = exact.philox(seeds[:, None], decided, STREAMS[stream], lane)
        word = torch.stack(words, -1).gather(-1, (ids & 3).expand_as(values)[..., None])
        noise = exact.log(exact.exponential(word.squeeze(-1)))
        raced = values * (1 / temperature)[:, None] - noise
        values = torch.where((temperature < GREEDY_BELOW)[:, None], values, raced)
    wins = (row < (row.shape[0] if vocab_size is None else vocab_size)) & ~values.isnan()
    return torch.where(wins, values, -torch.inf), torch.where(wins, ids, NO_ID)


def _check(
    hidden: Tensor,
    head_weight: Tensor,
    vocab_size: int | None,
    vocab_start: int,
    id_map: Tensor | None,
    temperature: Tensor | None,
    seeds: Tensor | None,
    positions: Tensor | None,
    stream: str,
) -> None:
    """The checks of csrc/head_argmax_args.h, with the same messages."""
    expect = Expect("head_argmax", hidden)
    expect.dtype("hidden", hidden, torch.bfloat16, torch.float16, torch.float32)
    shape = list(hidden.shape)
    expect.that(
        len(shape) == 2 and shape[1] >= 1, f"hidden expected shape [T, H >= 1], got {shape}"
    )
    expect.unit_stride("hidden", hidden)
    num_tokens, size = shape

    expect.device("head_weight", head_weight)
    expect.dtype("head_weight", head_weight, hidden.dtype)
    shape = list(head_weight.shape)
    packed = len(shape) == 4
    fits = shape[1:] == ([size / 2, PANEL, 2] if packed else [size])
    expect.that(
        fits and shape[0] >= 1,
        f"head_weight expected shape [V >= 1, {size}] or packed [V/16, {size // 2}, 16, 2], "
        f"got {shape}",
    )
    if packed:
        expect.dtype("packed head_weight", head_weight, torch.bfloat16)
        expect.that(head_weight.is_contiguous(), "packed head_weight expected a contiguous tensor")
    else:
        expect.unit_stride("head_weight", head_weight)
    num_rows = shape[0] * (PANEL if packed else 1)

    expect.that(
        vocab_size is None or 0 <= vocab_size <= num_rows,
        f"vocab_size expected a number in [0, {num_rows}], got {vocab_size}",
    )
    last_start = NOISE_IDS - num_rows
    expect.that(
        0 <= vocab_start <= last_start,
        f"vocab_start expected a number in [0, {last_start}], got {vocab_start}",
    )
    if id_map is not None:
        expect.device("id_map", id_map)
        expect.dtype("id_map", id_map, torch.int32, torch.int64)
        expect.shape("id_map", id_map, num_rows)
        expect.unit_stride("id_map", id_map)
        expect.that(vocab_start == 0, f"vocab_start expected 0 with id_map, got {vocab_start}")

    given = [x is not None for x in (temperature, seeds, positions)]
    expect.that(
        all(given) or not any(given),
        f"expected all of temperature, seeds and positions or none, got {sum(given)} of them",
    )
    if temperature is not None and seeds is not None and positions is not None:
        expect.tensor("temperature", temperature, torch.float32, num_tokens)
        expect.tensor("seeds", seeds, torch.int64, num_tokens)
        expect.device("positions", positions)
        expect.dtype("positions", positions, torch.int32, torch.int64)
        expect.shape("positions", positions, num_tokens)
        expect.unit_stride("positions", positions)
    expect.that(stream in STREAMS, f"stream expected one of {', '.join(STREAMS)}, got {stream!r}")


def _fake(**inputs: Any) -> tuple[Tensor, Tensor]:
    _check(**inputs)
    hidden, head_weight = inputs["hidden"], inputs["head_weight"]
    num_rows = head_weight.shape[0] * (PANEL if head_weight.dim() == 4 else 1)
    shape = (num_rows + SLICE - 1) // SLICE, hidden.shape[0]
    return hidden.new_empty(shape, dtype=torch.float32), hidden.new_empty(shape, dtype=torch.int64)


OP = declare(head_argmax, fake=_fake, triton="mtp_kernels.kernels.head_argmax:head_argmax")
