"""head_argmax: lm_head and the choice of a token, without writing logits."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from cases import BENCH_KEPT, BENCH_VOCAB, BF16, HEAD_BENCH, HeadBench
from interleaved import OURS, PRUNED, VLLM, Contenders, Contest, agree, compiled
from torch import Tensor

from mtp_kernels.ops import pack_projection
from mtp_kernels.ops.head_argmax import best_ids
from suite import stock

ROWS = HEAD_BENCH
NOTES = {
    "ours, unpacked": "the weight as the checkpoint has it, without a packed copy",
    PRUNED: f"packed, {BENCH_KEPT:,} of {BENCH_VOCAB:,} rows of the weight",
    "ours, sampled": "packed; a sample at temperature 0.7 instead of the argmax",
    "torch": "F.linear and argmax, eager",
    "torch.compile": "the same, compiled for the row's shape",
    VLLM: "vLLM's linear, which is oneDNN's with its own packed weight, and argmax",
}
head_argmax = torch.ops.mtp_kernels.head_argmax.default


@dataclass(frozen=True)
class Head:
    """weight: [V, H]. kept: [V'] the ids that a pruned head scores, in `pruned`."""

    weight: Tensor
    packed: Tensor
    kept: Tensor
    pruned: Tensor
    linear: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, weight: Tensor) -> "Head":
        vocab = weight.shape[0]
        kept = torch.arange(vocab * BENCH_KEPT // BENCH_VOCAB // 16 * 16)
        kept = kept * (vocab // kept.numel())
        packed = pack_projection(weight)
        return cls(weight, packed, kept, pack_projection(weight[kept]), stock.linear(weight))

    def ours(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return head_argmax(hidden, self.packed)

    def ours_pruned(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return head_argmax(hidden, self.pruned, id_map=self.kept)

    def torch(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight).argmax(-1)


@functools.lru_cache(maxsize=2)  # the tiny one, and one that fills memory
def head_of(vocab: int, size: int) -> Head:
    gen = torch.Generator().manual_seed(0)
    return Head.of(torch.randn(vocab, size, generator=gen, dtype=BF16).mul_(size**-0.5))


def contenders_of(row: HeadBench, head: Head, hidden: Tensor) -> Contenders:
    ours = {OURS: lambda: best_ids(*head.ours(hidden))}
    if row.alone:
        return ours
    by_compiler = compiled(head.torch)
    return ours | {
        "ours, unpacked": lambda: best_ids(*head_argmax(hidden, head.weight)),
        PRUNED: lambda: best_ids(*head.ours_pruned(hidden)),
        "torch": lambda: head.torch(hidden),
        "torch.compile": lambda: by_compiler(hidden),
        VLLM: lambda: head.linear(hidden).argmax(-1),
    }


def same(ours: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(other, ours, rtol=0, atol=0)


def test_head_argmax(row: HeadBench, contest: Contest) -> None:
    head = head_of(row.V, row.H)
    gen = torch.Generator().manual_seed(1)
    winners = head.kept[torch.randint(0, head.kept.numel(), (row.T,), generator=gen)]
    # Near the weights of its winner, so that rounding does not decide, and pruning does not either.
    hidden = head.weight[winners] * row.H**0.5
    contenders = contenders_of(row, head, hidden)
    agree(contenders | {"the rows that were planted": lambda: winners}, same)
    if not row.alone:
        sampling = {
            "temperature": torch.full((row.T,), 0.7),
            "seeds": torch.arange(row.T),
            "positions": torch.arange(row.T),
        }
        contenders |= {
            "ours, sampled": lambda: best_ids(*head_argmax(hidden, head.packed, **sampling))
        }
    contest(
        "head_argmax",
        contenders,
        moved={OURS: head.packed.nbytes, PRUNED: head.pruned.nbytes},
        operations=2 * row.T * head.weight.numel(),
        read=head.packed,
        notes=NOTES,
    )
