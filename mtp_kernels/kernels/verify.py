"""verify in two launches: every block of every row is reduced, then each request decides.

The law of a row is known from a few numbers per block of 4096 lanes (highest logit, sum of weights),
so the first launch reads the logits once, on the whole machine, and the second reads single lanes
of the drafts and the one block that the token is drawn from. Filters, and residuals against
draft_logits, make it read whole rows again, of the rows that decide something.

The reference in ops/verify.py is the definition; names here are its names. Nothing fuses, divides
approximately or depends on the order of a float sum, so the bits are the reference's.
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
DIGITS = tl.constexpr(16)  # ways of one pass of the search for a cut
LOWEST_KEY = tl.constexpr(-0x7F800000)  # of -inf


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


class Law(NamedTuple):
    """The reference's Law, of which lanes are made when they are needed. Vectors are [blocks]."""

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


class Round(NamedTuple):
    """One request's part of the call."""

    b: Any
    first_row: Any
    given: Any  # drafts, judged or not
    temperature: Any


@triton.jit
def _round(inputs, b):
    first_row = tl.load(inputs.cu_rows + b).to(tl.int64)
    end = tl.load(inputs.cu_rows + b + 1).to(tl.int64)
    # A wrong cu_rows, which is not checked on a GPU, must not read past the drafts.
    given = tl.minimum(end - first_row - 1, inputs.num_drafts).to(tl.int32)
    return Round(b, first_row, given, tl.load(inputs.temperature + b))


# Logits


@triton.jit
def _bits(words, lanes, inside):
    """Bit `lane % 32` of word `lane // 32`."""
    return (tl.load(words + lanes // 32, mask=inside, other=0) >> (lanes % 32)) & 1 != 0


@triton.jit
def _target_logits(inputs, round, i, start, read, SIZE: tl.constexpr):
    """Lanes from start of row i after bias, penalties and mask, [SIZE] fp32; -inf past the end.

    read: whether to read them at all.
    """
    lanes = start + tl.arange(0, SIZE)
    inside = (lanes < inputs.vocab) & read
    row = round.first_row + i
    logits = inputs.logits.data + row * inputs.logits.stride
    x = tl.load(logits + lanes, mask=inside, other=-INF).to(tl.float32)
    if inputs.bias_ids is not None:
        ids = inputs.bias_ids.data + round.b * inputs.bias_ids.stride
        values = inputs.bias_values.data + round.b * inputs.bias_values.stride
        for m in range(inputs.num_biases):
            token = tl.load(ids + m)
            if (token >= start) & (token < start + SIZE):
                x = tl.where(lanes == token, x + tl.load(values + m), x)
        x = tl.where(inside, x, -INF)
    if inputs.penalties is not None:
        of = inputs.penalties
        at = tl.load(of.rows + round.b).to(tl.int64)
        if (at >= 0) & (at < of.num_rows):
            counts = tl.load(of.counts.data + at * of.counts.stride + lanes, mask=inside, other=0)
            for j in range(i):  # the drafts before this row count as generated
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
        mask = inputs.allowed_mask.data + row * inputs.allowed_mask.stride
        x = tl.where(_bits(mask, lanes, inside), x, -INF)
    return x


@triton.jit
def _draft_logits(inputs, row, start, read, PADDING: tl.constexpr, SIZE: tl.constexpr):
    lanes = start + tl.arange(0, SIZE)
    logits = inputs.draft_logits.data + row * inputs.draft_logits.stride
    mask = (lanes < inputs.vocab) & read
    return tl.load(logits + lanes, mask=mask, other=PADDING).to(tl.float32)


@triton.jit
def _draft_id(inputs, round, i):
    return tl.load(inputs.draft_ids.data + round.b * inputs.draft_ids.stride + i)


@triton.jit
def _draft_row(inputs, round, i):
    """Draft i's row of draft_logits, which may be outside."""
    if inputs.draft_rows is not None:
        row = tl.load(inputs.draft_rows.data + round.b * inputs.draft_rows.stride + i).to(tl.int64)
    else:
        row = round.b * inputs.num_drafts + i
    return row


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


@triton.jit(do_not_specialize=["num_draft_rows"])
def reduce_blocks_kernel(
    inputs,
    scratch,
    num_draft_rows,
    METHOD: tl.constexpr,
    PURPOSE: tl.constexpr,
    DRAFT_KIND: tl.constexpr,
):
    """Grid (slots * blocks,), blocks fastest: one block of one row into Scratch.

    A slot is a row of the target's or of draft_logits; those that nobody uses end at once. The sums
    are those of the unfiltered law.
    """
    pid = tl.program_id(0)
    slot = pid // inputs.num_blocks
    start = pid % inputs.num_blocks * BLOCK
    round = _round(inputs, (slot // inputs.num_slots).to(tl.int64))
    i = slot % inputs.num_slots
    is_target = i <= inputs.num_drafts
    used = i <= round.given
    draft_row = round.b
    if inputs.draft_logits is not None:
        if not is_target:
            i -= inputs.num_drafts + 1
            used = i < round.given
            if used:
                draft_row = _draft_row(inputs, round, i)
                used = (draft_row >= 0) & (draft_row < num_draft_rows)
    if not used:
        return

    if inputs.draft_logits is not None:
        if is_target:
            x = _target_logits(inputs, round, i, start, True, BLOCK)
        elif DRAFT_KIND == "probs":
            x = _draft_logits(inputs, draft_row, start, True, 0.0, BLOCK)
            x = tl.where(x >= 0, x, INF)
        else:
            x = _draft_logits(inputs, draft_row, start, True, -INF, BLOCK)
    else:
        x = _target_logits(inputs, round, i, start, True, BLOCK)

    bad = (x != x) | (x == INF)
    x = tl.where(bad, -INF, x)
    highest = tl.max(x)
    picks = tl.min(tl.where(x == highest, tl.arange(0, BLOCK), BLOCK - 1))
    picks |= tl.max(bad.to(tl.int32)) << (2 * LANE_BITS)
    at = pid.to(tl.int64)
    total = tl.zeros((), tl.int64)
    has_law = round.temperature >= GREEDY_BELOW
    if DRAFT_KIND == "probs":
        has_law = has_law & is_target
    if has_law:
        scale = tl.div_rn(LOG2_E, round.temperature)
        fractions = _exp2_below(x, highest, scale)
        total = tl.sum(_weights(fractions))
        if METHOD == "coupled":
            if is_target:
                seed = tl.load(inputs.seeds + round.b)
                position = tl.load(inputs.positions + round.first_row + i).to(tl.int64) + 1
                score, winner = _race(fractions, seed, position, start, PURPOSE)
                picks |= winner << LANE_BITS
                tl.store(scratch.scores + at, score)
                if scratch.winners is not None:
                    won = tl.where(tl.arange(0, BLOCK) == winner, x, -INF)
                    tl.store(scratch.winners + at, tl.max(won))
    tl.store(scratch.highest + at, highest)
    tl.store(scratch.sums + at, total)
    tl.store(scratch.picks + at, picks)


# Laws


@triton.jit
def _at(values, block, NUM: tl.constexpr):
    """One value of a vector of integers or of floats that are not infinite."""
    return tl.sum(tl.where(tl.arange(0, NUM) == block, values, 0))


@triton.jit
def _highest_at(law, block, NUM: tl.constexpr):
    return tl.max(tl.where(tl.arange(0, NUM) == block, law.highest, -INF))


@triton.jit
def _masses(sums, scales):
    return (sums.to(tl.float64) * scales.to(tl.float64)).to(tl.int64)


@triton.jit
def _slot(inputs, round, i, IS_DRAFT: tl.constexpr):
    slot = round.b * inputs.num_slots + i
    if IS_DRAFT:
        slot += inputs.num_drafts + 1
    return slot


@triton.jit
def _law(inputs, scratch, round, slot, cut, NUM: tl.constexpr):
    """A slot's law; with a cut, its sums must be those above the cut."""
    blocks = tl.arange(0, NUM)
    inside = blocks < inputs.num_blocks
    at = slot * inputs.num_blocks + blocks
    highest = tl.load(scratch.highest + at, mask=inside, other=-INF)
    sums = tl.load(scratch.sums + at, mask=inside, other=0)
    picks = tl.load(scratch.picks + at, mask=inside, other=0)

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
    cut = tl.to_tensor(cut)
    return Law(
        is_finite, is_point, best, scale, cut, highest, scales, sums, masses, tl.sum(masses)
    )


@triton.jit
def _target_law(inputs, scratch, round, i, NUM: tl.constexpr):
    slot = _slot(inputs, round, i, False)
    cut = -INF
    if scratch.cuts is not None:
        cut = tl.load(scratch.cuts + slot)
    return _law(inputs, scratch, round, slot, cut, NUM)


@triton.jit
def _draft_law(inputs, scratch, round, i, DRAFT_KIND: tl.constexpr, NUM: tl.constexpr):
    slot = _slot(inputs, round, i, True)
    cut = -INF
    if scratch.cuts is not None:
        if DRAFT_KIND == "filtered_logits":
            cut = tl.load(scratch.cuts + slot)
    return _law(inputs, scratch, round, slot, cut, NUM)


@triton.jit
def _row_logits(
    inputs, round, law, i, draft_row, start, IS_DRAFT: tl.constexpr, SIZE: tl.constexpr
):
    """The law's logits: those below its cut, and all but a point's, are -inf."""
    if IS_DRAFT:
        x = _draft_logits(inputs, draft_row, start, not law.is_point, -INF, SIZE)
    else:
        x = _target_logits(inputs, round, i, start, not law.is_point, SIZE)
    is_best = start + tl.arange(0, SIZE) == law.best
    x = tl.where(law.is_point, tl.where(is_best, 0.0, -INF), x)
    return tl.where(x >= law.cut, x, -INF)


@triton.jit
def _fractions(
    inputs,
    round,
    law,
    i,
    draft_row,
    start,
    IS_DRAFT: tl.constexpr,
    SIZE: tl.constexpr,
    NUM: tl.constexpr,
):
    """Lanes of the reference's `Law.fractions`, [SIZE], all of one block."""
    x = _row_logits(inputs, round, law, i, draft_row, start, IS_DRAFT, SIZE)
    return _exp2_below(x, _highest_at(law, start // BLOCK, NUM), law.scale)


@triton.jit
def _probability(
    inputs, round, law, i, draft_row, token, IS_DRAFT: tl.constexpr, NUM: tl.constexpr
):
    fraction = _fractions(inputs, round, law, i, draft_row, token, IS_DRAFT, 1, NUM)
    weight = tl.max(_weights(fraction))
    mass = _masses(weight, _at(law.scales, token // BLOCK, NUM))
    return mass.to(tl.float64) / law.total.to(tl.float64)


@triton.jit
def _unit(law, kept):
    """What `Law.lanes` multiplies the fractions of each block by."""
    return (kept * law.scales.to(tl.float64) * ONE / law.total.to(tl.float64)).to(tl.float32)


@triton.jit
def _residual_weights(
    inputs,
    round,
    p,
    p_unit,
    q,
    q_unit,
    i,
    draft_row,
    block,
    DRAFT_KIND: tl.constexpr,
    NUM: tl.constexpr,
):
    """Lanes of `residual(p, q, kept)`, [BLOCK] int64."""
    start = block * BLOCK
    p_lanes = _fractions(inputs, round, p, i, draft_row, start, False, BLOCK, NUM)
    p_lanes *= _at(p_unit, block, NUM)
    if DRAFT_KIND == "probs":
        q_lanes = _draft_logits(inputs, draft_row, start, True, 0.0, BLOCK)
    else:
        q_lanes = _fractions(inputs, round, q, i, draft_row, start, True, BLOCK, NUM)
        q_lanes *= _at(q_unit, block, NUM)
    return (tl.maximum(p_lanes - q_lanes, 0.0) * WHOLE).to(tl.int64)


@triton.jit
def _residual_masses(
    inputs,
    round,
    p,
    p_unit,
    q,
    q_unit,
    i,
    draft_row,
    DRAFT_KIND: tl.constexpr,
    NUM: tl.constexpr,
):
    masses = tl.zeros((NUM,), tl.int64)
    for block in range(inputs.num_blocks):
        if _at(p_unit, block, NUM) > 0:
            weights = _residual_weights(
                inputs, round, p, p_unit, q, q_unit, i, draft_row, block, DRAFT_KIND, NUM
            )
            masses = tl.where(tl.arange(0, NUM) == block, tl.sum(weights), masses)
    return masses


# Filters


@triton.jit
def _key(x):
    """An int32 in the order of x; the lower half of a bfloat16's is 0."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -2147483648 - bits, bits)


@triton.jit
def _of_key(key):
    return tl.where(key < 0, -2147483648 - key, key).to(tl.float32, bitcast=True)


@triton.jit
def _search(
    inputs,
    round,
    law,
    i,
    draft_row,
    cut,
    limit,
    COUNT: tl.constexpr,
    GRAIN: tl.constexpr,
    IS_DRAFT: tl.constexpr,
    NUM: tl.constexpr,
):
    """The highest cut that keeps enough of what `cut` keeps; `cut` if all of that is not enough.

    COUNT: enough is `limit` lanes; else `limit` times the weight that `cut` keeps.

    Pass by pass the interval of keys that holds the cut is divided by 16. Blocks and passes
    without a lane in it are skipped. Keys are multiples of 2^GRAIN.
    """
    top = tl.max(law.highest)
    # The interval is [low, low + 16 << shift), at first all finite keys from the cut to the top.
    low = tl.maximum((_key(cut) + ((1 << GRAIN) - 1)) >> GRAIN, (LOWEST_KEY >> GRAIN) + 1)
    span = (_key(top) >> GRAIN).to(tl.int64) - low
    shift = 0
    while (span >> shift) >= DIGITS:
        shift += 4
    above = tl.zeros((), tl.int64)  # kept above the interval
    enough = limit
    is_first = True
    digits = tl.arange(0, DIGITS)
    while shift >= 0:
        kept = tl.zeros((DIGITS,), tl.int64)  # in the interval from each digit on
        for block in range(inputs.num_blocks):
            if (_key(_highest_at(law, block, NUM)) >> GRAIN) >= low:
                x = _row_logits(
                    inputs, round, law, i, draft_row, block * BLOCK, IS_DRAFT, BLOCK
                )
                key = _key(x) >> GRAIN
                digit = (key - low).to(tl.uint32, bitcast=True) >> shift
                digit = tl.where((key >= low) & (digit < DIGITS), digit.to(tl.int32), -1)
                if tl.max(digit) >= 0:
                    if COUNT:
                        values = tl.full((BLOCK,), 1, tl.int64)
                    else:
                        values = _weights(_exp2_below(x, top, law.scale))
                    for d in tl.static_range(DIGITS):
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
    return _of_key(low << GRAIN)


@triton.jit
def _filter(
    inputs,
    scratch,
    round,
    i,
    draft_row,
    GRAIN: tl.constexpr,
    IS_DRAFT: tl.constexpr,
    NUM: tl.constexpr,
):
    """Find the cut of a row, and make its sums in scratch those above the cut."""
    slot = _slot(inputs, round, i, IS_DRAFT)
    law = _law(inputs, scratch, round, slot, -INF, NUM)
    cut = -INF
    if not law.is_point:
        if inputs.min_p is not None:
            min_p = tl.load(inputs.min_p + round.b)
            if min_p > 0:
                cut = tl.max(law.highest) + exact.log(min_p) * round.temperature
        if inputs.top_k is not None:
            top_k = tl.load(inputs.top_k + round.b)
            if (top_k > 0) & (top_k < inputs.vocab):
                limit = top_k.to(tl.float64)
                cut = _search(
                    inputs, round, law, i, draft_row, cut, limit, True, GRAIN, IS_DRAFT, NUM
                )
        if inputs.top_p is not None:
            top_p = tl.load(inputs.top_p + round.b)
            if top_p < 1:
                limit = top_p.to(tl.float64)
                cut = _search(
                    inputs, round, law, i, draft_row, cut, limit, False, GRAIN, IS_DRAFT, NUM
                )
    if cut > -INF:
        blocks = tl.arange(0, NUM)
        sums = tl.zeros((NUM,), tl.int64)
        for block in range(inputs.num_blocks):
            highest = _highest_at(law, block, NUM)
            if highest >= cut:
                x = _row_logits(
                    inputs, round, law, i, draft_row, block * BLOCK, IS_DRAFT, BLOCK
                )
                x = tl.where(x >= cut, x, -INF)
                weights = _weights(_exp2_below(x, highest, law.scale))
                sums = tl.where(blocks == block, tl.sum(weights), sums)
        tl.debug_barrier()  # all threads have read the old sums
        at = slot * inputs.num_blocks + blocks
        tl.store(scratch.sums + at, sums, mask=blocks < inputs.num_blocks)
    tl.store(scratch.cuts + slot, cut)
    tl.debug_barrier()  # all threads see them


# Launch 2


@triton.jit
def _is_one_hot(inputs, round, i, num_draft_rows):
    row = _draft_row(inputs, round, i)
    return (row < 0) | (row >= num_draft_rows)


@triton.jit
def _judged(
    inputs, scratch, round, num_draft_rows, DRAFT_KIND: tl.constexpr, NUM: tl.constexpr
):
    """How many drafts can be judged: those before the first bad id or row."""
    judged = 0
    fits = True
    while (judged < round.given) & fits:
        draft = _draft_id(inputs, round, judged)
        fits = (draft >= 0) & (draft < inputs.vocab)
        slot = _slot(inputs, round, judged, False)
        fits = fits & _law(inputs, scratch, round, slot, -INF, NUM).is_finite
        if inputs.draft_logits is not None:
            if not _is_one_hot(inputs, round, judged, num_draft_rows):
                slot = _slot(inputs, round, judged, True)
                is_finite = _law(inputs, scratch, round, slot, -INF, NUM).is_finite
                fits = fits & is_finite
        judged += fits.to(tl.int32)
    return judged


@triton.jit
def _draft_probability(
    inputs, scratch, round, i, token, num_draft_rows, DRAFT_KIND: tl.constexpr, NUM: tl.constexpr
):
    q = tl.full((), 1.0, tl.float64)
    if inputs.draft_logits is not None:
        if not _is_one_hot(inputs, round, i, num_draft_rows):
            row = _draft_row(inputs, round, i)
            if DRAFT_KIND == "probs":
                q = tl.max(_draft_logits(inputs, row, token, True, 0.0, 1)).to(tl.float64)
            else:
                law = _draft_law(inputs, scratch, round, i, DRAFT_KIND, NUM)
                q = _probability(inputs, round, law, i, row, token, True, NUM)
    return q


@triton.jit
def _filter_draft(
    inputs,
    scratch,
    round,
    i,
    num_draft_rows,
    DRAFT_KIND: tl.constexpr,
    GRAIN: tl.constexpr,
    NUM: tl.constexpr,
):
    if inputs.draft_logits is not None:
        if DRAFT_KIND == "filtered_logits":
            if not _is_one_hot(inputs, round, i, num_draft_rows):
                row = _draft_row(inputs, round, i)
                _filter(inputs, scratch, round, i, row, GRAIN, True, NUM)


@triton.jit
def _place(weights, uniform):
    """The index at a random place of the cumulative sum."""
    up_to = tl.cumsum(weights, 0)
    total = tl.max(up_to)
    place = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
    return tl.sum((up_to <= place).to(tl.int32))


@triton.jit
def _accept_uniform(seed, position):
    w0, w1, _w2, _w3 = exact.philox(seed, position, exact.ACCEPT, tl.zeros((1,), tl.int32))
    return tl.max(exact.uniform(w0, w1))


@triton.jit
def _position(inputs, round, i):
    return tl.load(inputs.positions + round.first_row + i).to(tl.int64) + 1


@triton.jit
def _race_winner(
    inputs, scratch, round, law, i, seed, PURPOSE: tl.constexpr, NUM: tl.constexpr
):
    """The reference's `Request.race`: each block's winner is known, unless a cut removed it."""
    winner = law.best
    if not law.is_point:
        blocks = tl.arange(0, NUM)
        inside = blocks < inputs.num_blocks
        at = _slot(inputs, round, i, False) * inputs.num_blocks + blocks
        scores = tl.load(scratch.scores + at, mask=inside, other=0.0)
        lanes = tl.load(scratch.picks + at, mask=inside, other=0)
        lanes = (lanes >> LANE_BITS) & (BLOCK - 1)
        if scratch.winners is not None:
            won = tl.load(scratch.winners + at, mask=inside, other=-INF)
            again = ((won < law.cut) & (law.highest > -INF)).to(tl.int32)
            if tl.max(again) > 0:
                position = _position(inputs, round, i)
                for block in range(inputs.num_blocks):
                    if _at(again, block, NUM) > 0:
                        start = block * BLOCK
                        fractions = _fractions(
                            inputs, round, law, i, round.b, start, False, BLOCK, NUM
                        )
                        score, lane = _race(fractions, seed, position, start, PURPOSE)
                        scores = tl.where(blocks == block, score, scores)
                        lanes = tl.where(blocks == block, lane, lanes)
        scores *= law.scales
        block = tl.min(tl.where(scores == tl.max(scores), blocks, NUM - 1))
        winner = block * BLOCK + _at(lanes, block, NUM)
    return winner


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
    TARGET_GRAIN: tl.constexpr,
    DRAFT_GRAIN: tl.constexpr,
    NUM: tl.constexpr,
):
    """Grid (requests,): judge a request's drafts in turn, then draw the token after them.

    NUM: num_blocks, rounded up to a power of two.
    """
    round = _round(inputs, tl.program_id(0).to(tl.int64))
    seed = tl.load(inputs.seeds + round.b)
    judged = _judged(inputs, scratch, round, num_draft_rows, DRAFT_KIND, NUM)
    accepted = 0
    kept_there = tl.full((), 1.0, tl.float64)
    filtered = 0  # target rows whose cut is known

    if METHOD == "standard":
        goes_on = True
        while (accepted < judged) & goes_on:
            if scratch.cuts is not None:
                _filter(inputs, scratch, round, accepted, round.b, TARGET_GRAIN, False, NUM)
                _filter_draft(
                    inputs, scratch, round, accepted, num_draft_rows, DRAFT_KIND, DRAFT_GRAIN, NUM
                )
                filtered = accepted + 1
            draft = _draft_id(inputs, round, accepted).to(tl.int32)
            law = _target_law(inputs, scratch, round, accepted, NUM)
            p = _probability(inputs, round, law, accepted, round.b, draft, False, NUM)
            q = _draft_probability(
                inputs, scratch, round, accepted, draft, num_draft_rows, DRAFT_KIND, NUM
            )
            u = _accept_uniform(seed, _position(inputs, round, accepted))
            goes_on = u * q < p
            accepted += goes_on.to(tl.int32)

    if METHOD == "synthetic":
        goes_on = True
        while (accepted < judged) & goes_on:
            u = _accept_uniform(seed, _position(inputs, round, accepted))
            goes_on = u < tl.load(inputs.synthetic_rates + accepted).to(tl.float64)
            accepted += goes_on.to(tl.int32)
        if scratch.cuts is not None:
            if accepted < judged:
                _filter_draft(
                    inputs, scratch, round, accepted, num_draft_rows, DRAFT_KIND, DRAFT_GRAIN, NUM
                )

    if METHOD == "block":
        kept = tl.full((), 1.0, tl.float64)
        if scratch.cuts is not None:
            if judged > 0:
                _filter(inputs, scratch, round, 0, round.b, TARGET_GRAIN, False, NUM)
                _filter_draft(
                    inputs, scratch, round, 0, num_draft_rows, DRAFT_KIND, DRAFT_GRAIN, NUM
                )
                filtered = 1
        for i in range(1, judged + 1):
            draft = _draft_id(inputs, round, i - 1).to(tl.int32)
            law = _target_law(inputs, scratch, round, i - 1, NUM)
            p = _probability(inputs, round, law, i - 1, round.b, draft, False, NUM)
            q = _draft_probability(
                inputs, scratch, round, i - 1, draft, num_draft_rows, DRAFT_KIND, NUM
            )
            ratio = kept * p / tl.where(q > 0, q, 1.0)
            kept = tl.where(q > 0, tl.minimum(ratio, 1.0), (kept * p > 0).to(tl.float64))
            passing = kept
            if i < judged:
                if scratch.cuts is not None:
                    _filter(inputs, scratch, round, i, round.b, TARGET_GRAIN, False, NUM)
                    _filter_draft(
                        inputs, scratch, round, i, num_draft_rows, DRAFT_KIND, DRAFT_GRAIN, NUM
                    )
                    filtered = i + 1
                if kept < 1:
                    left = _residual_mass(
                        inputs, scratch, round, i, kept, num_draft_rows, DRAFT_KIND, NUM
                    )
                    passing = left / (left + (1 - kept))
            if _accept_uniform(seed, _position(inputs, round, i - 1)) < passing:
                accepted = i
                kept_there = kept

    if METHOD == "coupled":
        goes_on = True
        last = 0
        while goes_on:
            if scratch.cuts is not None:
                _filter(inputs, scratch, round, accepted, round.b, TARGET_GRAIN, False, NUM)
            law = _target_law(inputs, scratch, round, accepted, NUM)
            last = _race_winner(inputs, scratch, round, law, accepted, seed, PURPOSE, NUM)
            goes_on = accepted < judged
            if goes_on:
                goes_on = last == _draft_id(inputs, round, accepted)
            accepted += goes_on.to(tl.int32)
    else:
        if scratch.cuts is not None:
            if accepted >= filtered:
                _filter(inputs, scratch, round, accepted, round.b, TARGET_GRAIN, False, NUM)
        law = _target_law(inputs, scratch, round, accepted, NUM)
        last = _draw(
            inputs,
            scratch,
            round,
            law,
            accepted,
            accepted < judged,
            kept_there,
            seed,
            num_draft_rows,
            PURPOSE,
            DRAFT_KIND,
            NUM,
        )

    out = token_ids + round.b * (inputs.num_drafts + 1)
    for i in range(inputs.num_drafts + 1):
        token = tl.full((), -1, tl.int64)
        if i < accepted:
            token = _draft_id(inputs, round, i).to(tl.int64)
        if i == accepted:
            token = last.to(tl.int64)
        tl.store(out + i, token)
    tl.store(num_accepted + round.b, accepted)
    tl.store(status + round.b, _status(inputs, scratch, round, accepted, NUM))


@triton.jit
def _status(inputs, scratch, round, i, NUM: tl.constexpr):
    blocks = tl.arange(0, NUM)
    inside = blocks < inputs.num_blocks
    at = _slot(inputs, round, i, False) * inputs.num_blocks + blocks
    bad = tl.max(tl.load(scratch.picks + at, mask=inside, other=0) >> (2 * LANE_BITS))
    highest = tl.max(tl.load(scratch.highest + at, mask=inside, other=-INF))
    return bad * NOT_FINITE + (highest == -INF).to(tl.int32) * NOTHING_ALLOWED


@triton.jit
def _residual_mass(
    inputs, scratch, round, i, kept, num_draft_rows, DRAFT_KIND: tl.constexpr, NUM: tl.constexpr
):
    """The reference's `residual_mass` of row i and draft i."""
    p = _target_law(inputs, scratch, round, i, NUM)
    draft = _draft_id(inputs, round, i).to(tl.int32)
    left = kept * (1 - _probability(inputs, round, p, i, round.b, draft, False, NUM))
    if inputs.draft_logits is not None:
        if not _is_one_hot(inputs, round, i, num_draft_rows):
            row = _draft_row(inputs, round, i)
            q = _draft_law(inputs, scratch, round, i, DRAFT_KIND, NUM)
            p_unit, q_unit = _unit(p, kept), _unit(q, 1.0)
            masses = _residual_masses(
                inputs, round, p, p_unit, q, q_unit, i, row, DRAFT_KIND, NUM
            )
            left = tl.sum(masses).to(tl.float64) * (1 / WHOLE)
    return left


@triton.jit
def _draw(
    inputs,
    scratch,
    round,
    p,
    i,
    is_rejected,
    kept,
    seed,
    num_draft_rows,
    PURPOSE: tl.constexpr,
    DRAFT_KIND: tl.constexpr,
    NUM: tl.constexpr,
):
    """The token of row i: of what draft i leaves if it is rejected, and else of all the law p."""
    zero = tl.zeros((1,), tl.int32)
    w0, w1, w2, w3 = exact.philox(seed, _position(inputs, round, i), PURPOSE, zero)
    for_block, for_lane = tl.max(exact.uniform(w0, w1)), tl.max(exact.uniform(w2, w3))

    blocks = tl.arange(0, NUM)
    masses = p.masses
    excluded = -1  # the draft, where it is one-hot
    if is_rejected:
        excluded = _draft_id(inputs, round, i).to(tl.int32)
        x = _fractions(inputs, round, p, i, round.b, excluded, False, 1, NUM)
        is_there = blocks == excluded // BLOCK
        sums = p.sums - tl.where(is_there, tl.max(_weights(x)), 0)
        masses = _masses(sums, p.scales)
    if inputs.draft_logits is not None:
        draft_row = round.b
        has_q = False
        if is_rejected:
            has_q = not _is_one_hot(inputs, round, i, num_draft_rows)
        q = p
        if has_q:
            q = _draft_law(inputs, scratch, round, i, DRAFT_KIND, NUM)
        p_unit, q_unit = _unit(p, kept), _unit(q, 1.0)
        if has_q:
            draft_row = _draft_row(inputs, round, i)
            masses = _residual_masses(
                inputs, round, p, p_unit, q, q_unit, i, draft_row, DRAFT_KIND, NUM
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
                inputs, round, p, p_unit, q, q_unit, i, draft_row, block, DRAFT_KIND, NUM
            )
        else:
            weights = _weights(_fractions(inputs, round, p, i, round.b, start, False, BLOCK, NUM))
            weights = tl.where(start + tl.arange(0, BLOCK) == excluded, 0, weights)
    else:
        weights = _weights(_fractions(inputs, round, p, i, round.b, start, False, BLOCK, NUM))
        weights = tl.where(start + tl.arange(0, BLOCK) == excluded, 0, weights)
    return start + _place(weights, for_lane)


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
    definition._check(**locals())
    num_requests, num_drafts = draft_ids.shape
    token_ids = logits.new_empty(num_requests, num_drafts + 1, dtype=torch.int64)
    num_accepted = logits.new_empty(num_requests, dtype=torch.int32)
    status = logits.new_empty(num_requests, dtype=torch.int32)
    if num_requests == 0:
        return token_ids, num_accepted, status

    vocab = logits.shape[1]
    num_blocks = triton.cdiv(vocab, BLOCK.value)
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
    )
    num_draft_rows = 0 if draft_logits is None else draft_logits.shape[0]
    strings = {
        "METHOD": method,
        "PURPOSE": definition.STREAMS[stream],
        "DRAFT_KIND": draft_kind,
    }
    # A float32 sum of bias or penalties has no spare bits in its key.
    is_changed = bias_ids is not None or penalties is not None
    with torch.cuda.device(logits.device) if logits.is_cuda else contextlib.nullcontext():
        reduce_blocks_kernel[(num_requests * num_slots * num_blocks,)](
            inputs, scratch, num_draft_rows, **strings, **_REDUCE_CONFIG
        )
        decide_kernel[(num_requests,)](
            inputs,
            scratch,
            token_ids,
            num_accepted,
            status,
            num_draft_rows,
            **strings,
            TARGET_GRAIN=0 if is_changed else _GRAINS[logits.dtype],
            DRAFT_GRAIN=0 if draft_logits is None else _GRAINS[draft_logits.dtype],
            NUM=triton.next_power_of_2(num_blocks),
            **_DECIDE_CONFIG,
        )
    return token_ids, num_accepted, status


# Fixed, no autotuning on the serving path. Decisions must not depend on a compiler's fusing.
# 4 warps: 32 lanes a thread, four 16-byte loads of bfloat16 in flight, and no spills.
_REDUCE_CONFIG = {"num_warps": 4, "enable_fp_fusion": False}
# 8 warps: one program works alone on a request, and its int64 cumulative sum of a block fits.
_DECIDE_CONFIG = {"num_warps": 8, "enable_fp_fusion": False}

_GRAINS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}  # zero bits of a `_key`


def _matrix(x: Tensor | None) -> Matrix | None:
    return None if x is None else Matrix(x, x.stride(0))
