"""The draft head: lm_head and the choice of a token in one op, over all tensor-parallel ranks."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)

from mtp_kernels import ops, verification
from mtp_kernels.verification import Method, Sampling
from mtp_kernels.vllm.compat import warn_once
from mtp_kernels.vllm.settings import DISABLE, DRAFT_VOCAB, disabled_parts

Choice = Tensor | tuple[Tensor, Tensor]
"""What `drafting.DraftToken` returns: ids [B], or (values, ids) [S, B] of all slices and ranks."""


class DraftHead:
    """Chooses drafts from hidden states, with the lm_head as it is when this is made.

    Each rank scores its own rows of the vocabulary and keeps one winner per slice of them; all
    winners are gathered, so that every rank comes to the same draft. A pruned vocabulary means a
    copy of the head's rows, and so does bfloat16 on CPU, in the order they are read in.
    """

    def __init__(
        self,
        lm_head: ParallelLMHead,
        logits_processor: LogitsProcessor,
        vocab: Sequence[int] | None = None,
        *,
        writes_logits: bool = False,
    ) -> None:
        """vocab: ids that may be drafted, None: all. writes_logits: `logits` will be asked for.

        Raises:
            ValueError: a vocabulary for a head that cannot be fused; the text says why.
        """
        self._lm_head, self._logits_processor = lm_head, logits_processor
        self.is_fused = not (obstacle := _obstacle(lm_head, logits_processor))
        if obstacle and vocab is not None:
            raise ValueError(f"{DRAFT_VOCAB}: expected a head that can be fused, but {obstacle}")
        if obstacle and "head" not in disabled_parts():
            warn_once(f"mtp_kernels: drafts are chosen from written logits: {obstacle}")
        self._num_drafted = lm_head.org_vocab_size if vocab is None else len(vocab)
        self._ids_of_ranks: Tensor | None = None  # of all ranks' kept rows; V: of none
        if not self.is_fused:
            return

        shard, weight = lm_head.shard_indices, lm_head.weight.detach()
        self._start, self._id_map = shard.org_vocab_start_index, None
        self._size = shard.org_vocab_end_index - self._start
        if vocab is not None:
            weight, ids = self._prune(weight, vocab)
            self._start, self._size, self._id_map = 0, ids.numel(), _padded(ids, len(weight))
        is_cpu = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
        if is_cpu and not (writes_logits and vocab is not None):
            weight = ops.pack_projection(_padded(weight, -(-len(weight) // 16) * 16))
            if self._id_map is not None:
                self._id_map = _padded(self._id_map, len(weight) * 16)
        self._weight = weight

    def describe(self) -> str:
        """For the log: what drafts are chosen by, and what its copy of the weight costs."""
        if not self.is_fused:
            return "unfused"
        text = f"fused, {self._num_drafted} of {self._lm_head.org_vocab_size} ids"
        if self._weight.data_ptr() != self._lm_head.weight.data_ptr():
            size = self._weight.numel() * self._weight.element_size() / 2**20
            text += f", {size:.1f} MiB of its own"
        return text

    def best(self, scored: Tensor) -> Choice:
        """The most likely tokens. scored: [B, H]."""
        return self._choose(scored) if self.is_fused else self.logits(scored).argmax(-1)

    def sample(
        self,
        scored: Tensor,
        first_positions: Tensor,
        step: int,
        sampling: Sampling,
        method: Method,
    ) -> tuple[Choice, Tensor | None]:
        """Draft number `step` of each request, and what it was sampled from if `method` asks.

        scored: [B, H]; first_positions: [B], of the rows that will judge the drafts 0.

        Returns (tokens, logits [B, V]), which the verifier gets as "filtered_logits" with the
        requests' `sampling`. `coupled` takes drafts from anywhere: its logits are None, never
        written by a fused head, and the race, with the target's noise, is then without filters. It
        is won by another token than the target's only where the filters cut the winner.
        """
        positions = first_positions + step
        if method == "coupled" and self.is_fused:
            return self._choose(scored, sampling, positions), None
        logits = self.logits(scored)
        if method == "coupled":
            return verification.sample(logits, positions, sampling, method="coupled"), None
        seeds = verification.round_seeds(sampling.seeds, first_positions)
        sampling = replace(sampling, seeds=seeds)
        return verification.sample(logits, positions, sampling, stream="draft"), logits

    def logits(self, scored: Tensor) -> Tensor:
        """[B, V], on all ranks; -inf for tokens that may not be drafted, which are not scored."""
        if self._ids_of_ranks is None:
            return self._logits_processor(self._lm_head, scored)
        kept = torch.nn.functional.linear(scored, self._weight)
        if self._lm_head.tp_size > 1:
            kept = tensor_model_parallel_all_gather(kept)
        logits = kept.new_full((len(scored), self._lm_head.org_vocab_size + 1), -torch.inf)
        logits.index_copy_(1, self._ids_of_ranks, kept)
        return logits[:, :-1]

    def _choose(
        self, scored: Tensor, sampling: Sampling | None = None, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        values, ids = torch.ops.mtp_kernels.head_argmax(
            scored,
            self._weight,
            vocab_size=self._size,
            vocab_start=self._start,
            id_map=self._id_map,
            temperature=sampling and sampling.temperature,
            seeds=sampling and sampling.seeds,
            positions=positions,
            stream="target" if sampling else "draft",
        )
        if self._lm_head.tp_size > 1:
            values = tensor_model_parallel_all_gather(values, dim=0)
            # As the bits of floats: vLLM's gather for CPUs knows no integers.
            bits = tensor_model_parallel_all_gather(ids.view(torch.float32), dim=0)
            ids = bits.view(torch.int64)
        return values, ids

    def _prune(self, weight: Tensor, vocab: Sequence[int]) -> tuple[Tensor, Tensor]:
        """This rank's kept rows and their ids; ranks with fewer rows than others are padded."""
        lm_head, part = self._lm_head, self._lm_head.num_embeddings_per_partition
        of_rank: list[list[int]] = [[] for _ in range(lm_head.num_embeddings_padded // part)]
        for token in sorted(vocab):
            of_rank[token // part].append(token)
        most = max(map(len, of_rank))
        padded = [ids + [lm_head.org_vocab_size] * (most - len(ids)) for ids in of_rank]
        self._ids_of_ranks = torch.tensor(padded, device=weight.device).flatten()
        rank = lm_head.shard_indices.padded_org_vocab_start_index // part
        kept = torch.tensor(of_rank[rank], dtype=torch.int64, device=weight.device)
        return _padded(weight[kept - self._start], most), kept


def _obstacle(lm_head: ParallelLMHead, logits_processor: LogitsProcessor) -> str:
    """Why this head cannot be fused; empty if it can."""
    if "head" in disabled_parts():
        return f"{DISABLE} names head"
    if not isinstance(lm_head.quant_method, UnquantizedEmbeddingMethod | UnquantizedLinearMethod):
        return f"lm_head is quantized ({type(lm_head.quant_method).__name__})"
    if logits_processor.head_dtype not in (None, lm_head.weight.dtype):
        return f"head_dtype is {logits_processor.head_dtype}, not the model's"
    if logits_processor.scale != 1 or logits_processor.soft_cap is not None:
        return "the logits are scaled or capped"
    if getattr(lm_head, "bias", None) is not None:
        return "lm_head has a bias"
    return ""


def _padded(rows: Tensor, count: int) -> Tensor:
    """`rows` with zeros after them, `count` in all."""
    if len(rows) == count:
        return rows
    return torch.cat([rows, rows.new_zeros(count - len(rows), *rows.shape[1:])])
