"""draft_step in one launch: a program per request; in step 0 more of them, for the hidden states.

The programs of a request read its row range and slot, which nobody writes in this launch.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from mtp_kernels.kernels.draft_pack import ascends, matrix, on_device
from mtp_kernels.ops import draft_step as definition
from mtp_kernels.ops import head_argmax

NO_ID = tl.constexpr(head_argmax.NO_ID)
INF = tl.constexpr(float("inf"))


class Buffers(NamedTuple):
    """Of the round. A field that is None is compiled out."""

    input_ids: Any
    positions: Any
    hidden: Any
    row_start: Any
    last_row: Any
    slots: Any
    lookahead: Any
    draft_ids: Any
    rope: Any
    most_rows: Any


class Memory(NamedTuple):
    """Of the slots."""

    kept_ids: Any
    kept_hidden: Any
    num_kept: Any
    end: Any
    assumed: Any
    kept_rope: Any
    num_slots: Any


@triton.jit
def _best_id(values, values_stride, ids, ids_stride, b, num_slices, SLICES: tl.constexpr):
    """The id of the highest value, the lowest of equals."""
    best = tl.full((SLICES,), NO_ID, tl.int64)
    highest = tl.full((SLICES,), -INF, tl.float32)
    for start in range(0, num_slices, SLICES):
        slices = start + tl.arange(0, SLICES).to(tl.int64)
        inside = slices < num_slices
        id = tl.load(ids + slices * ids_stride + b, mask=inside, other=NO_ID).to(tl.int64)
        value = tl.zeros((SLICES,), tl.float32)
        if values is not None:
            value = tl.load(values + slices * values_stride + b, mask=inside, other=-INF)
            value = tl.where(value == value, value, -INF)
        better = (value > highest) | ((value == highest) & (id < best))
        best = tl.where(better, id, best)
        highest = tl.where(better, value, highest)
    best = tl.min(tl.where(highest == tl.max(highest), best, NO_ID))
    return tl.where(best == NO_ID, 0, best)


@triton.jit
def _remember_ids(buffers, memory, slot, first, last, PAST: tl.constexpr, AXES: tl.constexpr):
    for i in tl.static_range(PAST):
        row = last - (PAST - 1 - i)
        if row >= first:
            id = tl.load(buffers.input_ids + row).to(tl.int64)
            tl.store(memory.kept_ids + slot * PAST + i, id)
            for axis in tl.static_range(AXES):
                rope = tl.load(buffers.rope.data + axis * buffers.rope.stride + row).to(tl.int64)
                tl.store(memory.kept_rope + (slot * AXES + axis) * PAST + i, rope)
    tl.store(memory.num_kept + slot, tl.minimum(last + 1 - first, PAST))
    tl.store(memory.end + slot, tl.load(buffers.positions + last).to(tl.int64) + 1)


@triton.jit
def _remember_hidden(
    buffers,
    memory,
    slot,
    first,
    last,
    start,
    PAST: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Columns from start of the last rows."""
    columns = start + tl.arange(0, BLOCK)
    for i in tl.static_range(PAST):
        row = last - (PAST - 1 - i)
        inside = columns < tl.where(row >= first, HIDDEN, 0)
        hidden = tl.load(buffers.hidden.data + row * buffers.hidden.stride + columns, mask=inside)
        tl.store(memory.kept_hidden + (slot * PAST + i) * HIDDEN + columns, hidden, mask=inside)


@triton.jit
def _rotate(input_ids, first, last, fed, BLOCK: tl.constexpr):
    for start in range(first, last, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        ids = tl.load(input_ids + rows + 1, mask=rows < last)
        tl.debug_barrier()  # the next block's first store is to the last row of this load
        tl.store(input_ids + rows, ids, mask=rows < last)
    tl.debug_barrier()  # of one row only: it has been remembered by now
    tl.store(input_ids + last, fed)


@triton.jit(do_not_specialize=["values_stride", "ids_stride", "num_slices"])
def draft_step_kernel(
    values,
    values_stride,
    ids,
    ids_stride,
    num_slices,
    buffers,
    memory,
    STEP: tl.constexpr,
    PAST: tl.constexpr,
    HIDDEN: tl.constexpr,
    AXES: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """Grid (requests, 1); in step 0 (requests, 1 + blocks of a hidden state)."""
    b = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    first = tl.load(buffers.row_start + b).to(tl.int64)
    stop = tl.load(buffers.row_start + b + 1).to(tl.int64)
    last = tl.load(buffers.last_row + b).to(tl.int64)
    slot = tl.load(buffers.slots + b).to(tl.int64)
    has_rows = (0 <= first) & (first <= last) & (last < tl.minimum(stop, buffers.most_rows))
    has_rows = has_rows & ascends(buffers.row_start, tl.num_programs(0), REQUESTS)
    remembered = has_rows & (0 <= slot) & (slot < memory.num_slots)
    if part > 0:
        if remembered:
            start = (part - 1) * BLOCK
            _remember_hidden(buffers, memory, slot, first, last, start, PAST, HIDDEN, BLOCK)
    else:
        token = _best_id(values, values_stride, ids, ids_stride, b, num_slices, SLICES)
        draft = buffers.draft_ids.data + b * buffers.draft_ids.stride + STEP
        tl.store(draft, tl.where(has_rows, token, -1))
        if STEP == 0:
            if remembered:
                _remember_ids(buffers, memory, slot, first, last, PAST, AXES)
        if STEP < PAST:
            known = tl.load(buffers.lookahead.data + b * buffers.lookahead.stride + STEP)
            fed = tl.where(known >= 0, known, token)
            if remembered:
                tl.store(memory.assumed + slot * PAST + STEP, fed)
            if has_rows:
                _rotate(buffers.input_ids, first, last, fed, ROWS)


def draft_step(
    values: Tensor | None,
    ids: Tensor,
    step: int,
    *,
    input_ids: Tensor,
    positions: Tensor,
    hidden: Tensor,
    row_start: Tensor,
    last_row: Tensor,
    slots: Tensor,
    lookahead: Tensor,
    draft_ids: Tensor,
    kept_ids: Tensor,
    kept_hidden: Tensor,
    num_kept: Tensor,
    end: Tensor,
    assumed: Tensor,
    rope: Tensor | None = None,
    kept_rope: Tensor | None = None,
) -> None:
    """The op, see ops/draft_step.py. On CPU tensors it runs under TRITON_INTERPRET=1."""
    definition._check(**locals())
    (num_slices, num_requests), past = ids.shape, assumed.shape[1]
    if num_requests == 0:
        return
    buffers = Buffers(
        input_ids,
        positions,
        matrix(hidden),
        row_start,
        last_row,
        slots,
        matrix(lookahead),
        matrix(draft_ids),
        matrix(rope),
        input_ids.numel(),
    )
    memory = Memory(kept_ids, kept_hidden, num_kept, end, assumed, kept_rope, end.numel())
    block = min(triton.next_power_of_2(hidden.shape[1]), _BLOCK)
    blocks = triton.cdiv(hidden.shape[1], block) if step == 0 and past > 0 else 0
    with on_device(ids):
        draft_step_kernel[(num_requests, 1 + blocks)](
            values,
            0 if values is None else values.stride(0),
            ids,
            ids.stride(0),
            num_slices,
            buffers,
            memory,
            STEP=step,
            PAST=past,
            HIDDEN=hidden.shape[1],
            AXES=0 if rope is None else rope.shape[0],
            SLICES=min(triton.next_power_of_2(num_slices), _SLICES),
            BLOCK=block,
            ROWS=_ROWS,
            REQUESTS=triton.next_power_of_2(last_row.numel()),
            **_CONFIG,
        )


# 4 warps: one 16-byte load of a bfloat16 row per thread. No float is computed with.
_CONFIG = {"num_warps": 4, "enable_fp_fusion": False}
_BLOCK = 1024
_SLICES = 512
_ROWS = 128


def traffic(step: int, num_kept: int, row_bytes: int) -> tuple[int, int]:
    """Bytes of hidden states that a launch reads and writes, here and in csrc/draft_step.cuh.

    num_kept: rows that are remembered, which step 0 copies. The integers, some of a row, are left
    out.
    """
    moved = num_kept * row_bytes if step == 0 else 0
    return moved, moved
