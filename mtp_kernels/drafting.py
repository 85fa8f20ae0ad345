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
one slot mapping serve the whole round. Under TARGET a row's output is needed only where it drafts:
the rest of the rows stop behind the attention of each layer, a prompt's as well.

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

from mtp_kernels import ops
from mtp_kernels.archs import Feed

RunLayer = Callable[[int, Tensor, Tensor, Tensor, Tensor | None, bool], tuple[Tensor, Tensor]]
"""`run_layer(layer, ids [T], positions [T], hidden [T, H], rows, write_kv) -> (scored, recycled)`.

`scored` goes to the head, `recycled` to the next layer under CHAIN: the two differ in architectures
that recycle before the final norm. `rows [B]` are the rows to return of both, `[B, H]`; None: all,
`[T, H]`. Other rows than those are there for their KV alone: what follows the layer's attention
need not be run on them. With `write_kv` false the layer's KV cache must stay as it is. Where the
buffers have `rope`, that is what `positions` are, [A, T].
"""

DraftToken = Callable[[int, Tensor], Tensor | tuple[Tensor, Tensor]]
"""`draft_token(step, scored [B, H]) -> ids [B]`: the head of the layer of this step.

Or `-> (values [S, B], ids [S, B])`, the winners of S slices of the vocabulary, of all ranks.
"""


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
    kv_slots: Tensor | None = None  # [KV-cache groups, max_rows] int64, -1 = the row holds no token
    rope: Tensor | None = None  # [A, max_rows] int64, positions for RoPE where they are others

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
        kv_groups: int = 0,
        rope_axes: int = 0,
    ) -> "RoundBuffers":
        """Zeroed buffers of their own; without kv_groups or rope_axes those two are None."""

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
            kv_slots=zeros(kv_groups, max_rows) if kv_groups else None,
            rope=zeros(rope_axes, max_rows) if rope_axes else None,
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

        def full(value: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        # Of the round in the buffers, at fixed addresses too.
        self._slots = full(-1, max_requests)
        self._lookahead = full(-1, max_requests, past)
        # Of the last round, per slot. draft_pack reads it, draft_step writes it.
        self._memory = {
            "kept_ids": full(0, num_slots, past),
            "kept_hidden": full(0, num_slots, past, hidden.shape[1], dtype=hidden.dtype),
            "num_kept": full(0, num_slots),
            "end": full(-1, num_slots),
            "assumed": full(-1, num_slots, past),
            "kept_rope": None
            if buffers.rope is None
            else full(0, num_slots, buffers.rope.shape[0], past),
        }
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
        num_slots = self._memory["end"].numel()
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
            self._memory["end"].narrow(0, slot, 1).fill_(-1)
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
        block_tables: Sequence[Tensor] = (),
        block_sizes: Sequence[int] = (),
        max_len: int | None = None,
        target_rope: Tensor | None = None,
    ) -> None:
        """Fill the buffers with the rows of one round, in one launch: `ops.draft_pack`.

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
            block_tables: per KV-cache group [B, C] int32; with them `buffers.kv_slots` is filled.
            block_sizes: tokens per block of each group.
            max_len: no KV slot for positions from here on.
            target_rope: [A, Tq] int, for `buffers.rope` (M-RoPE).

        Raises:
            RuntimeError: a shape that does not fit, or more requests or rows than the buffers hold.
        """
        buffers = self.buffers
        ops.draft_pack.OP(
            slots,
            query_start,
            num_rejected,
            target_ids,
            target_positions,
            target_hidden,
            next_ids,
            lookahead_ids,
            row_start,
            num_rows,
            **self._memory,
            out_ids=buffers.input_ids,
            out_positions=buffers.positions,
            out_hidden=buffers.hidden,
            out_row_start=buffers.row_start,
            out_seq_lens=buffers.seq_lens,
            out_last_row=buffers.last_row,
            out_slots=self._slots,
            out_lookahead=self._lookahead,
            block_tables=block_tables,
            block_sizes=block_sizes,
            max_len=max_len,
            out_kv_slots=buffers.kv_slots,
            target_rope=target_rope,
            out_rope=buffers.rope,
        )

    def draft(
        self, num_requests: int, num_rows: int, run_layer: RunLayer, draft_token: DraftToken
    ) -> Tensor:
        """Run the layers over the packed rows; returns `draft_ids[:B]`, `[B, K]` int64.

        Between two layers there is one launch, `ops.draft_step`, and under CHAIN the gather of the
        rows to score and the copy of the recycled hidden states, which a repeated layer has as
        well. Layers must not write into the hidden states they are given: the first step remembers
        them.

        `num_requests` and `num_rows` may exceed what :meth:`pack` was given (padding of a
        captured graph); what is drafted for padding is meaningless and remembered nowhere.
        """
        buffers = self.buffers
        ids, hidden = buffers.input_ids[:num_rows], buffers.hidden[:num_rows]
        positions = buffers.positions if buffers.rope is None else buffers.rope
        positions = positions[..., :num_rows]
        last_row = buffers.last_row[:num_requests]
        for step, layer in enumerate(self.schedule):
            # A repeated layer would overwrite its own rows with those of a deeper step.
            write_kv = step == layer
            following = self.schedule[step + 1 : step + 2]
            chained = bool(following) and self.feed is Feed.CHAIN
            rows = None if chained else last_row
            scored, recycled = run_layer(layer, ids, positions, hidden, rows, write_kv)
            drafted = draft_token(step, scored[last_row] if chained else scored)
            values, winners = drafted if isinstance(drafted, tuple) else (None, drafted[None])
            ops.draft_step.OP(
                values,
                winners,
                step,
                **self._memory,
                input_ids=buffers.input_ids,
                positions=buffers.positions,
                hidden=buffers.hidden,
                row_start=buffers.row_start,
                last_row=buffers.last_row,
                slots=self._slots,
                lookahead=self._lookahead,
                draft_ids=buffers.draft_ids,
                rope=buffers.rope,
            )
            if chained:
                hidden.copy_(recycled)
            elif following == [layer]:  # which writes no KV: nothing comes of the other rows
                hidden[last_row] = recycled
        return buffers.draft_ids[:num_requests]
