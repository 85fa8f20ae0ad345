"""verify: rejection sampling of drafted tokens, from raw logits to the tokens of a round."""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from mtp_kernels.ops import _exact as exact
from mtp_kernels.ops._declare import Expect, declare

METHODS = ("standard", "block", "coupled", "synthetic")
STREAMS = {"target": exact.TARGET, "draft": exact.DRAFT}
DRAFT_KINDS = ("logits", "filtered_logits", "probs")
GREEDY_BELOW = 1e-5
NOT_FINITE, NOTHING_ALLOWED = 1, 2  # bits of status

BLOCK = 4096
"""Lanes of the vocabulary whose weights share a unit. Part of the definition, not of a launch."""
_ONE = 40  # a block's heaviest lane weighs 2^40
_WHOLE = 52  # residuals are counted in 2^-52 of the whole distribution


def verify(
    logits: Tensor,
    draft_ids: Tensor,
    cu_rows: Tensor,
    positions: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    *,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    draft_logits: Tensor | None = None,
    draft_rows: Tensor | None = None,
    draft_kind: str = "logits",
    allowed_mask: Tensor | None = None,
    bias_ids: Tensor | None = None,
    bias_values: Tensor | None = None,
    penalty_rows: Tensor | None = None,
    output_counts: Tensor | None = None,
    prompt_mask: Tensor | None = None,
    presence_penalty: Tensor | None = None,
    frequency_penalty: Tensor | None = None,
    repetition_penalty: Tensor | None = None,
    synthetic_rates: Tensor | None = None,
    method: str = "standard",
    stream: str = "target",
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept or reject each request's drafts and sample the token after the accepted ones.

    Request b has logits rows `cu_rows[b]:cu_rows[b + 1]`. Its row i decides the token after its
    first i drafts, and judges draft i; its last row, after all drafts, gives the bonus token. With
    no drafts this is plain sampling.

    logits: [R, V] bfloat16, float16 or float32, as the model made them; rows may be strided.
    draft_ids: [B, K] int32 or int64, of which a request with n rows uses the first n - 1.
    cu_rows: [B + 1] int32 or int64, ascending by 1 to K + 1, from 0; logits rows after the last
        belong to nobody.
    positions: [R] int32 or int64, of each row's input token; what it decides is one further.
    temperature: [B] float32; below 1e-5 the request is greedy.
    seeds: [B] int64.
    top_k: [B] int32 or int64; 0, or V and above: off.
    top_p: [B] float32 in (0, 1]; 1: off.
    min_p: [B] float32 in [0, 1], relative to the likeliest token; 0: off.
    draft_logits: [N, V], what the drafts were sampled from, any of the three dtypes, rows may be
        strided. None: drafts are taken as certain ("one-hot"), which is lossless for any drafter.
    draft_rows: [B, K] int32 or int64, each draft's row of draft_logits; outside of [0, N): that
        draft is one-hot. None: draft (b, i) has row b K + i.
    draft_kind: "logits": sampled at the request's temperature; "filtered_logits": also with its
        min_p, top_k and top_p; "probs": draft_logits holds probabilities.
    allowed_mask: [R, ceil(V / 32)] int32, bit v % 32 of word v // 32 set: token v may be sampled.
    bias_ids, bias_values: [B, M] int32 and float32, added to the logits; ids outside [0, V) add
        nothing.
    penalty_rows: [B] int32 or int64, each request's row of the next two; outside of [0, S): none.
    output_counts: [S, V] int32, how often the request has generated each token.
    prompt_mask: [S, ceil(V / 32)] int32, bits of the tokens in the request's prompt.
    presence_penalty, frequency_penalty, repetition_penalty: [B] float32; 0, 0 and 1: off. A row
        counts the drafts before it as generated.
    synthetic_rates: [K] float32, for method "synthetic": the chance that a draft is accepted once
        all before it are.
    method: "standard": Leviathan et al. 2023 (arXiv 2211.17192), token by token; "block": Sun et
        al. 2024 (arXiv 2403.10444), the block as a whole, which accepts at least as many;
        "coupled": Daliri et al. 2024 (arXiv 2408.07978), target and drafts share their noise, so
        that the text depends on the seed but not on the drafts; "synthetic": for benchmarks, not
        lossless.
    stream: "target", or "draft" for sampling drafts with this op (K = 0).

    Returns fresh tensors: token_ids [B, K + 1] int64, accepted drafts and one more token, then -1;
    num_accepted [B] int32; status [B] int32, of the row that decided the last token: 0, or the sum
    of 1 (it has NaN or +inf) and 2 (it has no finite logit).

    Logits are changed in the order bias, penalties, mask, temperature, min_p, top_k, and top_p of
    what is then left. Ties at a cut are kept, at all three. A draft is rejected that is no token
    id; what follows it is ignored, and its place is sampled as if nothing had been drafted. So
    is a draft whose draft_logits row is not finite, and a draft on a row of status other than 0,
    which gives its best finite id (0 without any). B, K and V - 1 may be 0.

    Integers, and every decision, are the same on all backends, bit for bit, and independent of
    the other requests, of threads and of launch geometry. Each token's weight becomes an integer,
    in blocks of 4096 tokens; sums of integers have no order. Randomness is Philox, keyed by seed
    and position (`_exact.philox`): one seed serves all rounds of a request, see `round_seeds` in
    verification.py for its drafts. Values are checked on CPU only. On a GPU a request that has
    no rows, or others than those of logits, gets no token; no other value leads out of bounds.
    """
    inputs = locals()
    check(**inputs)
    num_requests, num_drafts = draft_ids.shape
    token_ids = torch.full((num_requests, num_drafts + 1), -1, dtype=torch.int64)
    num_accepted = torch.zeros(num_requests, dtype=torch.int32)
    status = torch.zeros(num_requests, dtype=torch.int32)
    for b in range(num_requests):
        request = Request(b, **inputs)
        accepted, last = VERIFY[method](request)
        token_ids[b, :accepted] = torch.tensor(request.drafts[:accepted])
        token_ids[b, accepted] = last
        num_accepted[b], status[b] = accepted, request.status(accepted)
    return tuple(x.to(logits.device) for x in (token_ids, num_accepted, status))


# The methods. Each returns how many drafts it accepts, and the token after them.


def _standard(request: "Request") -> tuple[int, int]:
    for i, draft in enumerate(request.drafts):
        p, q = request.target(i), request.draft(i)
        if not request.accepts(i, p.probability(draft), q.probability(draft)):
            return i, request.draw(i, residual(p, q, 1.0))
    bonus = len(request.drafts)
    return bonus, request.draw(bonus, request.target(bonus))


def _block(request: "Request") -> tuple[int, int]:
    """Algorithm 2 of Sun et al.; `kept` is their p_i, `passing` their h_i^block."""
    num_drafts = len(request.drafts)
    accepted, kept, kept_there = 0, 1.0, 1.0
    for i in range(1, num_drafts + 1):
        draft = request.drafts[i - 1]
        p = request.target(i - 1).probability(draft)
        q = request.draft(i - 1).probability(draft)
        kept = min(kept * p / q, 1.0) if q > 0 else float(kept * p > 0)
        if i == num_drafts or kept >= 1:
            passing = kept
        else:
            left = residual_mass(request.target(i), request.draft(i), kept)
            passing = left / (left + (1 - kept))
        if request.accepts(i - 1, passing):
            accepted, kept_there = i, kept
    law = request.target(accepted)
    if accepted < num_drafts:
        law = residual(law, request.draft(accepted), kept_there)
    return accepted, request.draw(accepted, law)


def _coupled(request: "Request") -> tuple[int, int]:
    for i, draft in enumerate(request.drafts):
        if (winner := request.race(i)) != draft:
            return i, winner
    return len(request.drafts), request.race(len(request.drafts))


def _synthetic(request: "Request") -> tuple[int, int]:
    for i in range(len(request.drafts)):
        if not request.accepts(i, request.synthetic_rate(i)):
            return i, request.draw(i, residual(request.target(i), request.draft(i), 1.0))
    bonus = len(request.drafts)
    return bonus, request.draw(bonus, request.target(bonus))


VERIFY = dict(zip(METHODS, (_standard, _block, _coupled, _synthetic), strict=True))


# Distributions. Lane v of the vocabulary sits at [v // BLOCK, v % BLOCK].


@dataclass
class Law:
    """The distribution of a row's token, in integers."""

    fractions: Tensor  # [blocks, BLOCK] fp32, a lane's weight relative to its block's heaviest
    weights: Tensor  # [blocks, BLOCK] int64, the same in units of 2^-40
    scales: Tensor  # [blocks] fp32, the block's heaviest lane relative to the row's
    masses: Tensor  # [blocks] int64, the blocks' weights in the row's unit
    is_finite: bool = True  # no NaN and no +inf in the row, and a finite logit

    def probability(self, token: int) -> float:
        block, lane = divmod(token, BLOCK)
        mass = _truncated(self.weights[block, lane].double() * self.scales[block].double())
        return float(mass) / float(self.masses.sum())

    def lanes(self, kept: float = 1.0) -> Tensor:
        """`kept` times each lane's probability, [blocks, BLOCK] fp32."""
        total = self.masses.sum().double()
        return self.fractions * (kept * self.scales.double() * 2.0**_ONE / total).float()[:, None]


@dataclass
class OneHot:
    """What a draft was sampled from when nothing else is known: certain."""

    token: int
    is_finite: bool = True

    def probability(self, token: int) -> float:
        return float(token == self.token)


@dataclass
class Probs:
    """Draft probabilities as given."""

    values: Tensor  # [blocks, BLOCK] fp32

    @property
    def is_finite(self) -> bool:
        return bool((self.values.isfinite() & (self.values >= 0)).all())

    def probability(self, token: int) -> float:
        return float(self.values.view(-1)[token])

    def lanes(self) -> Tensor:
        return self.values


Draft = Law | OneHot | Probs


def residual(p: Law, q: Draft, kept: float) -> Law:
    """`max(kept p - q, 0)`, not normalised: what a rejected draft is replaced from."""
    if isinstance(q, OneHot):
        weights = p.weights.clone()
        weights.view(-1)[q.token] = 0
        return Law(p.fractions, weights, p.scales, _masses(weights, p.scales))
    lanes = (p.lanes(kept) - q.lanes()).clamp(min=0)
    weights = _truncated(lanes * 2.0**_WHOLE)
    return Law(lanes, weights, p.scales, weights.sum(1))


def residual_mass(p: Law, q: Draft, kept: float) -> float:
    if isinstance(q, OneHot):
        return kept * (1 - p.probability(q.token))
    return float(residual(p, q, kept).masses.sum()) * 2.0**-_WHOLE


def law_of(x: Tensor, temperature: Tensor, cuts: "Cuts | None" = None) -> Law:
    """The law of a row of logits [V], fp32: softmax(x / temperature) above the cuts.

    All on one lane, the lowest of the highest, where the request is greedy or the row is not
    finite.
    """
    is_finite = not bool((x.isnan() | (x == math.inf)).any())
    x = torch.where(x.isnan() | (x == math.inf), -math.inf, x)
    has_any = bool((x > -math.inf).any())
    if temperature < GREEDY_BELOW or not (is_finite and has_any):
        best = int(x.argmax()) if has_any else 0
        x = torch.full_like(x, -math.inf)
        x[best] = 0
        scale = torch.ones(())
    else:
        scale = torch.tensor(exact.LOG2_E) / temperature
        x = torch.where(x >= cut_of(x, scale, temperature, cuts), x, -math.inf) if cuts else x
    x = _blocks(x, -math.inf)
    highest = x.amax(1)
    fractions = _exp2_below(x, highest[:, None], scale)
    weights = _truncated(_exp2_below(x, highest[:, None], scale, _ONE))
    scales = _exp2_below(highest, highest.max(), scale)
    return Law(fractions, weights, scales, _masses(weights, scales), is_finite and has_any)


@dataclass
class Cuts:
    """A request's filters; None is off."""

    top_k: int | None
    top_p: Tensor | None
    min_p: Tensor | None


def cut_of(x: Tensor, scale: Tensor, temperature: Tensor, cuts: Cuts) -> Tensor:
    """The lowest logit that min_p, then top_k, then top_p keep, all as high as it with it."""
    cut = torch.tensor(-math.inf)
    if cuts.min_p is not None:
        cut = x.max() + exact.log(cuts.min_p) * temperature
    kept = x[(x >= cut) & (x > -math.inf)].sort(descending=True).values
    if cuts.top_k is not None and cuts.top_k < kept.numel():
        cut = kept[cuts.top_k - 1]
        kept = kept[kept >= cut]
    if cuts.top_p is not None:
        weights = _truncated(_exp2_below(kept, x.max(), scale, _ONE))
        up_to = weights.cumsum(0)
        first = torch.searchsorted(-kept, -kept)  # of the lanes as high as this one
        above = torch.where(first > 0, up_to[first - 1], 0)
        cut = kept[above.double() < cuts.top_p.double() * up_to[-1].double()][-1]
    return cut


def _exp2_below(x: Tensor, highest: Tensor, scale: Tensor, exponent: int = 0) -> Tensor:
    """`2^((x - highest) scale + exponent)`, and 0 for -inf."""
    return torch.where(x > -math.inf, exact.exp2((x - highest) * scale, exponent), 0.0)


def _masses(weights: Tensor, scales: Tensor) -> Tensor:
    return _truncated(weights.sum(1).double() * scales.double())


def _blocks(x: Tensor, padding: float) -> Tensor:
    return torch.nn.functional.pad(x, (0, -x.numel() % BLOCK), value=padding).view(-1, BLOCK)


def _truncated(x: Tensor) -> Tensor:
    return x.to(torch.int64)


def _draw(law: Law, words: list[Tensor]) -> int:
    """The lane at a random place: first a block, then a lane of it."""
    block = _place(law.masses, exact.uniform(words[0], words[1]))
    return block * BLOCK + _place(law.weights[block], exact.uniform(words[2], words[3]))


def _place(weights: Tensor, uniform: Tensor) -> int:
    up_to = weights.cumsum(0)
    place = torch.minimum(_truncated(uniform * up_to[-1].double()), up_to[-1] - 1)
    return int(torch.searchsorted(up_to, place, right=True))


class Request:
    """One request of a call: its drafts, its distributions, its random numbers."""

    def __init__(self, b: int, **inputs: Any) -> None:
        self._in = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in inputs.items()}
        self._b = b
        self._first_row, end = (int(x) for x in self._in["cu_rows"][b : b + 2])
        self._given = [int(x) for x in self._in["draft_ids"][b, : end - self._first_row - 1]]
        self._targets: dict[int, Law] = {}
        self.drafts: list[int] = []  # those that can be judged
        for i, draft in enumerate(self._given):
            if not 0 <= draft < self._in["logits"].shape[1]:
                break
            if not (self.target(i).is_finite and self.draft(i).is_finite):
                break
            self.drafts.append(draft)

    def _value(self, name: str) -> Tensor | None:
        values = self._in[name]
        return None if values is None else values[self._b]

    def _cuts(self) -> Cuts:
        top_k, top_p, min_p = (self._value(name) for name in ("top_k", "top_p", "min_p"))
        return Cuts(
            int(top_k) if top_k is not None and top_k > 0 else None,
            top_p if top_p is not None and top_p < 1 else None,
            min_p if min_p is not None and min_p > 0 else None,
        )

    def target(self, i: int) -> Law:
        if i not in self._targets:
            self._targets[i] = law_of(self._logits(i), self._value("temperature"), self._cuts())
        return self._targets[i]

    def status(self, i: int) -> int:
        x = self._logits(i)
        bad = bool((x.isnan() | (x == math.inf)).any())
        return NOT_FINITE * bad + NOTHING_ALLOWED * (not bool(x.isfinite().any()))

    def draft(self, i: int) -> Draft:
        draft_logits, rows = self._in["draft_logits"], self._in["draft_rows"]
        row = self._b * self._in["draft_ids"].shape[1] + i if rows is None else rows[self._b, i]
        if draft_logits is None or not 0 <= row < draft_logits.shape[0]:
            return OneHot(self._given[i])
        x, kind = draft_logits[row].float(), self._in["draft_kind"]
        if kind == "probs":
            return Probs(_blocks(x, 0))
        cuts = self._cuts() if kind == "filtered_logits" else None
        return law_of(x, self._value("temperature"), cuts)

    def _logits(self, i: int) -> Tensor:
        """Row i after bias, penalties and mask, fp32."""
        x = self._in["logits"][self._first_row + i].float()
        if (ids := self._value("bias_ids")) is not None:
            inside = (ids >= 0) & (ids < x.numel())
            x = x.index_add(0, ids[inside], self._value("bias_values")[inside])
        row = self._value("penalty_rows")
        if row is not None and 0 <= row < self._in["output_counts"].shape[0]:
            counts = self._in["output_counts"][row].clone()
            for draft in self._given[:i]:
                if 0 <= draft < x.numel():
                    counts[draft] += 1
            seen = unpack_bits(self._in["prompt_mask"][row], x.numel()) | (counts > 0)
            repetition = self._value("repetition_penalty")
            x = torch.where(seen, torch.where(x > 0, x * (1 / repetition), x * repetition), x)
            x = x - self._value("frequency_penalty") * counts.float()
            x = x - self._value("presence_penalty") * (counts > 0).float()
        if (mask := self._in["allowed_mask"]) is not None:
            x = torch.where(unpack_bits(mask[self._first_row + i], x.numel()), x, -math.inf)
        return x

    def _words(self, i: int, purpose: int, lane: Tensor) -> list[Tensor]:
        position = self._in["positions"][self._first_row + i].to(torch.int64) + 1
        return exact.philox(self._in["seeds"][self._b], position, purpose, lane)

    def accepts(self, i: int, p: float, q: float = 1.0) -> bool:
        """Whether draft i's coin falls on its side, which it does with probability p / q.

        Coins are numbered within the round, which is known by its first row: `block` tosses coins
        behind the place where it stops, and the next round must not meet them again.
        """
        words = self._words(0, exact.ACCEPT, torch.tensor(i))
        return float(exact.uniform(words[0], words[1])) * q < p

    def draw(self, i: int, law: Law) -> int:
        """A token of row i from `law`, from the row's own law where that is empty."""
        words = self._words(i, STREAMS[self._in["stream"]], torch.tensor(0))
        return _draw(law if law.masses.sum() > 0 else self.target(i), words)

    def race(self, i: int) -> int:
        """The token whose exponential clock, at the rate of its probability, rings first."""
        law, purpose = self.target(i), STREAMS[self._in["stream"]]
        lane = torch.arange(law.fractions.numel())
        words = torch.stack(self._words(i, purpose, lane // 4)).gather(0, lane[None] % 4)[0]
        scores = law.fractions / exact.exponential(words).view_as(law.fractions)
        best, lanes = scores.max(1)  # the first of several
        block = int((best * law.scales).argmax())
        return block * BLOCK + int(lanes[block])

    def synthetic_rate(self, i: int) -> float:
        return float(self._in["synthetic_rates"][i])


def unpack_bits(words: Tensor, count: int) -> Tensor:
    """[..., W] int32 to [..., count] bool, lowest bit of the lowest word first."""
    bits = torch.arange(32, device=words.device)
    return ((words[..., None] >> bits) & 1).flatten(-2)[..., :count].bool()


def check(
    logits: Tensor,
    draft_ids: Tensor,
    cu_rows: Tensor,
    positions: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    draft_logits: Tensor | None,
    draft_rows: Tensor | None,
    draft_kind: str,
    allowed_mask: Tensor | None,
    bias_ids: Tensor | None,
    bias_values: Tensor | None,
    penalty_rows: Tensor | None,
    output_counts: Tensor | None,
    prompt_mask: Tensor | None,
    synthetic_rates: Tensor | None,
    method: str,
    stream: str,
    **per_request: Tensor | None,
) -> None:
    """The checks of csrc/verify_args.h, with the same messages; of values on CPU only."""
    expect = Expect("verify", logits)
    floats = (torch.bfloat16, torch.float16, torch.float32)
    ints = (torch.int32, torch.int64)

    def one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
        expect.that(value in choices, f"{name} expected one of {', '.join(choices)}, got {value!r}")

    def matrix(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...], columns: int) -> None:
        expect.device(name, x)
        expect.dtype(name, x, *dtypes)
        expect.that(
            x.dim() == 2 and x.shape[1] == columns,
            f"{name} expected shape [rows, {columns}], got {list(x.shape)}",
        )
        expect.unit_stride(name, x)

    def tensor(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...], *shape: int) -> None:
        expect.device(name, x)
        expect.dtype(name, x, *dtypes)
        expect.shape(name, x, *shape)
        expect.unit_stride(name, x)

    one_of("method", method, METHODS)
    one_of("stream", stream, tuple(STREAMS))
    one_of("draft_kind", draft_kind, DRAFT_KINDS)
    expect.dtype("logits", logits, *floats)
    expect.that(
        logits.dim() == 2 and logits.shape[1] >= 1,
        f"logits expected shape [R, V >= 1], got {list(logits.shape)}",
    )
    expect.unit_stride("logits", logits)
    num_rows, vocab = logits.shape
    expect.that(draft_ids.dim() == 2, f"draft_ids expected [B, K], got {list(draft_ids.shape)}")
    num_requests, num_drafts = draft_ids.shape
    words = (vocab + 31) // 32
    tensor("draft_ids", draft_ids, ints, num_requests, num_drafts)
    tensor("cu_rows", cu_rows, ints, num_requests + 1)
    tensor("positions", positions, ints, num_rows)
    tensor("temperature", temperature, (torch.float32,), num_requests)
    tensor("seeds", seeds, (torch.int64,), num_requests)
    for name, x in per_request.items():  # top_k, top_p, min_p and the penalties
        if x is not None:
            tensor(name, x, ints if name == "top_k" else (torch.float32,), num_requests)
    if draft_logits is not None:
        matrix("draft_logits", draft_logits, floats, vocab)
    if draft_rows is not None:
        tensor("draft_rows", draft_rows, ints, num_requests, num_drafts)
    if allowed_mask is not None:
        tensor("allowed_mask", allowed_mask, (torch.int32,), num_rows, words)
    expect.that(
        (bias_ids is None) == (bias_values is None),
        "bias_ids and bias_values expected both or neither",
    )
    if bias_ids is not None and bias_values is not None:
        expect.that(bias_ids.dim() == 2, f"bias_ids expected [B, M], got {list(bias_ids.shape)}")
        shape = (num_requests, bias_ids.shape[1])
        tensor("bias_ids", bias_ids, (torch.int32,), *shape)
        tensor("bias_values", bias_values, (torch.float32,), *shape)
    penalties = {
        "penalty_rows": penalty_rows,
        "output_counts": output_counts,
        "prompt_mask": prompt_mask,
        **{name: per_request[name] for name in PENALTIES},
    }
    missing = [name for name, x in penalties.items() if x is None]
    expect.that(
        len(missing) in (0, len(penalties)),
        f"penalties expected all of {', '.join(penalties)}, got no {', '.join(missing)}",
    )
    if penalty_rows is not None and output_counts is not None and prompt_mask is not None:
        tensor("penalty_rows", penalty_rows, ints, num_requests)
        matrix("output_counts", output_counts, (torch.int32,), vocab)
        tensor("prompt_mask", prompt_mask, (torch.int32,), output_counts.shape[0], words)
    expect.that(
        (synthetic_rates is not None) == (method == "synthetic"),
        'synthetic_rates expected exactly with method "synthetic"',
    )
    if synthetic_rates is not None:
        tensor("synthetic_rates", synthetic_rates, (torch.float32,), num_drafts)
    if logits.device.type == "cpu" and not isinstance(logits, FakeTensor):
        _check_values(num_rows, num_drafts, cu_rows, temperature, synthetic_rates, **per_request)


def _check_values(
    num_rows: int,
    num_drafts: int,
    cu_rows: Tensor,
    temperature: Tensor,
    synthetic_rates: Tensor | None,
    **per_request: Tensor | None,
) -> None:
    bounds = cu_rows.tolist()
    if bounds[0] != 0:
        raise RuntimeError(f"verify: cu_rows expected to start at 0, got {bounds[0]}")
    for b, (start, end) in enumerate(itertools.pairwise(bounds)):
        if not 1 <= end - start <= num_drafts + 1:
            raise RuntimeError(
                f"verify: cu_rows expected 1 to {num_drafts + 1} rows per request, got "
                f"{end - start} for request {b}"
            )
    if bounds[-1] > num_rows:
        raise RuntimeError(
            f"verify: cu_rows expected to end within the {num_rows} rows of logits, got "
            f"{bounds[-1]}"
        )
    values = {"temperature": temperature, "synthetic_rates": synthetic_rates, **per_request}
    for name, x in values.items():
        lowest, highest, wanted = _RANGES[name]
        for i, value in enumerate([] if x is None else x.tolist()):
            inside = lowest <= value <= highest and (value > 0 or name not in _POSITIVE)
            if not inside:
                raise RuntimeError(f"verify: {name} expected {wanted}, got {value:g} at index {i}")


PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
_LARGEST = torch.finfo(torch.float32).max
_RANGES = {
    "temperature": (0, _LARGEST, "a finite number >= 0"),
    "top_k": (0, math.inf, "a number >= 0"),
    "top_p": (0, 1, "a number in (0, 1]"),
    "min_p": (0, 1, "a number in [0, 1]"),
    "synthetic_rates": (0, 1, "a number in [0, 1]"),
    "presence_penalty": (-_LARGEST, _LARGEST, "a finite number"),
    "frequency_penalty": (-_LARGEST, _LARGEST, "a finite number"),
    "repetition_penalty": (0, _LARGEST, "a finite number > 0"),
}
_POSITIVE = ("top_p", "repetition_penalty")


def _fake(**inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    check(**inputs)
    logits = inputs["logits"]
    num_requests, num_drafts = inputs["draft_ids"].shape
    return (
        logits.new_empty(num_requests, num_drafts + 1, dtype=torch.int64),
        logits.new_empty(num_requests, dtype=torch.int32),
        logits.new_empty(num_requests, dtype=torch.int32),
    )


OP = declare(verify, fake=_fake, triton="mtp_kernels.kernels.verify:verify")
