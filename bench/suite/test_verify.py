"""verify: rejection sampling from the model's logits as they are."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from cases import VERIFY_BENCH, VERIFY_SAMPLING, VerifyBench
from interleaved import OURS, VLLM, Contenders, Contest, agree, compiled
from torch import Tensor

from mtp_kernels import verification

ROWS = VERIFY_BENCH
NOTES = {
    "torch": "what one writes first: softmax of all rows in fp32, gather, compare, sample",
    "torch.compile": "the same, compiled for the row's shape",
    VLLM: "its RejectionSampler with its C++ kernels; its expansion of per-request values, which "
    "gives uninitialised memory on CPU, is replaced by one torch call",
    "transformers": "what generate does with the logits in assisted decoding: its logits warpers, "
    "row by row, and its _speculative_sampling; the drafts' logits come processed",
}


class Batch:
    """Logits of which each row has one likely token; most drafts are it.

    With the peak given, a row's likely token has a probability of about 0.8 at temperature 0.7;
    with one of 60 it leaves no choice.
    """

    def __init__(
        self,
        requests: int,
        drafts: int,
        vocab: int,
        device: torch.device | str = "cpu",
        *,
        peak: float = 12.25,
        sampled: bool = False,
    ) -> None:
        """sampled: drafts come with logits that they were sampled from."""
        gen = torch.Generator(device).manual_seed(0)
        self.requests, self.drafts, self.vocab = requests, drafts, vocab
        num_rows = requests * (drafts + 1)
        on = {"generator": gen, "device": device}
        self.logits = torch.randn(num_rows, vocab, dtype=torch.bfloat16, **on).mul_(2)
        peaks = torch.randint(0, vocab, (num_rows,), **on)
        self.logits.scatter_(1, peaks[:, None], peak)
        hit = torch.rand(requests, drafts, **on) < 0.8
        other = torch.randint(0, vocab, (requests, drafts), **on)
        self.draft_ids = torch.where(hit, peaks.view(requests, -1)[:, :drafts], other)
        self.draft_logits: Tensor | None = None
        if sampled:
            shape = requests * drafts, vocab
            self.draft_logits = torch.randn(shape, dtype=torch.bfloat16, **on).mul_(2)
            self.draft_logits.scatter_(1, self.draft_ids.view(-1, 1), peak)
        self.cu_rows = torch.arange(0, num_rows + 1, drafts + 1, dtype=torch.int32, device=device)
        self.positions = torch.arange(num_rows, device=device)
        self.seeds = torch.arange(requests, device=device)

    def full(self, value: float | None, dtype: torch.dtype = torch.float32) -> Tensor | None:
        if value is None:
            return None
        return torch.full((self.requests,), value, dtype=dtype, device=self.logits.device)


def ours(batch: Batch, temperature: float, top_k: int | None, top_p: float | None) -> Callable:
    sampling = verification.Sampling(
        temperature=batch.full(temperature),
        seeds=batch.seeds,
        top_k=batch.full(top_k, torch.int32),
        top_p=batch.full(top_p),
    )
    drafts = verification.Drafts(batch.draft_ids, batch.draft_logits, kind="filtered_logits")
    return lambda: verification.verify(
        batch.logits, batch.cu_rows, batch.positions, drafts, sampling
    )


def straightforward_torch(
    batch: Batch, temperature: float, *_: Any
) -> Callable[[], tuple[Tensor, Tensor]]:
    """Tokens [B, K + 1] and how many drafts were accepted [B], for drafts taken as certain."""
    requests = torch.arange(batch.requests, device=batch.logits.device)
    places = torch.arange(batch.drafts + 1, device=batch.logits.device)

    def result(token: Tensor, accepted: Tensor) -> tuple[Tensor, Tensor]:
        last = torch.where(places == accepted[:, None], token[:, None], -1)
        drafts = F.pad(batch.draft_ids, (0, 1))
        return torch.where(places < accepted[:, None], drafts, last), accepted

    def greedy() -> tuple[Tensor, Tensor]:
        best = batch.logits.argmax(-1).view(batch.requests, -1)
        accepted = (best[:, :-1] == batch.draft_ids).long().cumprod(1).sum(1)
        return result(best[requests, accepted], accepted)

    def sampled() -> tuple[Tensor, Tensor]:
        p = (batch.logits.float() / temperature).softmax(-1).view(batch.requests, -1, batch.vocab)
        p_draft = p[:, :-1].gather(2, batch.draft_ids[:, :, None])[:, :, 0]
        accepted = (torch.rand_like(p_draft) < p_draft).long().cumprod(1).sum(1)
        p = p[requests, accepted]
        rejected = batch.draft_ids.gather(1, accepted.clamp(max=batch.drafts - 1)[:, None])
        is_bonus = (accepted == batch.drafts)[:, None]
        p = p.scatter(1, rejected, p.gather(1, rejected) * is_bonus)
        return result((p / torch.empty_like(p).exponential_()).argmax(-1), accepted)

    return greedy if temperature == 0 else sampled


def vllm_sampler(
    batch: Batch, temperature: float, top_k: int | None, top_p: float | None
) -> Callable:
    """vLLM's V1 RejectionSampler. Not for drafts with logits: it wants their probabilities."""
    if batch.logits.is_cpu:
        repair_expansion()
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    device = batch.logits.device
    metadata = SpecDecodeMetadata.make_dummy(batch.draft_ids.tolist(), device)
    rows = torch.arange(batch.logits.shape[0], device=device).view(batch.requests, -1)
    metadata.target_logits_indices = rows[:, :-1].flatten()
    metadata.bonus_logits_indices = rows[:, -1]
    none = torch.tensor([], device=device)
    sampling = SamplingMetadata(
        temperature=batch.full(temperature) if temperature else None,
        all_greedy=temperature == 0,
        all_random=temperature != 0,
        top_p=batch.full(top_p),
        top_k=batch.full(top_k, torch.int32),
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=none,
        presence_penalties=none,
        repetition_penalties=none,
        output_token_ids=[],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    sampler = RejectionSampler(Sampler())
    return lambda: sampler(metadata, None, batch.logits, sampling)


def repair_expansion() -> None:
    """Of values of requests to those of rows: on CPU vLLM's own leaves memory as it was."""
    from vllm.platforms import current_platform

    current_platform.register_triton_kernel_overrides()  # as the engine does, before the import
    from vllm.v1.sample import rejection_sampler

    def expand(
        x: Tensor,
        cu_num_tokens: Tensor,
        num_tokens: int,
        replace_from: int = 0,
        replace_to: int = 0,
    ) -> Tensor:
        counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1)).long()
        return torch.where(x == replace_from, replace_to, x).repeat_interleave(counts)

    rejection_sampler.expand_batch_to_tokens = expand


def transformers_sampler(
    batch: Batch, temperature: float, top_k: int | None, top_p: float | None
) -> Callable[[], Tensor]:
    """For one request. Returns its tokens [1, n]."""
    from transformers.generation import logits_process
    from transformers.generation.utils import _speculative_sampling

    assert batch.requests == 1 and batch.draft_logits is not None
    warpers = logits_process.LogitsProcessorList(
        [logits_process.TemperatureLogitsWarper(temperature)]
    )
    if top_k is not None and top_p is not None:
        warpers += [logits_process.TopKLogitsWarper(top_k), logits_process.TopPLogitsWarper(top_p)]

    def warped(logits: Tensor) -> Tensor:
        logits = logits.float()[None]
        for i in range(logits.shape[1]):
            logits[:, i] = warpers(batch.draft_ids, logits[:, i])
        return logits

    draft_logits = warped(batch.draft_logits)
    return lambda: _speculative_sampling(
        batch.draft_ids, draft_logits, batch.drafts, warped(batch.logits)
    )[0]


def contenders_of(row: VerifyBench, batch: Batch) -> Contenders:
    sampling = VERIFY_SAMPLING[row.sampling]
    contenders: dict[str, Callable[[], Any]] = {OURS: ours(batch, *sampling)}
    if row.alone:
        return contenders
    if row.drafts == "sampled drafts":
        return contenders | {"transformers": transformers_sampler(batch, *sampling)}
    by_torch = straightforward_torch(batch, *sampling)
    if row.sampling in ("temperature 0.7", "greedy"):
        contenders["torch"] = by_torch
    if row.sampling == "temperature 0.7":
        contenders["torch.compile"] = compiled(by_torch)
    return contenders | {VLLM: vllm_sampler(batch, *sampling)}


def same(ours: verification.Verified, other: Any) -> None:
    """Tokens [B, K + 1], of whatever kind of result."""
    for name in ("token_ids", "sampled_token_ids"):
        other = getattr(other, name, other)
    tokens = other[0] if isinstance(other, tuple) else other
    tokens = F.pad(tokens.long(), (0, ours.token_ids.shape[1] - tokens.shape[1]), value=-1)
    torch.testing.assert_close(tokens, ours.token_ids, rtol=0, atol=0)


def bytes_needed(batch: Batch, accepted: Tensor) -> int:
    """Of the rows up to each first rejection: no other changes the result."""
    rows = int((accepted + 1).sum())
    if batch.draft_logits is not None:
        rows += int((accepted + 1).clamp(max=batch.drafts).sum())
    return rows * batch.vocab * batch.logits.itemsize


def test_verify(row: VerifyBench, contest: Contest) -> None:
    sampled = row.drafts == "sampled drafts"
    # All have random numbers of their own, so that they are compared where there is no choice.
    agree(contenders_of(row, Batch(row.B, row.K, row.V, peak=60, sampled=sampled)), same)
    batch = Batch(row.B, row.K, row.V, sampled=sampled)
    contenders = contenders_of(row, batch)
    needed = bytes_needed(batch, contenders[OURS]().num_accepted)
    contest("verify", contenders, moved=needed, read=batch.logits, notes=NOTES)
