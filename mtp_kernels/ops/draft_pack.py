"""draft_pack: the rows of one draft round, from what the target ran and what is remembered."""

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor

from mtp_kernels.ops._declare import Expect, declare


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
    """Fill a round's buffers: of each request the repair window, then its surviving rows.

    Request b gets the rows `row_start[b]:row_start[b + 1]`. A surviving row has the target's hidden
    state and position, and the id that follows in the target's query, `next_ids[b]` in the last
    one. The window before it comes from what `draft_step` has remembered of the slot: as many rows
    as the round before assumed wrong tokens from, if this round begins where that one ended. Rows
    reserved beyond are unused: id 0, hidden 0, RoPE 0, no KV slot, positions that run on.

    Integers are int32 or int64; 1-D tensors have unit stride, others may have strided rows, but the
    five from kept_ids to assumed, and kept_rope, are contiguous.

    slots: [B], each request's row of those; outside of [0, S): padding, of which nothing is
        remembered, and which has no KV slots.
    query_start: [B + 1], request b's rows in the target's flat tensors.
    num_rejected: [B], trailing rows of the query that do not survive. A request of which none
        survives is padding.
    target_ids: [Tq], the ids that the target ran. Tq >= 1 unless B = 0.
    target_positions: [Tq], index of each token in its sequence.
    target_hidden: [>= Tq, H] any dtype, the target's hidden states.
    next_ids: [B], the known token after each request's last surviving row.
    lookahead_ids: [B, K - 1], the tokens after next_ids, -1 = not known.
    row_start: [B + 1], ascending from 0 to num_rows. Taken within [0, num_rows]; one that descends
        anywhere is taken as num_rows throughout, so that no request has rows.
    num_rows: rows of this round, 0 unless B >= 1.
    kept_ids: [S, K - 1] int64, ids that layer 0 was fed in the last rows of the round before,
        newest last. kept_hidden: [S, K - 1, H], the hidden states of those rows.
    num_kept: [S] int64, how many of them there are.
    end: [S] int64, position after the last of them; -1 = nothing is remembered.
    assumed: [S, K - 1] int64, tokens that the later layers were fed beyond the known ones.
    block_tables: per KV-cache group [>= B, C >= 1], the block of each `block_sizes[g]` tokens of a
        request, negative = none. Empty: the engine maps KV slots itself.
    max_len: positions from here on have no KV slot. None: no limit but the tables'.
    target_rope: [A, Tq], positions for RoPE where they are not the target_positions (M-RoPE).
    kept_rope: [S, A, K - 1] int64, of the kept rows.

    Written, with room for R rows and M requests:
    out_ids: [R]. out_positions: [R]. out_hidden: [R, H] of target_hidden's dtype.
    out_row_start: [M + 1], row_start as taken, then num_rows.
    out_seq_lens: [M], position of the last reserved row + 1; 0 without reserved rows.
    out_last_row: [M], the row that drafts; 0 without reserved rows.
    out_slots: [M], slots, -1 = padding.
    out_lookahead: [M, K - 1], lookahead_ids, -1 for requests from B on.
    out_kv_slots: [G, R], per KV-cache group the slot of each row's token, -1 = none.
    out_rope: [A, R].
    Rows before num_rows that are no request's get id 0, position 0, hidden 0, RoPE 0, no KV slot.
    Rows from num_rows on are written in out_kv_slots only.

    K - 1, B and num_rows may be 0. Values are not checked: wrong ones give wrong rows, but nothing
    outside of the tensors is read or written. Results are the same on all backends, of whatever
    values.
    """
    _check(**locals())
    num_requests, past, device = slots.numel(), assumed.shape[1], slots.device

    row_start = torch.where(ascends(row_start), row_start.long().clamp(0, num_rows), num_rows)
    out_row_start[: num_requests + 1] = row_start
    out_row_start[num_requests + 1 :] = num_rows
    for out, padding in (
        (out_seq_lens, 0),
        (out_last_row, 0),
        (out_slots, -1),
        (out_lookahead, -1),
    ):
        out[num_requests:] = padding
    if out_kv_slots is not None:
        out_kv_slots[:] = -1
    if num_requests == 0:
        return

    num_targets = target_ids.numel()
    query_start = query_start.long().clamp(0, num_targets)
    first, capacity = query_start[:-1], row_start.diff()
    num_new = torch.minimum((query_start.diff() - num_rejected.clamp(min=0)).clamp(min=0), capacity)
    remembered = (slots >= 0) & (slots < end.numel()) & (num_new > 0)
    slot = torch.where(remembered, slots, 0).long()

    # How many of the tokens assumed last round are confirmed by the tokens known now.
    step = torch.arange(past, device=device)
    following = (first[:, None] + 1 + step).clamp(max=num_targets - 1)
    known = torch.where(step == num_new[:, None] - 1, next_ids[:, None], target_ids[following])
    agrees = (step < num_new[:, None]) & (known == assumed[slot])
    confirmed = agrees.long().cumprod(1).sum(1)

    first_position = target_positions[first.clamp(max=num_targets - 1)]
    first_position = torch.where(num_new > 0, first_position, 0).long()
    window = torch.minimum(past - confirmed, num_kept[slot])
    window = torch.minimum(window, capacity - num_new).clamp(min=0)
    window = torch.where(remembered & (end[slot] == first_position), window, 0)
    num_used = window + num_new
    last = row_start[:-1] + num_used.clamp(min=1) - 1

    reserved = capacity > 0
    out_seq_lens[:num_requests] = torch.where(reserved, first_position - window + capacity, 0)
    out_last_row[:num_requests] = torch.where(reserved, last, 0)
    out_slots[:num_requests] = torch.where(remembered, slots, -1)
    out_lookahead[:num_requests] = lookahead_ids

    row = torch.arange(num_rows, device=device)
    request = torch.searchsorted(row_start[1:], row, right=True).clamp(max=num_requests - 1)
    owned = (row_start[0] <= row) & (row < row_start[-1])
    offset = row - row_start[request]
    behind = offset - window[request]  # the first surviving row; negative in the window
    in_window, used = behind < 0, owned & (offset < num_used[request])
    source = (first[request] + behind).clamp(0, num_targets - 1)
    kept = (past + behind).clamp(0, max(past - 1, 0))

    ids = target_ids[(source + 1).clamp(max=num_targets - 1)]
    ids = torch.where(behind == num_new[request] - 1, next_ids[request], ids).long()
    hidden = target_hidden[source]
    if past:
        ids = torch.where(in_window, kept_ids[slot[request], kept], ids)
        hidden = torch.where(in_window[:, None], kept_hidden[slot[request], kept], hidden)
    positions = first_position[request] + behind
    out_ids[:num_rows] = ids.masked_fill(~used, 0)
    out_hidden[:num_rows] = hidden.masked_fill(~used[:, None], 0)
    out_positions[:num_rows] = positions.masked_fill(~owned, 0)

    if target_rope is not None and kept_rope is not None and out_rope is not None:
        rope = target_rope[:, source].long()
        if past:
            rope = torch.where(in_window, kept_rope[slot[request], :, kept].T, rope)
        out_rope[:, :num_rows] = rope.masked_fill(~used, 0)

    mapped = used & remembered[request] & (positions >= 0)
    if max_len is not None:
        mapped &= positions < max_len
    for group, (table, size) in enumerate(zip(block_tables, block_sizes, strict=True)):
        assert out_kv_slots is not None  # by _check
        column = positions // size
        block = table[request, column.clamp(0, table.shape[1] - 1)].long()
        inside = mapped & (column < table.shape[1]) & (block >= 0)
        out_kv_slots[group, :num_rows] = torch.where(inside, block * size + positions % size, -1)


def ascends(starts: Tensor) -> Tensor:
    """Whether no start is below the one before it; a bool tensor of one element."""
    return (starts[1:] >= starts[:-1]).all()


def _check(
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
    max_len: int | None,
    out_kv_slots: Tensor | None,
    target_rope: Tensor | None,
    kept_rope: Tensor | None,
    out_rope: Tensor | None,
) -> None:
    """The checks of csrc/draft_args.h, with the same messages."""
    expect = Expect("draft_pack", slots)
    expect.that(assumed.dim() == 2, f"assumed expected shape [S, K - 1], got {list(assumed.shape)}")
    num_requests, past, num_targets = slots.numel(), assumed.shape[1], target_ids.numel()
    most_requests, most_rows = out_last_row.numel(), out_ids.numel()
    for name, x, shape in (
        ("slots", slots, [num_requests]),
        ("query_start", query_start, [num_requests + 1]),
        ("num_rejected", num_rejected, [num_requests]),
        ("target_ids", target_ids, [num_targets]),
        ("target_positions", target_positions, [num_targets]),
        ("next_ids", next_ids, [num_requests]),
        ("lookahead_ids", lookahead_ids, [num_requests, past]),
        ("row_start", row_start, [num_requests + 1]),
        ("out_ids", out_ids, [most_rows]),
        ("out_positions", out_positions, [most_rows]),
        ("out_row_start", out_row_start, [most_requests + 1]),
        ("out_seq_lens", out_seq_lens, [most_requests]),
        ("out_last_row", out_last_row, [most_requests]),
        ("out_slots", out_slots, [most_requests]),
        ("out_lookahead", out_lookahead, [most_requests, past]),
    ):
        ints(expect, name, x, *shape)
    expect.that(
        num_targets >= 1 or num_requests == 0,
        "target_ids expected a row for the requests, got none",
    )
    for name, count, most in (
        ("slots", num_requests, most_requests),
        ("num_rows", num_rows, most_rows if num_requests else 0),
    ):
        expect.that(0 <= count <= most, f"{name} expected at most {most}, got {count}")
    expect.device("target_hidden", target_hidden)
    expect.that(
        target_hidden.dim() == 2 and target_hidden.shape[0] >= num_targets,
        f"target_hidden expected shape [>= {num_targets}, H], got {list(target_hidden.shape)}",
    )
    expect.unit_stride("target_hidden", target_hidden)
    expect.tensor("out_hidden", out_hidden, target_hidden.dtype, most_rows, target_hidden.shape[1])
    check_memory(expect, past, target_hidden, kept_ids, kept_hidden, num_kept, end, assumed)

    ropes = (target_rope, kept_rope, out_rope)
    expect.that(
        all(x is None for x in ropes) or all(x is not None for x in ropes),
        "target_rope, kept_rope and out_rope expected all or none",
    )
    if target_rope is not None and kept_rope is not None and out_rope is not None:
        expect.that(
            target_rope.dim() == 2,
            f"target_rope expected shape [A, Tq], got {list(target_rope.shape)}",
        )
        axes = target_rope.shape[0]
        ints(expect, "target_rope", target_rope, axes, num_targets)
        ints(expect, "out_rope", out_rope, axes, most_rows)
        contiguous(expect, "kept_rope", kept_rope, torch.int64, end.numel(), axes, past)

    groups = len(block_tables)
    expect.that(
        len(block_sizes) == groups and (out_kv_slots is not None or groups == 0),
        f"block_sizes and out_kv_slots expected one for each of {groups} block_tables",
    )
    if out_kv_slots is not None:
        ints(expect, "out_kv_slots", out_kv_slots, groups, most_rows)
    for table, size in zip(block_tables, block_sizes, strict=True):
        expect.device("block_tables", table)
        expect.dtype("block_tables", table, torch.int32)
        expect.that(
            table.dim() == 2 and table.shape[0] >= num_requests and table.shape[1] >= 1,
            f"block_tables expected shape [>= {num_requests}, C >= 1], got {list(table.shape)}",
        )
        expect.unit_stride("block_tables", table)
        expect.that(size >= 1, f"block_sizes expected a number >= 1, got {size}")


def ints(expect: Expect, name: str, x: Tensor, *shape: int) -> None:
    expect.device(name, x)
    expect.dtype(name, x, torch.int32, torch.int64)
    expect.shape(name, x, *shape)
    expect.unit_stride(name, x)


def check_memory(
    expect: Expect,
    past: int,
    hidden: Tensor,
    kept_ids: Tensor,
    kept_hidden: Tensor,
    num_kept: Tensor,
    end: Tensor,
    assumed: Tensor,
) -> None:
    """What draft_pack reads and draft_step writes, per slot; csrc/draft_args.h says the same."""
    num_slots = end.numel()
    expect.that(num_slots >= 1, "end expected at least one slot, got none")
    contiguous(expect, "kept_ids", kept_ids, torch.int64, num_slots, past)
    contiguous(expect, "kept_hidden", kept_hidden, hidden.dtype, num_slots, past, hidden.shape[-1])
    contiguous(expect, "num_kept", num_kept, torch.int64, num_slots)
    contiguous(expect, "end", end, torch.int64, num_slots)
    contiguous(expect, "assumed", assumed, torch.int64, num_slots, past)


def contiguous(expect: Expect, name: str, x: Tensor, dtype: torch.dtype, *shape: int) -> None:
    expect.tensor(name, x, dtype, *shape)
    expect.that(x.is_contiguous(), f"{name} expected a contiguous tensor")


OP = declare(
    draft_pack,
    mutates_args=[
        name for name in inspect.signature(draft_pack).parameters if name.startswith("out_")
    ],
    triton="mtp_kernels.kernels.draft_pack:draft_pack",
)
