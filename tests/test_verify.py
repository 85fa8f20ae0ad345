"""verify: the law of its tokens, enumerated and sampled, and the cases that broke other engines."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mtp_kernels.ops import verify as op


def softmax_of(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> Tensor:
    """The law a row of logits stands for, in float64 and by sorting: not the way the op does it."""
    x = logits.double() / temperature
    p = x.softmax(-1)
    p = torch.where(p >= min_p * p.max(), p, 0)
    if 0 < top_k < p.numel():
        p = torch.where(p >= p.sort(descending=True).values[top_k - 1], p, 0)
    p = p / p.sum()
    above = torch.tensor([float(p[p > one].sum()) for one in p])
    p = torch.where(above < top_p, p, 0)
    return p / p.sum()


class Scripted(op.Request):
    """A request whose coins and draws are decided by a script; notes how likely each was."""

    def __init__(self, script: list[int], b: int, **inputs: Any) -> None:
        self.script, self.step, self.chance = script, 0, 1.0
        self.sizes: list[int] = []  # how many choices each decision had
        super().__init__(b, **inputs)

    def _decide(self, chances: list[float]) -> int:
        """The script's choice, the first possible one where the script has ended."""
        possible = [i for i, chance in enumerate(chances) if chance > 0]
        if self.step == len(self.script):
            self.script = [*self.script, 0]
        self.sizes.append(len(possible))
        choice = possible[self.script[self.step]]
        self.step += 1
        self.chance *= chances[choice]
        return choice

    def accepts(self, i: int, p: float, q: float = 1.0) -> bool:
        passing = min(1.0, p / q) if q > 0 else float(p > 0)
        return self._decide([1 - passing, passing]) == 1

    def draw(self, i: int, law: op.Law) -> int:
        law = law if law.masses.sum() > 0 else self.target(i)
        blocks = law.masses.double() / law.masses.sum().double()
        lanes = law.weights.double() / law.weights.sum(1, keepdim=True).double()
        return self._decide((blocks[:, None] * lanes).nan_to_num().flatten().tolist())


def outcomes(method: str, inputs: dict[str, Any]) -> Iterator[tuple[list[int], float]]:
    """Every round that can happen to request 0: the emitted tokens, and their probability."""
    script: list[int] = []
    while True:
        request = Scripted(script, 0, **inputs)
        accepted, last = op.VERIFY[method](request)
        yield [*request.drafts[:accepted], last], request.chance
        script = request.script[: request.step]
        while script and script[-1] + 1 == request.sizes[len(script) - 1]:
            script.pop()
        if not script:
            return
        script[-1] += 1


DEFAULTS = dict.fromkeys(
    (
        "top_k top_p min_p draft_logits draft_rows allowed_mask bias_ids bias_values penalty_rows "
        "output_counts prompt_mask presence_penalty frequency_penalty repetition_penalty "
        "synthetic_rates"
    ).split()
) | {"draft_kind": "logits", "method": "standard", "stream": "target"}

FILTERS = {  # name -> top_k, top_p, min_p
    "plain": (0, 1.0, 0.0),
    "top_k": (3, 1.0, 0.0),
    "top_p": (0, 0.8, 0.0),
    "min_p": (0, 1.0, 0.2),
    "all": (4, 0.9, 0.1),
}


class Tree:
    """Random logits of target and draft after every prefix of up to K tokens."""

    def __init__(self, vocab: int, num_drafts: int, seed: int, filters: str) -> None:
        gen = torch.Generator().manual_seed(seed)
        self.vocab, self.num_drafts = vocab, num_drafts
        self.temperature, self.filters = 0.7, FILTERS[filters]
        self.logits: dict[tuple[int, ...], Tensor] = {}
        self.draft_logits: dict[tuple[int, ...], Tensor] = {}
        for length in range(num_drafts + 1):
            for prefix in itertools.product(range(vocab), repeat=length):
                self.logits[prefix] = torch.randn(vocab, generator=gen)
                self.draft_logits[prefix] = torch.randn(vocab, generator=gen)
        self.p = {prefix: self._law(x) for prefix, x in self.logits.items()}
        self.q = {prefix: self._law(x) for prefix, x in self.draft_logits.items()}

    def _law(self, x: Tensor) -> list[float]:
        return softmax_of(x, self.temperature, *self.filters).tolist()

    def inputs(self, drafts: tuple[int, ...], kind: str | None) -> dict[str, Any]:
        prefixes = [drafts[:i] for i in range(self.num_drafts + 1)]
        top_k, top_p, min_p = self.filters
        given: dict[str, Any] = {}
        if kind == "filtered_logits":
            given["draft_logits"] = torch.stack([self.draft_logits[x] for x in prefixes[:-1]])
        elif kind == "probs":
            given["draft_logits"] = torch.tensor([self.q[x] for x in prefixes[:-1]])
        return (
            DEFAULTS
            | {
                "logits": torch.stack([self.logits[prefix] for prefix in prefixes]),
                "draft_ids": torch.tensor([drafts], dtype=torch.int64).view(1, self.num_drafts),
                "cu_rows": torch.tensor([0, self.num_drafts + 1]),
                "positions": torch.arange(self.num_drafts + 1),
                "temperature": torch.tensor([self.temperature]),
                "seeds": torch.tensor([1]),
                "top_k": torch.tensor([top_k]),
                "top_p": torch.tensor([top_p]),
                "min_p": torch.tensor([min_p]),
                "draft_kind": kind or "logits",
            }
            | given
        )

    def continued(self, tokens: list[int]) -> Iterator[tuple[tuple[int, ...], float]]:
        """Sequences of K + 1 tokens that start with these, and their chance under the target."""
        if len(tokens) == self.num_drafts + 1:
            yield tuple(tokens), 1.0
            return
        for token, chance in enumerate(self.p[tuple(tokens)]):
            for sequence, rest in self.continued([*tokens, token]):
                yield sequence, chance * rest

    def check(self, law: dict[tuple[int, ...], float]) -> None:
        assert sum(law.values()) == pytest.approx(1, abs=1e-6)
        for sequence, chance in self.continued([]):
            assert law.get(sequence, 0.0) == pytest.approx(chance, abs=1e-6), sequence


def law_over_drafts(
    tree: Tree, method: str, kind: str
) -> tuple[dict[tuple[int, ...], float], float]:
    """The law of K + 1 tokens, of which verify gave the first, and the mean accepted count."""
    law: dict[tuple[int, ...], float] = {}
    mean = 0.0
    for drafts in itertools.product(range(tree.vocab), repeat=tree.num_drafts):
        drafted = math.prod(tree.q[drafts[:i]][x] for i, x in enumerate(drafts))
        if drafted == 0:
            continue
        for tokens, chance in outcomes(method, tree.inputs(drafts, kind)):
            mean += drafted * chance * (len(tokens) - 1)
            for sequence, rest in tree.continued(tokens):
                law[sequence] = law.get(sequence, 0.0) + drafted * chance * rest
    return law, mean


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("vocab, num_drafts", [(6, 1), (6, 2), (3, 3)])
def test_law_with_sampled_drafts(vocab: int, num_drafts: int, method: str, filters: str) -> None:
    """Exact enumeration: whatever was drafted, the tokens have the target's law."""
    tree = Tree(vocab, num_drafts, seed=vocab + num_drafts, filters=filters)
    law, _ = law_over_drafts(tree, method, "filtered_logits")
    tree.check(law)


@pytest.mark.parametrize("method", ["standard", "block"])
def test_law_with_given_draft_probabilities(method: str) -> None:
    tree = Tree(5, 2, seed=3, filters="plain")
    law, _ = law_over_drafts(tree, method, "probs")
    tree.check(law)


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("vocab, num_drafts", [(6, 0), (6, 1), (6, 2), (3, 3)])
def test_law_with_certain_drafts(vocab: int, num_drafts: int, method: str, filters: str) -> None:
    """Without draft logits any drafts at all are lossless; some of them filtered out."""
    tree = Tree(vocab, num_drafts, seed=7, filters=filters)
    for start in range(vocab):
        drafts = tuple((start + 2 * i) % vocab for i in range(num_drafts))
        law: dict[tuple[int, ...], float] = {}
        for tokens, chance in outcomes(method, tree.inputs(drafts, None)):
            for sequence, rest in tree.continued(tokens):
                law[sequence] = law.get(sequence, 0.0) + chance * rest
        tree.check(law)


def test_block_accepts_at_least_as_many() -> None:
    """Case 22: by the joint law of the block, not per token; one draft equals the token rule."""
    gains = []
    for seed in range(3):
        tree = Tree(3, 2, seed, "plain")
        (_, token), (_, block) = (
            law_over_drafts(tree, method, "filtered_logits") for method in ("standard", "block")
        )
        gains.append(block - token)
    assert min(gains) > -1e-6 and max(gains) > 1e-3
    tree = Tree(5, 1, 0, "plain")
    (token_law, token), (block_law, block) = (
        law_over_drafts(tree, method, "filtered_logits") for method in ("standard", "block")
    )
    assert token == pytest.approx(block, abs=1e-9)
    assert token_law == pytest.approx(block_law, abs=1e-9)
