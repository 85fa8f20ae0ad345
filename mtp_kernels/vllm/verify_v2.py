"""The verify op over a batch of vLLM's V2 model runner, from its tables of request states."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from mtp_kernels import verification
from mtp_kernels.verification import Drafts, Method, Penalties, Sampling
from mtp_kernels.vllm.compat import warn_once
from mtp_kernels.vllm.verify import STATUS

_KNOWN_PROCESSORS = {BadWordsState, LogitBiasState, PenaltiesState}


def is_vllms_own(sampler: Any, rejection_sampler: Any = None) -> bool:
    """Whether these are the samplers that we know, not a watermarking one or a model's own."""
    return type(sampler) is Sampler and type(rejection_sampler) in (type(None), RejectionSampler)


def verify(
    self: RejectionSampler,
    method: Method,
    logits: Tensor,
    draft_logits: Tensor | None,
    draft_sampled: Tensor,
    pos: Tensor,
    cu_num_logits: Tensor,
    idx_mapping: Tensor,
    idx_mapping_np: np.ndarray,
    expanded_idx_mapping: Tensor,
    expanded_local_pos: Tensor,
    seq_lens_upper_bound_np: np.ndarray,
    verify_draft_sampled: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `RejectionSampler._verify` returns: (processed logits, sampled, number sampled).

    Where nobody asks for processed logits, the first is the logits as they came.
    """
    context = LogitsContext(
        expanded_idx_mapping=expanded_idx_mapping,
        idx_mapping=idx_mapping,
        idx_mapping_np=idx_mapping_np,
        expanded_local_pos=expanded_local_pos,
        input_ids=draft_sampled,
        pos=pos,
        seq_lens_upper_bound_np=seq_lens_upper_bound_np,
    )
    steps = self.num_speculative_steps
    place = torch.arange(steps, device=logits.device)
    # Row i + 1 of a request holds its draft i. What comes after its last is not looked at.
    rows = (cu_num_logits[:-1, None] + 1 + place).clamp(max=logits.shape[0] - 1)
    drafts = Drafts(verify_draft_sampled[rows])
    if draft_logits is not None and method != "coupled":
        # A drafter's vocabulary may lack the padding of the target's, or have more.
        vocab = min(logits.shape[1], draft_logits.shape[-1])
        logits, draft_logits = logits[:, :vocab], draft_logits[..., :vocab]
        rows = idx_mapping[:, None] * steps + place
        kind = getattr(self, "draft_kind", "logits")  # of our speculator, or of vLLM's
        drafts = replace(drafts, logits=draft_logits.flatten(0, 1), rows=rows, kind=kind)
    rates = self.synthetic_conditional_rates
    return _decide(self.sampler, method, logits, cu_num_logits, drafts, context, rates)


def sample(
    self: Sampler,
    logits: Tensor,
    expanded_idx_mapping: Tensor,
    idx_mapping: Tensor,
    idx_mapping_np: np.ndarray,
    pos: Tensor,
    input_ids: Tensor,
    expanded_local_pos: Tensor,
    seq_lens_upper_bound_np: np.ndarray,
    return_logprobs: bool = False,
) -> tuple[Tensor, Tensor]:
    """What `Sampler.sample` returns, coupled: (sampled, processed logits)."""
    context = LogitsContext(
        expanded_idx_mapping=expanded_idx_mapping,
        idx_mapping=idx_mapping,
        idx_mapping_np=idx_mapping_np,
        expanded_local_pos=expanded_local_pos,
        input_ids=input_ids,
        pos=pos,
        seq_lens_upper_bound_np=seq_lens_upper_bound_np,
    )
    num_reqs = logits.shape[0]  # this sampler has one row per request
    cu_rows = torch.arange(num_reqs + 1, device=logits.device)
    drafts = Drafts(torch.empty(num_reqs, 0, dtype=torch.int64, device=logits.device))
    processed, sampled, _ = _decide(self, "coupled", logits, cu_rows, drafts, context, None)
    return sampled[:, 0], processed


def needs_copy(sampler: Sampler, requests: np.ndarray) -> bool:
    """Whether vLLM's code has to change an fp32 copy of the logits. requests: state indices."""
    return _uses_processors(sampler, requests) or _uses_processed(sampler, requests)


def _decide(
    sampler: Sampler,
    method: Method,
    logits: Tensor,
    cu_rows: Tensor,
    drafts: Drafts,
    context: LogitsContext,
    rates: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    requests = context.idx_mapping_np
    sampling = _filters(sampler, context)
    if needs_copy(sampler, requests):
        if _uses_processors(sampler, requests):
            warn_once(
                "mtp_kernels: bad_words, allowed_token_ids, min_tokens, thinking budgets and "
                "custom processors are applied by vLLM, to a copy of the logits in fp32"
            )
        logits = logits.to(torch.float32, copy=True)
        for processor in sampler.logits_processors:
            logits = processor.apply(logits, context)
        sampler.thinking_budget_state.apply(logits, context)
    else:
        sampling = _with_bias_and_penalties(sampler, sampling, context, logits.shape[1])
    verified = verification.verify(
        logits,
        cu_rows,
        context.pos,
        drafts,
        sampling,
        method=method,
        synthetic_rates=rates,
    )
    STATUS.add(verified.status)
    if _uses_processed(sampler, requests):
        logits = verification.processed_logits(logits, cu_rows, drafts.ids, sampling)
    return logits, verified.token_ids, verified.num_accepted + 1


def _uses_processors(sampler: Sampler, requests: np.ndarray) -> bool:
    """Whether a request has something that the op has no argument for."""
    thinking = sampler.thinking_budget_state
    if thinking.enabled and thinking.use_thinking_budget[requests].any():
        return True
    for processor in sampler.logits_processors:
        if isinstance(processor, BadWordsState):
            used = processor.num_bad_words.np[requests]
        elif isinstance(processor, LogitBiasState):
            used = processor.num_allowed_token_ids.np[requests]
            used = used | processor.num_stop_token_ids.np[requests]
        else:
            used = np.array(type(processor) not in _KNOWN_PROCESSORS)
        if used.any():
            return True
    return False


def _uses_processed(sampler: Sampler, requests: np.ndarray) -> bool:
    if sampler.return_sampling_mask:
        return True
    if sampler.logprobs_mode not in PROCESSED_LOGPROBS_MODES:
        return False
    of_tokens = sampler.logprob_token_ids_state.max_num_token_ids(requests)
    return sampler.sampling_states.max_num_logprobs(requests) != NO_LOGPROBS or of_tokens > 0


def _filters(sampler: Sampler, context: LogitsContext) -> Sampling:
    states, at, requests = sampler.sampling_states, context.idx_mapping, context.idx_mapping_np

    def used(state: Any, off: float) -> Tensor | None:
        return state.gpu[at] if (state.np[requests] != off).any() else None

    return Sampling(
        temperature=states.temperature.gpu[at],
        seeds=states.seeds.gpu[at],
        top_k=used(states.top_k, states.vocab_size),
        top_p=used(states.top_p, 1.0),
        min_p=used(states.min_p, 0.0),
    )


def _with_bias_and_penalties(
    sampler: Sampler, sampling: Sampling, context: LogitsContext, vocab: int
) -> Sampling:
    at, requests = context.idx_mapping, context.idx_mapping_np
    for processor in sampler.logits_processors:
        if isinstance(processor, LogitBiasState):
            width = int(processor.num_logit_bias.np[requests].max())
            if width:
                place = torch.arange(width, device=at.device)
                given = place < processor.num_logit_bias.gpu[at][:, None]
                ids = processor.logit_bias_token_ids.gpu[at, :width]
                values = processor.logit_bias.gpu[at, :width]
                sampling = replace(sampling, bias_ids=ids.where(given, -1), bias_values=values)
    state = sampler.penalties_state
    if (penalised := state.use_penalty[requests]).any():
        rows = np.where(penalised, requests, -1).astype(np.int32)
        penalties = Penalties(
            rows=async_tensor_h2d(rows, device=at.device),
            output_counts=state.output_bin_counts[:, :vocab],
            prompt_mask=state.prompt_bin_mask[:, : (vocab + 31) // 32],
            presence=state.presence_penalty.gpu[at],
            frequency=state.frequency_penalty.gpu[at],
            repetition=state.repetition_penalty.gpu[at],
        )
        sampling = replace(sampling, penalties=penalties)
    return sampling
