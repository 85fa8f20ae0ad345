"""Offline numbers of a checkpoint: answers, layer accuracies, acceptance by feed rule.

Every round recomputes everything densely, so no cache can be wrong: slow, and the yardstick.

    python evaluate.py --checkpoint checkpoint     # writes metrics.json into the checkpoint
"""

import argparse
import json
import random
import re
from pathlib import Path

import torch
from data import BOS, EOS, python_modules, python_window
from model import TinyMiMoV2, load
from torch import Tensor

HERE = Path(__file__).resolve().parent
FEEDS = ("target", "chain", "layer0")


@torch.no_grad()
def draft(model: TinyMiMoV2, ids: Tensor, k: int, feed: str = "target") -> list[int]:
    """The k greedy drafts that follow `ids`, by a from-scratch pass.

    ids: [S] verified tokens; the last one is the newest (its hidden is not known yet)
    feed: "target", every layer sees the trunk's hidden (how this checkpoint was trained);
        "chain", layer m+1 sees layer m's output at the same row; "layer0", only layer 0 runs,
        on its own output, one position further each step (what an engine with one layer does)
    """
    hidden, _ = model.trunk(ids[:-1])
    return draft_from_hidden(model, ids, hidden, k, feed)


@torch.no_grad()
def draft_from_hidden(
    model: TinyMiMoV2, ids: Tensor, hidden: Tensor, k: int, feed: str
) -> list[int]:
    """`draft` with the trunk's hidden given: [S - 1, H], the rows of ids[:-1]."""
    if feed not in FEEDS:
        raise ValueError(f"feed: expected one of {FEEDS}, got {feed!r}")
    if feed != "layer0" and k > model.num_mtp_layers:
        raise ValueError(f"k: expected at most {model.num_mtp_layers} (MTP layers), got {k}")
    tokens, fed, drafts = ids[1:], hidden, []
    for step in range(k):
        layer = 0 if feed == "layer0" else step
        out, _, _ = model.mtp_layer(layer, fed, tokens)
        drafts.append(int(model.lm_head(out[-1]).argmax()))
        newest = ids.new_tensor([drafts[-1]])
        if feed == "layer0":
            # The rows so far keep their inputs (they are in the cache); one row is added.
            tokens, fed = torch.cat([tokens, newest]), torch.cat([fed, out[-1:]])
        else:
            # The same rows again, each with the id one further.
            tokens = torch.cat([tokens[1:], newest])
            fed = out if feed == "chain" else hidden
    return drafts


@torch.no_grad()
def generate(
    model: TinyMiMoV2, prompt: list[int], max_new: int, k: int = 3, feed: str = "target"
) -> tuple[list[int], list[int]]:
    """Greedy speculative decoding. Returns new ids (EOS included) and accepted drafts per round."""
    ids = list(prompt)
    hidden, logits = model.trunk(torch.tensor(ids))
    ids.append(int(logits[-1].argmax()))
    accepted_per_round: list[int] = []
    while EOS not in ids[len(prompt) :] and len(ids) - len(prompt) < max_new:
        # The rows of verified tokens in the last verification pass are what a fresh pass gives.
        known = hidden[: len(ids) - 1]
        drafts = draft_from_hidden(model, torch.tensor(ids), known, k, feed) if k else []
        hidden, logits = model.trunk(torch.tensor(ids + drafts))
        best = logits[-len(drafts) - 1 :].argmax(-1).tolist()
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == best[accepted]:
            accepted += 1
        accepted_per_round.append(accepted)
        ids += best[: accepted + 1]
    new = ids[len(prompt) :]
    if EOS in new:
        new = new[: new.index(EOS) + 1]
    return new[:max_new], accepted_per_round


def acceptance(rounds: list[int], k: int) -> dict[str, object]:
    """Rates at positions 1..k, mean length (accepted + 1), and how often 0..k were accepted."""
    n = len(rounds)
    return {
        "rounds": n,
        "accepted_at_position": [round(sum(a > i for a in rounds) / n, 4) for i in range(k)],
        "mean_length": round(1 + sum(rounds) / n, 4),
        "rounds_by_accepted": [sum(a == i for a in rounds) for i in range(k + 1)],
    }


@torch.no_grad()
def layer_accuracy(model: TinyMiMoV2, ids: Tensor, counted: Tensor) -> list[float]:
    """Next-token accuracy of the trunk, then of each MTP layer (target feed).

    ids: [B, S]; counted: [B, S] bool, which ids count as targets
    """
    n = model.num_mtp_layers
    rows = ids.shape[1] - n - 1
    hidden, logits = model.trunk(ids[:, :rows])
    guesses = [logits.argmax(-1)]
    for m in range(n):
        out, _, _ = model.mtp_layer(m, hidden, ids[:, 1 + m : 1 + m + rows])
        guesses.append(model.lm_head(out).argmax(-1))
    result = []
    for depth, guess in enumerate(guesses):
        span = slice(1 + depth, 1 + depth + rows)
        hit = (guess == ids[:, span])[counted[:, span]]
        result.append(round(hit.float().mean().item(), 4))
    return result


def heldout_batches(count: int = 128, length: int = 256) -> dict[str, tuple[Tensor, Tensor]]:
    """Held-out rows for `layer_accuracy`: working and answers only, and Python text."""
    ids = torch.full((count, length), EOS)
    counted = torch.zeros(count, length, dtype=torch.bool)
    for row, problem in enumerate(read_jsonl("heldout_arithmetic.jsonl")[:count]):
        body = [BOS, *problem["text"].encode(), EOS]
        ids[row, : len(body)] = torch.tensor(body)
        counted[row, 1 + len(problem["prompt"]) : len(body)] = True
    rng = random.Random("evaluate")
    sources = list(python_modules(heldout=True).values())
    windows = [
        [BOS, *python_window(rng, rng.choice(sources), length).ljust(length, b"\n")][:length]
        for _ in range(count)
    ]
    python = torch.tensor(windows)
    return {
        "arithmetic": (ids, counted),
        "python": (python, torch.ones_like(python, dtype=torch.bool)),
    }


def read_jsonl(name: str) -> list[dict]:
    """The rows of one of this folder's held-out files."""
    return [json.loads(line) for line in (HERE / name).read_text().splitlines()]


def answer_of(text: str) -> int | None:
    """The number after the last "Answer:", None if there is none."""
    found = re.findall(r"Answer: (-?\d+)", text)
    return int(found[-1]) if found else None


def evaluate(
    model: TinyMiMoV2, problems: int = 256, compared: int = 64, k: int = 3
) -> dict[str, object]:
    """All offline numbers. The feeds are compared on the first `compared` held-out problems."""
    metrics: dict[str, object] = {
        f"accuracy_{kind}_trunk_then_mtp": layer_accuracy(model, ids, counted)
        for kind, (ids, counted) in heldout_batches().items()
    }
    arithmetic = read_jsonl("heldout_arithmetic.jsonl")[:problems]
    rounds: list[int] = []
    right = 0
    for problem in arithmetic:
        new, accepted = generate(model, [BOS, *problem["prompt"].encode()], 160, k)
        right += (
            answer_of(bytes(t for t in new if t < 256).decode(errors="replace"))
            == (problem["answer"])
        )
        rounds += accepted
    metrics["arithmetic_problems"] = len(arithmetic)
    metrics["arithmetic_exact_match"] = round(right / len(arithmetic), 4)
    metrics["arithmetic_acceptance_target"] = acceptance(rounds, k)
    for feed in FEEDS:
        rounds = []
        for problem in arithmetic[:compared]:
            rounds += generate(model, [BOS, *problem["prompt"].encode()], 160, k, feed)[1]
        metrics[f"arithmetic_first_{compared}_acceptance_{feed}"] = acceptance(rounds, k)
    rounds = []
    for row in read_jsonl("heldout_python.jsonl"):
        rounds += generate(model, [BOS, *row["prompt"].encode()], 64, k)[1]
    metrics["python_acceptance_target"] = acceptance(rounds, k)
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=HERE / "checkpoint")
    parser.add_argument("--problems", type=int, default=256)
    parser.add_argument("--compared", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    torch.set_num_threads(1)  # one short sequence at a time: more threads only wait
    model = load(args.checkpoint, getattr(torch, args.dtype))
    metrics = evaluate(model, args.problems, args.compared)
    path = args.checkpoint / "metrics.json"
    saved = json.loads(path.read_text()) if path.exists() else {}
    saved[f"offline_{args.dtype}"] = metrics
    path.write_text(json.dumps(saved, indent=2) + "\n")
    print(json.dumps(metrics, indent=2))


if __name__ == "__main__":
    main()
