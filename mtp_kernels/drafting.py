"""Multi-layer MTP drafting: the schedule of layers, their inputs, and the repair of their KV.

The contract, for one request. The target has hidden states h_0..h_L and the tokens t_0..t_{L+1}
are known (t_{L+1} was just sampled). MTP layer m at row j sees a hidden state of row j and the
embedding of t_{j+1+m}, attends at position j over its own KV of the rows before, and predicts
t_{j+2+m}. Row L of layer m therefore drafts t_{L+2+m}, from tokens of which the last m are
themselves drafts::

    row            L-2      L-1      L
    layer 0      t_{L-1}   t_L     t_{L+1}   -> d_1 = t_{L+2}
    layer 1      t_L     t_{L+1}    d_1      -> d_2
    layer 2      t_{L+1}   d_1      d_2      -> d_3

From one layer to the next the ids of a request rotate left by one and the newest draft is
appended; rows and positions stay. All layers run on the same rows, so one attention metadata and
one slot mapping serve the whole round.

The last m rows of layer m hold KV computed from drafts. Where verification did not confirm those
drafts, the rows are run again in the next round, in front of its new rows. With K drafts per
round, of whose first K - 1 (the ones that were fed to a layer) c agree with the tokens that are
known now, the *repair window* is the K - 1 - c rows before the first new row. Chunked prefill is
the same rule with less guessing: tokens of the prompt beyond the chunk take the place of drafts,
and are confirmed when the next chunk brings them.

Nothing here knows an engine. The engine says which rows the target ran, and runs a layer or the
head when asked to.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mtp_kernels.archs import Feed

RunLayer = Callable[[int, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
"""`run_layer(layer, ids [T], positions [T], hidden [T, H], write_kv) -> (scored, recycled)`.

`scored [T, H]` goes to the head, `recycled [T, H]` to the next layer under CHAIN: the two differ
in architectures that recycle before the final norm. With `write_kv` false the layer's KV cache
must stay as it is.
"""

DraftToken = Callable[[int, Tensor], Tensor]
"""`draft_token(step, scored [B, H]) -> ids [B]`: the head of the layer of this step."""


def layer_schedule(num_layers: int, num_drafts: int, repeat_last_layer: bool) -> list[int]:
    """The MTP layer that runs at each of `num_drafts` steps: `[0, 1, ..., num_drafts - 1]`.

    With `repeat_last_layer`, steps past the last layer run it again on its own output. That is
    an approximation outside of what the checkpoint was trained for; such steps write no KV.

    Raises:
        ValueError: more drafts than layers without `repeat_last_layer`, or a count below 1.
    """
    for name, count in (("num_layers", num_layers), ("num_drafts", num_drafts)):
        if count < 1:
            raise ValueError(f"{name}: expected at least 1, got {count}")
    if num_drafts > num_layers and not repeat_last_layer:
        raise ValueError(
            f"num_drafts: expected at most {num_layers}, the number of MTP layers in the "
            f"checkpoint, got {num_drafts}; repeat_last_layer allows more, approximately"
        )
    return [min(step, num_layers - 1) for step in range(num_drafts)]


def row_capacity(query_lens: Sequence[int], num_drafts: int) -> list[int]:
    """Rows that a round reserves per request: `max(query_len, num_drafts)`.

    A round needs the request's surviving rows plus its repair window. Surviving rows beyond the
    first confirm one assumed token each, so a window never outgrows `num_drafts` rows in all,
    and a query of `num_drafts + 1` rows, the usual one, is never widened.
    """
    return [max(query_len, num_drafts) for query_len in query_lens]


@dataclass
class RoundBuffers:
    """Inputs of one draft round at fixed addresses, as CUDA graphs want them.

    Rows are grouped by request: `row_start[b]:row_start[b + 1]` holds the repair window, then
    the new rows, then unused rows. T = `row_start[B]`.
    """

    input_ids: Tensor  # [max_rows] int, rotates from step to step
    positions: Tensor  # [max_rows] int64
    hidden: Tensor  # [max_rows, H]
    row_start: Tensor  # [max_requests + 1] int
    seq_lens: Tensor  # [max_requests] int, position of the last reserved row + 1
    last_row: Tensor  # [max_requests] int64, the row that drafts
    draft_ids: Tensor  # [max_requests, K] int64, the result

    @classmethod
    def allocate(
        cls,
        *,
        max_requests: int,
        max_rows: int,
        num_drafts: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "RoundBuffers":
        """Zeroed buffers of their own."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            input_ids=zeros(max_rows, dtype=torch.int32),
            positions=zeros(max_rows),
            hidden=zeros(max_rows, hidden_size, dtype=dtype),
            row_start=zeros(max_requests + 1, dtype=torch.int32),
            seq_lens=zeros(max_requests, dtype=torch.int32),
            last_row=zeros(max_requests),
            draft_ids=zeros(max_requests, num_drafts),
        )


class Drafter:
    """Drafts K tokens per request and round with N MTP layers, keeping their KV exact.

    A round is :meth:`assign_slots`, :meth:`pack`, then :meth:`draft`. Between rounds the drafter
    remembers, per request, what a repair needs: the ids and the target's hidden states of the
    last K - 1 rows, and the tokens that layers 1.. were fed beyond the known ones. That counts
    only for a round which begins at the row where the last one ended: a preempted request that
    starts over, or from a cached prefix, needs no repair.

    No method synchronises with the host or has shapes that depend on tensor contents.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_drafts: int,
        feed: Feed,
        num_slots: int,
        buffers: RoundBuffers,
        repeat_last_layer: bool = False,
    ) -> None:
        self.schedule = layer_schedule(num_layers, num_drafts, repeat_last_layer)
        self.feed = Feed(feed)
        self.buffers = buffers
        if buffers.draft_ids.shape[1] != num_drafts:
            raise ValueError(
                f"buffers.draft_ids: expected {num_drafts} columns, one per draft, got "
                f"{list(buffers.draft_ids.shape)}"
            )
        hidden, device = buffers.hidden, buffers.hidden.device
        max_requests, past = buffers.last_row.numel(), num_drafts - 1

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._past = past
        self._row_request = zeros(buffers.input_ids.numel())
        self._slots = torch.full((max_requests,), num_slots, device=device)
        self._lookahead = zeros(max_requests, past)
        # Per slot; the extra last one takes the writes of padding requests.
        self._kept_ids = zeros(num_slots + 1, past)
        self._kept_hidden = zeros(num_slots + 1, past, hidden.shape[1], dtype=hidden.dtype)
        self._num_kept = zeros(num_slots + 1)
        self._end = torch.full_like(self._num_kept, -1)  # row after the last one
        self._assumed = torch.full_like(self._kept_ids, -1)
        self._slot_of: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._free_slots = list(range(num_slots))

    def assign_slots(self, request_ids: Sequence[str]) -> list[int]:
        """The slot of each request; a request not seen before gets one that remembers nothing.

        Out of free slots, the request that drafted longest ago is forgotten. That one has most
        likely finished. If it comes back, rows built on drafts stay unrepaired behind it: it
        drafts a little worse, and never wrongly, since drafts are verified.

        Raises:
            ValueError: more requests than slots, or one request twice.
        """
        num_slots = self._end.numel() - 1
        if len(request_ids) > num_slots or len(set(request_ids)) < len(request_ids):
            raise ValueError(
                f"request_ids: expected at most {num_slots} different ones, got "
                f"{len(request_ids)}, {len(set(request_ids))} of them different"
            )
        for request_id in request_ids:
            if request_id in self._slot_of:
                self._slot_of.move_to_end(request_id)
        fresh = [request_id for request_id in request_ids if request_id not in self._slot_of]
        for request_id in fresh:
            slot = self._free_slots.pop() if self._free_slots else self._slot_of.popitem(False)[1]
            self._slot_of[request_id] = slot
            self._end[slot] = -1
        return [self._slot_of[request_id] for request_id in request_ids]

    def pack(
        self,
        *,
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
    ) -> None:
        """Fill the buffers with the rows of one round.

        Every request must have a row that survives, and at least :func:`row_capacity` rows
        reserved; that is in the tensors, and not checked.

        Args:
            slots: [B] int64, from :meth:`assign_slots`; -1 = padding, remembered nowhere.
            query_start: [B + 1] int, request b's rows in the target's flat tensors.
            num_rejected: [B] int, trailing rows of the query that verification rejected.
            target_ids: [Tq] int, the ids that the target ran.
            target_positions: [Tq] int64.
            target_hidden: [Tq, H], the target's hidden states, after its final norm if that is
                what the architecture's MTP layers are fed.
            next_ids: [B] int, the known token after each request's last surviving row: sampled,
                or of the prompt.
            lookahead_ids: [B, K - 1] int, the tokens after `next_ids` where the prompt has them
                already (a chunk's end), -1 = not known.
            row_start: [B + 1] int, offsets of the :func:`row_capacity` rows per request.
            num_rows: `row_start[B]`, as a host integer.

        Raises:
            ValueError: a shape that does not fit, or more requests or rows than the buffers hold.
        """
        buffers, past, device = self.buffers, self._past, slots.device
        num_requests = slots.numel()
        for name, got, expected in (
            ("query_start", query_start.shape, (num_requests + 1,)),
            ("num_rejected", num_rejected.shape, (num_requests,)),
            ("next_ids", next_ids.shape, (num_requests,)),
            ("lookahead_ids", lookahead_ids.shape, (num_requests, past)),
            ("row_start", row_start.shape, (num_requests + 1,)),
        ):
            if tuple(got) != expected:
                raise ValueError(f"{name}: expected shape {list(expected)}, got {list(got)}")
        for name, count, most in (
            ("slots", num_requests, buffers.last_row.numel()),
            ("num_rows", num_rows, buffers.input_ids.numel()),
        ):
            if count > most:
                raise ValueError(f"{name}: expected at most {most}, got {count}")
        slots = torch.where(slots >= 0, slots, self._end.numel() - 1)
        query_start, row_start = query_start.long(), row_start.long()
        first, num_new = query_start[:-1], query_start.diff() - num_rejected
        capacity = row_start.diff()

        # How many of the tokens assumed last round are confirmed by the tokens known now.
        step = torch.arange(past, device=device)
        following = (first[:, None] + 1 + step).clamp_(max=target_ids.numel() - 1)
        known = torch.where(step < num_new[:, None] - 1, target_ids[following].long(), -1)
        known = torch.where(step == num_new[:, None] - 1, next_ids.long()[:, None], known)
        confirmed = (known == self._assumed[slots]).long().cumprod(1).sum(1)

        first_position = target_positions[first]
        window = torch.minimum(past - confirmed, self._num_kept[slots])
        window = torch.where(self._end[slots] == first_position, window, 0)
        window = torch.minimum(window, capacity - num_new)

        request = torch.repeat_interleave(capacity, output_size=num_rows)
        offset = torch.arange(num_rows, device=device) - row_start[request]
        row_window = window[request]
        in_window = offset < row_window
        source = (first[request] + offset - row_window).clamp_(0, target_ids.numel() - 1)
        kept = (past - row_window + offset).clamp_(0, max(past - 1, 0))

        last_row = row_start[:-1] + window + num_new - 1
        ids = target_ids[(source + 1).clamp_(max=target_ids.numel() - 1)].long()
        hidden = target_hidden[source]
        if past:
            slot = slots[request]
            ids = torch.where(in_window, self._kept_ids[slot, kept], ids)
            hidden = torch.where(in_window[:, None], self._kept_hidden[slot, kept], hidden)
        ids[last_row] = next_ids.long()

        buffers.input_ids[:num_rows] = ids
        buffers.positions[:num_rows] = first_position[request] - row_window + offset
        buffers.hidden[:num_rows] = hidden
        buffers.row_start[: num_requests + 1] = row_start
        buffers.row_start[num_requests + 1 :] = num_rows  # padding requests have no rows
        buffers.seq_lens[:num_requests] = first_position - window + capacity
        buffers.seq_lens[num_requests:] = 0
        buffers.last_row[:num_requests] = last_row
        buffers.last_row[num_requests:] = 0
        self._row_request[:num_rows] = request
        self._slots.fill_(self._end.numel() - 1)
        self._slots[:num_requests] = slots
        self._lookahead[:num_requests] = lookahead_ids

    def draft(
        self, num_requests: int, num_rows: int, run_layer: RunLayer, draft_token: DraftToken
    ) -> Tensor:
        """Run the layers over the packed rows; returns `draft_ids[:B]`, `[B, K]` int64.

        `num_requests` and `num_rows` may exceed what :meth:`pack` was given (padding of a
        captured graph); what is drafted for padding is meaningless and remembered nowhere.
        """
        buffers = self.buffers
        ids = buffers.input_ids[:num_rows]
        positions = buffers.positions[:num_rows]
        last_row = buffers.last_row[:num_requests]
        draft_ids = buffers.draft_ids[:num_requests]
        slots = self._slots[:num_requests]
        request = self._row_request[:num_rows]
        is_last = last_row[request] == torch.arange(num_rows, device=ids.device)
        self._remember(slots, last_row, num_requests)

        final_step = len(self.schedule) - 1
        for step, layer in enumerate(self.schedule):
            hidden = buffers.hidden[:num_rows]
            # A repeated layer would overwrite its own rows with those of a deeper step.
            write_kv = step == layer
            scored, recycled = run_layer(layer, ids, positions, hidden, write_kv)
            token = draft_token(step, scored[last_row])
            draft_ids[:, step] = token
            if step == final_step:
                break
            fed = self._lookahead[:num_requests, step]
            fed = torch.where(fed >= 0, fed, token)
            self._assumed[slots, step] = fed
            ids.copy_(torch.where(is_last, fed[request].to(ids.dtype), ids.roll(-1)))
            if self.feed is Feed.CHAIN or self.schedule[step + 1] == layer:
                hidden.copy_(recycled)
        return draft_ids

    def _remember(self, slots: Tensor, last_row: Tensor, num_requests: int) -> None:
        """Keep the last K - 1 rows of each request, newest last, for the next round's repair."""
        buffers, past = self.buffers, self._past
        first_row = buffers.row_start[:num_requests]
        rows = last_row[:, None] - torch.arange(past - 1, -1, -1, device=last_row.device)
        rows = rows.clamp_(min=0)
        self._kept_ids[slots] = buffers.input_ids[rows].long()
        self._kept_hidden[slots] = buffers.hidden[rows]
        self._num_kept[slots] = (last_row + 1 - first_row).clamp_(max=past)
        self._end[slots] = buffers.positions[last_row] + 1
