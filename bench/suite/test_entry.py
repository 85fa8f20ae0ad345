"""entry: embedding, two norms, concat and projection."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from cases import BF16, ENTRY_BENCH, TOLERANCES, EntryBench
from interleaved import OURS, VLLM, Contenders, Contest, agree, compiled
from torch import Tensor

from mtp_kernels.ops import pack_projection
from suite import stock

ROWS = ENTRY_BENCH
EPS, TABLE = 1e-6, 8192  # rows of the embedding table: enough of them to be read from memory
NOTES = {
    "torch": "F.embedding, F.rms_norm, cat and F.linear, eager",
    "torch.compile": "the same, compiled for the row's shape",
    VLLM: "F.embedding, vLLM's C++ rms_norm, cat and vLLM's linear, which is oneDNN's with its "
    "own packed weight: our reading of its MTP layer",
}


@dataclass(frozen=True)
class Weights:
    """Of one MTP layer. proj: [H, 2H]; packed: for our kernel; project: vLLM's linear of it."""

    table: Tensor
    enorm: Tensor
    hnorm: Tensor
    proj: Tensor
    packed: Tensor
    project: Callable[[Tensor], Tensor]

    @classmethod
    def draw(cls, size: int, table: Tensor, seed: int = 0) -> "Weights":
        gen = torch.Generator().manual_seed(seed)

        def randn(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(shape, generator=gen, dtype=BF16).mul_(scale)

        proj = randn(size, 2 * size, scale=(2 * size) ** -0.5)
        gains = [1 + randn(size, scale=0.1) for _ in range(2)]
        return cls(table, *gains, proj, pack_projection(proj), stock.linear(proj))

    def ours(self, ids: Tensor, hidden: Tensor) -> Tensor:
        return torch.ops.mtp_kernels.entry(
            hidden,
            self.enorm,
            self.hnorm,
            self.packed,
            input_ids=ids,
            embed_weight=self.table,
            enorm_eps=EPS,
            hnorm_eps=EPS,
        )

    def torch(self, ids: Tensor, hidden: Tensor) -> Tensor:
        size = hidden.shape[-1:]
        embedding = F.rms_norm(F.embedding(ids, self.table), size, self.enorm, EPS)
        halves = [embedding, F.rms_norm(hidden, size, self.hnorm, EPS)]
        return F.linear(torch.cat(halves, dim=-1), self.proj)

    def vllm(self) -> Callable[[Tensor, Tensor], Tensor]:
        return stock.entry(self.table, self.enorm, self.hnorm, self.project, EPS)


@functools.lru_cache(maxsize=1)
def weights_of(size: int) -> Weights:
    gen = torch.Generator().manual_seed(1)
    return Weights.draw(size, torch.randn(TABLE, size, generator=gen, dtype=BF16).mul_(0.05))


def contenders_of(row: EntryBench, weights: Weights, ids: Tensor, hidden: Tensor) -> Contenders:
    ours = {OURS: lambda: weights.ours(ids, hidden)}
    if row.alone:
        return ours
    by_compiler, by_vllm = compiled(weights.torch), weights.vllm()
    return ours | {
        "torch": lambda: weights.torch(ids, hidden),
        "torch.compile": lambda: by_compiler(ids, hidden),
        VLLM: lambda: by_vllm(ids, hidden),
    }


def same(ours: Tensor, other: Tensor) -> None:
    rtol, atol = TOLERANCES[BF16]
    # Two roundings of a normed value apart, times weights of about 1/sqrt(2H): sums of outputs ~ 1.
    torch.testing.assert_close(other, ours, rtol=4 * rtol, atol=4 * atol)


def test_entry(row: EntryBench, contest: Contest) -> None:
    weights = weights_of(row.H)
    gen = torch.Generator().manual_seed(2)
    ids = torch.randint(0, TABLE, (row.T,), generator=gen)
    hidden = torch.randn(row.T, row.H, generator=gen).mul_(3).to(BF16)
    contenders = contenders_of(row, weights, ids, hidden)
    agree(contenders, same)
    contest(
        "entry",
        contenders,
        moved=weights.proj.nbytes + 3 * hidden.nbytes,
        operations=2 * row.T * weights.proj.numel(),
        read=weights.packed,
        notes=NOTES,
    )
