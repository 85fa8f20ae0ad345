"""verify in two launches: every block of every row is reduced, then each request decides.

The law of a row is known from a few numbers per block of 4096 lanes (highest logit, sum of
weights), so the first launch reads the logits once, on the whole machine, and the second reads the
drafts' lanes and the one block that the token is drawn from. With filters the first launch also
leaves the highest logit of every group of 32 lanes, which tells the second where to look for the
lanes above a cut; only when those are many are rows read again. So they are for residuals against
draft_logits.

The reference in ops/verify.py is the definition; names here are its names. Nothing fuses, divides
approximately or depends on the order of a float sum, so the bits are the reference's.

Run in Triton's interpreter; compiled for sm_80, sm_90 and sm_100, not run there (Triton 3.9).
"""

import contextlib
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtp_kernels.kernels import exact
from mtp_kernels.ops import _exact
from mtp_kernels.ops import verify as definition

BLOCK = tl.constexpr(definition.BLOCK)
GREEDY_BELOW = tl.constexpr(definition.GREEDY_BELOW)
NOT_FINITE = tl.constexpr(definition.NOT_FINITE)
NOTHING_ALLOWED = tl.constexpr(definition.NOTHING_ALLOWED)
LOG2_E = tl.constexpr(_exact.LOG2_E)
INF = tl.constexpr(float("inf"))
ONE = tl.constexpr(2.0**40)  # a block's heaviest lane weighs this
WHOLE = tl.constexpr(2.0**52)  # residuals are counted in parts of this
LANE_BITS = tl.constexpr(12)  # of BLOCK, in Scratch.picks
LOWEST_KEY = tl.constexpr(-0x7F800000)  # of -inf, see `_key`
DIGITS = tl.constexpr(16)  # ways of one pass of `_search`


# Arguments. A field that is None is compiled out.


class Matrix(NamedTuple):
    """A tensor of rows with unit stride inside."""

    data: Any
    stride: Any


class Penalties(NamedTuple):
    rows: Any
    num_rows: Any
    counts: Any
    prompt_mask: Any
    presence: Any
    frequency: Any
    repetition: Any


class Inputs(NamedTuple):
    """The op's arguments, and sizes."""

    logits: Any
    draft_ids: Any
    cu_rows: Any
    positions: Any
    temperature: Any
    seeds: Any
    top_k: Any
    top_p: Any
    min_p: Any
    draft_logits: Any
    draft_rows: Any
    allowed_mask: Any
    bias_ids: Any
    bias_values: Any
    penalties: Any
    synthetic_rates: Any
    num_rows: Any
    vocab: Any
    num_drafts: Any
    num_biases: Any
    num_blocks: Any
    num_slots: Any  # rows per request, target's and then drafts'


class Scratch(NamedTuple):
    """What is known of each row, [slot, block]; request b has num_slots slots from b num_slots."""

    highest: Any  # fp32, -inf in a block without a finite logit
    sums: Any  # int64, of weights
    picks: Any  # int32: the highest's lane, the race's winner << 12, whether NaN or +inf << 24
    scores: Any  # fp32, of the race's winner
    winners: Any  # fp32, the logit of the race's winner
    cuts: Any  # fp32, [slot]
    groups: Any  # fp32, [slot, block, BLOCK / GROUP], the highest logits of groups of lanes
    candidates: Any  # int32, [slot, BLOCK / GROUP], the groups that may pass a cut


class Call(NamedTuple):
    inputs: Any
    scratch: Any
    num_draft_rows: Any


class Round(NamedTuple):
    """One request's part of the call."""

    b: Any
    first_row: Any
    given: Any  # drafts, judged or not; -1 without rows
    temperature: Any


class Row(NamedTuple):
    """The target's row i, or the row of draft i."""

    i: Any
    at: Any  # in logits, or in draft_logits, where it may be outside: then the draft is one-hot
    slot: Any


class Law(NamedTuple):
    """The reference's Law, whose lanes are made when they are needed. Vectors are [NUM]."""

    is_finite: Any
    is_point: Any  # all on lane best: greedy, or not finite
    best: Any
    scale: Any
    cut: Any
    highest: Any
    scales: Any
    sums: Any
    masses: Any
    total: Any


# Constexprs everywhere below. NUM: blocks of a row, rounded up to a power of two. GROUP: lanes of a
# group. GRAIN: low bits of a row's `_key`s that are 0. IS_DRAFT: whether a row is draft_logits'.


@triton.jit
def _round(inputs, b):
    first_row = tl.load(inputs.cu_rows + b).to(tl.int64)
    end = tl.load(inputs.cu_rows + b + 1).to(tl.int64)
    # cu_rows is not checked on a GPU: no rows, or others than those of the logits, count as none.
    given = tl.minimum(end - first_row - 1, inputs.num_drafts).to(tl.int32)
    fits = (first_row >= 0) & (end > first_row) & (end <= inputs.num_rows)
    given = tl.where(fits, given, -1)
    return Round(b, first_row, given, tl.load(inputs.temperature + b))


@triton.jit
def _draft_id(inputs, round, i):
    return tl.load(inputs.draft_ids.data + round.b * inputs.draft_ids.stride + i)


@triton.jit
def _position(inputs, round, i):
    """Of the token that row i decides."""
    return tl.load(inputs.positions + round.first_row + i).to(tl.int64) + 1


@triton.jit
def _target_row(inputs, round, i):
    return Row(i, round.first_row + i, round.b * inputs.num_slots + i)


@triton.jit
def _draft_row(inputs, round, i):
    if inputs.draft_rows is not None:
        at = tl.load(inputs.draft_rows.data + round.b * inputs.draft_rows.stride + i).to(tl.int64)
    else:
        at = round.b * inputs.num_drafts + i
    return Row(i, at, round.b * inputs.num_slots + inputs.num_drafts + 1 + i)


@triton.jit
def _is_one_hot(call, row):
    return (row.at < 0) | (row.at >= call.num_draft_rows)


# Logits


@triton.jit
def _bits(words, lanes, inside):
    """Bit `lane % 32` of word `lane // 32`."""
    return (tl.load(words + lanes // 32, mask=inside, other=0) >> (lanes % 32)) & 1 != 0


@triton.jit
def _target_logits(inputs, round, row, lanes, first, end, read):
    """Some lanes of a row after bias, penalties and mask, fp32; -inf past the end.

    lanes: int32 of any shape, from first to end. read: false where they are not needed.
    """
    inside = (lanes < inputs.vocab) & read
    logits = inputs.logits.data + row.at * inputs.logits.stride
    x = tl.load(logits + lanes, mask=inside, other=-INF).to(tl.float32)
    if inputs.bias_ids is not None:
        ids = inputs.bias_ids.data + round.b * inputs.bias_ids.stride
        values = inputs.bias_values.data + round.b * inputs.bias_values.stride
        for m in range(inputs.num_biases):
            token = tl.load(ids + m)
            if (token >= first) & (token < end):
                x = tl.where(lanes == token, x + tl.load(values + m), x)
        x = tl.where(inside, x, -INF)
    if inputs.penalties is not None:
        of = inputs.penalties
        at = tl.load(of.rows + round.b).to(tl.int64)
        if (at >= 0) & (at < of.num_rows):
            counts = tl.load(of.counts.data + at * of.counts.stride + lanes, mask=inside, other=0)
            for j in range(row.i):  # the drafts before this row count as generated
                counts += (lanes == _draft_id(inputs, round, j)).to(tl.int32)
            prompt = of.prompt_mask.data + at * of.prompt_mask.stride
            seen = _bits(prompt, lanes, inside) | (counts > 0)
            repetition = tl.load(of.repetition + round.b)
            repeated = tl.where(x > 0, x * tl.div_rn(1.0, repetition), x * repetition)
            x = tl.where(seen, repeated, x)
            x = x - tl.load(of.frequency + round.b) * counts.to(tl.float32)
            x = x - tl.load(of.presence + round.b) * (counts > 0).to(tl.float32)
        x = tl.where(inside, x, -INF)
    if inputs.allowed_mask is not None:
        mask = inputs.allowed_mask.data + row.at * inputs.allowed_mask.stride
        x = tl.where(_bits(mask, lanes, inside), x, -INF)
    return x


@triton.jit
def _draft_logits(inputs, row, lanes, read, PADDING: tl.constexpr):
    logits = inputs.draft_logits.data + row.at * inputs.draft_logits.stride
    inside = (lanes < inputs.vocab) & read
    return tl.load(logits + lanes, mask=inside, other=PADDING).to(tl.float32)


@triton.jit
def _exp2_below(x, highest, scale):
    """`2^((x - highest) scale)`, and 0 for -inf."""
    return tl.where(x > -INF, exact.exp2((x - highest) * scale), 0.0)


@triton.jit
def _weights(fractions):
    return (fractions * ONE).to(tl.int64)


# Launch 1


@triton.jit
def _race(fractions, seed, position, start, PURPOSE: tl.constexpr):
    """The highest `fraction / exponential` of a block, and its lane."""
    counters = start // 4 + tl.arange(0, BLOCK // 4)
    w0, w1, w2, w3 = exact.philox(seed, position, PURPOSE, counters)  # of four lanes each
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    scores = tl.div_rn(fractions, exact.exponential(words))
    score = tl.max(scores)
    return score, tl.min(tl.where(scores == score, tl.arange(0, BLOCK), BLOCK - 1))


@triton.jit
def _filters(inputs, round):
    """top_k, top_p and min_p of a request, with values that keep everything where they are off."""
    top_k = inputs.vocab + tl.zeros((), tl.int64)
    top_p = tl.full((), 1.0, tl.float32)
    min_p = tl.full((), 0.0, tl.float32)
    if inputs.top_k is not None:
        given = tl.load(inputs.top_k + round.b).to(tl.int64)
        top_k = tl.where((given > 0) & (given < top_k), given, top_k)
    if inputs.top_p is not None:
        top_p = tl.load(inputs.top_p + round.b)
    if inputs.min_p is not None:
        min_p = tl.load(inputs.min_p + round.b)
    return top_k, top_p, min_p


@triton.jit
def _is_filtered(inputs, round):
    top_k, top_p, min_p = _filters(inputs, round)
    return (top_k < inputs.vocab) | (top_p < 1) | (min_p > 0)


@triton.jit(do_not_specialize=["num_draft_rows"])
def reduce_blocks_kernel(
    inputs,
    scratch,
    num_draft_rows,
    METHOD: tl.constexpr,
    PURPOSE: tl.constexpr,
    DRAFT_KIND: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Grid (slots * blocks,), blocks fastest: one block of one row into Scratch.

    A slot is a row of the target's or of a draft; those that nobody uses end at once. The sums are
    those of the unfiltered law.
    """
    call = Call(inputs, scratch, num_draft_rows)
    pid = tl.program_id(0)
    start = pid % inputs.num_blocks * BLOCK
    slot = pid // inputs.num_blocks
    round = _round(inputs, (slot // inputs.num_slots).to(tl.int64))
    i = slot % inputs.num_slots
    is_target = i <= inputs.num_drafts
    row = _target_row(inputs, round, i)
    used = i <= round.given
    if inputs.draft_logits is not None:
        if not is_target:
            i -= inputs.num_drafts + 1
            used = i < round.given
            if used:
                row = _draft_row(inputs, round, i)
                used = not _is_one_hot(call, row)
    if not used:
        return

    lanes = start + tl.arange(0, BLOCK)
    if inputs.draft_logits is not None:
        if is_target:
            x = _target_logits(inputs, round, row, lanes, start, start + BLOCK, True)
        elif DRAFT_KIND == "probs":
            x = _draft_logits(inputs, row, lanes, True, 0.0)
            x = tl.where(x >= 0, x, INF)
        else:
            x = _draft_logits(inputs, row, lanes, True, -INF)
    else:
        x = _target_logits(inputs, round, row, lanes, start, start + BLOCK, True)
    bad = (x != x) | (x == INF)
    x = tl.where(bad, -INF, x)
    highest = tl.max(x)
    picks = tl.min(tl.where(x == highest, tl.arange(0, BLOCK), BLOCK - 1))
    picks |= tl.max(bad.to(tl.int32)) << (2 * LANE_BITS)

    at = pid.to(tl.int64)
    total = tl.zeros((), tl.int64)
    has_law = (round.temperature < GREEDY_BELOW) == 0
    if DRAFT_KIND == "probs":
        has_law = has_law & is_target
    if has_law:
        fractions = _exp2_below(x, highest, tl.div_rn(LOG2_E, round.temperature))
        total = tl.sum(_weights(fractions))
        if METHOD == "coupled":
            if is_target:
                seed = tl.load(inputs.seeds + round.b)
                position = _position(inputs, round, i)
                score, winner = _race(fractions, seed, position, start, PURPOSE)
                picks |= winner << LANE_BITS
                tl.store(scratch.scores + at, score)
                if scratch.winners is not None:
                    won = tl.where(tl.arange(0, BLOCK) == winner, x, -INF)
                    tl.store(scratch.winners + at, tl.max(won))
        if scratch.groups is not None:
            if _is_filtered(inputs, round):
                NUM_GROUPS: tl.constexpr = BLOCK // GROUP
                highest_of = tl.max(tl.reshape(x, (NUM_GROUPS, GROUP)), 1)
                tl.store(scratch.groups + at * NUM_GROUPS + tl.arange(0, NUM_GROUPS), highest_of)
    tl.store(scratch.highest + at, highest)
    tl.store(scratch.sums + at, total)
    tl.store(scratch.picks + at, picks)


# Laws


@triton.jit
def _at(values, block, NUM: tl.constexpr):
    """One value of a vector that has no infinite ones."""
    return tl.sum(tl.where(tl.arange(0, NUM) == block, values, 0))


@triton.jit
def _highest_at(law, block, NUM: tl.constexpr):
    return tl.max(tl.where(tl.arange(0, NUM) == block, law.highest, -INF))


@triton.jit
def _masses(sums, scales):
    return (sums.to(tl.float64) * scales.to(tl.float64)).to(tl.int64)


@triton.jit
def _law(call, round, row, cut, NUM: tl.constexpr):
    """A row's law; with a cut, its sums must be those above the cut."""
    blocks = tl.arange(0, NUM)
    inside = blocks < call.inputs.num_blocks
    at = row.slot * call.inputs.num_blocks + blocks
    highest = tl.load(call.scratch.highest + at, mask=inside, other=-INF)
    sums = tl.load(call.scratch.sums + at, mask=inside, other=0)
    picks = tl.load(call.scratch.picks + at, mask=inside, other=0)

    top = tl.max(highest)
    is_finite = (tl.max(picks >> (2 * LANE_BITS)) == 0) & (top > -INF)
    best_block = tl.min(tl.where(highest == top, blocks, NUM - 1))
    best = best_block * BLOCK + (_at(picks, best_block, NUM) & (BLOCK - 1))
    is_point = (round.temperature < GREEDY_BELOW) | (not is_finite)
    scale = tl.div_rn(LOG2_E, tl.where(is_point, 1.0, round.temperature))
    scale = tl.where(is_point, 1.0, scale)
    top = tl.where(is_point, 0.0, top)
    is_best = blocks == best_block
    highest = tl.where(is_point, tl.where(is_best, 0.0, -INF), highest)
    sums = tl.where(is_point, tl.where(is_best, 1 << 40, 0).to(tl.int64), sums)
    highest = tl.where(highest >= cut, highest, -INF)
    scales = _exp2_below(highest, top, scale)
    masses = _masses(sums, scales)
    cut = tl.full((), cut, tl.float32)
    return Law(is_finite, is_point, best, scale, cut, highest, scales, sums, masses, tl.sum(masses))


@triton.jit
def _target_law(call, round, row, NUM: tl.constexpr):
    cut = -INF
    if call.scratch.cuts is not None:
        cut = tl.load(call.scratch.cuts + row.slot)
    return _law(call, round, row, cut, NUM)


@triton.jit
def _draft_law(call, round, row, DRAFT_KIND: tl.constexpr, NUM: tl.constexpr):
    cut = -INF
    if call.scratch.cuts is not None:
        if DRAFT_KIND == "filtered_logits":
            cut = tl.load(call.scratch.cuts + row.slot)
    return _law(call, round, row, cut, NUM)


@triton.jit
def _law_logits(inputs, round, row, law, lanes, first, end, IS_DRAFT: tl.constexpr):
    """Logits the law is made of: those below its cut, and all but a point's, are -inf."""
    if IS_DRAFT:
        x = _draft_logits(inputs, row, lanes, not law.is_point, -INF)
    else:
        x = _target_logits(inputs, round, row, lanes, first, end, not law.is_point)
    x = tl.where(law.is_point, tl.where(lanes == law.best, 0.0, -INF), x)
    return tl.where(x >= law.cut, x, -INF)


@triton.jit
def _block_logits(inputs, round, row, law, block, IS_DRAFT: tl.constexpr):
    start = block * BLOCK
    lanes = start + tl.arange(0, BLOCK)
    return _law_logits(inputs, round, row, law, lanes, start, start + BLOCK, IS_DRAFT)


@triton.jit
def _fractions(inputs, round, row, law, block, IS_DRAFT: tl.constexpr, NUM: tl.constexpr):
    """One block of the reference's `Law.fractions`, [BLOCK]."""
    x = _block_logits(inputs, round, row, law, block, IS_DRAFT)
    return _exp2_below(x, _highest_at(law, block, NUM), law.scale)


@triton.jit
def _weight_of(inputs, round, row, law, token, IS_DRAFT: tl.constexpr, NUM: tl.constexpr):
    lane = token + tl.zeros((1,), tl.int32)
    x = _law_logits(inputs, round, row, law, lane, token, token + 1, IS_DRAFT)
    return tl.max(_weights(_exp2_below(x, _highest_at(law, token // BLOCK, NUM), law.scale)))


@triton.jit
def _probability(inputs, round, row, law, token, IS_DRAFT: tl.constexpr, NUM: tl.constexpr):
    weight = _weight_of(inputs, round, row, law, token, IS_DRAFT, NUM)
    mass = _masses(weight, _at(law.scales, token // BLOCK, NUM))
    return mass.to(tl.float64) / law.total.to(tl.float64)


# Residuals against draft_logits


@triton.jit
def _unit(law, kept):
    """What `Law.lanes` multiplies the fractions of each block by."""
    return (kept * law.scales.to(tl.float64) * ONE / law.total.to(tl.float64)).to(tl.float32)


@triton.jit
def _residual_weights(
    inputs,
    round,
    p_row,
    p,
    p_unit,
    q_row,
    q,
    q_unit,
    block,
    DRAFT_KIND: tl.constexpr,
    NUM: tl.constexpr,
):
    """One block of `residual(p, q, kept)`, [BLOCK] int64."""
    p_lanes = _fractions(inputs, round, p_row, p, block, False, NUM) * _at(p_unit, block, NUM)
    if DRAFT_KIND == "probs":
        q_lanes = _draft_logits(inputs, q_row, block * BLOCK + tl.arange(0, BLOCK), True, 0.0)
    else:
        q_lanes = _fractions(inputs, round, q_row, q, block, True, NUM) * _at(q_unit, block, NUM)
    return (tl.maximum(p_lanes - q_lanes, 0.0) * WHOLE).to(tl.int64)


@triton.jit
def _residual_masses(
    inputs,
    round,
    p_row,
    p,
    p_unit,
    q_row,
    q,
    q_unit,
    DRAFT_KIND: tl.constexpr,
    NUM: tl.constexpr,
):
    masses = tl.zeros((NUM,), tl.int64)
    for block in range(inputs.num_blocks):
        if _at(p_unit, block, NUM) > 0:
            weights = _residual_weights(
                inputs, round, p_row, p, p_unit, q_row, q, q_unit, block, DRAFT_KIND, NUM
            )
            masses = tl.where(tl.arange(0, NUM) == block, tl.sum(weights), masses)
    return masses


@triton.jit
def _residual_mass(call, round, row, kept, DRAFT_KIND: tl.constexpr, NUM: tl.constexpr):
    """The reference's `residual_mass` of row i and draft i."""
    inputs = call.inputs
    p = _target_law(call, round, row, NUM)
    draft = _draft_id(inputs, round, row.i).to(tl.int32)
    left = kept * (1 - _probability(inputs, round, row, p, draft, False, NUM))
    if inputs.draft_logits is not None:
        q_row = _draft_row(inputs, round, row.i)
        if not _is_one_hot(call, q_row):
            q = _draft_law(call, round, q_row, DRAFT_KIND, NUM)
            p_unit, q_unit = _unit(p, kept), _unit(q, 1.0)
            masses = _residual_masses(
                inputs, round, row, p, p_unit, q_row, q, q_unit, DRAFT_KIND, NUM
            )
            left = tl.sum(masses).to(tl.float64) * (1 / WHOLE)
    return left


# Filters


@triton.jit
def _key(x, GRAIN: tl.constexpr):
    """An int32 in the order of x, without the GRAIN low bits, which are 0 in a row's logits."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -2147483648 - bits, bits) >> GRAIN


@triton.jit
def _of_key(key, GRAIN: tl.constexpr):
    bits = key << GRAIN
    return tl.where(bits < 0, -2147483648 - bits, bits).to(tl.float32, bitcast=True)


@triton.jit
def _lowest_key(cut, GRAIN: tl.constexpr):
    """The lowest key of a finite logit that `cut` keeps."""
    return tl.maximum((_key(cut, 0) + ((1 << GRAIN) - 1)) >> GRAIN, (LOWEST_KEY >> GRAIN) + 1)


@triton.jit
def _bisect(keys, values, low, top, enough):
    """The highest key from which on the values sum up to `enough`; low, if even all do not."""
    span = top.to(tl.int64) - low
    shift = 0
    while (span >> shift) > 1:
        shift += 1
    while shift >= 0:
        middle = low + (tl.full((), 1, tl.int64) << shift)
        from_middle = tl.sum(tl.where(keys >= middle, values, 0)).to(tl.float64)
        low = tl.where((from_middle >= enough) & (middle <= top), middle, low).to(tl.int32)
        shift -= 1
    return low


@triton.jit
def _search(
    inputs,
    round,
    row,
    law,
    low,
    limit,
    COUNT: tl.constexpr,
    GRAIN: tl.constexpr,
    IS_DRAFT: tl.constexpr,
    NUM: tl.constexpr,
):
    """`_bisect` over a whole row: reads it once for every 4 bits of key.

    COUNT: `limit` lanes are enough; else `limit` times the weight from `low` on.
    Blocks without a key in the interval, 16 of which are told apart per pass, cost no more than
    a look.
    """
    top = tl.max(law.highest)
    span = _key(top, GRAIN).to(tl.int64) - low  # the interval: low to low + (16 << shift)
    shift = 0
    while (span >> shift) >= DIGITS:
        shift += 4
    above = tl.zeros((), tl.int64)  # kept above the interval
    enough = limit
    is_first = True
    digits = tl.arange(0, DIGITS)
    while shift >= 0:
        kept = tl.zeros((DIGITS,), tl.int64)  # in the interval, from each digit on
        for block in range(inputs.num_blocks):
            if _key(_highest_at(law, block, NUM), GRAIN) >= low:
                x = _block_logits(inputs, round, row, law, block, IS_DRAFT)
                key = _key(x, GRAIN)
                digit = (key - low).to(tl.uint32, bitcast=True) >> shift
                digit = tl.where((key >= low) & (digit < DIGITS), digit.to(tl.int32), -1)
                if tl.max(digit) >= 0:
                    if COUNT:
                        values = tl.full((BLOCK,), 1, tl.int64)
                    else:
                        values = _weights(_exp2_below(x, top, law.scale))
                    for d in range(DIGITS):
                        kept_here = tl.sum(tl.where(digit >= d, values, 0))
                        kept += tl.where(digits == d, kept_here, 0)
        if is_first:
            if not COUNT:
                enough = limit * tl.max(kept).to(tl.float64)
            is_first = False
        is_enough = (above + kept).to(tl.float64) >= enough
        digit = tl.maximum(tl.sum(is_enough.to(tl.int32)) - 1, 0)
        above += tl.sum(tl.where(digits == digit + 1, kept, 0))
        low += digit << shift
        shift -= 4
    return low


@triton.jit
def _weight_from(
    inputs,
    round,
    row,
    law,
    low,
    GRAIN: tl.constexpr,
    IS_DRAFT: tl.constexpr,
    NUM: tl.constexpr,
):
    """The weight of a row from key `low` on, relative to its highest logit."""
    top = tl.max(law.highest)
    total = tl.zeros((), tl.int64)
    for block in range(inputs.num_blocks):
        if _key(_highest_at(law, block, NUM), GRAIN) >= low:
            x = _block_logits(inputs, round, row, law, block, IS_DRAFT)
            x = tl.where(_key(x, GRAIN) >= low, x, -INF)
            total += tl.sum(_weights(_exp2_below(x, top, law.scale)))
    return total


@triton.jit
def _cut_among_few(
    call,
    round,
    row,
    law,
    keys,
    bound,
    num_candidates,
    enough,
    GROUP: tl.constexpr,
    GRAIN: tl.constexpr,
    IS_DRAFT: tl.constexpr,
    NUM: tl.constexpr,
):
    """A row's cut and its sums above the cut, where the groups from `bound` on fit one block.

    keys: of the groups. enough: weight that top_p keeps, -1 where it must be computed here.
    """
    inputs, scratch = call.inputs, call.scratch
    PER_BLOCK: tl.constexpr = BLOCK // GROUP
    GROUPS: tl.constexpr = NUM * PER_BLOCK
    listed = scratch.candidates + row.slot * PER_BLOCK
    is_candidate = keys >= bound
    place = tl.cumsum(is_candidate.to(tl.int32), 0) - 1
    tl.store(listed + place, tl.arange(0, GROUPS), mask=is_candidate)
    tl.debug_barrier()  # all threads see the whole list
    nth = tl.arange(0, PER_BLOCK)
    group = tl.load(listed + nth, mask=nth < num_candidates, other=GROUPS)

    lanes = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # [PER_BLOCK, GROUP]
    x = _law_logits(inputs, round, row, law, lanes, 0, inputs.vocab, IS_DRAFT)
    x_keys = _key(x, GRAIN)
    top = tl.max(law.highest)
    top_key = _key(top, GRAIN)
    top_k, top_p, _min_p = _filters(inputs, round)
    if top_k < inputs.vocab:
        ones = tl.full((PER_BLOCK, GROUP), 1, tl.int32)
        bound = _bisect(x_keys, ones, bound, top_key, top_k.to(tl.float64))
    if top_p < 1:
        weights = _weights(_exp2_below(x, top, law.scale))
        if enough < 0:
            weight = tl.sum(tl.where(x_keys >= bound, weights, 0))
            enough = top_p.to(tl.float64) * weight.to(tl.float64)
        bound = _bisect(x_keys, weights, bound, top_key, enough)

    x = tl.where(x_keys >= bound, x, -INF)
    block = group // PER_BLOCK
    at = row.slot * inputs.num_blocks + block
    highest = tl.load(scratch.highest + at, mask=nth < num_candidates, other=0.0)
    group_sums = tl.sum(_weights(_exp2_below(x, highest[:, None], law.scale)), 1)
    is_there = tl.arange(0, NUM)[:, None] == block[None, :]
    sums = tl.sum(tl.where(is_there, group_sums[None, :], 0), 1)
    return _of_key(bound, GRAIN), sums


@triton.jit
def _cut_among_many(
    inputs,
    round,
    row,
    law,
    bound,
    GRAIN: tl.constexpr,
    IS_DRAFT: tl.constexpr,
    NUM: tl.constexpr,
):
    """The same by reading the row. bound: the lowest key that min_p keeps."""
    top_k, top_p, _min_p = _filters(inputs, round)
    if top_k < inputs.vocab:
        limit = top_k.to(tl.float64)
        bound = _search(inputs, round, row, law, bound, limit, True, GRAIN, IS_DRAFT, NUM)
    if top_p < 1:
        limit = top_p.to(tl.float64)
        bound = _search(inputs, round, row, law, bound, limit, False, GRAIN, IS_DRAFT, NUM)
    sums = tl.zeros((NUM,), tl.int64)
    for block in range(inputs.num_blocks):
        highest = _highest_at(law, block, NUM)
        if _key(highest, GRAIN) >= bound:
            x = _block_logits(inputs, round, row, law, block, IS_DRAFT)
            x = tl.where(_key(x, GRAIN) >= bound, x, -INF)
            block_sum = tl.sum(_weights(_exp2_below(x, highest, law.scale)))
            sums = tl.where(tl.arange(0, NUM) == block, block_sum, sums)
    return _of_key(bound, GRAIN), sums


@triton.jit
def _filter(
    call,
    round,
    row,
    GROUP: tl.constexpr,
    GRAIN: tl.constexpr,
    IS_DRAFT: tl.constexpr,
    NUM: tl.constexpr,
):
    """Find a row's cut, and make its sums in scratch those above the cut."""
    inputs, scratch = call.inputs, call.scratch
    law = _law(call, round, row, -INF, NUM)
    cut = -INF
    if _is_filtered(inputs, round) & (not law.is_point):
        PER_BLOCK: tl.constexpr = BLOCK // GROUP
        GROUPS: tl.constexpr = NUM * PER_BLOCK
        top_k, top_p, min_p = _filters(inputs, round)
        top = tl.max(law.highest)
        if min_p > 0:
            cut = top + exact.log(min_p) * round.temperature
        low = _lowest_key(cut, GRAIN)

        # Every group has at least one lane as high as its highest: a lower bound of the cut.
        ids = tl.arange(0, GROUPS)
        at = row.slot * inputs.num_blocks * PER_BLOCK + ids
        inside = ids < inputs.num_blocks * PER_BLOCK
        groups = tl.load(scratch.groups + at, mask=inside, other=-INF)
        keys = _key(groups, GRAIN)
        bound = low
        if top_k < inputs.vocab:
            ones = tl.full((GROUPS,), 1, tl.int32)
            bound = _bisect(keys, ones, low, _key(top, GRAIN), top_k.to(tl.float64))
        num_candidates = tl.sum((keys >= bound).to(tl.int32))
        enough = tl.full((), -1.0, tl.float64)
        if (num_candidates > PER_BLOCK) & (top_p < 1) & (top_k >= inputs.vocab):
            weight = _weight_from(inputs, round, row, law, low, GRAIN, IS_DRAFT, NUM)
            enough = top_p.to(tl.float64) * weight.to(tl.float64)
            weights = _weights(_exp2_below(_of_key(keys, GRAIN), top, law.scale))
            bound = _bisect(keys, weights, low, _key(top, GRAIN), enough)
            num_candidates = tl.sum((keys >= bound).to(tl.int32))

        if num_candidates <= PER_BLOCK:
            cut, sums = _cut_among_few(
                call,
                round,
                row,
                law,
                keys,
                bound,
                num_candidates,
                enough,
                GROUP,
                GRAIN,
                IS_DRAFT,
                NUM,
            )
        else:
            cut, sums = _cut_among_many(inputs, round, row, law, low, GRAIN, IS_DRAFT, NUM)
        tl.debug_barrier()  # all threads have read the old sums
        blocks = tl.arange(0, NUM)
        at_sums = scratch.sums + row.slot * inputs.num_blocks + blocks
        tl.store(at_sums, sums, mask=blocks < inputs.num_blocks)
    tl.store(scratch.cuts + row.slot, cut)
    tl.debug_barrier()  # all threads see the new ones


@triton.jit
def _filter_target(call, round, i, GROUP: tl.constexpr, GRAIN: tl.constexpr, NUM: tl.constexpr):
    if call.scratch.cuts is not None:
        _filter(call, round, _target_row(call.inputs, round, i), GROUP, GRAIN, False, NUM)


@triton.jit
def _filter_draft(
    call,
    round,
    i,
    DRAFT_KIND: tl.constexpr,
    GROUP: tl.constexpr,
    GRAIN: tl.constexpr,
    NUM: tl.constexpr,
):
    if call.scratch.cuts is not None and call.inputs.draft_logits is not None:
        if DRAFT_KIND == "filtered_logits":
            row = _draft_row(call.inputs, round, i)
            if not _is_one_hot(call, row):
                _filter(call, round, row, GROUP, GRAIN, True, NUM)


# Launch 2


@triton.jit
def _judged(call, round, NUM: tl.constexpr):
    """How many drafts can be judged: those before the first bad id or row."""
    inputs = call.inputs
    judged = 0
    fits = True
    while (judged < round.given) & fits:
        draft = _draft_id(inputs, round, judged)
        row = _target_row(inputs, round, judged)
        fits = (draft >= 0) & (draft < inputs.vocab) & _law(call, round, row, -INF, NUM).is_finite
        if inputs.draft_logits is not None:
            row = _draft_row(inputs, round, judged)
            if not _is_one_hot(call, row):
                fits = fits & _law(call, round, row, -INF, NUM).is_finite
        judged += fits.to(tl.int32)
    return judged


@triton.jit
def _accept_uniform(inputs, round, i):
    """Draft i's coin. Coins are numbered within the round, which is known by its first row."""
    lane = tl.zeros((1,), tl.int32) + i
    seed = tl.load(inputs.seeds + round.b)
    w0, w1, _w2, _w3 = exact.philox(seed, _position(inputs, round, 0), exact.ACCEPT, lane)
    return tl.max(exact.uniform(w0, w1))


@triton.jit
def _chances(call, round, i, DRAFT_KIND: tl.constexpr, NUM: tl.constexpr):
    """Draft i's probabilities under the target and under what it was drafted from."""
    inputs = call.inputs
    token = _draft_id(inputs, round, i).to(tl.int32)
    row = _target_row(inputs, round, i)
    law = _target_law(call, round, row, NUM)
    p = _probability(inputs, round, row, law, token, False, NUM)
    q = tl.full((), 1.0, tl.float64)
    if inputs.draft_logits is not None:
        row = _draft_row(inputs, round, i)
        if not _is_one_hot(call, row):
            if DRAFT_KIND == "probs":
                lane = token + tl.zeros((1,), tl.int32)
                q = tl.max(_draft_logits(inputs, row, lane, True, 0.0)).to(tl.float64)
            else:
                law = _draft_law(call, round, row, DRAFT_KIND, NUM)
                q = _probability(inputs, round, row, law, token, True, NUM)
    return p, q


@triton.jit
def _race_winner(call, round, i, PURPOSE: tl.constexpr, NUM: tl.constexpr):
    """The reference's `Request.race`: each block's winner is known, unless a cut removed it."""
    inputs, scratch = call.inputs, call.scratch
    row = _target_row(inputs, round, i)
    law = _target_law(call, round, row, NUM)
    winner = law.best
    if not law.is_point:
        blocks = tl.arange(0, NUM)
        inside = blocks < inputs.num_blocks
        at = row.slot * inputs.num_blocks + blocks
        scores = tl.load(scratch.scores + at, mask=inside, other=0.0)
        lanes = tl.load(scratch.picks + at, mask=inside, other=0) >> LANE_BITS & (BLOCK - 1)
        if scratch.winners is not None:
            won = tl.load(scratch.winners + at, mask=inside, other=-INF)
            again = ((won < law.cut) & (law.highest > -INF)).to(tl.int32)
            if tl.max(again) > 0:
                seed = tl.load(inputs.seeds + round.b)
                position = _position(inputs, round, i)
                for block in range(inputs.num_blocks):
                    if _at(again, block, NUM) > 0:
                        fractions = _fractions(inputs, round, row, law, block, False, NUM)
                        score, lane = _race(fractions, seed, position, block * BLOCK, PURPOSE)
                        scores = tl.where(blocks == block, score, scores)
                        lanes = tl.where(blocks == block, lane, lanes)
        scores *= law.scales
        block = tl.min(tl.where(scores == tl.max(scores), blocks, NUM - 1))
        winner = block * BLOCK + _at(lanes, block, NUM)
    return winner


@triton.jit
def _place(weights, uniform):
    """The index at a random place of the cumulative sum; 0 if that is 0."""
    up_to = tl.cumsum(weights, 0)
    total = tl.max(up_to)
    place = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
    return tl.where(total > 0, tl.sum((up_to <= place).to(tl.int32)), 0)


@triton.jit
def _draw(
    call,
    round,
    i,
    is_rejected,
    kept,
    PURPOSE: tl.constexpr,
    DRAFT_KIND: tl.constexpr,
    NUM: tl.constexpr,
):
    """The token of row i: of what draft i leaves if it is rejected, and else of all the law."""
    inputs = call.inputs
    row = _target_row(inputs, round, i)
    p = _target_law(call, round, row, NUM)
    zero = tl.zeros((1,), tl.int32)
    seed = tl.load(inputs.seeds + round.b)
    w0, w1, w2, w3 = exact.philox(seed, _position(inputs, round, i), PURPOSE, zero)
    for_block, for_lane = tl.max(exact.uniform(w0, w1)), tl.max(exact.uniform(w2, w3))

    masses = p.masses
    excluded = -1  # the draft, where it is one-hot
    if is_rejected:
        excluded = _draft_id(inputs, round, i).to(tl.int32)
        weight = _weight_of(inputs, round, row, p, excluded, False, NUM)
        is_there = tl.arange(0, NUM) == excluded // BLOCK
        masses = _masses(p.sums - tl.where(is_there, weight, 0), p.scales)
    if inputs.draft_logits is not None:
        q_row, q = row, p  # not used, unless
        has_q = False
        if is_rejected:
            q_row = _draft_row(inputs, round, i)
            has_q = not _is_one_hot(call, q_row)
            if has_q:
                q = _draft_law(call, round, q_row, DRAFT_KIND, NUM)
        p_unit, q_unit = _unit(p, kept), _unit(q, 1.0)
        if has_q:
            masses = _residual_masses(
                inputs, round, row, p, p_unit, q_row, q, q_unit, DRAFT_KIND, NUM
            )
            has_q = tl.sum(masses) > 0

    if tl.sum(masses) == 0:  # nothing is left
        masses = p.masses
        excluded = -1
    block = _place(masses, for_block)
    start = block * BLOCK
    if inputs.draft_logits is not None:
        if has_q:
            weights = _residual_weights(
                inputs, round, row, p, p_unit, q_row, q, q_unit, block, DRAFT_KIND, NUM
            )
        else:
            weights = _weights(_fractions(inputs, round, row, p, block, False, NUM))
            weights = tl.where(start + tl.arange(0, BLOCK) == excluded, 0, weights)
    else:
        weights = _weights(_fractions(inputs, round, row, p, block, False, NUM))
        weights = tl.where(start + tl.arange(0, BLOCK) == excluded, 0, weights)
    return start + _place(weights, for_lane)


@triton.jit
def _status(call, round, i, NUM: tl.constexpr):
    blocks = tl.arange(0, NUM)
    inside = blocks < call.inputs.num_blocks
    at = _target_row(call.inputs, round, i).slot * call.inputs.num_blocks + blocks
    bad = tl.max(tl.load(call.scratch.picks + at, mask=inside, other=0) >> (2 * LANE_BITS))
    highest = tl.max(tl.load(call.scratch.highest + at, mask=inside, other=-INF))
    return bad * NOT_FINITE + (highest == -INF).to(tl.int32) * NOTHING_ALLOWED


@triton.jit(do_not_specialize=["num_draft_rows"])
def decide_kernel(
    inputs,
    scratch,
    token_ids,
    num_accepted,
    status,
    num_draft_rows,
    METHOD: tl.constexpr,
    PURPOSE: tl.constexpr,
    DRAFT_KIND: tl.constexpr,
    GROUP: tl.constexpr,
    TARGET_GRAIN: tl.constexpr,
    DRAFT_GRAIN: tl.constexpr,
    NUM: tl.constexpr,
):
    """Grid (requests,): judge a request's drafts in turn, then draw the token after them."""
    call = Call(inputs, scratch, num_draft_rows)
    round = _round(inputs, tl.program_id(0).to(tl.int64))
    if round.given < 0:
        for i in range(inputs.num_drafts + 1):
            tl.store(token_ids + round.b * (inputs.num_drafts + 1) + i, -1)
        tl.store(num_accepted + round.b, 0)
        tl.store(status + round.b, 0)
        return
    judged = _judged(call, round, NUM)
    accepted = 0
    kept_there = tl.full((), 1.0, tl.float64)  # block: what of p is compared with q
    last = 0
    goes_on = True

    if METHOD == "standard":
        while goes_on:
            _filter_target(call, round, accepted, GROUP, TARGET_GRAIN, NUM)
            goes_on = accepted < judged
            if goes_on:
                _filter_draft(call, round, accepted, DRAFT_KIND, GROUP, DRAFT_GRAIN, NUM)
                p, q = _chances(call, round, accepted, DRAFT_KIND, NUM)
                goes_on = _accept_uniform(inputs, round, accepted) * q < p
            accepted += goes_on.to(tl.int32)

    if METHOD == "block":
        kept = tl.full((), 1.0, tl.float64)
        for i in range(judged + 1):
            _filter_target(call, round, i, GROUP, TARGET_GRAIN, NUM)
            if i < judged:
                _filter_draft(call, round, i, DRAFT_KIND, GROUP, DRAFT_GRAIN, NUM)
            if i > 0:
                p, q = _chances(call, round, i - 1, DRAFT_KIND, NUM)
                ratio = kept * p / tl.where(q > 0, q, 1.0)
                kept = tl.where(q > 0, tl.minimum(ratio, 1.0), (kept * p > 0).to(tl.float64))
                passing = kept
                if (i < judged) & (kept < 1):
                    row = _target_row(inputs, round, i)
                    left = _residual_mass(call, round, row, kept, DRAFT_KIND, NUM)
                    passing = left / (left + (1 - kept))
                if _accept_uniform(inputs, round, i - 1) < passing:
                    accepted = i
                    kept_there = kept

    if METHOD == "coupled":
        while goes_on:
            _filter_target(call, round, accepted, GROUP, TARGET_GRAIN, NUM)
            last = _race_winner(call, round, accepted, PURPOSE, NUM)
            goes_on = accepted < judged
            if goes_on:
                goes_on = last == _draft_id(inputs, round, accepted)
            accepted += goes_on.to(tl.int32)

    if METHOD == "synthetic":
        while (accepted < judged) & goes_on:
            rate = tl.load(inputs.synthetic_rates + accepted).to(tl.float64)
            goes_on = _accept_uniform(inputs, round, accepted) < rate
            accepted += goes_on.to(tl.int32)
        _filter_target(call, round, accepted, GROUP, TARGET_GRAIN, NUM)
        if accepted < judged:
            _filter_draft(call, round, accepted, DRAFT_KIND, GROUP, DRAFT_GRAIN, NUM)

    if METHOD != "coupled":
        is_rejected = accepted < judged
        last = _draw(call, round, accepted, is_rejected, kept_there, PURPOSE, DRAFT_KIND, NUM)

    out = token_ids + round.b * (inputs.num_drafts + 1)
    for i in range(inputs.num_drafts + 1):
        token = tl.full((), -1, tl.int64)
        if i < accepted:
            token = _draft_id(inputs, round, i).to(tl.int64)
        if i == accepted:
            token = last.to(tl.int64)
        tl.store(out + i, token)
    tl.store(num_accepted + round.b, accepted)
    tl.store(status + round.b, _status(call, round, accepted, NUM))


def verify(
    logits: Tensor,
    draft_ids: Tensor,
    cu_rows: Tensor,
    positions: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    *,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    draft_logits: Tensor | None = None,
    draft_rows: Tensor | None = None,
    draft_kind: str = "logits",
    allowed_mask: Tensor | None = None,
    bias_ids: Tensor | None = None,
    bias_values: Tensor | None = None,
    penalty_rows: Tensor | None = None,
    output_counts: Tensor | None = None,
    prompt_mask: Tensor | None = None,
    presence_penalty: Tensor | None = None,
    frequency_penalty: Tensor | None = None,
    repetition_penalty: Tensor | None = None,
    synthetic_rates: Tensor | None = None,
    method: str = "standard",
    stream: str = "target",
) -> tuple[Tensor, Tensor, Tensor]:
    """The op, see ops/verify.py. On CPU tensors it runs under TRITON_INTERPRET=1."""
    definition.check(**locals())
    num_requests, num_drafts = draft_ids.shape
    token_ids = logits.new_empty(num_requests, num_drafts + 1, dtype=torch.int64)
    num_accepted = logits.new_empty(num_requests, dtype=torch.int32)
    status = logits.new_empty(num_requests, dtype=torch.int32)
    if num_requests == 0:
        return token_ids, num_accepted, status

    vocab = logits.shape[1]
    num_blocks = triton.cdiv(vocab, BLOCK.value)
    num = triton.next_power_of_2(num_blocks)
    group = _group(num)
    per_block = BLOCK.value // group
    num_slots = num_drafts + 1 + (num_drafts if draft_logits is not None else 0)
    penalties = None
    if penalty_rows is not None:
        penalties = Penalties(
            penalty_rows,
            output_counts.shape[0],
            _matrix(output_counts),
            _matrix(prompt_mask),
            presence_penalty,
            frequency_penalty,
            repetition_penalty,
        )
    inputs = Inputs(
        logits=_matrix(logits),
        draft_ids=_matrix(draft_ids),
        cu_rows=cu_rows,
        positions=positions,
        temperature=temperature,
        seeds=seeds,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        draft_logits=_matrix(draft_logits),
        draft_rows=_matrix(draft_rows),
        allowed_mask=_matrix(allowed_mask),
        bias_ids=_matrix(bias_ids),
        bias_values=_matrix(bias_values),
        penalties=penalties,
        synthetic_rates=synthetic_rates,
        num_rows=logits.shape[0],
        vocab=vocab,
        num_drafts=num_drafts,
        num_biases=0 if bias_ids is None else bias_ids.shape[1],
        num_blocks=num_blocks,
        num_slots=num_slots,
    )

    def scratch_of(dtype: torch.dtype, *shape: int) -> Tensor:
        return logits.new_empty(num_requests * num_slots, *shape, dtype=dtype)

    is_filtered = any(x is not None for x in (top_k, top_p, min_p))
    races = method == "coupled"
    scratch = Scratch(
        highest=scratch_of(torch.float32, num_blocks),
        sums=scratch_of(torch.int64, num_blocks),
        picks=scratch_of(torch.int32, num_blocks),
        scores=scratch_of(torch.float32, num_blocks) if races else None,
        winners=scratch_of(torch.float32, num_blocks) if races and is_filtered else None,
        cuts=scratch_of(torch.float32) if is_filtered else None,
        groups=scratch_of(torch.float32, num_blocks * per_block) if is_filtered else None,
        candidates=scratch_of(torch.int32, per_block) if is_filtered else None,
    )
    num_draft_rows = 0 if draft_logits is None else draft_logits.shape[0]
    constants = {
        "METHOD": method,
        "PURPOSE": definition.STREAMS[stream],
        "DRAFT_KIND": draft_kind,
        "GROUP": group,
    }
    # Bias and penalties leave no low bits of a logit 0.
    is_changed = bias_ids is not None or penalties is not None
    is_heavy = is_changed or races
    with torch.cuda.device(logits.device) if logits.is_cuda else contextlib.nullcontext():
        reduce_blocks_kernel[(num_requests * num_slots * num_blocks,)](
            inputs,
            scratch,
            num_draft_rows,
            **constants,
            **(_REDUCE_HEAVY_CONFIG if is_heavy else _REDUCE_CONFIG),
        )
        decide_kernel[(num_requests,)](
            inputs,
            scratch,
            token_ids,
            num_accepted,
            status,
            num_draft_rows,
            **constants,
            TARGET_GRAIN=0 if is_changed else _GRAINS[logits.dtype],
            DRAFT_GRAIN=0 if draft_logits is None else _GRAINS[draft_logits.dtype],
            NUM=num,
            **_DECIDE_CONFIG,
        )
    return token_ids, num_accepted, status


# Fixed, no autotuning on the serving path. Decisions must not depend on a compiler's fusing.
# Registers are for sm_90; the limits keep ptxas from spilling a few bytes for more occupancy.
_EXACT = {"enable_fp_fusion": False}
# 4096 lanes on 4 warps: four 16-byte loads of bfloat16 a thread, 60 to 80 registers.
_REDUCE_CONFIG = _EXACT | {"num_warps": 4}
# Philox and penalties need three times the registers a lane: fewer lanes a thread.
_REDUCE_HEAVY_CONFIG = _EXACT | {"num_warps": 8, "maxnreg": 160}
# One program works alone on a request: wide, and at home on an SM.
_DECIDE_CONFIG = _EXACT | {"num_warps": 8, "maxnreg": 255}


def traffic(
    num_requests: int,
    num_drafts: int,
    vocab: int,
    itemsize: int = 2,
    *,
    num_candidates: int | None = None,
) -> int:
    """Bytes that both launches move where every draft is judged and accepted, which is the most.

    Of method standard and one-hot drafts, without bias, penalties and mask. What a launch reads
    several times comes from memory once. Arguments and results, some dozen bytes of a row, are left
    out.

    num_candidates: None without filters; else the groups of lanes in each row that may pass its
    cut: at most BLOCK / GROUP, as with more the row is read again.
    """
    num_rows = num_requests * (num_drafts + 1)
    num_blocks = triton.cdiv(vocab, BLOCK.value)
    lanes = num_rows * vocab + num_requests * min(vocab, BLOCK.value)  # the block drawn from
    reduced = 2 * num_rows * num_blocks * (4 + 8 + 4)  # highest, sums, picks: written and read
    if num_candidates is None:
        return (lanes + num_requests * num_drafts) * itemsize + reduced
    group = _group(triton.next_power_of_2(num_blocks))
    lanes += num_rows * num_candidates * group  # the drafts' among them
    groups = num_blocks * (BLOCK.value // group) + num_candidates  # written and read, of 4 bytes
    cut = num_blocks * 8 + 2 * 4  # sums above it written, itself written and read
    return lanes * itemsize + reduced + num_rows * (2 * 4 * groups + cut)


def cuda_traffic(
    num_requests: int,
    num_drafts: int,
    vocab: int,
    itemsize: int = 2,
    *,
    num_candidates: int | None = None,
) -> tuple[int, int]:
    """Bytes of logits that the launches of csrc/verify.cuh ask for, and of scratch that they move.

    As for `traffic`. A draft's logit comes with the 7 beside it.
    """
    num_rows = num_requests * (num_drafts + 1)
    num_blocks = triton.cdiv(vocab, BLOCK.value)
    lanes = num_rows * vocab + num_requests * (min(vocab, BLOCK.value) + 8 * num_drafts)
    scratch = 2 * num_rows * num_blocks * 32  # a block's law, written and read
    if num_candidates is not None:
        lanes += num_rows * num_candidates * 32
        scratch += num_rows * num_blocks * (2 * 4 * BLOCK.value // 32 + 8)  # groups; sums again
    return lanes * itemsize, scratch


_GRAINS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}  # zero bits of a `_key`


def _group(num: int) -> int:
    """Lanes of a group: a row's groups, 8192 at most, fit the registers."""
    return max(32, num * BLOCK.value // 8192)


def _matrix(x: Tensor | None) -> Matrix | None:
    return None if x is None else Matrix(x, x.stride(0))
