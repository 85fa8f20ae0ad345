"""verify: the law of its tokens, enumerated and sampled, and the cases that broke other engines."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import cases
import pytest
import torch
from torch import Tensor

from mtp_kernels import verification
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


# From here on the op itself, on many requests at once.

verify = torch.ops.mtp_kernels.verify


def uniform_batch(count: int, logits: Tensor, draft_ids: Tensor, **more: Any) -> dict[str, Any]:
    """`count` copies of one request with rows `logits`, which differ in their seed."""
    rows = logits.shape[0]
    base = {
        "logits": logits.repeat(count, 1),
        "draft_ids": draft_ids,
        "cu_rows": torch.arange(0, count * rows + 1, rows),
        "positions": torch.arange(100, 100 + rows).repeat(count),
        "temperature": torch.ones(count),
        "seeds": torch.arange(count) * 7919 - 5,
    }
    return base | more


def chi_square_fits(observed: Tensor, chances: Tensor, false_alarm: float = 1e-6) -> bool:
    """Whether counts fit a law; a fitting one fails with chance `false_alarm`."""
    expected = observed.sum() * chances
    assert observed[chances == 0].sum() == 0, "a token of probability 0 was emitted"
    observed, expected = observed[chances > 0], expected[chances > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    degrees = torch.tensor((expected.numel() - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, statistic / 2)) > false_alarm


def overlapping_laws(vocab: int, rows: int) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(5)
    p = torch.randn(rows, vocab, generator=gen)
    return p, p[: rows - 1] + 0.5 * torch.randn(rows - 1, vocab, generator=gen)


@pytest.mark.parametrize("drafted", ["sampled", "same seed and stream as the target", "certain"])
@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_every_position_has_the_law_of_the_target(
    num_drafts: int, method: str, drafted: str
) -> None:
    """Case 20: 200,000 seeds; drafts from this op, so that a noise shared with it would show.

    Rows do not depend on what was drafted before them, so emitted position i has law p_i among
    the requests that got as far. The one case that must not fit: drafts made with the target's
    own noise are not independent of it.
    """
    count, vocab = 200_000, 8
    p, q = overlapping_laws(vocab, num_drafts + 1)
    seeds = uniform_batch(count, p, torch.empty(count, 0))["seeds"]
    stream = "target" if "stream" in drafted else "draft"
    ids = [
        verify(
            **uniform_batch(count, q[i : i + 1], torch.empty(count, 0, dtype=torch.int64))
            | {"positions": torch.full((count,), 100 + i), "stream": stream, "seeds": seeds}
        )[0]
        for i in range(num_drafts)
    ]
    draft_ids = torch.cat(ids, dim=1)
    if drafted == "certain":
        given = {}
    else:
        rows = torch.arange(num_drafts).expand(count, -1)
        given = {"draft_logits": q, "draft_rows": rows}
    tokens, accepted, _ = verify(**uniform_batch(count, p, draft_ids, method=method, **given))
    fits = []
    for i in range(num_drafts + 1):
        there = tokens[accepted >= i, i]
        fits.append(
            chi_square_fits(there.bincount(minlength=vocab).double(), p[i].double().softmax(-1))
        )
    if drafted.startswith("same"):
        assert not all(fits)
    else:
        assert all(fits), fits


def test_coupled_has_the_law_of_the_target_and_ignores_the_drafts() -> None:
    count, vocab, num_drafts = 200_000, 8, 2
    p, _ = overlapping_laws(vocab, num_drafts + 1)
    gen = torch.Generator().manual_seed(0)
    random_ids = torch.randint(0, vocab, (count, num_drafts), generator=gen)
    tokens, _, _ = verify(**uniform_batch(count, p, random_ids, method="coupled"))
    all_right = uniform_batch(count, p, random_ids, method="coupled")
    for i in range(num_drafts):  # what was emitted without a draft is what an equal draft gets
        alone = verify(
            **uniform_batch(count, p[i : i + 1], random_ids[:, :0], method="coupled")
            | {"positions": torch.full((count,), 100 + i)}
        )[0][:, 0]
        all_right["draft_ids"][:, i] = alone
    tokens_all, accepted_all, _ = verify(**all_right)
    assert (accepted_all == num_drafts).all()
    known = tokens >= 0
    assert (tokens[known] == tokens_all[known]).all() and known[:, 0].all()
    for i in range(num_drafts + 1):
        counts = tokens_all[:, i].bincount(minlength=vocab).double()
        assert chi_square_fits(counts, p[i].double().softmax(-1))


def test_drafts_with_the_targets_noise_agree_more_often_under_coupled() -> None:
    count, vocab = 20_000, 8
    p, q = overlapping_laws(vocab, 2)
    none = torch.empty(count, 0, dtype=torch.int64)
    rates = {}
    for stream in ("target", "draft"):
        drafts = verify(**uniform_batch(count, q, none, method="coupled", stream=stream))[0]
        accepted = verify(**uniform_batch(count, p, drafts, method="coupled"))[1]
        rates[stream] = float(accepted.float().mean())
    assert rates["target"] > rates["draft"] + 0.2


@pytest.mark.parametrize("method", ["standard", "block", "coupled"])
def test_a_text_of_several_rounds_has_the_law_of_the_target(method: str) -> None:
    """One seed per request for all its rounds: no random number may be met twice.

    Position t has law p_t whatever came before, so four positions have the product of the laws.
    """
    count, vocab, num_drafts, length = 100_000, 3, 3, 4
    p, q = overlapping_laws(vocab, length + 2 * num_drafts + 2)
    seeds = torch.arange(count) * 7919 - 5
    text = torch.full((count, length + 2 * num_drafts + 1), -1)
    done = torch.zeros(count, dtype=torch.int64)
    while int(done.min()) < length:
        drafts = []
        for i in range(num_drafts):
            drafts.append(
                verify(
                    **uniform_batch(count, q[:1], torch.empty(count, 0, dtype=torch.int64))
                    | {"logits": q[done + i], "positions": 100 + done + i, "stream": "draft"}
                    | {"seeds": verification.round_seeds(seeds, 100 + done)}
                )[0]
            )
        rows = done[:, None] + torch.arange(num_drafts + 1)
        inputs = uniform_batch(count, p[: num_drafts + 1], torch.cat(drafts, 1), method=method)
        inputs |= {"logits": p[rows.flatten()], "positions": 100 + rows.flatten(), "seeds": seeds}
        if method != "coupled":
            inputs |= {"draft_logits": q, "draft_rows": rows[:, :-1]}
        tokens, accepted, _ = verify(**inputs)
        keep = tokens >= 0
        keep &= (done < length)[:, None]
        text[keep.nonzero()[:, 0], rows[keep]] = tokens[keep]
        done += torch.where(done < length, accepted + 1, 0)
    cells = (text[:, :length] * vocab ** torch.arange(length)).sum(1)
    laws = p[:length].double().softmax(-1)
    joint = laws[0]
    for law in laws[1:]:
        joint = (joint[None] * law[:, None]).flatten()
    assert chi_square_fits(cells.bincount(minlength=vocab**length).double(), joint)


@pytest.mark.parametrize("method", ["standard", "synthetic"])
def test_acceptance_rates(method: str) -> None:
    """standard accepts a certain draft with its probability, synthetic with the given rate."""
    count = 100_000
    p, _ = overlapping_laws(8, 3)
    drafts = p[:2].argmax(-1).expand(count, -1).contiguous()
    inputs = uniform_batch(count, p, drafts, method=method)
    chances = p.softmax(-1).amax(-1)[:2]
    if method == "synthetic":
        chances = inputs["synthetic_rates"] = torch.tensor([0.9, 0.25])
    accepted = verify(**inputs)[1]
    law = torch.tensor([1 - chances[0], chances[0] * (1 - chances[1]), chances[0] * chances[1]])
    assert chi_square_fits(accepted.bincount(minlength=3).double(), law.double())


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("vocab", [7, 999, 1000, 8193])
@pytest.mark.parametrize("method", ["standard", "block", "coupled"])
def test_rows_that_are_not_finite(vocab: int, temperature: float, method: str) -> None:
    """Case 16: a bad row gives its best finite id and a status, its neighbours do not notice."""
    gen = torch.Generator().manual_seed(vocab)
    logits = torch.randn(8, vocab, generator=gen).bfloat16()
    draft_ids = logits[::2].argmax(-1, keepdim=True)
    good = uniform_batch(4, logits[:2], draft_ids, method=method) | {"logits": logits}
    good["temperature"] = torch.full((4,), temperature)
    bad = good | {"logits": logits.clone()}
    bad["logits"][0, vocab // 2] = torch.nan
    bad["logits"][2] = torch.nan
    bad["logits"][4] = -torch.inf
    bad["draft_ids"] = torch.full_like(draft_ids, vocab - 1)
    bad["draft_ids"][3] = draft_ids[3]
    tokens, accepted, status = verify(**bad)
    assert status[:3].tolist() == [op.NOT_FINITE, op.NOT_FINITE + op.NOTHING_ALLOWED, 2]
    assert accepted[:3].tolist() == [0, 0, 0]
    best = logits[0].float().index_fill(0, torch.tensor(vocab // 2), -torch.inf).argmax()
    assert tokens[:3, 0].tolist() == [int(best), 0, 0]
    for got, want in zip((tokens, accepted, status), verify(**good), strict=True):
        assert torch.equal(got[3], want[3])


@pytest.mark.parametrize("with_q", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("method", ["standard", "block", "coupled"])
def test_drafts_that_are_no_tokens(method: str, temperature: float, with_q: bool) -> None:
    """Case 17: rejected before any gather; their place is sampled as if nothing was drafted."""
    gen = torch.Generator().manual_seed(1)
    vocab, count = 50, 200
    logits = torch.randn(4, vocab, generator=gen)
    for first in (4, -1):
        draft_ids = torch.tensor([[first, -1, 2**31]]).expand(count, -1).contiguous()
        inputs = uniform_batch(count, logits, draft_ids, method=method)
        inputs["temperature"] = torch.full((count,), temperature)
        if with_q:
            inputs["draft_logits"] = torch.randn(count * 3, vocab, generator=gen)
        tokens, accepted, _ = verify(**inputs)
        if first == 4:
            shorter = inputs | {"draft_ids": draft_ids[:, :1].contiguous()}
            shorter |= uniform_batch(count, logits[:2], shorter["draft_ids"])
            shorter["temperature"] = inputs["temperature"]
            if with_q:
                shorter["draft_logits"] = inputs["draft_logits"][::3]
        else:
            shorter = inputs | uniform_batch(count, logits[:1], draft_ids[:, :0])
            shorter["temperature"] = inputs["temperature"]
            shorter["draft_logits"] = None
        want, want_accepted, _ = verify(**shorter | {"method": method})
        assert torch.equal(tokens[:, : want.shape[1]], want)
        assert (tokens[:, want.shape[1] :] == -1).all() and torch.equal(accepted, want_accepted)


def test_greedy_beside_sampled() -> None:
    """Case 19: temperature decides per request; a request without drafts in the middle."""
    gen = torch.Generator().manual_seed(2)
    logits = torch.randn(9, 100, generator=gen).bfloat16()
    together = {
        "logits": logits,
        "draft_ids": torch.randint(0, 100, (4, 2), generator=gen),
        "cu_rows": torch.tensor([0, 3, 4, 6, 9]),
        "positions": torch.arange(9),
        "temperature": torch.tensor([0, 1e-6, 0.7, 0]),
        "seeds": torch.tensor([1, 2, 3, 4]),
        "top_p": torch.tensor([0.5, 0.9, 0.9, 1.0]),
    }
    together["draft_ids"][0] = logits[:2].argmax(-1)
    results = verify(**together)
    assert results[1].tolist()[0] == 2 and results[0][0, 2] == logits[2].argmax()
    for b in range(4):
        start, end = together["cu_rows"][b : b + 2].tolist()
        alone = {
            "logits": logits[start:end],
            "cu_rows": torch.tensor([0, end - start]),
            "positions": together["positions"][start:end],
        }
        per_request = ("draft_ids", "temperature", "seeds", "top_p")
        alone |= {name: together[name][b : b + 1] for name in per_request}
        for got, want in zip(verify(**alone), results, strict=True):
            assert torch.equal(got[0], want[b])


@pytest.mark.parametrize("kind", ["filtered_logits", "logits"])
def test_q_is_what_the_draft_was_sampled_from(kind: str) -> None:
    """Case 21: with top_k 3, q is 0 outside of three tokens; any other q does not give p."""
    count, vocab = 100_000, 8
    p, q = overlapping_laws(vocab, 2)
    three = {"top_k": torch.full((count,), 3)}
    none = torch.empty(count, 0, dtype=torch.int64)
    drafts = verify(**uniform_batch(count, q, none, stream="draft"), **three)[0]
    rows = torch.zeros(count, 1, dtype=torch.int64)
    given = {"draft_logits": q, "draft_rows": rows, "draft_kind": kind}
    tokens = verify(**uniform_batch(count, p, drafts), **three, **given)[0]
    law = softmax_of(p[0], 1.0, 3, 1.0, 0.0)
    assert chi_square_fits(tokens[:, 0].bincount(minlength=vocab).double(), law) == (
        kind == "filtered_logits"
    )


def test_penalties_see_the_drafts_before_each_row() -> None:
    """Case 23: drafts [a, a]: row 0 sees the history, row 1 the history + a, the bonus a + a."""
    a, b, c = 3, 5, 8
    logits = torch.zeros(3, 10)
    logits[:, a], logits[:, b], logits[:, c] = 3.0, 2.4, 1.2
    inputs = {
        "logits": logits,
        "draft_ids": torch.tensor([[a, a]]),
        "cu_rows": torch.tensor([0, 3]),
        "positions": torch.arange(3),
        "temperature": torch.zeros(1),
        "seeds": torch.zeros(1, dtype=torch.int64),
        "penalty_rows": torch.tensor([0]),
        "output_counts": torch.zeros(1, 10, dtype=torch.int32),
        "prompt_mask": torch.zeros(1, 1, dtype=torch.int32),
        "presence_penalty": torch.zeros(1),
        "frequency_penalty": torch.zeros(1),
        "repetition_penalty": torch.ones(1),
    }

    def tokens(**changed: Tensor) -> list[int]:
        return verify(**inputs | changed)[0][0].tolist()

    one = torch.ones(1)
    assert tokens() == [a, a, a]
    assert tokens(presence_penalty=one) == [a, b, -1]  # 3 -> 2 at row 1
    assert tokens(presence_penalty=one * 0.5) == [a, a, a]  # only once, however often generated
    assert tokens(frequency_penalty=one * 0.4) == [a, a, b]  # 3 -> 2.6 -> 2.2
    assert tokens(repetition_penalty=one * 1.3) == [a, b, -1]  # 3 -> 2.3
    history = inputs["output_counts"].clone()
    history[0, a] = 2
    assert tokens(frequency_penalty=one * 0.4, output_counts=history) == [b, -1, -1]
    prompt = torch.tensor([[1 << a | 1 << b]], dtype=torch.int32)
    assert tokens(repetition_penalty=one * 3, prompt_mask=prompt) == [c, -1, -1]
    assert tokens(presence_penalty=one * 3, prompt_mask=prompt) == [a, b, -1]  # output only
    nobody = torch.tensor([-1])
    assert tokens(presence_penalty=one, penalty_rows=nobody) == [a, a, a]


def test_masks_and_bias_act_on_their_row_and_request() -> None:
    a, b = 3, 5
    logits = torch.zeros(4, 40)
    logits[:, a], logits[:, b] = 3.0, 2.0
    inputs = {
        "logits": logits,
        "draft_ids": torch.tensor([[a], [a]]),
        "cu_rows": torch.tensor([0, 2, 4]),
        "positions": torch.arange(4),
        "temperature": torch.zeros(2),
        "seeds": torch.zeros(2, dtype=torch.int64),
    }
    mask = torch.full((4, 2), -1, dtype=torch.int32)
    mask[1, 0] = ~(1 << a)
    assert verify(**inputs, allowed_mask=mask)[0].tolist() == [[a, b], [a, a]]
    bias = {"bias_ids": torch.tensor([[-1, 39], [b, -1]], dtype=torch.int32)}
    bias["bias_values"] = torch.tensor([[9.0, 3.5], [1.5, 9.0]])
    assert verify(**inputs, **bias)[0].tolist() == [[39, -1], [b, -1]]
    one = {
        "penalty_rows": torch.tensor([0, -1]),
        "output_counts": torch.zeros(1, 40, dtype=torch.int32),
        "prompt_mask": torch.tensor([[1 << b, 0]], dtype=torch.int32),
        "presence_penalty": torch.zeros(2),
        "frequency_penalty": torch.zeros(2),
        "repetition_penalty": torch.tensor([2.0, 1.0]),
    }
    bias["bias_ids"][0, 0], bias["bias_values"][0] = b, torch.tensor([3.0, 0.0])
    # First the bias: (2 + 3) / 2 < 3, and at row 1, where a has been seen, > 3 / 2. The penalty
    # first would give 2 / 2 + 3 > 3.
    assert verify(**inputs, **bias, **one)[0].tolist() == [[a, b], [b, -1]]


def restricted(inputs: dict[str, Any], requests: list[int]) -> dict[str, Any]:
    """The same call for some of the requests, in another order."""
    rows = [
        torch.arange(int(inputs["cu_rows"][b]), int(inputs["cu_rows"][b + 1])) for b in requests
    ]
    counts = torch.tensor([0] + [len(r) for r in rows])
    index, row_index = torch.tensor(requests, dtype=torch.int64), torch.cat(rows)
    changed: dict[str, Any] = {"cu_rows": counts.cumsum(0)}
    num_drafts = inputs["draft_ids"].shape[1]
    if inputs.get("draft_logits") is not None and inputs.get("draft_rows") is None:
        every = torch.arange(inputs["draft_ids"].numel()).view(len(inputs["draft_ids"]), num_drafts)
        changed["draft_rows"] = every[index]
    for name, x in inputs.items():
        if name in ("logits", "positions", "allowed_mask"):
            changed[name] = x[row_index]
        elif isinstance(x, Tensor) and name not in (
            "cu_rows draft_logits output_counts prompt_mask synthetic_rates".split()
        ):
            changed[name] = x[index]
    return inputs | changed


@pytest.mark.parametrize("seed", range(12))
def test_a_request_does_not_notice_its_batch(seed: int) -> None:
    """Bit for bit: reversed, alone, by number of threads and instruction set."""
    row = cases.random_verify_row(seed)
    inputs = cases.verify_inputs(row, seed)
    want = verify(**inputs)
    order = list(range(row.requests))[::-1]
    for got, w in zip(verify(**restricted(inputs, order)), want, strict=True):
        assert torch.equal(got, w[order])
    for b in range(0, row.requests, 9):
        for got, w in zip(verify(**restricted(inputs, [b])), want, strict=True):
            assert torch.equal(got[0], w[b])
    for count in (1, 2, 5):
        for isa in cases.CPU_ISAS:
            with cases.threads(count), cases.cpu_isa(isa):
                got = verify(**inputs)
            assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def plain_inputs() -> dict[str, Any]:
    return cases.verify_inputs(cases.VERIFY_ROWS[0])


def with_penalties() -> dict[str, Any]:
    row = next(row for row in cases.VERIFY_ROWS if row.id == "bf16-all")
    return cases.verify_inputs(row)


def changed(name: str, value: Any) -> dict[str, Any]:
    return plain_inputs() | {name: value}


def ascending(*bounds: int) -> Tensor:
    return torch.tensor(bounds)


GARBAGE = {  # words of the message -> inputs; B = 4, K = 3, V = 320
    "logits expected dtype bfloat16 or float16 or float32, got int64": lambda: changed(
        "logits", torch.zeros(16, 320, dtype=torch.int64)
    ),
    "logits expected shape [R, V >= 1], got [16]": lambda: changed("logits", torch.zeros(16)),
    "logits expected last stride 1, got 2": lambda: changed("logits", torch.zeros(16, 640)[:, ::2]),
    "draft_ids expected [B, K], got [4]": lambda: changed("draft_ids", torch.zeros(4).long()),
    "draft_ids expected dtype int32 or int64, got float32": lambda: changed(
        "draft_ids", torch.zeros(4, 3)
    ),
    "cu_rows expected shape [5], got [4]": lambda: changed("cu_rows", ascending(0, 1, 2, 3)),
    "cu_rows expected to start at 0, got 1": lambda: changed("cu_rows", ascending(1, 2, 3, 4, 5)),
    "cu_rows expected 1 to 4 rows per request, got 0 for request 1": lambda: changed(
        "cu_rows", ascending(0, 1, 1, 2, 3)
    ),
    "cu_rows expected 1 to 4 rows per request, got -1 for request 2": lambda: changed(
        "cu_rows", ascending(0, 1, 3, 2, 3)
    ),
    "cu_rows expected 1 to 4 rows per request, got 5 for request 0": lambda: changed(
        "cu_rows", ascending(0, 5, 6, 7, 8)
    ),
    "cu_rows expected to end within the 5 rows of logits, got 6": lambda: (
        changed("cu_rows", ascending(0, 1, 2, 3, 6))
        | {"logits": torch.zeros(5, 320), "positions": torch.zeros(5).long()}
    ),
    "positions expected dtype int32 or int64, got float32": lambda: changed(
        "positions", torch.zeros(plain_inputs()["logits"].shape[0])
    ),
    "temperature expected a finite number >= 0, got nan at index 2": lambda: changed(
        "temperature", torch.tensor([0, 1, torch.nan, 1])
    ),
    "temperature expected a finite number >= 0, got -1 at index 0": lambda: changed(
        "temperature", torch.tensor([-1.0, 1, 1, 1])
    ),
    "temperature expected a finite number >= 0, got inf at index 3": lambda: changed(
        "temperature", torch.tensor([1.0, 1, 1, torch.inf])
    ),
    "temperature expected dtype float32, got float64": lambda: changed(
        "temperature", torch.ones(4, dtype=torch.float64)
    ),
    "seeds expected shape [4], got [3]": lambda: changed("seeds", torch.zeros(3).long()),
    "seeds expected dtype int64, got int32": lambda: changed("seeds", torch.zeros(4).int()),
    "top_k expected a number >= 0, got -1 at index 1": lambda: changed(
        "top_k", torch.tensor([0, -1, 5, 400])
    ),
    "top_p expected a number in (0, 1], got 0 at index 0": lambda: changed(
        "top_p", torch.tensor([0.0, 1, 1, 1])
    ),
    "top_p expected a number in (0, 1], got 2 at index 3": lambda: changed(
        "top_p", torch.tensor([1.0, 1, 1, 2])
    ),
    "min_p expected a number in [0, 1], got nan at index 1": lambda: changed(
        "min_p", torch.tensor([0.0, torch.nan, 1, 1])
    ),
    "draft_logits expected shape [rows, 320], got [12, 319]": lambda: changed(
        "draft_logits", torch.zeros(12, 319)
    ),
    "draft_rows expected shape [4, 3], got [4, 2]": lambda: changed(
        "draft_rows", torch.zeros(4, 2).long()
    ),
    "allowed_mask expected dtype int32, got bool": lambda: changed(
        "allowed_mask", torch.zeros(16, 10, dtype=torch.bool)
    ),
    "allowed_mask expected shape [": lambda: changed(
        "allowed_mask", torch.zeros(3, 10, dtype=torch.int32)
    ),
    "bias_ids and bias_values expected both or neither": lambda: changed(
        "bias_ids", torch.zeros(4, 1, dtype=torch.int32)
    ),
    "penalties expected all of penalty_rows, output_counts": lambda: changed(
        "presence_penalty", torch.zeros(4)
    ),
    "repetition_penalty expected a finite number > 0, got 0 at index 2": lambda: (
        with_penalties() | {"repetition_penalty": torch.tensor([1.0, 1, 0, 1, 1, 1, 1, 1])}
    ),
    "output_counts expected shape [rows, 1000], got [3, 999]": lambda: (
        with_penalties() | {"output_counts": torch.zeros(3, 999, dtype=torch.int32)}
    ),
    "synthetic_rates expected exactly with method": lambda: changed("method", "synthetic"),
    "synthetic_rates expected a number in [0, 1], got 1.5 at index 2": lambda: (
        changed("method", "synthetic") | {"synthetic_rates": torch.tensor([1.0, 0.5, 1.5])}
    ),
    "method expected one of standard, block, coupled, synthetic, got 'fast'": lambda: changed(
        "method", "fast"
    ),
    "stream expected one of target, draft, got ''": lambda: changed("stream", ""),
    "draft_kind expected one of logits, filtered_logits, probs, got 'probabilities'": lambda: (
        changed("draft_kind", "probabilities")
    ),
}


@pytest.mark.parametrize("text", GARBAGE)
def test_bad_input_names_the_argument(text: str) -> None:
    """The kernel and the reference say the same."""
    inputs = GARBAGE[text]()
    messages = []
    for call in (verify, op.verify):
        with pytest.raises(RuntimeError) as error:
            call(**inputs)
        messages.append(str(error.value).splitlines()[0])
    assert messages[0] == messages[1] and messages[0].startswith("verify: ")
    assert text in messages[0]


@pytest.mark.parametrize("name", ["positions", "temperature", "draft_ids", "cu_rows"])
def test_a_tensor_without_data_among_others_is_an_error(name: str) -> None:
    """The dispatcher sends such a call to the fake, which must not return memory as it was."""
    inputs = plain_inputs()
    inputs[name] = inputs[name].to("meta")
    with pytest.raises(RuntimeError, match=f"verify: {name} expected device cpu, got meta"):
        verify(**inputs)
