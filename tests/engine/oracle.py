"""What every draft round should have drafted: dense passes of the plain PyTorch model."""

import importlib.util
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny_mimo_v2"
CHECKPOINT = EXAMPLE / "checkpoint"

TIE_MARGIN = 1e-3
"""Logit gap under which two fp32 implementations may pick different tokens."""

LEAST_EXPECTED = 5
"""Texts expected in a cell of a chi-square test. Simulated, its p values are then right within a
factor of 3."""


def plain_model():
    """The checkpoint in `examples/tiny_mimo_v2/model.py`, fp32."""
    torch.set_num_threads(1)  # its matrices are far too small to share
    spec = importlib.util.spec_from_file_location("tiny_model", EXAMPLE / "model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["tiny_model"] = module
    spec.loader.exec_module(module)
    return module.load(CHECKPOINT, torch.float32)


@dataclass
class Comparison:
    """Drafts of an engine run held against the oracle's."""

    checked: int = 0
    ties: int = 0
    wrong: list = field(default_factory=list)


@torch.inference_mode()
def compare(model, tokens: list[int], prompt_len: int, rounds: list, feed: str) -> Comparison:
    """Hold one request's rounds `[(last row L, drafts [K]), ...]` against dense passes.

    `tokens` is the prompt and all that was generated. A round at row L knew the tokens up to
    t_{L+1}, those of the prompt, and those that earlier rounds knew (a preempted request prefills
    its own output). Each draft is checked given the engine's own drafts before it, so that one
    tie does not count three times.
    """
    result, known_len, known = Comparison(), prompt_len, []
    rounds = [one for one in rounds if one[0] + 1 < len(tokens)]  # later tokens were cut off
    for last_row, _ in rounds:
        known_len = max(known_len, last_row + 2)
        known.append(known_len)
    if not rounds:
        return result
    num_rows = max(last_row for last_row, _ in rounds) + 1
    hidden = model.trunk(torch.tensor(tokens[:num_rows]))[0].expand(len(rounds), -1, -1)
    for layer in range(len(rounds[0][1])):
        ids = torch.zeros(len(rounds), num_rows, dtype=torch.long)
        for r, (last_row, drafts) in enumerate(rounds):
            sequence = tokens[: known[r]] + drafts[max(known[r] - last_row - 2, 0) :]
            row_ids = sequence[1 + layer : last_row + 2 + layer]
            ids[r, : len(row_ids)] = torch.tensor(row_ids)
        out = model.mtp_layer(layer, hidden, ids)[0]
        for r, (last_row, drafts) in enumerate(rounds):
            logits = model.lm_head(out[r, last_row])
            gap = float(logits.max() - logits[drafts[layer]])
            result.checked += 1
            if gap > TIE_MARGIN:
                result.wrong.append((last_row, layer, drafts[layer], int(logits.argmax()), gap))
            elif gap > 0:
                result.ties += 1
        if feed == "chain":
            hidden = out
    return result


@torch.inference_mode()
def acceptance(model, tokens: list[int], prompt_len: int, num_drafts: int) -> tuple[int, int]:
    """(tokens emitted, rounds) of drafting densely along a known greedy continuation."""
    hidden = model.trunk(torch.tensor(tokens))[0]
    row, emitted, rounds = prompt_len - 1, 0, 0
    while row + 1 < len(tokens) - 1:
        sequence, accepted = tokens[: row + 2], 0
        for layer in range(num_drafts):
            ids = torch.tensor(sequence[1 + layer : row + 2 + layer])
            out = model.mtp_layer(layer, hidden[: row + 1], ids)[0]
            sequence = [*sequence, int(model.lm_head(out[row]).argmax())]
        for step in range(num_drafts):
            if row + 2 + step >= len(tokens) or sequence[row + 2 + step] != tokens[row + 2 + step]:
                break
            accepted += 1
        row, emitted, rounds = row + accepted + 1, emitted + accepted + 1, rounds + 1
    return emitted, rounds


@torch.inference_mode()
def law_of_text(
    model, prompt: list[int], length: int, temperature: float, top_p: float, smallest: float
) -> dict[tuple[int, ...], float]:
    """Chance of each continuation of `length` tokens whose chance is at least `smallest`.

    Enumerated level by level; one with an unlikelier beginning is not likelier.
    """
    texts, chances = torch.empty(1, 0, dtype=torch.long), torch.ones(1, dtype=torch.float64)
    for _ in range(length):
        ids = torch.cat([torch.tensor(prompt).expand(len(texts), -1), texts], 1)
        logits = model.trunk(ids)[1][:, -1].double()
        law, order = (logits / temperature).softmax(-1).sort(-1, descending=True)
        law = law.where(law.cumsum(-1) - law < top_p, 0)
        joint = chances[:, None] * law / law.sum(-1, keepdim=True)
        parent, rank = (joint >= smallest).nonzero(as_tuple=True)
        texts = torch.cat([texts[parent], order[parent, rank][:, None]], 1)
        chances = joint[parent, rank]
    return dict(zip(map(tuple, texts.tolist()), chances.tolist(), strict=True))


def chi_square(
    law: dict[tuple[int, ...], float], texts: list[list[int]]
) -> tuple[float, int, float]:
    """(statistic, degrees of freedom, p value) of texts against a law, whose rest is one cell."""
    length = len(next(iter(law)))
    counts = Counter(tuple(text[:length]) for text in texts)
    cells = [(counts[text], len(texts) * chance) for text, chance in law.items()]
    seen, expected = (sum(column) for column in zip(*cells, strict=True))
    cells.append((len(texts) - seen, len(texts) - expected))
    assert all(expected >= LEAST_EXPECTED for _, expected in cells), cells[-1]
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    half = torch.tensor([len(cells) - 1, statistic], dtype=torch.float64) / 2
    return statistic, len(cells) - 1, float(torch.special.gammaincc(half[0], half[1]))
