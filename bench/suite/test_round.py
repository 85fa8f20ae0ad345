"""A draft round without its layers' attention and MLP: what lies between layers, entry, head."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from cases import BF16, ROUND_BENCH, TOLERANCES, RoundBench
from interleaved import OURS, PRUNED, VLLM, Contest
from torch import Tensor
from vllm.forward_context import set_forward_context

from mtp_kernels.archs import Feed
from mtp_kernels.drafting import Drafter, RoundBuffers
from suite import stock
from suite.test_entry import Weights
from suite.test_head_argmax import Head, head_of

ROWS = ROUND_BENCH
NOTES = {
    PRUNED: "the same with the pruned head",
    VLLM: "its own propose: its one layer runs K times, on all rows and then on one a request; "
    "entry, head and their linear as above. Ours runs K layers, each on all rows",
}


class Round:
    """What the target has given, after which a round drafts: B requests of K + 1 rows each."""

    def __init__(self, row: RoundBench) -> None:
        gen = torch.Generator().manual_seed(3)
        self.row, self.num_rows = row, row.B * (row.K + 1)
        self.query_start = torch.arange(0, self.num_rows + 1, row.K + 1, dtype=torch.int32)
        self.num_rejected = torch.randint(0, row.K + 1, (row.B,), generator=gen, dtype=torch.int32)
        self.ids = torch.randint(0, row.V, (self.num_rows,), generator=gen, dtype=torch.int32)
        self.next_ids = torch.randint(0, row.V, (row.B,), generator=gen, dtype=torch.int32)
        self.positions = 100 + torch.arange(self.num_rows) % (row.K + 1)
        self.hidden = torch.randn(self.num_rows, row.H, generator=gen).to(BF16)
        blocks = stock.MAX_LEN // stock.BLOCK
        self.table = torch.arange(row.B * blocks, dtype=torch.int32).view(row.B, blocks)
        self.last_rows = self.query_start[1:] - 1 - self.num_rejected

    def ours(
        self, layers: list[Weights], choose: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> Callable[[], Tensor]:
        row, config = self.row, stock.VllmConfig()
        buffers = RoundBuffers.allocate(
            max_requests=row.B,
            max_rows=self.num_rows,
            num_drafts=row.K,
            hidden_size=row.H,
            dtype=BF16,
            device=torch.device("cpu"),
            kv_groups=1,
        )
        drafter = Drafter(
            num_layers=row.K,
            num_drafts=row.K,
            feed=Feed.TARGET,
            num_slots=row.B,
            buffers=buffers,
        )
        slots, lookahead = torch.arange(row.B), torch.full((row.B, row.K - 1), -1)

        def run_layer(
            layer: int,
            ids: Tensor,
            positions: Tensor,
            hidden: Tensor,
            rows: Tensor,
            write_kv: bool,
        ) -> tuple[Tensor, Tensor]:
            with set_forward_context({}, config, num_tokens=self.num_rows):  # as vLLM's loop does
                out = layers[layer].ours(ids, hidden)[rows]
            return out, out

        def call() -> Tensor:
            drafter.pack(
                slots=slots,
                query_start=self.query_start,
                num_rejected=self.num_rejected,
                target_ids=self.ids,
                target_positions=self.positions,
                target_hidden=self.hidden,
                next_ids=self.next_ids,
                lookahead_ids=lookahead,
                row_start=self.query_start,
                num_rows=self.num_rows,
                block_tables=[self.table],
                block_sizes=[stock.BLOCK],
                max_len=stock.MAX_LEN,
            )
            return drafter.draft(
                row.B, self.num_rows, run_layer, lambda step, scored: choose(scored)
            )

        return call

    def vllm(self, layer: Weights, head: Head) -> Callable[[], Tensor]:
        row = self.row
        seq_lens = (self.positions[row.K :: row.K + 1] + 1).int()
        model = stock.Model(layer.vllm(), head.linear)
        proposer = stock.Proposer(model, row.K, self.num_rows, row.H)
        sampling: Any = None  # is not looked at where drafts are greedy
        return lambda: proposer.propose(
            row.K,
            self.ids,
            self.positions,
            self.hidden,
            self.next_ids,
            self.last_rows,
            stock.metadata(self.query_start, seq_lens, self.table),
            sampling,
            num_rejected_tokens_gpu=self.num_rejected,
        )

    def first_logits(self, layer: Weights, head: Head) -> Tensor:
        """Of each request's first draft, [B, V], the layer and the head by torch."""
        scored = layer.torch(self.next_ids, self.hidden[self.last_rows])
        return F.linear(scored, head.weight).float()


def check(drafts: Tensor, logits: Tensor) -> None:
    """First drafts, which are of the same layer for all, are best up to the rounding of logits."""
    reached = logits.gather(1, drafts[:, :1])[:, 0]
    rtol, atol = TOLERANCES[BF16]
    torch.testing.assert_close(reached, logits.amax(1), rtol=4 * rtol, atol=4 * atol)


def test_round(row: RoundBench, contest: Contest) -> None:
    one, head = Round(row), head_of(row.V, row.H)
    # The head's weight is the embedding table too: one row for every id, and no more memory.
    layers = [Weights.draw(row.H, head.weight, seed) for seed in range(row.K)]
    contenders = {
        OURS: one.ours(layers, head.ours),
        PRUNED: one.ours(layers, head.ours_pruned),
        VLLM: one.vllm(layers[0], head),
    }
    logits = one.first_logits(layers[0], head)
    kept = torch.full_like(logits, -torch.inf).index_copy(1, head.kept, logits[:, head.kept])
    for name, call in contenders.items():
        check(call(), kept if name == PRUNED else logits)
    entry, whole, pruned = layers[0].proj.nbytes, head.packed.nbytes, head.pruned.nbytes
    contest(
        "draft round",
        contenders,
        moved={OURS: row.K * (entry + whole), PRUNED: row.K * (entry + pruned)},
        read=head.packed,
        notes=NOTES,
    )
