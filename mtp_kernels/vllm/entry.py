"""The entry op as a vLLM CustomOp: `mtp_entry`, on unless `-mtp_entry` is given."""

import torch
from torch import Tensor, nn
from vllm.config import get_cached_compilation_config
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from mtp_kernels import ops
from mtp_kernels.vllm.settings import disabled_parts


class EntryProjection(nn.Module):
    """The weight `[H_out, 2H]` of an MTP layer's projection, bias-free."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)

    def pack(self) -> None:
        """Bring the weight into the order the CPU kernel reads it in, where there is one."""
        weight = self.weight
        if weight.device.type == "cpu" and weight.dtype == torch.bfloat16:
            if weight.shape[0] % 16 == 0:
                packed = ops.pack_projection(weight)
                self.weight = nn.Parameter(packed, requires_grad=False)


@CustomOp.register("mtp_entry")
class MtpEntry(CustomOp):
    """`eh_proj(concat(enorm(embedding), hnorm(hidden)))` of one MTP layer, `[T, H]`."""

    @classmethod
    def enabled(cls) -> bool:
        """On by default: vLLM adds "none" under inductor, which must not switch us off."""
        custom_ops = get_cached_compilation_config().custom_ops
        return f"-{cls.name}" not in custom_ops and "entry" not in disabled_parts()

    def forward_native(
        self,
        embed_tokens: VocabParallelEmbedding,
        enorm: RMSNorm,
        hnorm: RMSNorm,
        eh_proj: EntryProjection,
        input_ids: Tensor,
        inputs_embeds: Tensor | None,
        hidden: Tensor,
    ) -> Tensor:
        """The unfused sequence, as vLLM runs it."""
        if inputs_embeds is None:
            inputs_embeds = embed_tokens(input_ids)
        joined = torch.cat([enorm(inputs_embeds), hnorm(hidden)], dim=-1)
        return nn.functional.linear(joined, eh_proj.weight)

    def forward_cuda(
        self,
        embed_tokens: VocabParallelEmbedding,
        enorm: RMSNorm,
        hnorm: RMSNorm,
        eh_proj: EntryProjection,
        input_ids: Tensor,
        inputs_embeds: Tensor | None,
        hidden: Tensor,
    ) -> Tensor:
        """The fused op. A table split over ranks is read by vLLM's embedding first."""
        table = embed_tokens.weight
        if inputs_embeds is None and (embed_tokens.tp_size > 1 or table.dtype != hidden.dtype):
            inputs_embeds = embed_tokens(input_ids)
        from_table = inputs_embeds is None
        return torch.ops.mtp_kernels.entry(
            hidden,
            enorm.weight,
            hnorm.weight,
            eh_proj.weight,
            input_ids=input_ids if from_table else None,
            embed_weight=table if from_table else None,
            inputs_embeds=inputs_embeds,
            enorm_eps=enorm.variance_epsilon,
            hnorm_eps=hnorm.variance_epsilon,
        )

    forward_cpu = forward_cuda
