"""draft_step: what happens between two MTP layers, once per drafted token."""

import torch
from torch import Tensor

from mtp_kernels.ops._declare import Expect, declare
from mtp_kernels.ops.draft_pack import ascends, check_memory, contiguous, ints
from mtp_kernels.ops.head_argmax import best_ids


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
    """Make step's draft of each request, and shift it into the ids that the next layer is fed.

    Step 0 also remembers, per slot, what the next round's `draft_pack` needs: the last K - 1 rows,
    as layer 0 was fed them. So the rows must still be those that `draft_pack` made.

    Integers are int32 or int64; 1-D tensors have unit stride, others may have strided rows.

    values, ids: [S, B] float32 and integers, the winner of each of S >= 1 slices of the vocabulary,
        of all ranks. The highest value wins, the lowest id of equals; NaN counts as -inf; the
        largest int64 is no id, and 0 drafted where a request has nothing else. values None: S = 1.
    step: 0 to K - 1; nothing is shifted in the last one.
    input_ids: [R], written: of each request's rows up to its last, the ids move up by one, and the
        last row gets the token that the next layer is fed: lookahead's where known, else the draft.
    positions: [R]. hidden: [R, H], any dtype. rope: [A, R]. Read in step 0, like row_start.
    row_start: [M + 1], M >= B. last_row: [M]. slots: [M]. lookahead: [M, K - 1]. As `draft_pack`
        made them. Where the first B + 1 of row_start descend anywhere, no request has rows. No two
        requests share a slot.
    draft_ids: [M, K], column step is written for B requests; -1 for requests without rows.
    kept_ids, kept_hidden, num_kept, end, kept_rope: as in `draft_pack`, written in step 0 for the
        slots of this round, and of the kept tensors only as many rows as there are.
    assumed: [S, K - 1] int64, column step is written for the same slots: the tokens fed.

    B and K - 1 may be 0. Values are not checked: nothing outside of the tensors is read or written.
    Results are the same on all backends, of whatever values but two requests with one slot.
    """
    _check(**locals())
    num_requests, past = ids.shape[1], lookahead.shape[1]
    if num_requests == 0:
        return
    token = _best(values, ids)
    row_start, last = row_start[: num_requests + 1].long(), last_row[:num_requests].long()
    first = row_start[:-1]
    has_rows = ascends(row_start) & (first <= last) & (last < row_start[1:])
    has_rows &= (first >= 0) & (last < input_ids.numel())
    draft_ids[:num_requests, step] = torch.where(has_rows, token, -1)

    slot = slots[:num_requests].long()
    remembered = has_rows & (slot >= 0) & (slot < end.numel())
    slot = torch.where(remembered, slot, end.numel())

    def put(to: Tensor, new: Tensor) -> None:
        """Rows of the slots; other requests write one row past the end."""
        padded = torch.cat([to, to[:1]])
        padded[slot] = new.to(to.dtype)
        to.copy_(padded[:-1])

    if step == 0:
        age = torch.arange(past - 1, -1, -1, device=ids.device)
        rows = last[:, None] - age
        keeps = rows >= first[:, None]
        rows = rows.clamp(0, input_ids.numel() - 1)
        old = slot.clamp(max=end.numel() - 1)
        put(kept_ids, torch.where(keeps, input_ids[rows], kept_ids[old]))
        put(kept_hidden, torch.where(keeps[:, :, None], hidden[rows], kept_hidden[old]))
        put(num_kept, (last + 1 - first).clamp(max=past))
        put(end, positions[last.clamp(0, input_ids.numel() - 1)].long() + 1)
        if rope is not None and kept_rope is not None:
            new = rope[:, rows].transpose(0, 1)
            put(kept_rope, torch.where(keeps[:, None], new, kept_rope[old]))
    if step == past:
        return

    fed = lookahead[:num_requests, step]
    fed = torch.where(fed >= 0, fed, token)
    put(assumed[:, step], fed)
    row = torch.arange(input_ids.numel(), device=ids.device)
    request = torch.searchsorted(row_start[1:], row, right=True).clamp(max=num_requests - 1)
    last = last[request]
    moved = has_rows[request] & (first[request] <= row) & (row <= last)
    new = torch.where(row == last, fed[request], input_ids.roll(-1))
    input_ids.copy_(torch.where(moved, new, input_ids))


def _best(values: Tensor | None, ids: Tensor) -> Tensor:
    if values is None:
        values = torch.zeros(ids.shape, device=ids.device)
    return best_ids(torch.where(values.isnan(), -torch.inf, values), ids.long())


def _check(
    values: Tensor | None,
    ids: Tensor,
    step: int,
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
    rope: Tensor | None,
    kept_rope: Tensor | None,
) -> None:
    """The checks of csrc/draft_args.h, with the same messages."""
    expect = Expect("draft_step", ids)
    ok = ids.dim() == 2 and ids.shape[0] >= 1 and (values is not None or ids.shape[0] == 1)
    wanted = "[1, B]" if values is None else "[S >= 1, B]"
    expect.that(ok, f"ids expected shape {wanted}, got {list(ids.shape)}")
    expect.that(
        draft_ids.dim() == 2 and draft_ids.shape[1] >= 1,
        f"draft_ids expected shape [M, K >= 1], got {list(draft_ids.shape)}",
    )
    (slices, num_requests), (most_requests, num_drafts) = ids.shape, draft_ids.shape
    most_rows, past = input_ids.numel(), num_drafts - 1
    expect.that(
        num_requests <= most_requests, f"ids expected B <= {most_requests}, got {list(ids.shape)}"
    )
    expect.that(0 <= step < num_drafts, f"step expected 0 to {num_drafts - 1}, got {step}")
    if values is not None:
        expect.tensor("values", values, torch.float32, slices, num_requests)
    for name, x, shape in (
        ("ids", ids, [slices, num_requests]),
        ("input_ids", input_ids, [most_rows]),
        ("positions", positions, [most_rows]),
        ("row_start", row_start, [most_requests + 1]),
        ("last_row", last_row, [most_requests]),
        ("slots", slots, [most_requests]),
        ("lookahead", lookahead, [most_requests, past]),
        ("draft_ids", draft_ids, [most_requests, num_drafts]),
    ):
        ints(expect, name, x, *shape)
    expect.that(most_rows >= 1, "input_ids expected at least one row, got none")
    expect.that(
        hidden.dim() == 2, f"hidden expected shape [{most_rows}, H], got {list(hidden.shape)}"
    )
    expect.tensor("hidden", hidden, hidden.dtype, most_rows, hidden.shape[1])
    check_memory(expect, past, hidden, kept_ids, kept_hidden, num_kept, end, assumed)
    expect.that(
        (rope is None) == (kept_rope is None), "rope and kept_rope expected both or neither"
    )
    if rope is not None and kept_rope is not None:
        expect.that(rope.dim() == 2, f"rope expected shape [A, R], got {list(rope.shape)}")
        ints(expect, "rope", rope, rope.shape[0], most_rows)
        contiguous(expect, "kept_rope", kept_rope, torch.int64, end.numel(), rope.shape[0], past)


OP = declare(
    draft_step,
    mutates_args=[
        "input_ids",
        "draft_ids",
        "kept_ids",
        "kept_hidden",
        "num_kept",
        "end",
        "assumed",
        "kept_rope",
    ],
    triton="mtp_kernels.kernels.draft_step:draft_step",
)
