"""Speculative verification: which drafted tokens stay, and which token follows them.

A drafter proposes tokens x_1 .. x_k after a text; the target model has scored the text with all of
them in one pass, so that row i of its logits, i = 0 .. k, is its distribution p_i of the token
after x_1 .. x_i. The drafts were sampled from q_0 .. q_{k-1} (greedy drafts: all of q on one
token). Every method here but the last emits tokens that are distributed exactly as if they had
been sampled from the target one by one, whatever q is:

standard
    Accept x_{i+1} with probability min(1, p_i(x) / q_i(x)). Replace the first rejected one by a
    *recovered* token from max(p_i - q_i, 0), normalised; after the last accepted one sample a
    *bonus* token from p_k. Leviathan, Kalman, Matias, Fast inference from transformers via
    speculative decoding, ICML 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318.
block
    Judge the block as a whole. With a_0 = 1 and a_i = min(1, a_{i-1} p_{i-1}(x_i) / q_{i-1}(x_i)),
    length i passes with probability h_i = s_i / (s_i + 1 - a_i), s_i = sum max(a_i p_i - q_i, 0),
    and h_k = a_k. The longest passing length is accepted, and the recovered token is from
    max(a_i p_i - q_i, 0) there. Accepts at least as many tokens as `standard` on average. Sun et
    al., Block verification accelerates speculative decoding, ICLR 2025, arXiv 2403.10444.
coupled
    The target's token at a position is a fixed function of p and of the request's random numbers
    at that position (an exponential race: the token with the least E_v / p(v)), and a draft is
    accepted if it is that token. The text then depends on the seed, but not on whether, by what,
    or how many at a time it was drafted. Drafts sampled with the same random numbers agree most
    often. Daliri, Musco, Suresh, Coupling without communication and drafter-invariant speculative
    decoding, 2024, arXiv 2408.07978.
synthetic
    Accept with given probabilities. For benchmarks of everything else; not lossless.

`verify` judges, `sample` is the case of no drafts: target sampling, or draft sampling. Both read
the model's logits as they are, in bf16 and unscaled: temperature, filters, penalties, bias and
masks are applied on the way, per request, in any mix. The details, down to the rounding, are in
:func:`mtp_kernels.ops.verify.verify`.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mtp_kernels.ops import _exact as exact
from mtp_kernels.ops import verify as op

Method = Literal["standard", "block", "coupled", "synthetic"]
DraftKind = Literal["logits", "filtered_logits", "probs"]


@dataclass(frozen=True)
class Penalties:
    """Penalties on tokens of the prompt and of the text generated so far.

    The tables may have rows for more, or fewer, requests than the batch: `rows` says which row is
    whose. Drafts before a row count as generated there.
    """

    rows: Tensor  # [B] int, each request's row of the tables; outside of [0, S): no penalties
    output_counts: Tensor  # [S, V] int32, how often each token was generated
    prompt_mask: Tensor  # [S, ceil(V / 32)] int32, see `pack_bits`: tokens of the prompt
    presence: Tensor  # [B] float32, subtracted from tokens generated at least once; 0: off
    frequency: Tensor  # [B] float32, subtracted once per time generated; 0: off
    repetition: Tensor  # [B] float32 > 0, divides positive logits of seen tokens, multiplies others


@dataclass(frozen=True)
class Sampling:
    """How each request samples."""

    temperature: Tensor  # [B] float32 >= 0; below 1e-5: greedy
    seeds: Tensor  # [B] int64
    top_k: Tensor | None = None  # [B] int, 0: off
    top_p: Tensor | None = None  # [B] float32 in (0, 1], 1: off
    min_p: Tensor | None = None  # [B] float32 in [0, 1], 0: off
    bias_ids: Tensor | None = None  # [B, M] int32, -1 = none
    bias_values: Tensor | None = None  # [B, M] float32, added to those logits
    penalties: Penalties | None = None


@dataclass(frozen=True)
class Drafts:
    """What was drafted, and from what.

    Without `logits` the drafts are taken as certain, which is right for greedy drafts and lossless
    for all.
    """

    ids: Tensor  # [B, K] int, -1 = no draft
    logits: Tensor | None = None  # [N, V], what they were sampled from
    rows: Tensor | None = None  # [B, K] int, each draft's row of logits; None: b K + i
    kind: DraftKind = "logits"
    """`logits`: sampled at the request's temperature; `filtered_logits`: also with its min_p,
    top_k and top_p; `probs`: `logits` holds the probabilities themselves. A row of these must sum
    to 1, which is not checked, and the draft be drawn from it: with any other row the tokens are
    not the target's. A negative one counts as not finite."""


@dataclass(frozen=True)
class Verified:
    """What a round gave each request."""

    token_ids: Tensor  # [B, K + 1] int64: accepted drafts, one recovered or bonus token, then -1
    num_accepted: Tensor  # [B] int32, drafts accepted
    status: Tensor  # [B] int32, 0, or `NOT_FINITE` + `NOTHING_ALLOWED` of the deciding row


NOT_FINITE, NOTHING_ALLOWED = op.NOT_FINITE, op.NOTHING_ALLOWED
GREEDY_BELOW = op.GREEDY_BELOW


def verify(
    logits: Tensor,
    cu_rows: Tensor,
    positions: Tensor,
    drafts: Drafts,
    sampling: Sampling,
    *,
    allowed_mask: Tensor | None = None,
    method: Method = "standard",
    synthetic_rates: Tensor | None = None,
) -> Verified:
    """Judge each request's drafts and sample the token after the accepted ones.

    logits: [R, V] bfloat16, float16 or float32, raw, rows may be strided; not modified.
    cu_rows: [B + 1] int; request b has rows `cu_rows[b]:cu_rows[b + 1]`, one per draft and one.
    positions: [R] int, position of each row's input token in its request.
    allowed_mask: [R, ceil(V / 32)] int32, see `pack_bits`.
    synthetic_rates: [K] float32, the chance of each draft once those before it are accepted.

    Raises:
        RuntimeError: names the argument, what was expected and what came.
    """
    return Verified(
        *torch.ops.mtp_kernels.verify(
            logits,
            drafts.ids,
            cu_rows,
            positions,
            draft_logits=drafts.logits,
            draft_rows=drafts.rows,
            draft_kind=drafts.kind,
            allowed_mask=allowed_mask,
            method=method,
            synthetic_rates=synthetic_rates,
            **_arguments(sampling),
        )
    )


def sample(
    logits: Tensor,
    positions: Tensor,
    sampling: Sampling,
    *,
    allowed_mask: Tensor | None = None,
    method: Literal["standard", "block", "coupled"] = "standard",
    stream: Literal["target", "draft"] = "target",
) -> Tensor:
    """One token per row, [B] int64: `verify` without drafts, which also returns the status.

    logits: [B, V]; positions: [B]; see `verify` for both and for errors.
    method: what the target's tokens are verified with; "standard" and "block" sample alike.
    stream: random numbers. Drafts that `standard` and `block` judge are sampled with "draft" and
        `round_seeds`; those that `coupled` judges with method "coupled", stream "target" and the
        request's seeds.
    """
    num_rows = logits.shape[0]
    token_ids, _, _ = torch.ops.mtp_kernels.verify(
        logits,
        torch.empty(num_rows, 0, dtype=torch.int64, device=logits.device),
        torch.arange(num_rows + 1, dtype=torch.int32, device=logits.device),
        positions,
        allowed_mask=allowed_mask,
        method=method,
        stream=stream,
        **_arguments(sampling),
    )
    return token_ids[:, 0]


def round_seeds(seeds: Tensor, first_positions: Tensor) -> Tensor:
    """Seeds to sample the drafts of one round with, [B] int64; not for `coupled`.

    `block` looks at drafts behind the place where it stops. Drafted again with the same random
    numbers in the next round, these positions would be conditioned on that look, and the text
    biased.

    seeds: [B] int64; first_positions: [B], of the rows that will judge the first drafts.
    """
    return seeds + first_positions.long() * 0x1E3779B97F4A7C15


def adjusted_logits(
    logits: Tensor,
    cu_rows: Tensor,
    draft_ids: Tensor,
    sampling: Sampling,
    allowed_mask: Tensor | None = None,
) -> Tensor:
    """The logits after bias, penalties and mask, [R, V] float32; arguments and errors of `verify`.

    A slow path, for what must come between these and the rest.
    """
    _check(logits, cu_rows, draft_ids, sampling, allowed_mask)
    if cu_rows.numel() == 1:  # all rows are nobody's
        return logits.to(torch.float32, copy=True)
    x, vocab = logits.to(torch.float32, copy=True), logits.shape[1]
    request, place = _requests_of(cu_rows, logits.shape[0])
    if sampling.bias_ids is not None:
        ids, values = sampling.bias_ids[request].long(), sampling.bias_values[request]
        inside = (ids >= 0) & (ids < vocab)
        x = x.scatter_add(1, ids.where(inside, 0), values.where(inside, 0))
    penalties = sampling.penalties
    if penalties is not None and penalties.output_counts.shape[0] > 0:
        row = penalties.rows[request].long()
        has_any = (row >= 0) & (row < penalties.output_counts.shape[0])
        row = row.where(has_any, 0)
        ids = draft_ids[request].long()
        before = torch.arange(ids.shape[1], device=ids.device) < place[:, None]
        before &= (ids >= 0) & (ids < vocab)
        counts = penalties.output_counts[row].scatter_add(1, ids.where(before, 0), before.int())
        seen = op.unpack_bits(penalties.prompt_mask[row], vocab) | (counts > 0)
        presence, frequency, repetition = (
            values[request][:, None]
            for values in (penalties.presence, penalties.frequency, penalties.repetition)
        )
        y = torch.where(seen, torch.where(x > 0, x * (1 / repetition), x * repetition), x)
        y = y - frequency * counts.float() - presence * (counts > 0).float()
        x = torch.where(has_any[:, None], y, x)
    if allowed_mask is not None:
        x = x.masked_fill(~op.unpack_bits(allowed_mask, vocab), -torch.inf)
    return x


def processed_logits(
    logits: Tensor,
    cu_rows: Tensor,
    draft_ids: Tensor,
    sampling: Sampling,
    allowed_mask: Tensor | None = None,
) -> Tensor:
    """Logits whose softmax a sampled request's tokens are drawn from, [R, V] float32.

    Those of `adjusted_logits`, scaled by the temperature, and -inf below the cuts of min_p, top_k
    and top_p. A greedy request's are as adjusted, and its token is the highest; so are those of a
    row with NaN, +inf or nothing allowed. Arguments and errors of `verify`. Row by row, by the
    reference: a slow path.
    """
    x = adjusted_logits(logits, cu_rows, draft_ids, sampling, allowed_mask)
    if cu_rows.numel() == 1:
        return x
    request, _ = _requests_of(cu_rows, logits.shape[0])
    is_greedy = (sampling.temperature < GREEDY_BELOW)[request]
    temperature = sampling.temperature[request].where(~is_greedy, 1.0)
    filters = (sampling.top_k, sampling.top_p, sampling.min_p)
    if any(values is not None for values in filters):
        has_law = x.isfinite().any(1) & ~(x.isnan() | (x == torch.inf)).any(1) & ~is_greedy
        top_k, top_p, min_p = (None if values is None else values[request] for values in filters)
        for row in has_law.nonzero()[:, 0].tolist():
            cuts = op.Cuts(
                int(top_k[row]) if top_k is not None and top_k[row] > 0 else None,
                top_p[row] if top_p is not None and top_p[row] < 1 else None,
                min_p[row] if min_p is not None and min_p[row] > 0 else None,
            )
            scale = exact.LOG2_E / temperature[row]
            cut = op.cut_of(x[row], scale, temperature[row], cuts)
            x[row] = x[row].where(x[row] >= cut, -torch.inf)
    return x / temperature[:, None]


def _requests_of(cu_rows: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Each row's request, and its place among that request's rows, both [R] int64."""
    rows = torch.arange(num_rows, device=cu_rows.device, dtype=cu_rows.dtype)
    request = torch.searchsorted(cu_rows, rows, right=True) - 1
    request = request.clamp(max=cu_rows.numel() - 2)  # rows after the last are nobody's
    return request, rows - cu_rows[request]


def pack_bits(flags: Tensor) -> Tensor:
    """[..., V] bool to [..., ceil(V / 32)] int32: flag v is bit v % 32 of word v // 32."""
    if flags.dtype != torch.bool or flags.dim() == 0:
        raise ValueError(f"flags: expected bool [..., V], got {flags.dtype} {list(flags.shape)}")
    padded = torch.nn.functional.pad(flags, (0, -flags.shape[-1] % 32))
    bits = torch.arange(32, device=flags.device)
    return (padded.unflatten(-1, (-1, 32)).long() << bits).sum(-1).to(torch.int32)


def _check(
    logits: Tensor,
    cu_rows: Tensor,
    draft_ids: Tensor,
    sampling: Sampling,
    allowed_mask: Tensor | None,
) -> None:
    """The checks of the op, for what it is not needed for."""
    op.check(
        logits=logits,
        draft_ids=draft_ids,
        cu_rows=cu_rows,
        positions=torch.zeros(logits.shape[:1], dtype=torch.int32, device=logits.device),
        draft_logits=None,
        draft_rows=None,
        draft_kind="logits",
        allowed_mask=allowed_mask,
        synthetic_rates=None,
        method="standard",
        stream="target",
        **_arguments(sampling),
    )


def _arguments(sampling: Sampling) -> dict[str, Tensor | None]:
    penalties = sampling.penalties
    return {
        "temperature": sampling.temperature,
        "seeds": sampling.seeds,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "bias_ids": sampling.bias_ids,
        "bias_values": sampling.bias_values,
        "penalty_rows": penalties and penalties.rows,
        "output_counts": penalties and penalties.output_counts,
        "prompt_mask": penalties and penalties.prompt_mask,
        "presence_penalty": penalties and penalties.presence,
        "frequency_penalty": penalties and penalties.frequency,
        "repetition_penalty": penalties and penalties.repetition,
    }
