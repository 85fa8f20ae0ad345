"""Multi-layer drafting in vLLM's V1 model runner (CPU, and GPUs it still serves)."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.spec_decode.step3p5 import Step3p5MTPProposer

from mtp_kernels.drafting import RoundBuffers, row_capacity
from mtp_kernels.vllm.adapter import (
    log_active,
    make_drafter,
    max_rows,
    prepare,
    without_slots,
)
from mtp_kernels.vllm.head import Choice
from mtp_kernels.vllm.verify import rounds_of, samples_drafts


class MtpProposer(Step3p5MTPProposer):
    """Runs one MTP layer per draft step over all new rows and the repair window.

    Of `Step3p5MTPProposer` it is the bookkeeping for draft layers in several KV-cache groups
    that is used; sharing the target's head and config is as in `EagleProposer`.
    """

    draft_kind = "filtered_logits"
    """What `verify_v1.Rounds` gets as draft probabilities: the logits that it sampled from."""

    _maybe_share_lm_head = EagleProposer._maybe_share_lm_head
    _create_draft_vllm_config = EagleProposer._create_draft_vllm_config

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Any = None) -> None:
        super().__init__(vllm_config, device, runner)
        self.runner = runner
        buffers = RoundBuffers.allocate(
            max_requests=self.max_batch_size,
            max_rows=max_rows(vllm_config),
            num_drafts=self.num_speculative_tokens,
            hidden_size=self.hidden_size,
            dtype=self.dtype,
            device=device,
        )
        self.drafter = make_drafter(vllm_config, buffers)

    def load_model(self, target_model: torch.nn.Module) -> None:
        super().load_model(target_model)
        # Stock skips the whole batch's draft round when one request is within K of the end,
        # which would leave holes in everyone's MTP KV. Rows here never pass the target's.
        self.runner.effective_drafter_max_model_len += self.num_speculative_tokens
        # None: vLLM judges the drafts, and samples them.
        self._rounds = rounds_of(self.runner.rejection_sampler)
        method = None if self._rounds is None else self._rounds.method
        samples = samples_drafts(self.speculative_config)
        self.head = prepare(self.model, self.drafter, method, samples)
        names = self._draft_attn_layer_names
        log_active(self.vllm_config, self.drafter, self.model, self.head, names, "V1")

    def initialize_attn_backend(
        self, kv_cache_config: KVCacheConfig, kernel_block_sizes: list[int] | None = None
    ) -> None:
        super().initialize_attn_backend(kv_cache_config, kernel_block_sizes)
        groups, buffers = self.draft_attn_groups, self.drafter.buffers
        self._block_size_of = {
            group.kv_cache_group_id: group.kv_cache_spec.block_size for group in groups
        }
        shape = len(self._block_size_of), buffers.input_ids.numel()
        buffers.kv_slots = torch.full(shape, -1, dtype=torch.int64, device=self.device)

    def propose(
        self,
        num_speculative_tokens: int,
        target_token_ids: Tensor,
        target_positions: Tensor,
        target_hidden_states: Tensor,
        next_token_ids: Tensor,
        token_indices_to_sample: Tensor | None,
        common_attn_metadata: CommonAttentionMetadata,
        sampling_metadata: SamplingMetadata,
        mm_embed_inputs: tuple[list[Tensor], Tensor] | None = None,
        num_rejected_tokens_gpu: Tensor | None = None,
        slot_mappings: Any = None,
    ) -> Tensor:
        """[B, K] int64 drafts; see the base class for the arguments."""
        cad, batch = common_attn_metadata, self.runner.input_batch
        num_reqs, buffers = cad.num_reqs, self.drafter.buffers
        query_start = cad.query_start_loc_cpu[: num_reqs + 1].numpy()
        capacity = row_capacity(np.diff(query_start).tolist(), num_speculative_tokens)
        row_start = np.concatenate(([0], np.cumsum(capacity))).astype(np.int32)
        num_rows = int(row_start[-1])
        next_ids, lookahead = self._known_ids(next_token_ids, num_reqs, num_speculative_tokens)
        if num_rejected_tokens_gpu is None:
            num_rejected_tokens_gpu = torch.zeros_like(next_ids)

        self.drafter.pack(
            slots=async_tensor_h2d(
                np.array(self.drafter.assign_slots(batch.req_ids[:num_reqs])), device=self.device
            ),
            query_start=cad.query_start_loc[: num_reqs + 1],
            num_rejected=num_rejected_tokens_gpu,
            target_ids=target_token_ids,
            target_positions=target_positions,
            target_hidden=target_hidden_states,
            next_ids=next_ids,
            lookahead_ids=lookahead,
            row_start=async_tensor_h2d(row_start, device=self.device),
            num_rows=num_rows,
            block_tables=[self._per_group_block_tables[gid] for gid in self._block_size_of],
            block_sizes=list(self._block_size_of.values()),
            max_len=self.max_model_len,
        )
        cad = replace(
            cad,
            query_start_loc=buffers.row_start[: num_reqs + 1],
            query_start_loc_cpu=torch.from_numpy(row_start),
            seq_lens=buffers.seq_lens[:num_reqs],
            seq_lens_cpu_upper_bound=None,
            num_actual_tokens=num_rows,
            max_query_len=max(capacity),
            max_seq_len=self.max_model_len,
            positions=buffers.positions[:num_rows],
        )
        slots = self._register_slots(num_rows)
        _, attn_metadata = self.build_per_group_and_layer_attn_metadata(cad)
        draft_probs: list[Tensor] = []
        samples = samples_drafts(self.speculative_config) and not sampling_metadata.all_greedy
        if samples and self._rounds is not None:
            sampling = self._rounds.filters(sampling_metadata, num_reqs)
        first_positions = buffers.positions[buffers.last_row[:num_reqs]] + 1

        def run_layer(
            layer: int,
            ids: Tensor,
            positions: Tensor,
            hidden: Tensor,
            rows: Tensor | None,
            write_kv: bool,
        ) -> tuple[Tensor, Tensor]:
            with set_forward_context(
                attn_metadata,
                self.vllm_config,
                num_tokens=num_rows,
                slot_mapping=slots if write_kv else without_slots(slots),
            ):
                attended, residual = self.model(
                    input_ids=ids, positions=positions, hidden_states=hidden, spec_step_idx=layer
                )
                out = self.model.finish(layer, attended, residual, rows)
            return out, out

        def draft_token(step: int, scored: Tensor) -> Choice:
            if not samples:
                return self.head.best(scored)
            if self._rounds is not None:
                drafted, probs = self.head.sample(
                    scored, first_positions, step, sampling, self._rounds.method
                )
            else:
                drafted, probs = self._sample_draft_tokens_for_step(scored, sampling_metadata, step)
            if probs is not None:
                draft_probs.append(probs)
            return drafted

        draft_ids = self.drafter.draft(num_reqs, num_rows, run_layer, draft_token)
        self._last_draft_probs = torch.stack(draft_probs, dim=1) if draft_probs else None
        return draft_ids.clone()

    def _known_ids(self, sampled: Tensor, num_reqs: int, num_drafts: int) -> tuple[Tensor, Tensor]:
        """The token after each request's last row, and the K - 1 after it, -1 = not known.

        A request in the middle of its prompt samples nothing: its next tokens are the prompt's.
        """
        batch = self.runner.input_batch
        in_prefill = self.runner.discard_request_mask.np[:num_reqs]
        ahead = np.full((num_reqs, num_drafts), -1, dtype=np.int64)
        scheduled = np.diff(self.runner.query_start_loc.np[: num_reqs + 1])
        for request in np.flatnonzero(in_prefill):
            start = batch.num_computed_tokens_cpu[request] + scheduled[request]
            stop = min(start + num_drafts, batch.num_tokens_no_spec[request])
            ahead[request, : stop - start] = batch.token_ids_cpu[request, start:stop]
        known = async_tensor_h2d(ahead, device=self.device)
        next_ids = torch.where(known[:, 0] >= 0, known[:, 0], sampled[:num_reqs].long())
        return next_ids, known[:, 1:]

    def _register_slots(self, num_rows: int) -> dict[str, Tensor]:
        """Each draft layer's KV slot per row; also hands them to the groups' metadata."""
        slots = dict(zip(self._block_size_of, self.drafter.buffers.kv_slots, strict=True))
        for gid in slots:
            self._per_group_slot_mappings[gid] = slots[gid][:num_rows]
        return {
            name: slots[group.kv_cache_group_id][:num_rows]
            for group in self.draft_attn_groups
            for name in group.layer_names
        }
