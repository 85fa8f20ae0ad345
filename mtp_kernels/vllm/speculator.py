"""Multi-layer drafting in vLLM's V2 model runner (GPU; on CPU under the Triton interpreter)."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.spec_decode.multi_module_mtp.speculator import MultiModuleMTPSpeculator

from mtp_kernels import verification
from mtp_kernels.drafting import RoundBuffers, row_capacity
from mtp_kernels.verification import Sampling
from mtp_kernels.vllm import verify
from mtp_kernels.vllm.adapter import log_active, make_drafter, max_rows, without_slots


class MtpSpeculator(MultiModuleMTPSpeculator):
    """Runs one MTP layer per draft step over all new rows and the repair window.

    Of vLLM's multi-module speculator it is the graph dispatch and capture, the attention
    metadata and the draft sampling that is used; which rows run on what is decided here.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        rows = max_rows(vllm_config)
        self.input_buffers = InputBuffers(self.max_num_reqs, rows, device)
        self.hidden_states = torch.zeros(rows, self.hidden_size, dtype=self.dtype, device=device)
        self.drafter = make_drafter(
            vllm_config,
            RoundBuffers(
                input_ids=self.input_buffers.input_ids,
                positions=self.input_buffers.positions,
                hidden=self.hidden_states,
                row_start=self.input_buffers.query_start_loc,
                seq_lens=self.input_buffers.seq_lens,
                last_row=self.last_token_indices,
                draft_ids=self.draft_tokens,
            ),
        )
        del self.cached_draft_input_ids, self.cached_target_hidden_states  # the drafter's job
        self._method = verify.method_of(self.speculative_config) if verify.is_active() else None
        if self.draft_logits is None or self.draft_watermarker is not None:
            self._method = None
        if self._method == "coupled":
            self.draft_logits = None  # what drafts were sampled from makes no difference
        elif self._method is not None:
            # One more row, which the requests that pad a graph, index -1, write to.
            rows, *shape = self.draft_logits.shape
            self.draft_logits = self.draft_logits.new_zeros(rows + 1, *shape)

    def load_model(self, target_model: nn.Module) -> None:
        super().load_model(target_model)
        names = self.draft_attn_layer_names
        log_active(self.vllm_config, self.drafter, self.model, names, "V2")

    def set_attn(
        self, model_state: Any, kv_cache_config: Any, block_tables: Any, *args: Any
    ) -> None:
        rows = self.input_buffers.max_num_tokens
        if block_tables.slot_mappings.shape[1] < rows:  # sized for the target's rows only
            block_tables.slot_mappings = block_tables.slot_mappings.new_zeros(
                block_tables.slot_mappings.shape[0], rows
            )
        super().set_attn(model_state, kv_cache_config, block_tables, *args)

    def propose(self, input_batch: InputBatch, *args: Any, **kwargs: Any) -> Tensor:
        """[B, K] int64 drafts; see the base class for the arguments."""
        self._target_batch = input_batch
        self._is_dummy = kwargs.get("dummy_run", False)
        query_lens = np.diff(input_batch.query_start_loc_np[: input_batch.num_reqs + 1])
        capacity = np.array(row_capacity(query_lens.tolist(), self.num_speculative_steps))
        if (capacity > query_lens).any():
            input_batch = self._widen(input_batch, capacity, capacity - query_lens)
        return super().propose(input_batch, *args, **kwargs)

    def _widen(self, batch: InputBatch, capacity: np.ndarray, extra: np.ndarray) -> InputBatch:
        """The batch with `capacity[b]` rows per request, for the draft round's metadata."""
        row_start = np.concatenate(([0], np.cumsum(capacity))).astype(np.int32)
        num_rows = int(row_start[-1])
        return replace(
            batch,
            num_scheduled_tokens=capacity.astype(batch.num_scheduled_tokens.dtype),
            num_tokens=num_rows,
            num_tokens_after_padding=max(num_rows, batch.num_tokens_after_padding),
            query_start_loc=async_tensor_h2d(row_start, device=self.device),
            query_start_loc_np=row_start,
            seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound[: capacity.size]
            + torch.from_numpy(extra.astype(np.int32)),
        )

    def _prepare_inputs(
        self,
        target_hidden_states: Tensor,
        input_batch: InputBatch,
        num_tokens: int,
        max_query_len: int,
        num_sampled: Tensor,
        num_rejected: Tensor,
        last_sampled: Tensor,
        next_prefill_tokens: Tensor,
        mm_inputs: Any = None,
    ) -> None:
        """Fill the input buffers; `input_batch` may be wider than what the target ran."""
        batch, num_reqs = self._target_batch, input_batch.num_reqs
        target_rows = int(batch.query_start_loc_np[num_reqs])
        if self._is_dummy:
            slots = np.full(num_reqs, -1)
        else:
            slots = np.array(self.drafter.assign_slots(batch.req_ids[:num_reqs]))
        # A request in the middle of its prompt samples nothing: its next tokens are the prompt's,
        # where the prompt has them. The runner pads what it has not with id 0.
        state, steps = self.idx_mapping[:num_reqs], self.num_speculative_steps
        in_prompt = batch.prefill_len_np - batch.num_computed_prefill_tokens_np
        in_prompt = async_tensor_h2d(
            (in_prompt - batch.num_scheduled_tokens)[:num_reqs], device=self.device
        )
        ahead = torch.full((num_reqs, steps), -1, dtype=torch.int64, device=self.device)
        kept = min(steps, next_prefill_tokens.shape[0])
        ahead[:, :kept] = next_prefill_tokens[:kept, state].T
        ahead.masked_fill_(torch.arange(steps, device=self.device) >= in_prompt[:, None], -1)
        has_sampled = num_sampled[:num_reqs] > 0
        next_ids = torch.where(has_sampled, last_sampled[state].view(-1), ahead[:, 0])
        self.drafter.pack(
            slots=async_tensor_h2d(slots, device=self.device),
            query_start=batch.query_start_loc[: num_reqs + 1],
            num_rejected=num_rejected[:num_reqs],
            target_ids=batch.input_ids[:target_rows],
            target_positions=batch.positions[:target_rows],
            target_hidden=target_hidden_states,
            next_ids=next_ids,
            lookahead_ids=ahead[:, 1:],
            row_start=input_batch.query_start_loc[: num_reqs + 1],
            num_rows=num_tokens,
        )

    def _generate_drafts(
        self,
        num_reqs: int,
        num_tokens: int,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, Tensor] | None,
        num_tokens_across_dp: Tensor | None = None,
        cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
    ) -> None:
        """The device work of a round, as it is captured into a graph."""
        positions = self.input_buffers.positions[self.last_token_indices[:num_reqs]]

        def run_layer(
            layer: int, ids: Tensor, rows: Tensor, hidden: Tensor, write_kv: bool
        ) -> tuple[Tensor, Tensor]:
            slots = slot_mappings
            if slots is not None and not write_kv:
                slots = without_slots(slots)
            # ids, rows and hidden are views of the buffers that _run_model reads.
            return self._run_model(
                num_tokens,
                attn_metadata,
                slots,
                num_tokens_across_dp,
                layer,
                cudagraph_runtime_mode,
            )

        def draft_token(step: int, scored: Tensor) -> Tensor:
            if self._method is not None:
                return self._sample_draft(step, scored, positions + 1, num_reqs)
            self.current_draft_step.fill_(step)
            return self.sample_draft(
                scored,
                positions + 1 + step,
                self.idx_mapping[:num_reqs],
                self.temperature,
                self.seeds,
                self.current_draft_step,
                self.draft_logits,
                spec_step_idx=self.drafter.schedule[step],
            )

        self.drafter.draft(num_reqs, num_tokens, run_layer, draft_token)

    def _sample_draft(
        self, step: int, scored: Tensor, first_positions: Tensor, num_reqs: int
    ) -> Tensor:
        """[B] int64, sampled at the request's temperature; its filters are not at hand here.

        first_positions: [B], of the rows that will judge the drafts 0.
        """
        state = self.idx_mapping[:num_reqs]
        logits = self.compute_draft_logits(scored, self.drafter.schedule[step])
        sampling = Sampling(self.temperature[state], self.seeds[state])
        positions = first_positions + step
        if self._method == "coupled":
            return verification.sample(logits, positions, sampling, method="coupled")
        logits = logits.to(self.draft_logits.dtype)  # the verifier must see the very same ones
        self.draft_logits[state, step] = logits
        if self._method == "block":
            seeds = verification.round_seeds(sampling.seeds, first_positions)
            sampling = replace(sampling, seeds=seeds)
        return verification.sample(logits, positions, sampling, stream="draft")
