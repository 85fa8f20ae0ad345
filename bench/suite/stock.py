"""What stock vLLM runs on CPU between and around MTP layers: its functions, called as it does."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm import _custom_ops as custom_ops
from vllm.config import VllmConfig
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.platforms import current_platform

current_platform.import_kernels()
current_platform.register_triton_kernel_overrides()  # as a worker does, before what uses them

from vllm.v1.attention.backend import CommonAttentionMetadata  # noqa: E402
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher  # noqa: E402
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer  # noqa: E402

BLOCK, MAX_LEN = 16, 4096  # tokens of a KV block, and of a sequence


def linear(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """An unquantized linear layer, prepared as vLLM's CPU backend prepares one: for oneDNN."""
    layer = SimpleNamespace(weight=weight)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    return lambda x: layer.cpu_linear(x, weight, None)


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x)
    custom_ops.rms_norm(out, x, gain, eps)
    return out


def entry(
    table: Tensor, enorm: Tensor, hnorm: Tensor, project: Callable[[Tensor], Tensor], eps: float
) -> Callable[[Tensor, Tensor], Tensor]:
    """(ids [T], hidden [T, H]) -> [T, H]. Its C++ norm, which is faster than its RMSNorm here."""

    def call(ids: Tensor, hidden: Tensor) -> Tensor:
        halves = [rms_norm(F.embedding(ids, table), enorm, eps), rms_norm(hidden, hnorm, eps)]
        return project(torch.cat(halves, dim=-1))

    return call


@dataclass(frozen=True)
class Model:
    """A draft model that is nothing but its entry and its head."""

    entry: Callable[[Tensor, Tensor], Tensor]
    head: Callable[[Tensor], Tensor]

    def __call__(self, *, input_ids: Tensor, hidden_states: Tensor, **_: Any) -> Tensor:
        return self.entry(input_ids, hidden_states)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)


class Proposer(SpecDecodeBaseProposer):
    """vLLM's draft loop without an engine: no attention layers, and a model of two parts."""

    def __init__(self, model: Model | None, drafts: int, rows: int, hidden_size: int) -> None:
        # No call of the base class: it wants a checkpoint. These are what its methods read.
        self.model: Any = model
        self.vllm_config = VllmConfig()
        self.cudagraph_dispatcher = CudagraphDispatcher(self.vllm_config)
        self.draft_model_config = SimpleNamespace(hf_config=SimpleNamespace(architectures=[]))
        self.method, self.num_speculative_tokens = "mtp", drafts
        self.block_size, self.max_model_len = BLOCK, MAX_LEN
        self.vllm_config.model_config = SimpleNamespace(uses_mrope=False)
        self.input_ids = torch.zeros(rows, dtype=torch.int32)
        self.positions = torch.zeros(rows, dtype=torch.int64)
        self.hidden_states = torch.zeros(rows, hidden_size, dtype=torch.bfloat16)
        self._slot_mapping_buffer = torch.zeros(rows, dtype=torch.int64)
        self.arange = torch.arange(rows + 1, dtype=torch.int32)
        self.token_arange_np = self.arange.numpy()
        self.draft_attn_groups, self._draft_attn_layer_names = [], set()
        self.pass_hidden_states_to_model = True
        self.needs_extra_input_slots = self.uses_mrope = self.supports_mm_inputs = False
        self.parallel_drafting = self.constant_draft_positions = False
        self.use_local_argmax_reduction = self.use_heterogeneous_vocab = False
        self._enable_probabilistic_draft_probs = self._share_mtp_indices = False
        self.eplb_state = self.allowed_attn_types = self.vocab_mapping = None


def metadata(query_start: Tensor, seq_lens: Tensor, block_table: Tensor) -> CommonAttentionMetadata:
    """Of one round's queries. `propose` writes into it, so each round has its own."""
    num_tokens = int(query_start[-1])
    return CommonAttentionMetadata(
        query_start_loc=query_start,
        query_start_loc_cpu=query_start,
        seq_lens=seq_lens.clone(),
        num_reqs=seq_lens.numel(),
        num_actual_tokens=num_tokens,
        max_query_len=num_tokens // seq_lens.numel(),
        max_seq_len=MAX_LEN,
        block_table_tensor=block_table,
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
    )
