"""head_argmax against torch's linear and argmax and vLLM's oneDNN linear and argmax, on CPU.

python bench/head_argmax.py [--quick]
"""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from interleaved import Times, compare, provenance, write
from torch import Tensor

from mtp_kernels.ops import pack_projection
from mtp_kernels.ops.head_argmax import best_ids

head_argmax = torch.ops.mtp_kernels.head_argmax.default
Heads = Mapping[str, Callable[[Tensor], Tensor]]


def heads_of(weight: Tensor, kept: int) -> Heads:
    """Name -> a function from hidden [T, H] to ids [T]. "pruned" scores every so-many-th row."""
    packed = pack_projection(weight)
    id_map = torch.arange(kept) * (weight.shape[0] // kept)
    pruned = pack_projection(weight[id_map])
    onednn = vllm_linear(weight)
    return {
        "packed": lambda x: best_ids(*head_argmax(x, packed)),
        "unpacked": lambda x: best_ids(*head_argmax(x, weight)),
        "pruned": lambda x: best_ids(*head_argmax(x, pruned, id_map=id_map)),
        "torch": lambda x: F.linear(x, weight).argmax(-1),
        "vllm": lambda x: onednn(x).argmax(-1),
    }


def vllm_linear(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """What vLLM's CPU backend runs for an unquantised linear layer."""
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    handler = ops.create_onednn_mm(weight.t(), 32)
    return lambda x: ops.onednn_mm(handler, x, None)


def sampled(weight: Tensor, tokens: int) -> Callable[[Tensor], Tensor]:
    arguments = {
        "temperature": torch.full((tokens,), 0.7),
        "seeds": torch.arange(tokens),
        "positions": torch.arange(tokens),
    }
    return lambda x: best_ids(*head_argmax(x, weight, **arguments))


PAIRS = [
    ("torch", "packed"),
    ("vllm", "packed"),
    ("vllm", "unpacked"),
    ("packed", "pruned"),
    ("sampled", "unpacked"),
]
OURS = ("packed", "unpacked", "pruned")
COLUMNS = ["H", "T", "read", *OURS, *(" / ".join(pair) for pair in PAIRS)]


def line(size: int, tokens: int, times: Times, bytes_of: dict[str, int]) -> list[str]:
    cells = [f"{size}", f"{tokens}", f"{bytes_of['read'] / times.median('read') / 1e9:.1f} GB/s"]
    for name in OURS:
        share = times.ratio("read", name)[0] * bytes_of[name] / bytes_of["read"]
        cells.append(f"{times.median(name) * 1e3:.2f} ms, {share:.0%}")
    for peer, ours in PAIRS:
        ratio, bound = times.ratio(peer, ours)
        cells.append(f"{ratio:.2f} (>= {bound:.2f})")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to see that it runs")
    quick = parser.parse_args().quick
    vocab, kept, sizes = (4096, 512, (64,)) if quick else (152_576, 32_000, (2048, 4096))
    rounds = 3 if quick else 15
    table = [COLUMNS, ["---"] * len(COLUMNS)]
    results: list[dict[str, Any]] = []
    for size in sizes:
        gen = torch.Generator().manual_seed(0)
        weight = torch.randn(vocab, size, generator=gen, dtype=torch.bfloat16) * size**-0.5
        heads = heads_of(weight, kept)
        read = (
            pack_projection(weight).flatten().view(torch.int64)
        )  # on huge pages, where there are any
        for tokens in (1, 4, 8, 16):
            x = torch.randn(tokens, size, generator=gen).bfloat16()
            functions = {**heads, "sampled": sampled(weight, tokens)}
            contenders = {name: lambda f=f, x=x: f(x) for name, f in functions.items()}
            contenders["read"] = read.sum
            with torch.inference_mode():
                times = compare(contenders, rounds)
            bytes_of = dict.fromkeys((*OURS, "read"), weight.nbytes) | {"pruned": kept * size * 2}
            table.append(line(size, tokens, times, bytes_of))
            seconds = {name: values.tolist() for name, values in times.seconds.items()}
            shape = {"H": size, "T": tokens, "bytes": weight.nbytes}
            results.append(shape | {"seconds": seconds})
    where = provenance()
    lines = [
        f"head_argmax and best_ids: V={vocab:,}, bf16; pruned: {kept:,} rows of them, packed; in "
        "percent the share of the rate at which all threads together read and sum the same bytes",
        "",
        *("| " + " | ".join(cells) + " |" for cells in table),
        "",
        "Medians; ratios are medians of paired ratios, in brackets their lower 97.5% bound. "
        f"{where['date']}, {where['cpu']}, {where['threads']} threads, torch {where['torch']}, "
        f"commit {where['commit']}, {where['build']['cpu_isa']}.",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if not quick:
        write("head_argmax", {"where": where, "rows": results}, text)


if __name__ == "__main__":
    main()
