"""Acceptance of the tiny checkpoint's drafts against the size of the draft vocabulary.

python bench/draft_vocab.py [--quick]

The vocabulary is counted from training text, the prompts are held out; every size is a real vLLM
engine, and gives the text of the whole vocabulary.
"""

import argparse
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from interleaved import RESULTS, provenance, write
from matplotlib.figure import Figure

from mtp_kernels import cli, demo, draft_vocab

sys.path.insert(0, str(demo.EXAMPLE))
from data import make_problem

CHECKPOINT, VOCAB, K = demo.EXAMPLE / "checkpoint", 320, 3
SIZES = (4, 8, 16, 24, 32, 48, 64)


def count(folder: Path) -> Path:
    """The draft vocabulary of 2000 problems of the kind that the checkpoint was trained on."""
    rng = random.Random(7)
    text, out = folder / "problems.txt", folder / "vocab.txt"
    text.write_text("\n".join(make_problem(rng, heldout=False).text for _ in range(2000)))
    arguments = ["--tokenizer", str(CHECKPOINT), "--output", str(out), str(text)]
    if code := cli.main(["draft-vocab", *arguments]):
        raise SystemExit(code)
    return out


def decode(prompts: list[str], vocab: str, folder: Path) -> demo.Result:
    """Greedy, with drafts from `vocab`, a value of MTP_KERNELS_DRAFT_VOCAB."""
    os.environ["MTP_KERNELS_DRAFT_VOCAB"] = vocab
    job = demo.Job(str(CHECKPOINT), prompts, K, 160, 512, 8)
    variant = demo.Variant(f"vocabulary {vocab or 'whole'}", drafts=True)
    return demo.run_variant(variant, job, folder / "engine.log", lambda tokens, finished: None)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Acceptance per position, over the size as a share of the whole vocabulary."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for position in range(K):
        acceptance = [row["acceptance"][position] for row in rows]
        axes.plot(
            [row["size"] for row in rows], acceptance, marker="o", label=f"draft {position + 1}"
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks([row["size"] for row in rows], [str(row["size"]) for row in rows], rotation=45)
    axes.set(
        xlabel=f"ids that can be drafted, of {VOCAB}",
        ylabel="accepted, of all rounds",
        ylim=(0, 1.03),
        title="Pruned draft vocabulary: tiny checkpoint, greedy",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two sizes, to see that it runs")
    quick = parser.parse_args().quick
    problems = (demo.EXAMPLE / "heldout_arithmetic.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in problems[: 4 if quick else 64]]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        vocab = count(folder)
        occurring = len(draft_vocab.read(vocab, VOCAB))
        sizes = [*((16,) if quick else SIZES), occurring]
        whole = decode(prompts, "", folder)
        for size in [*sizes, VOCAB]:
            result = whole if size == VOCAB else decode(prompts, f"{vocab}:{size}", folder)
            if result.token_ids != whole.token_ids:
                raise SystemExit(f"size {size}: the text differs from that of the whole vocabulary")
            rows.append(
                {
                    "size": size,
                    "acceptance": [count / result.rounds for count in result.accepted],
                    "mean_length": 1 + sum(result.accepted) / result.rounds,
                }
            )
    where = provenance()
    lines = [
        f"Draft vocabulary of the tiny checkpoint, V={VOCAB}, K={K}, {len(prompts)} held-out "
        f"problems, greedy, bfloat16; counted from 2000 other problems ({occurring} ids occur)",
        "",
        "| ids | accepted at 1 / 2 / 3 | mean length |",
        "|---|---|---|",
        *(
            f"| {row['size']} | {' / '.join(f'{rate:.3f}' for rate in row['acceptance'])} "
            f"| {row['mean_length']:.2f} |"
            for row in rows
        ),
        "",
        f"The text is the same for all. {where['date']}, {where['cpu']}, commit {where['commit']}.",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if not quick:
        write("draft_vocab", {"where": where, "rows": rows}, text)
        plot(rows, RESULTS / "draft_vocab.png")


if __name__ == "__main__":
    main()
