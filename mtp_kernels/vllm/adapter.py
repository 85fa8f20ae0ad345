"""What the V1 proposer and the V2 speculator have in common."""

import logging
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backends.utils import PAD_SLOT_ID

from mtp_kernels.archs import Feed
from mtp_kernels.drafting import Drafter, RoundBuffers
from mtp_kernels.verification import Method
from mtp_kernels.vllm import settings
from mtp_kernels.vllm.head import DraftHead
from mtp_kernels.vllm.settings import DISABLE, draft_spec, repeat_last_layer

logger = logging.getLogger("vllm.mtp_kernels")


def make_drafter(vllm_config: VllmConfig, buffers: RoundBuffers) -> Drafter:
    """The drafter for a vLLM config whose draft model is ours.

    Raises:
        ValueError: the config asks for something multi-layer drafting cannot do exactly.
    """
    config, spec = vllm_config.speculative_config, draft_spec(vllm_config.speculative_config)
    check_supported(vllm_config, config.num_speculative_tokens)
    return Drafter(
        num_layers=config.draft_model_config.hf_config.num_nextn_predict_layers,
        num_drafts=config.num_speculative_tokens,
        feed=spec.feed,
        # Twice as many as can run, so that preempted requests keep their slot for a while.
        num_slots=2 * vllm_config.scheduler_config.max_num_seqs,
        buffers=buffers,
        repeat_last_layer=repeat_last_layer(),
    )


def prepare(model: nn.Module, drafter: Drafter, method: Method | None, samples: bool) -> DraftHead:
    """Make what is made once of the weights, which are loaded and shared; returns the head.

    From here on a call of the model ends with a layer's attention: our drafters finish it.

    samples: whether drafts are sampled; method: what they are sampled for, None: by vLLM.

    Raises:
        ValueError: the draft vocabulary asked for is not a list of this model's tokens, or the
            head cannot be fused, or vLLM samples; or tables of embeddings cannot be made.
    """
    model.model.stops_at_attention = True
    if settings.entry_table():
        model.model.project_embeddings(sorted(set(drafter.schedule)))
    kept = settings.draft_vocab(model.lm_head.org_vocab_size)
    if kept is not None and samples and method is None:
        raise ValueError(
            f"{settings.DRAFT_VOCAB}: vLLM samples the drafts here, from all tokens; that needs "
            "part verify, and a rejection_sample_method that it knows, without watermarking"
        )
    writes_logits = samples and method != "coupled"
    return DraftHead(model.lm_head, model.model.logits_processor, kept, writes_logits=writes_logits)


def max_rows(vllm_config: VllmConfig) -> int:
    """Most rows of one draft round: the target's, each request widened to K rows at worst."""
    scheduler = vllm_config.scheduler_config
    num_drafts = vllm_config.speculative_config.num_speculative_tokens
    return scheduler.max_num_batched_tokens + scheduler.max_num_seqs * (num_drafts - 1)


def without_slots(slot_mappings: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same slot mapping per layer with no row in it: a run that writes no KV."""
    return {name: torch.full_like(slots, PAD_SLOT_ID) for name, slots in slot_mappings.items()}


def check_supported(vllm_config: VllmConfig, num_drafts: int) -> None:
    """Refuse what would silently draft from wrong inputs or stale KV.

    Raises:
        ValueError: names the option, what is needed, and what it is.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    scheduler, block_size = vllm_config.scheduler_config, vllm_config.cache_config.block_size
    threshold = scheduler.long_prefill_token_threshold
    multimodal = model.supports_multimodal_inputs
    pipeline, data = parallel.pipeline_parallel_size, parallel.data_parallel_size
    context = parallel.decode_context_parallel_size
    tensor = parallel.tensor_parallel_size
    fits_table = tensor == 1 or not settings.entry_table()
    keeps_block = not vllm_config.speculative_config.use_eagle_block_drop()
    k = num_drafts
    for name, value, fits, need in (
        ("multimodal inputs", multimodal, not multimodal, "False"),
        ("pipeline_parallel_size", pipeline, pipeline == 1, "1"),
        ("data_parallel_size", data, data == 1, "1"),
        ("decode_context_parallel_size", context, context == 1, "1"),
        (f"{settings.ENTRY_TABLE}=1, whose tensor_parallel_size", tensor, fits_table, "1"),
        ("disable_eagle_block_drop", keeps_block, not keeps_block, "False"),
        # A widened round must fit, at worst at the very start of a request.
        ("max_model_len", model.max_model_len, model.max_model_len >= 2 * k, f">= {2 * k}"),
        # The block that a prefix hit drops must hold what the rows before it depend on.
        ("block_size", block_size, block_size is None or block_size >= k, f">= {k}"),
        # vLLM ends no chunk within K tokens of a prompt's end: smaller chunks would stall there.
        ("long_prefill_token_threshold", threshold, not 0 < threshold < k, f"0 or >= {k}"),
    ):
        if not fits:
            raise ValueError(
                f"{name}: multi-layer MTP drafting with K={k} needs {need}, got {value}; "
                f"{DISABLE}=layers gives vLLM's own drafting"
            )


def log_active(
    vllm_config: VllmConfig,
    drafter: Drafter,
    model: nn.Module,
    head: DraftHead,
    attn_layer_names: Iterable[str],
    runner: str,
) -> None:
    """The one line per engine that says what is active, and what its KV costs."""
    spec = draft_spec(vllm_config.speculative_config)
    layers = list(model.model.mtp.layers.values())
    entry = "fused" if layers[0].entry.enabled() else "unfused"
    if tables := [layer.projected for layer in layers if layer.projected is not None]:
        size = sum(table.numel() * table.element_size() for table in tables) / 2**20
        entry += f", {size:.1f} MiB of projected embeddings"
    attn_layers = get_layers_from_vllm_config(
        vllm_config, AttentionLayerBase, list(attn_layer_names)
    )
    kv_specs = [layer.get_kv_cache_spec(vllm_config) for layer in attn_layers.values()]
    logger.info(
        "mtp_kernels: %s runner drafts with MTP layers %s of %s, fed the %s's hidden; "
        "entry: %s; head: %s; KV of the %d layers: %.1f KiB per token",
        runner,
        drafter.schedule,
        spec.draft_architecture,
        "target" if spec.feed is Feed.TARGET else "previous layer",
        entry,
        head.describe(),
        len(kv_specs),
        sum(kv.page_size_bytes / kv.block_size for kv in kv_specs) / 1024,
    )
