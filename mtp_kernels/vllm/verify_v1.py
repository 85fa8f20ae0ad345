"""The verify op over a batch of vLLM's V1 model runner."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from mtp_kernels import verification
from mtp_kernels.verification import Drafts, Method, Penalties, Sampling, Verified
from mtp_kernels.vllm.compat import warn_once
from mtp_kernels.vllm.verify import STATUS

_KNOWN_PROCESSORS = {LogitBiasLogitsProcessor, MinPLogitsProcessor, MinTokensLogitsProcessor}


class Rounds:
    """Judges and samples for a runner, whose batch it reads."""

    def __init__(self, runner: Any, method: Method) -> None:
        self.runner = runner
        self.method = method
        self._batch: Batch | None = None
        self._seeds = torch.empty(0, dtype=torch.int64, device=runner.device)
        self._seed_row: dict[str, int] = {}

    def verify(
        self,
        sampler: RejectionSampler,
        metadata: SpecDecodeMetadata,
        draft_probs: Tensor | None,
        logits: Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """What `RejectionSampler.forward` returns.

        draft_probs: [number of drafts, V], what `runner.drafter` says it sampled from.
        """
        ends, num_drafts = metadata.cu_num_draft_tokens.long(), metadata.max_spec_len
        starts = torch.nn.functional.pad(ends[:-1], (1, 0))
        # A request's drafts follow each other; what comes after its last is not looked at.
        rows = starts[:, None] + torch.arange(num_drafts, device=ends.device)
        ids = metadata.draft_token_ids[rows.clamp(max=metadata.draft_token_ids.numel() - 1)]
        drafts = Drafts(ids)
        if draft_probs is not None and self.method != "coupled":
            kind = getattr(self.runner.drafter, "draft_kind", "probs")
            drafts = Drafts(ids, draft_probs, rows, kind)
        rates = sampler.synthetic_conditional_rates
        with_logprobs = sampling_metadata.max_num_logprobs is not None
        cu_rows = torch.nn.functional.pad(metadata.cu_num_sampled_tokens, (1, 0))
        verified, processed = self._decide(
            logits,
            cu_rows,
            [1 + n for n in metadata.num_draft_tokens],
            self.runner.positions[metadata.logits_indices],
            drafts,
            sampling_metadata,
            rates=None if rates is None else rates[:num_drafts],
            with_processed=with_logprobs and sampler.is_processed_logprobs_mode,
        )
        logprobs = None
        if with_logprobs:
            of = logits if processed is None else processed
            logprobs = _logprobs(sampler, of, cu_rows, verified.token_ids, sampling_metadata)
        return SamplerOutput(verified.token_ids.to(torch.int32), logprobs)

    def sample(
        self,
        sampler: Sampler,
        logits: Tensor,
        metadata: SamplingMetadata,
        logprobs_mode_override: str | None,
    ) -> tuple[Tensor, Tensor | None]:
        """What `Sampler.sample` returns, from logits that no processor has seen."""
        num_reqs = logits.shape[0]
        mode = logprobs_mode_override or sampler.logprobs_mode
        wanted = metadata.max_num_logprobs is not None or metadata.logprob_token_ids
        if self._is_warm_up(metadata):
            positions = torch.zeros(num_reqs, dtype=torch.int64, device=logits.device)
        else:
            last_rows = self.runner.query_start_loc.gpu[1 : num_reqs + 1] - 1
            positions = self.runner.positions[last_rows]
        verified, processed = self._decide(
            logits,
            torch.arange(num_reqs + 1, device=logits.device),
            [1] * num_reqs,
            positions,
            Drafts(torch.empty(num_reqs, 0, dtype=torch.int64, device=logits.device)),
            metadata,
            with_processed=bool(wanted) and mode in PROCESSED_LOGPROBS_MODES,
        )
        if processed is not None and mode == "processed_logprobs":
            processed = sampler.compute_logprobs(processed)
        return verified.token_ids[:, 0], processed

    def filters(self, metadata: SamplingMetadata, num_reqs: int) -> Sampling:
        """How the requests sample their drafts: without bias and penalties."""
        vocab = self.runner.model_config.get_vocab_size()
        return self._batch_of(metadata, num_reqs, vocab).filters

    def has_custom_processors(self, metadata: SamplingMetadata) -> bool:
        """Whether logits go through the user's code, which only vLLM's own sampler runs."""
        kinds = {type(one) for one in metadata.logitsprocs.all}
        custom = sorted(kind.__name__ for kind in kinds - _KNOWN_PROCESSORS)
        if custom:
            warn_once(f"mtp_kernels: {', '.join(custom)}: vLLM samples with it, not coupled")
        return bool(custom)

    def _decide(
        self,
        logits: Tensor,
        cu_rows: Tensor,
        num_rows: Sequence[int],
        positions: Tensor,
        drafts: Drafts,
        metadata: SamplingMetadata,
        *,
        rates: Tensor | None = None,
        with_processed: bool = False,
    ) -> tuple[Verified, Tensor | None]:
        batch = self._batch_of(metadata, len(num_rows), logits.shape[1])
        sampling, mask = batch.sampling(), batch.allowed_mask(logits, num_rows)
        holder = metadata.thinking_budget_state_holder
        if holder is not None and holder.has_tracked_requests():
            logits = verification.adjusted_logits(logits, cu_rows, drafts.ids, sampling, mask)
            _force_end_of_thinking(holder, logits, cu_rows, metadata)
            sampling, mask = batch.filters, None
        verified = verification.verify(
            logits,
            cu_rows,
            positions,
            drafts,
            sampling,
            allowed_mask=mask,
            method=self.method,
            synthetic_rates=rates,
        )
        STATUS.add(verified.status)
        processed = None
        if with_processed:
            processed = verification.processed_logits(logits, cu_rows, drafts.ids, sampling, mask)
        return verified, processed

    def _is_warm_up(self, metadata: SamplingMetadata) -> bool:
        """Whether vLLM is trying its samplers out, for no request."""
        return metadata is not self.runner.input_batch.sampling_metadata

    def _batch_of(self, metadata: SamplingMetadata, num_reqs: int, vocab: int) -> "Batch":
        if self._is_warm_up(metadata):
            seeds = torch.zeros(num_reqs, dtype=torch.int64, device=self.runner.device)
            return Batch(metadata, num_reqs, vocab, seeds, [])
        # vLLM makes a new SamplingMetadata when requests join, leave or move, and only then.
        if self._batch is None or self._batch.metadata is not metadata:
            held = self.runner.input_batch
            with_penalties = (
                held.presence_penalties_reqs
                | held.frequency_penalties_reqs
                | held.repetition_penalties_reqs
            )
            penalised = sorted(held.req_id_to_index[request] for request in with_penalties)
            self._batch = Batch(metadata, num_reqs, vocab, self._seeds_of(metadata), penalised)
        return self._batch

    def _seeds_of(self, metadata: SamplingMetadata) -> Tensor:
        """[B] int64: the seed of a request's generator, else one drawn when the request joined.

        Drawn from the device's default generator, as vLLM's noise for such requests is: ranks of
        a tensor-parallel group agree on the one exactly as they do on the other.
        """
        requests, device = self.runner.input_batch.req_ids, self.runner.device
        known, num_known = self._seed_row, self._seeds.numel()
        rows = [known.get(request, num_known + row) for row, request in enumerate(requests)]
        fresh = torch.randint(-(2**63), 2**63 - 1, (len(requests),), device=device)
        seeds = torch.cat([self._seeds, fresh])[_to_device(rows, torch.int64, device)]
        if metadata.generators:
            given = [one.initial_seed() for one in metadata.generators.values()]
            given = np.array(given, dtype=np.uint64).view(np.int64)
            rows = _to_device(list(metadata.generators), torch.int64, device)
            seeds[rows] = _to_device(given, torch.int64, device)
        self._seeds, self._seed_row = seeds, {request: i for i, request in enumerate(requests)}
        return seeds


class Batch:
    """What the op wants to know of a `SamplingMetadata`: made once, and kept while that is."""

    def __init__(
        self,
        metadata: SamplingMetadata,
        num_reqs: int,
        vocab: int,
        seeds: Tensor,
        penalised: list[int],
    ) -> None:
        self.metadata = metadata
        self.num_reqs, self.vocab, self.device = num_reqs, vocab, seeds.device
        processors = {type(one): one for one in metadata.logitsprocs.all}
        temperature, min_p = metadata.temperature, processors.get(MinPLogitsProcessor)
        if temperature is None:  # all greedy
            temperature = torch.zeros(num_reqs, device=self.device)
        self.filters = Sampling(
            temperature=temperature,
            seeds=seeds,
            top_k=metadata.top_k,
            top_p=metadata.top_p,
            min_p=min_p.min_p.view(-1) if min_p is not None and min_p.min_p_count else None,
        )
        bias = processors.get(LogitBiasLogitsProcessor)
        self._unpenalised = self._with_bias(bias.biases) if bias is not None else self.filters
        min_tokens = processors.get(MinTokensLogitsProcessor)
        self._min_tokens = min_tokens.min_toks if min_tokens is not None else {}
        self._allowed: Tensor | None = None  # [B, words]
        if metadata.allowed_token_ids_mask is not None:
            self._allowed = verification.pack_bits(~metadata.allowed_token_ids_mask)
        self._penalised, self._num_counted = penalised, [0] * len(penalised)
        if penalised:
            self._penalties = self._make_penalties()

    def sampling(self) -> Sampling:
        """All that is set per request; penalties count what has been generated up to now."""
        if not self._penalised:
            return self._unpenalised
        self._count_outputs()
        return replace(self._unpenalised, penalties=self._penalties)

    def allowed_mask(self, logits: Tensor, num_rows: Sequence[int]) -> Tensor | None:
        """[R, words] int32: allowed_token_ids, min_tokens and bad_words, row by row."""
        if self._allowed is None and not self._min_tokens and not self.metadata.bad_words_token_ids:
            return None
        words = np.full((sum(num_rows), (self.vocab + 31) // 32), 0xFFFFFFFF, dtype=np.uint32)
        rows, tokens = self._banned(logits, num_rows)
        np.bitwise_and.at(words, (rows, tokens // 32), ~(np.uint32(1) << (tokens % 32)))
        mask = _to_device(words.view(np.int32), torch.int32, self.device)
        if self._allowed is not None:
            num = _to_device(list(num_rows), torch.int64, self.device)
            mask &= self._allowed.repeat_interleave(num, 0, output_size=len(mask))
        return mask

    def _banned(self, logits: Tensor, num_rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """(row, token) of what min_tokens and bad_words rule out: two [n] uint32."""
        first_row = [0, *itertools.accumulate(num_rows)]
        rows: list[int] = []
        tokens: list[int] = []
        for request, (least, output, stops, has_grammar) in self._min_tokens.items():
            num_early = min(max(least - len(output), 0), num_rows[request])
            early = range(first_row[request], first_row[request] + num_early)
            if has_grammar and num_early:
                # Where the grammar leaves nothing but the end, the end it is.
                rest = logits[early.start : early.stop].clone()
                rest[:, list(stops)] = -torch.inf
                can_go_on = (rest > -torch.inf).any(1).tolist()
                early = [row for row, can in zip(early, can_go_on, strict=True) if can]
            for row in early:
                rows += [row] * len(stops)
                tokens += stops
        for request, words in self.metadata.bad_words_token_ids.items():
            drafts = self.metadata.spec_token_ids[request] if self.metadata.spec_token_ids else []
            output = self.metadata.output_token_ids[request][-max(map(len, words)) :]
            for place in range(num_rows[request]):
                past = output + drafts[:place]
                for *before, last in words:
                    if past[len(past) - len(before) :] == before:
                        rows.append(first_row[request] + place)
                        tokens.append(last)
        return np.array(rows, dtype=np.uint32), np.array(tokens, dtype=np.uint32)

    def _with_bias(self, biases: dict[int, dict[int, float]]) -> Sampling:
        if not biases:
            return self.filters
        width = max(len(bias) for bias in biases.values())
        ids = np.full((self.num_reqs, width), -1, dtype=np.int32)
        values = np.zeros((self.num_reqs, width), dtype=np.float32)
        for request, bias in biases.items():
            ids[request, : len(bias)] = list(bias)
            values[request, : len(bias)] = list(bias.values())
        return replace(
            self.filters,
            bias_ids=_to_device(ids, torch.int32, self.device),
            bias_values=_to_device(values, torch.float32, self.device),
        )

    def _make_penalties(self) -> Penalties:
        metadata, num = self.metadata, len(self._penalised)
        rows = np.full(self.num_reqs, -1, dtype=np.int32)
        rows[self._penalised] = np.arange(num)
        # vLLM pads prompts with the id after the last.
        prompts = metadata.prompt_token_ids[_to_device(self._penalised, torch.int64, self.device)]
        in_prompt = torch.zeros(num, self.vocab + 1, dtype=torch.bool, device=self.device)
        in_prompt.scatter_(1, prompts.clamp(max=self.vocab), True)
        return Penalties(
            rows=_to_device(rows, torch.int32, self.device),
            output_counts=torch.zeros(num, self.vocab, dtype=torch.int32, device=self.device),
            prompt_mask=verification.pack_bits(in_prompt[:, :-1]),
            presence=metadata.presence_penalties,
            frequency=metadata.frequency_penalties,
            repetition=metadata.repetition_penalties,
        )

    def _count_outputs(self) -> None:
        rows: list[int] = []
        tokens: list[int] = []
        for row, request in enumerate(self._penalised):
            new = self.metadata.output_token_ids[request][self._num_counted[row] :]
            if -1 in new:  # async scheduling has not yet read what stands there
                new = new[: new.index(-1)]
            self._num_counted[row] += len(new)
            rows += [row] * len(new)
            tokens += new
        at = (
            _to_device(rows, torch.int64, self.device),
            _to_device(tokens, torch.int64, self.device),
        )
        one = torch.ones((), dtype=torch.int32, device=self.device)
        self._penalties.output_counts.index_put_(at, one, accumulate=True)


def _force_end_of_thinking(
    holder: Any, logits: Tensor, cu_rows: Tensor, metadata: SamplingMetadata
) -> None:
    """Thinking budgets are vLLM's code, on an fp32 copy of the logits, changed in place."""
    warn_once("mtp_kernels: thinking_token_budget is applied by vLLM, to a copy of the logits")
    spec = metadata.spec_token_ids
    holder.update_state(metadata.output_token_ids, spec, repeat_indices=None)
    is_last = torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device)
    is_last[cu_rows[1:] - 1] = True
    for rows, is_bonus in ((is_last, True), (~is_last, False)):  # the order vLLM needs
        logits[rows] = holder.apply_to_logits(logits[rows], is_bonus, spec)


def _logprobs(
    sampler: RejectionSampler,
    logits: Tensor,
    cu_rows: Tensor,
    token_ids: Tensor,
    metadata: SamplingMetadata,
) -> LogprobsTensors:
    """K + 1 rows per request, of which vLLM later keeps those with a token."""
    rows = cu_rows[:-1, None] + torch.arange(token_ids.shape[1], device=logits.device)
    of_tokens = logits[rows.flatten().clamp(max=logits.shape[0] - 1)].float()
    if not sampler.is_logits_logprobs_mode:
        of_tokens = sampler.sampler.compute_logprobs(of_tokens)
    return sampler.sampler.gather_logprobs(
        of_tokens, metadata.max_num_logprobs, token_ids.clamp(min=0).flatten()
    )


def _to_device(values: Sequence[int] | np.ndarray, dtype: torch.dtype, device: Any) -> Tensor:
    return async_tensor_h2d(values, dtype=dtype, device=device)
