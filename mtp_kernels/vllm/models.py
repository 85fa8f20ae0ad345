"""MiMo-V2 draft models that build and load every MTP layer of the checkpoint."""

import logging
import re
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.models import mimo_v2_mtp as stock
from vllm.model_executor.models.utils import maybe_prefix

from mtp_kernels import ops
from mtp_kernels.archs import Feed
from mtp_kernels.vllm.entry import EntryProjection, MtpEntry
from mtp_kernels.vllm.settings import ENTRY_TABLE, draft_spec

logger = logging.getLogger("vllm.mtp_kernels")


class MtpLayer(stock.MiMoV2MTPLayer):
    """vLLM's MTP layer with its entry (embedding, two norms, concat, projection) fused."""

    def __init__(self, config, prefix, cache_config=None, quant_config=None) -> None:
        super().__init__(config, prefix, cache_config, quant_config)
        self.eh_proj = EntryProjection(2 * config.hidden_size, config.hidden_size)
        self.entry = MtpEntry()
        self.projected: Tensor | None = None  # [V, H], see MultiLayerPredictor.project_embeddings

    def forward(
        self,
        embed_tokens: VocabParallelEmbedding,
        input_ids: Tensor,
        inputs_embeds: Tensor | None,
        positions: Tensor,
        hidden: Tensor,
        hidden_part: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """ids `[T]` (or embeddings `[T, H]`) and hidden `[T, H]` -> attended and residual `[T, H]`.

        The layer's KV is written then; :meth:`finish` is for the rows of which more is needed.
        With hidden_part, this layer's of `entry_hidden`, embeddings come from the table.
        """
        if hidden_part is not None:
            residual = torch.ops.mtp_kernels.entry_lookup(hidden_part, input_ids, self.projected)
        else:
            residual = self.entry(
                embed_tokens, self.enorm, self.hnorm, self.eh_proj, input_ids, inputs_embeds, hidden
            )
        attended = self.self_attn(positions=positions, hidden_states=self.input_layernorm(residual))
        return attended, residual

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """The MLP and the final norm, of any rows: `[B, H]`. Writes into its arguments."""
        normed, residual = self.pre_mlp_layernorm(attended, residual)
        return self.final_layernorm(self.mlp(normed) + residual)


def _project_hidden(hidden: Tensor, layers: Sequence[MtpLayer]) -> Tensor:
    """[N, T, H]: the hidden halves of the layers' entries."""
    return torch.ops.mtp_kernels.entry_hidden(
        hidden,
        [layer.hnorm.weight for layer in layers],
        [layer.eh_proj.weight for layer in layers],
        hnorm_eps=layers[0].hnorm.variance_epsilon,
    )


class MultiLayerPredictor(nn.Module):
    """All MTP layers, and the embedding they share with the target."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.speculative_config.draft_model_config.hf_config
        self.num_mtp_layers = config.num_nextn_predict_layers
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.mtp = nn.Module()  # so that parameters are named model.mtp.layers.<m>. as stored
        self.mtp.layers = nn.ModuleDict(
            {
                str(layer): MtpLayer(
                    config=config,
                    prefix=f"{maybe_prefix(prefix, 'mtp.layers')}.{layer}",
                    cache_config=vllm_config.cache_config,
                    quant_config=vllm_config.quant_config,
                )
                for layer in range(self.num_mtp_layers)
            }
        )
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.stops_at_attention = False  # for a caller of `MiMoV2MTPModel.finish`
        self._feed = draft_spec(vllm_config.speculative_config).feed
        self._projecting: Sequence[MtpLayer] = ()  # layers that have a table
        self._hidden_parts: Tensor | None = None  # [N, T, H] of this round

    def project_embeddings(self, used: Sequence[int]) -> None:
        """Make a table of projected embeddings for each layer that is used: half of an entry's
        bytes, once and for all, for V times H elements of memory.

        What is rounded once more is the embedding half of the projection, to the model dtype.

        Raises:
            ValueError: what a table cannot be made for.
        """
        table = self.embed_tokens
        self._projecting = [self.mtp.layers[str(layer)] for layer in used]
        for name, value, need in (
            ("fused entry", self._projecting[0].entry.enabled(), True),
            ("dtype of the embedding", table.weight.dtype, self._projecting[0].enorm.weight.dtype),
        ):
            if value != need:
                raise ValueError(f"{ENTRY_TABLE}: {name} must be {need}, but is {value}")
        for layer in self._projecting:
            layer.projected = ops.project_embeddings(
                table.weight[: table.org_vocab_size],
                layer.enorm.weight,
                layer.eh_proj.weight,
                enorm_eps=layer.enorm.variance_epsilon,
            )

    def _hidden_part(self, layer: int, hidden: Tensor) -> Tensor:
        """[T, H] of one layer. Fed the target's hidden states, the first layer of a round makes
        those of all: the later ones get the same rows, unless one is repeated."""
        if self._feed is Feed.TARGET and layer == 0:
            self._hidden_parts = _project_hidden(hidden, self._projecting)
        if self._hidden_parts is None:
            return _project_hidden(hidden, [self._projecting[layer]])[0]
        part = self._hidden_parts[layer]
        if layer == len(self._projecting) - 1:
            self._hidden_parts = None  # not while the target runs
        return part

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        previous_hidden_states: Tensor,
        inputs_embeds: Tensor | None = None,
        spec_step_idx: int = 0,
    ) -> Tensor | tuple[Tensor, Tensor]:
        layer, hidden_part = self.mtp.layers[str(spec_step_idx)], None
        if layer.projected is not None:
            hidden_part = self._hidden_part(spec_step_idx, previous_hidden_states)
        attended, residual = layer(
            self.embed_tokens,
            input_ids,
            inputs_embeds,
            positions,
            previous_hidden_states,
            hidden_part,
        )
        return (attended, residual) if self.stops_at_attention else layer.finish(attended, residual)

    def compute_logits(
        self, hidden_states: Tensor, lm_head: ParallelLMHead, spec_step_idx: int = 0
    ) -> Tensor:
        return self.logits_processor(lm_head, hidden_states)


class MiMoV2MTPModel(stock.MiMoV2MTP):
    """MiMo-V2's draft model. `spec_step_idx` is the MTP layer, 0-based.

    Called, it runs a layer, as vLLM's own proposers want it. With `model.stops_at_attention` it
    runs the layer as far as its attention, and `finish` takes what that returns.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        nn.Module.__init__(self)
        self.config = vllm_config.speculative_config.draft_model_config.hf_config
        self.model = MultiLayerPredictor(
            vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model")
        )
        self.lm_head = ParallelLMHead(
            self.config.vocab_size,
            self.config.hidden_size,
            prefix=maybe_prefix(prefix, "lm_head"),
        )

    def finish(self, layer: int, attended: Tensor, residual: Tensor, rows: Tensor | None) -> Tensor:
        """The rest of the layer, on these rows or on all: `[B, H]`, or `[T, H]`, final-normed."""
        if rows is not None:
            attended, residual = attended[rows], residual[rows]
        return self.model.mtp.layers[str(layer)].finish(attended, residual)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load, and hold the result against the checkpoint.

        Raises:
            ValueError: an MTP weight has no parameter, a parameter got no weight, or a shape
                does not fit; the text lists the names.
        """
        seen: list[tuple[str, tuple[int, ...]]] = []

        def watched() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                if "model.mtp." in name and "rotary_emb.inv_freq" not in name:
                    seen.append((name, tuple(tensor.shape)))
                yield name, tensor

        try:
            loaded = super().load_weights(watched())
        except (AssertionError, RuntimeError, ValueError) as error:
            if not seen:
                raise
            name, shape = seen[-1]
            raise ValueError(f"checkpoint: cannot load {name} of shape {shape}: {error}") from error
        check_complete([name for name, _ in seen], loaded, dict(self.named_parameters()))
        layers = self.model.mtp.layers
        for layer in layers.values():
            if layer.entry.enabled():
                layer.eh_proj.pack()
        size = sum(p.numel() * p.element_size() for p in self.model.mtp.parameters()) / 2**20
        logger.info(
            "mtp_kernels: loaded %d MTP layers, %.1f MiB (%.1f MiB more than the first alone)",
            len(layers),
            size,
            size * (1 - 1 / len(layers)),
        )
        return loaded


def check_complete(
    seen: Iterable[str], loaded: set[str], parameters: dict[str, torch.nn.Parameter]
) -> None:
    """Every MTP weight in the checkpoint found a home, and every MTP parameter was written.

    Raises:
        ValueError: with both lists of names.
    """
    stacked = [(r"\.(q|k|v)_proj\.", ".qkv_proj."), (r"\.(gate|up)_proj\.", ".gate_up_proj.")]

    def home(name: str) -> str:
        for pattern, fused in stacked:
            name = re.sub(pattern, fused, name)
        return name

    homeless = sorted(name for name in seen if home(name) not in loaded)
    unwritten = sorted(
        name for name in parameters if name.startswith("model.mtp.") and name not in loaded
    )
    if homeless or unwritten:
        raise ValueError(
            "checkpoint: MTP weights without a parameter: "
            f"{homeless or 'none'}; MTP parameters without a weight: {unwritten or 'none'}"
        )


class MiMoV2OmniMTPModel(MiMoV2MTPModel, stock.MiMoV2OmniMTP):
    """The same layers under the multimodal architecture's name."""
