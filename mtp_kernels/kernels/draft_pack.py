"""draft_pack in one launch: a program per row, and some for what is per request.

Every program works out its request's window anew, from a dozen integers. It only reads what is
remembered, and nobody writes that in this launch, so programs need not wait for each other.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtp_kernels.ops import draft_pack as definition

# Arguments. A field that is None is compiled out.


class Matrix(NamedTuple):
    """A tensor of rows with unit stride inside."""

    data: Any
    stride: Any


class Table(NamedTuple):
    """Of one KV-cache group."""

    blocks: Any
    stride: Any
    columns: Any
    block_size: Any


class Inputs(NamedTuple):
    slots: Any
    query_start: Any
    num_rejected: Any
    target_ids: Any
    target_positions: Any
    target_hidden: Any
    next_ids: Any
    lookahead_ids: Any
    row_start: Any
    kept_ids: Any
    kept_hidden: Any
    num_kept: Any
    end: Any
    assumed: Any
    target_rope: Any
    kept_rope: Any
    num_slots: Any


class Outputs(NamedTuple):
    ids: Any
    positions: Any
    hidden: Any
    row_start: Any
    seq_lens: Any
    last_row: Any
    slots: Any
    lookahead: Any
    kv_slots: Any
    rope: Any
    most_requests: Any
    most_rows: Any


class Counts(NamedTuple):
    """What differs from round to round."""

    requests: Any
    targets: Any
    rows: Any


class Rows(NamedTuple):
    """Of requests: the window, the surviving rows, the unused ones."""

    slot: Any  # -1 = padding
    start: Any
    count: Any
    window: Any
    num_new: Any
    first: Any  # surviving row, in the target's tensors
    first_position: Any


@triton.jit
def _clamp(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def _load(values, at, mask):
    return tl.load(values + at, mask=mask, other=0).to(tl.int64)


@triton.jit
def ascends(starts, count, COUNT: tl.constexpr):
    """Whether none of the first count + 1 starts is below the one before it."""
    b = tl.arange(0, COUNT)
    inside = b < count
    return tl.sum((_load(starts, b + 1, inside) < _load(starts, b, inside)).to(tl.int32)) == 0


@triton.jit
def _row_start(inputs, counts, b, inside, in_order):
    start = _clamp(_load(inputs.row_start, b, inside), 0, counts.rows)
    return tl.where(inside & in_order, start, counts.rows)


@triton.jit
def _plan(inputs, counts, b, inside, in_order, PAST: tl.constexpr):
    """The rows of one or several requests b."""
    start = _row_start(inputs, counts, b, inside, in_order)
    count = _row_start(inputs, counts, b + 1, inside, in_order) - start
    first = _clamp(_load(inputs.query_start, b, inside), 0, counts.targets)
    num_new = _clamp(_load(inputs.query_start, b + 1, inside), 0, counts.targets) - first
    num_new -= tl.maximum(_load(inputs.num_rejected, b, inside), 0)
    num_new = _clamp(num_new, 0, count)
    survives = inside & (num_new > 0)
    first_position = _load(inputs.target_positions, first, survives)
    slot = _load(inputs.slots, b, inside)
    remembered = survives & (slot >= 0) & (slot < inputs.num_slots)
    slot = tl.where(remembered, slot, -1)

    # How many of the tokens assumed last round are confirmed by the tokens known now.
    next_id = _load(inputs.next_ids, b, inside)
    agrees = remembered
    confirmed = num_new * 0
    for i in tl.static_range(PAST):
        known = _load(inputs.target_ids, first + 1 + i, agrees & (i < num_new - 1))
        known = tl.where(i == num_new - 1, next_id, known)
        assumed = _load(inputs.assumed, slot * PAST + i, agrees)
        agrees = agrees & (i < num_new) & (known == assumed)
        confirmed += agrees.to(tl.int64)
    continues = remembered & (_load(inputs.end, slot, remembered) == first_position)
    wanted = tl.minimum(PAST - confirmed, _load(inputs.num_kept, slot, remembered))
    window = tl.where(continues, _clamp(wanted, 0, count - num_new), 0)
    return Rows(slot, start, count, window, num_new, first, first_position)


@triton.jit
def _write_requests(inputs, outputs, counts, b, PAST: tl.constexpr, REQUESTS: tl.constexpr):
    """What is per request, of requests b and of those that the round does not have."""
    inside = b < counts.requests
    there = b < outputs.most_requests
    in_order = ascends(inputs.row_start, counts.requests, REQUESTS)
    r = _plan(inputs, counts, b, inside, in_order, PAST)
    row_start = _row_start(inputs, counts, b, b <= counts.requests, in_order)
    tl.store(outputs.row_start + b, row_start, mask=b <= outputs.most_requests)
    reserved = inside & (r.count > 0)
    seq_len = tl.where(reserved, r.first_position - r.window + r.count, 0)
    tl.store(outputs.seq_lens + b, seq_len, mask=there)
    last = tl.where(reserved, r.start + tl.maximum(r.window + r.num_new, 1) - 1, 0)
    tl.store(outputs.last_row + b, last, mask=there)
    tl.store(outputs.slots + b, r.slot, mask=there)
    for i in tl.static_range(PAST):
        known = _load(inputs.lookahead_ids.data, b * inputs.lookahead_ids.stride + i, inside)
        lookahead = outputs.lookahead.data + b * outputs.lookahead.stride + i
        tl.store(lookahead, tl.where(inside, known, -1), mask=there)


@triton.jit
def _kv_slot(table, b, position, max_len, mapped):
    column = position // table.block_size
    mapped = mapped & (position >= 0) & (position < max_len) & (column < table.columns)
    block = tl.load(table.blocks + b * table.stride + column, mask=mapped, other=-1).to(tl.int64)
    slot = block * table.block_size + position % table.block_size
    return tl.where(block >= 0, slot, -1)


@triton.jit
def _write_row(
    inputs,
    tables,
    outputs,
    counts,
    row,
    max_len,
    PAST: tl.constexpr,
    HIDDEN: tl.constexpr,
    AXES: tl.constexpr,
    REQUESTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    requests = tl.arange(0, REQUESTS)
    stops = _load(inputs.row_start, requests + 1, requests < counts.requests)
    before = (stops <= row) & (requests < counts.requests)
    b = tl.minimum(tl.sum(before.to(tl.int32)), counts.requests - 1).to(tl.int64)
    in_order = ascends(inputs.row_start, counts.requests, REQUESTS)
    r = _plan(inputs, counts, b, b >= 0, in_order, PAST)
    offset = row - r.start
    owned = (offset >= 0) & (offset < r.count)
    behind = offset - r.window
    used = owned & (offset < r.window + r.num_new)
    in_window, is_new = used & (behind < 0), used & (behind >= 0)
    source = r.first + behind
    position = r.first_position + behind

    id = _load(inputs.target_ids, source + 1, is_new & (behind < r.num_new - 1))
    id = tl.where(behind == r.num_new - 1, _load(inputs.next_ids, b, b >= 0), id)
    kept = r.slot * PAST + PAST + behind
    if PAST > 0:
        id = tl.where(in_window, _load(inputs.kept_ids, kept, in_window), id)
    tl.store(outputs.ids + row, tl.where(used, id, 0))
    tl.store(outputs.positions + row, tl.where(owned, position, 0))
    for axis in tl.static_range(AXES):
        rope = _load(inputs.target_rope.data, axis * inputs.target_rope.stride + source, is_new)
        if PAST > 0:
            at = (r.slot * AXES + axis) * PAST + PAST + behind
            rope = tl.where(in_window, _load(inputs.kept_rope, at, in_window), rope)
        tl.store(outputs.rope.data + axis * outputs.rope.stride + row, rope)
    for group in tl.static_range(len(tables)):
        kv_slot = _kv_slot(tables[group], b, position, max_len, used & (r.slot >= 0))
        tl.store(outputs.kv_slots.data + group * outputs.kv_slots.stride + row, kv_slot)

    # One of the two loads is of no columns. (The interpreter cannot combine a scalar with a mask.)
    new_columns, old_columns = tl.where(is_new, HIDDEN, 0), tl.where(in_window, HIDDEN, 0)
    for start in tl.static_range(0, HIDDEN, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        new = inputs.target_hidden.data + source * inputs.target_hidden.stride + columns
        hidden = tl.load(new, mask=columns < new_columns, other=0)
        if PAST > 0:
            old = inputs.kept_hidden + kept * HIDDEN + columns
            old = tl.load(old, mask=columns < old_columns, other=0)
            hidden = tl.where(in_window, old, hidden)
        to = outputs.hidden.data + row * outputs.hidden.stride + columns
        tl.store(to, hidden, mask=columns < HIDDEN)


@triton.jit(do_not_specialize=["num_requests", "num_targets", "num_rows", "max_len"])
def draft_pack_kernel(
    inputs,
    tables,
    outputs,
    num_requests,
    num_targets,
    num_rows,
    max_len,
    PAST: tl.constexpr,
    HIDDEN: tl.constexpr,
    AXES: tl.constexpr,
    REQUESTS: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """Grid (num_rows + n,): the rows; then per LANES requests and rows past the last."""
    counts = Counts(num_requests, num_targets, num_rows)
    pid = tl.program_id(0)
    if pid < num_rows:
        _write_row(
            inputs,
            tables,
            outputs,
            counts,
            pid.to(tl.int64),
            max_len,
            PAST,
            HIDDEN,
            AXES,
            REQUESTS,
            BLOCK,
        )
    else:
        lanes = (pid - num_rows).to(tl.int64) * LANES + tl.arange(0, LANES)
        _write_requests(inputs, outputs, counts, lanes, PAST, REQUESTS)
        rows = num_rows + lanes
        for group in tl.static_range(len(tables)):
            unused = outputs.kv_slots.data + group * outputs.kv_slots.stride + rows
            tl.store(unused, rows * 0 - 1, mask=rows < outputs.most_rows)


def draft_pack(
    slots: Tensor,
    query_start: Tensor,
    num_rejected: Tensor,
    target_ids: Tensor,
    target_positions: Tensor,
    target_hidden: Tensor,
    next_ids: Tensor,
    lookahead_ids: Tensor,
    row_start: Tensor,
    num_rows: int,
    *,
    kept_ids: Tensor,
    kept_hidden: Tensor,
    num_kept: Tensor,
    end: Tensor,
    assumed: Tensor,
    out_ids: Tensor,
    out_positions: Tensor,
    out_hidden: Tensor,
    out_row_start: Tensor,
    out_seq_lens: Tensor,
    out_last_row: Tensor,
    out_slots: Tensor,
    out_lookahead: Tensor,
    block_tables: Sequence[Tensor],
    block_sizes: Sequence[int],
    max_len: int | None = None,
    out_kv_slots: Tensor | None = None,
    target_rope: Tensor | None = None,
    kept_rope: Tensor | None = None,
    out_rope: Tensor | None = None,
) -> None:
    """The op, see ops/draft_pack.py. On CPU tensors it runs under TRITON_INTERPRET=1."""
    definition._check(**locals())
    most_requests, most_rows = out_last_row.numel(), out_ids.numel()
    inputs = Inputs(
        slots,
        query_start,
        num_rejected,
        target_ids,
        target_positions,
        matrix(target_hidden),
        next_ids,
        matrix(lookahead_ids),
        row_start,
        kept_ids,
        kept_hidden,
        num_kept,
        end,
        assumed,
        matrix(target_rope),
        kept_rope,
        end.numel(),
    )
    tables = tuple(
        Table(table, table.stride(0), table.shape[1], size)
        for table, size in zip(block_tables, block_sizes, strict=True)
    )
    outputs = Outputs(
        out_ids,
        out_positions,
        matrix(out_hidden),
        out_row_start,
        out_seq_lens,
        out_last_row,
        out_slots,
        matrix(out_lookahead),
        matrix(out_kv_slots),
        matrix(out_rope),
        most_requests,
        most_rows,
    )
    others = max(most_requests + 1, most_rows - num_rows if tables else 0)
    with on_device(slots):
        draft_pack_kernel[(num_rows + triton.cdiv(others, _LANES),)](
            inputs,
            tables,
            outputs,
            slots.numel(),
            target_ids.numel(),
            num_rows,
            2**62 if max_len is None else max_len,
            PAST=assumed.shape[1],
            HIDDEN=target_hidden.shape[1],
            AXES=0 if out_rope is None else out_rope.shape[0],
            REQUESTS=triton.next_power_of_2(max(most_requests, 1)),
            BLOCK=min(triton.next_power_of_2(target_hidden.shape[1]), _BLOCK),
            LANES=_LANES,
            **_CONFIG,
        )


# 4 warps: a thread has four 16-byte loads of a bfloat16 row in flight. No float is computed with.
_CONFIG = {"num_warps": 4, "enable_fp_fusion": False}
_BLOCK = 4096
_LANES = 128


def traffic(num_rows: int, num_used: int, row_bytes: int) -> tuple[int, int]:
    """Bytes of hidden states that a launch reads and writes, here and in csrc/draft_pack.cuh.

    num_used: rows of windows and surviving ones, which are copies; the others become zeros. The
    integers, some dozen of a row, are left out.
    """
    return num_used * row_bytes, num_rows * row_bytes


def matrix(x: Tensor | None) -> Matrix | None:
    return None if x is None else Matrix(x, x.stride(0))


def on_device(x: Tensor) -> contextlib.AbstractContextManager:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
