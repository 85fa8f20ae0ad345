"""verify against vLLM's rejection sampler and straightforward torch, on CPU.

python bench/verify.py [--quick]
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from interleaved import compare, provenance, read_ceiling, write
from torch import Tensor

from mtp_kernels import verification

ROWS = {  # name -> temperature, top_k, top_p
    "temperature 0.7": (0.7, None, None),
    "greedy": (0.0, None, None),
    "top_k 50, top_p 0.95": (0.7, 50, 0.95),
}


class Batch:
    """Logits of which each row has one token of probability about 0.8; most drafts are it."""

    def __init__(
        self, requests: int, drafts: int, vocab: int, device: torch.device | str = "cpu"
    ) -> None:
        gen = torch.Generator(device).manual_seed(0)
        self.requests, self.drafts, self.vocab = requests, drafts, vocab
        num_rows = requests * (drafts + 1)
        on = {"generator": gen, "device": device}
        self.logits = torch.randn(num_rows, vocab, dtype=torch.bfloat16, **on).mul_(2)
        peaks = torch.randint(0, vocab, (num_rows,), **on)
        self.logits.scatter_(1, peaks[:, None], 12.25)
        hit = torch.rand(requests, drafts, **on) < 0.8
        other = torch.randint(0, vocab, (requests, drafts), **on)
        self.draft_ids = torch.where(hit, peaks.view(requests, -1)[:, :drafts], other)
        self.cu_rows = torch.arange(0, num_rows + 1, drafts + 1, dtype=torch.int32, device=device)
        self.positions = torch.arange(num_rows, device=device)
        self.seeds = torch.arange(requests, device=device)

    def full(self, value: float | None, dtype: torch.dtype = torch.float32) -> Tensor | None:
        if value is None:
            return None
        return torch.full((self.requests,), value, dtype=dtype, device=self.logits.device)


def ours(batch: Batch, temperature: float, top_k: int | None, top_p: float | None) -> Callable:
    sampling = verification.Sampling(
        temperature=batch.full(temperature),
        seeds=batch.seeds,
        top_k=batch.full(top_k, torch.int32),
        top_p=batch.full(top_p),
    )
    drafts = verification.Drafts(batch.draft_ids)
    return lambda: verification.verify(
        batch.logits, batch.cu_rows, batch.positions, drafts, sampling
    )


def straightforward_torch(batch: Batch, temperature: float, *_: Any) -> Callable:
    """What one writes first: softmax of all rows in fp32, then gather, compare, sample."""
    requests = torch.arange(batch.requests, device=batch.logits.device)

    def greedy() -> tuple[Tensor, Tensor]:
        best = batch.logits.argmax(-1).view(batch.requests, -1)
        accepted = (best[:, :-1] == batch.draft_ids).long().cumprod(1).sum(1)
        return best[requests, accepted], accepted

    def sampled() -> tuple[Tensor, Tensor]:
        p = (batch.logits.float() / temperature).softmax(-1).view(batch.requests, -1, batch.vocab)
        p_draft = p[:, :-1].gather(2, batch.draft_ids[:, :, None])[:, :, 0]
        accepted = (torch.rand_like(p_draft) < p_draft).long().cumprod(1).sum(1)
        p = p[requests, accepted]
        rejected = batch.draft_ids.gather(1, accepted.clamp(max=batch.drafts - 1)[:, None])
        is_bonus = (accepted == batch.drafts)[:, None]
        p.scatter_(1, rejected, p.gather(1, rejected) * is_bonus)
        return (p / torch.empty_like(p).exponential_()).argmax(-1), accepted

    return greedy if temperature == 0 else sampled


def vllm_sampler(
    batch: Batch, temperature: float, top_k: int | None, top_p: float | None
) -> Callable:
    """vLLM's V1 RejectionSampler, with its expansion of per-request values repaired.

    On CPU that function returns uninitialised memory, which for top_k also crashes.
    """
    from vllm.platforms import current_platform

    current_platform.register_triton_kernel_overrides()  # as the engine does, before the import
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    def expand(
        x: Tensor,
        cu_num_tokens: Tensor,
        num_tokens: int,
        replace_from: int = 0,
        replace_to: int = 0,
    ) -> Tensor:
        counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1)).long()
        return torch.where(x == replace_from, replace_to, x).repeat_interleave(counts)

    rejection_sampler.expand_batch_to_tokens = expand
    metadata = SpecDecodeMetadata.make_dummy(batch.draft_ids.tolist(), torch.device("cpu"))
    rows = torch.arange(batch.logits.shape[0]).view(batch.requests, -1)
    metadata.target_logits_indices = rows[:, :-1].flatten()
    metadata.bonus_logits_indices = rows[:, -1]
    sampling = SamplingMetadata(
        temperature=batch.full(temperature) if temperature else None,
        all_greedy=temperature == 0,
        all_random=temperature != 0,
        top_p=batch.full(top_p),
        top_k=batch.full(top_k, torch.int32),
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.tensor([]),
        presence_penalties=torch.tensor([]),
        repetition_penalties=torch.tensor([]),
        output_token_ids=[],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    sampler = rejection_sampler.RejectionSampler(Sampler())
    return lambda: sampler(metadata, None, batch.logits, sampling)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to see that it runs")
    quick = parser.parse_args().quick
    batch = Batch(4, 3, 4096) if quick else Batch(64, 3, 152_576)
    rounds = 3 if quick else 15
    ceiling = read_ceiling(batch.logits)
    size = batch.logits.nbytes
    results: dict[str, Any] = {}
    lines = [
        f"verify: B={batch.requests}, K={batch.drafts}, V={batch.vocab:,}, bf16 "
        f"({size / 1e6:.0f} MB of logits, read at {ceiling / 1e9:.1f} GB/s at best)",
        "",
        "| | mtp_kernels | share of read ceiling | torch | vLLM | torch / ours | vLLM / ours |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, (temperature, top_k, top_p) in ROWS.items():
        contenders = {"ours": ours(batch, temperature, top_k, top_p)}
        if top_k is None:
            contenders["torch"] = straightforward_torch(batch, temperature)
        contenders["vllm"] = vllm_sampler(batch, temperature, top_k, top_p)
        with torch.inference_mode():
            times = compare(contenders, rounds)
        # Rows after a rejection need no reading, and ours are not read.
        rows_needed = int((contenders["ours"]().num_accepted + 1).sum())
        share = rows_needed * batch.vocab * 2 / times.median("ours") / ceiling
        cells = [name, f"{times.median('ours') * 1e3:.2f} ms", f"{share:.0%}"]
        result: dict[str, Any] = {"share_of_read_ceiling": share, "rows_needed": rows_needed}
        result["ratio"] = {}
        for peer in ("torch", "vllm"):
            cells.append(f"{times.median(peer) * 1e3:.0f} ms" if peer in contenders else "")
        for peer in ("torch", "vllm"):
            if peer not in contenders:
                cells.append("")
                continue
            ratio, bound = times.ratio(peer, "ours")
            result["ratio"][peer] = {"median": ratio, "lower_bound": bound}
            cells.append(f"{ratio:.1f} (>= {bound:.1f})")
        result["seconds"] = {peer: values.tolist() for peer, values in times.seconds.items()}
        results[name] = result
        lines.append("| " + " | ".join(cells) + " |")
    where = provenance()
    lines += [
        "",
        "Medians; ratios are medians of paired ratios, in brackets their lower 97.5% bound. The "
        "share is of the bytes of rows up to each first rejection, which is what ours reads. "
        f"{where['date']}, {where['cpu']}, {where['threads']} threads, torch {where['torch']}, "
        f"commit {where['commit']}, {where['build']['cpu_isa']}.",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if not quick:
        write("verify", {"where": where, "bytes": size, "ceiling": ceiling, "rows": results}, text)


if __name__ == "__main__":
    main()
