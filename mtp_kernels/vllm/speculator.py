"""Multi-layer drafting in vLLM's V2 model runner (GPU; on CPU under the Triton interpreter)."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.dp_utils import dispatch_cg_and_sync_dp
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.multi_module_mtp.speculator import MultiModuleMTPSpeculator
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
from vllm.v1.worker.utils import get_uniform_decode_token_count

from mtp_kernels.drafting import RoundBuffers, row_capacity
from mtp_kernels.verification import Sampling
from mtp_kernels.vllm import verify
from mtp_kernels.vllm.adapter import (
    log_active,
    make_drafter,
    max_rows,
    prepare,
    without_slots,
)
from mtp_kernels.vllm.head import Choice


class MtpSpeculator(MultiModuleMTPSpeculator):
    """Runs one MTP layer per draft step over all new rows and the repair window.

    Of vLLM's multi-module speculator it is the graph dispatch and capture, the attention metadata
    and the model call that is used; which rows run on what is decided here.
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
        self._nothing_known = self.draft_input_id_overrides  # [max_num_reqs, K - 1], all -1
        config = self.speculative_config
        self._samples_drafts = verify.samples_drafts(config)
        self._method = verify.method_of(config) if verify.is_active() else None
        if self.draft_watermarker is not None:
            self._method = None
        if self._method == "coupled":
            self.draft_logits = None  # what drafts were sampled from makes no difference
        elif self._method is not None and self.draft_logits is not None:
            # One more row, which the requests that pad a graph, index -1, write to.
            rows, *shape = self.draft_logits.shape
            self.draft_logits = self.draft_logits.new_zeros(rows + 1, *shape)

    def load_model(self, target_model: nn.Module) -> None:
        super().load_model(target_model)
        self.head = prepare(self.model, self.drafter, self._method, self._samples_drafts)
        names = self.draft_attn_layer_names
        log_active(self.vllm_config, self.drafter, self.model, self.head, names, "V2")

    def use_samplers(self, sampler: Sampler, rejection_sampler: RejectionSampler) -> None:
        """Where the requests' filters are, and who judges the drafts."""
        states = sampler.sampling_states
        self._filters_now = {"top_k": states.top_k, "top_p": states.top_p, "min_p": states.min_p}
        # Those move from buffer to buffer, and a captured graph reads where it always did.
        self._filters = {
            name: state.gpu.to(self.device, copy=True) for name, state in self._filters_now.items()
        }
        if self._samples_drafts and self._method is not None:
            rejection_sampler.draft_kind = "filtered_logits"

    def set_attn(
        self, model_state: Any, kv_cache_config: Any, block_tables: Any, *args: Any
    ) -> None:
        rows = self.input_buffers.max_num_tokens
        if block_tables.slot_mappings.shape[1] < rows:  # sized for the target's rows only
            block_tables.slot_mappings = block_tables.slot_mappings.new_zeros(
                block_tables.slot_mappings.shape[0], rows
            )
        super().set_attn(model_state, kv_cache_config, block_tables, *args)
        self.drafter.buffers.kv_slots = block_tables.slot_mappings[:, :rows]

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, Tensor] | None,
        last_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        num_sampled: Tensor,
        num_rejected: Tensor,
        last_sampled: Tensor,
        next_prefill_tokens: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> Tensor:
        """[B, K] int64 drafts; see the base class for the arguments."""
        num_reqs = input_batch.num_reqs
        query_lens = np.diff(input_batch.query_start_loc_np[: num_reqs + 1])
        capacity = np.array(row_capacity(query_lens.tolist(), self.num_speculative_steps))
        row_start = np.concatenate(([0], np.cumsum(capacity))).astype(np.int32)
        num_rows = int(row_start[-1])
        longest = input_batch.seq_lens_cpu_upper_bound.numpy()[:num_reqs] + capacity - query_lens
        self.draft_max_seq_len = min(int(longest.max()), self.max_model_len)
        if self._samples_drafts:
            self._copy_request_inputs(
                num_reqs, input_batch.idx_mapping, temperature, seeds, dummy_run=dummy_run
            )

        slots = [-1] * num_reqs
        if not dummy_run:
            slots = self.drafter.assign_slots(input_batch.req_ids[:num_reqs])
        next_ids, lookahead = self._known_ids(
            input_batch, num_sampled, last_sampled, next_prefill_tokens
        )
        target_rows = int(input_batch.query_start_loc_np[num_reqs])
        is_widened = num_rows > target_rows
        self.drafter.pack(
            slots=async_tensor_h2d(slots, dtype=torch.int64, device=self.device),
            query_start=input_batch.query_start_loc[: num_reqs + 1],
            num_rejected=num_rejected[:num_reqs],
            target_ids=input_batch.input_ids[:target_rows],
            target_positions=input_batch.positions[:target_rows],
            target_hidden=last_hidden_states,
            next_ids=next_ids,
            lookahead_ids=lookahead,
            row_start=async_tensor_h2d(row_start, device=self.device)
            if is_widened
            else input_batch.query_start_loc[: num_reqs + 1],
            num_rows=num_rows,
            block_tables=self.block_tables.input_block_tables,
            block_sizes=self.block_tables.block_sizes,
            max_len=self.max_model_len,
        )

        num_padded = max(num_rows, input_batch.num_tokens_after_padding)
        desc, sync = dispatch_cg_and_sync_dp(
            self.cudagraph_manager,
            num_reqs,
            num_padded,
            get_uniform_decode_token_count(
                num_reqs, num_rows, int(capacity.max()), input_batch.decode_graph_eligible
            ),
            dp_size=self.dp_size,
            dp_rank=self.dp_rank,
            need_eager=is_profile,
            dp_sync_state=dp_sync_state,
        )
        if not (dummy_run and skip_attn_for_dummy_run):
            by_group = self.drafter.buffers.kv_slots[:, : desc.num_tokens]
            slot_mappings = build_slot_mappings_by_layer(by_group, self.kv_cache_config)
            attn_metadata = self._build_attn_metadata(
                num_reqs=num_reqs,
                batch_desc=desc,
                query_start_loc_np=row_start,
                seq_lens_cpu_upper_bound=torch.from_numpy(longest.astype(np.int32)),
                step=0,
            )
        self._prepare_eplb_forward(num_rows)
        if desc.cg_mode == CUDAGraphMode.FULL:
            self.cudagraph_manager.run_fullgraph(desc)
        else:
            self._generate_drafts(
                num_reqs,
                desc.num_tokens,
                attn_metadata,
                slot_mappings,
                num_tokens_across_dp=None if sync is None else sync.num_tokens_across_dp,
                cudagraph_runtime_mode=desc.cg_mode,
            )
        return self.draft_tokens[:num_reqs]

    def _copy_request_inputs(self, *args: Any, **kwargs: Any) -> None:
        super()._copy_request_inputs(*args, **kwargs)
        for name, state in self._filters_now.items():
            self._filters[name].copy_(state.gpu, non_blocking=True)

    def _known_ids(
        self,
        batch: InputBatch,
        num_sampled: Tensor,
        last_sampled: Tensor,
        next_prefill_tokens: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The token after each request's last row, and the K - 1 after it, -1 = not known."""
        num_reqs, state = batch.num_reqs, batch.idx_mapping[: batch.num_reqs]
        next_ids = last_sampled[state].view(-1)
        in_prompt = batch.prefill_len_np - batch.num_computed_prefill_tokens_np
        in_prompt = (in_prompt - batch.num_scheduled_tokens)[:num_reqs]
        if not (in_prompt > 0).any():
            return next_ids, self._nothing_known[:num_reqs]
        # A request in the middle of its prompt samples nothing: its next tokens are the prompt's,
        # where the prompt has them. The runner pads what it has not with id 0.
        steps = self.num_speculative_steps
        ahead = torch.full((num_reqs, steps), -1, dtype=torch.int64, device=self.device)
        kept = min(steps, next_prefill_tokens.shape[0])
        ahead[:, :kept] = next_prefill_tokens[:kept, state].T
        in_prompt = async_tensor_h2d(in_prompt, device=self.device)
        ahead.masked_fill_(torch.arange(steps, device=self.device) >= in_prompt[:, None], -1)
        has_sampled = num_sampled[:num_reqs] > 0
        return torch.where(has_sampled, next_ids, ahead[:, 0]), ahead[:, 1:]

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
        if self._samples_drafts:
            first_positions = self.input_buffers.positions[self.last_token_indices[:num_reqs]] + 1
            sampling = self._sampling(num_reqs)

        def run_layer(
            layer: int,
            ids: Tensor,
            positions: Tensor,
            hidden: Tensor,
            rows: Tensor | None,
            write_kv: bool,
        ) -> tuple[Tensor, Tensor]:
            slots = slot_mappings
            if slots is not None and not write_kv:
                slots = without_slots(slots)
            # ids, positions and hidden are views of the buffers that _run_model reads.
            attended, residual = self._run_model(
                num_tokens,
                attn_metadata,
                slots,
                num_tokens_across_dp,
                layer,
                cudagraph_runtime_mode,
            )
            out = self.model.finish(layer, attended, residual, rows)
            return out, out

        def draft_token(step: int, scored: Tensor) -> Choice:
            if not self._samples_drafts:
                return self.head.best(scored)
            if self._method is not None:
                drafted, logits = self.head.sample(
                    scored, first_positions, step, sampling, self._method
                )
                if logits is not None:
                    self.draft_logits[self.idx_mapping[:num_reqs], step] = logits
                return drafted
            self.current_draft_step.fill_(step)
            return self.sample_draft(
                scored,
                first_positions + step,
                self.idx_mapping[:num_reqs],
                self.temperature,
                self.seeds,
                self.current_draft_step,
                self.draft_logits,
                spec_step_idx=self.drafter.schedule[step],
            )

        self.drafter.draft(num_reqs, num_tokens, run_layer, draft_token)

    def _sampling(self, num_reqs: int) -> Sampling:
        """How the requests sample. A graph serves requests with filters and without: all are on."""
        at = self.idx_mapping[:num_reqs]
        filters = {name: values[at] for name, values in self._filters.items()}
        return Sampling(temperature=self.temperature[at], seeds=self.seeds[at], **filters)
