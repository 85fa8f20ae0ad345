"""Runs the checkpoint in vLLM and compares it with the plain model; writes metrics.json.

    VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_KVCACHE_SPACE=1 python check_vllm.py --dtype float32

`--mtp 3` adds MTP drafting, as whatever vLLM and plugins are installed do it
(`VLLM_PLUGINS=""` keeps plugins out). Tokens that differ are followed up: at the first one, the
plain model's two best logits are compared, and a gap under `TIE` counts as a tie.
"""

import argparse
import json
from pathlib import Path

import torch
from data import BOS
from evaluate import HERE, answer_of, read_jsonl
from model import load
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

# Gap of the two best logits under which rounding may decide, by dtype.
TIE = {"float32": 1e-3, "bfloat16": 0.25}
MAX_NEW = 160


def compare(checkpoint: Path, dtype: str, prompts: list[list[int]], outputs: list[list[int]]):
    """Teacher-force the plain model on vLLM's outputs: counts of rows that differ, and of ties."""
    model = load(checkpoint, getattr(torch, dtype))
    tokens = identical = ties = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        _, logits = model.trunk(torch.tensor(prompt + output))
        logits = logits[len(prompt) - 1 : -1].float()
        differs = (logits.argmax(-1) != torch.tensor(output)).nonzero()
        tokens += len(output)
        identical += not len(differs)
        if len(differs):
            best = logits[differs[0, 0]].topk(2).values
            ties += bool(best[0] - best[1] < TIE[dtype])
    return {
        "prompts": len(prompts),
        "tokens": tokens,
        "identical": identical,
        "differ_at_a_tie": ties,
        "differ_otherwise": len(prompts) - identical - ties,
    }


def acceptance_metrics(llm: LLM) -> dict[str, object]:
    """Acceptance by position and mean length, from vLLM's counters."""
    values = {m.name: m for m in llm.get_metrics() if m.name.startswith("vllm:spec_decode")}
    drafts = values["vllm:spec_decode_num_drafts"].value
    accepted = values["vllm:spec_decode_num_accepted_tokens_per_pos"].values
    return {
        "rounds": drafts,
        "accepted_at_position": [round(a / drafts, 4) for a in accepted],
        "mean_length": round(1 + sum(accepted) / drafts, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=HERE / "checkpoint")
    parser.add_argument("--dtype", choices=sorted(TIE), default="float32")
    parser.add_argument("--mtp", type=int, default=0)
    parser.add_argument("--name", help="key in metrics.json; not written without it")
    args = parser.parse_args()

    problems = read_jsonl("heldout_arithmetic.jsonl")
    python = read_jsonl("heldout_python.jsonl")
    prompts = [[BOS, *row["prompt"].encode()] for row in problems + python]
    llm = LLM(
        model=str(args.checkpoint),
        dtype=args.dtype,
        max_model_len=1024,
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config=(
            {"method": "mtp", "num_speculative_tokens": args.mtp} if args.mtp else None
        ),
    )
    # The text prompt goes through the tokenizer; it must give the same ids.
    encoded = llm.get_tokenizer().encode(problems[0]["prompt"])
    assert encoded == prompts[0], "the tokenizer does not give BOS and bytes"

    sampling = SamplingParams(temperature=0, max_tokens=MAX_NEW)
    results = llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], sampling)
    outputs = [list(r.outputs[0].token_ids) for r in results]
    right = sum(
        answer_of(r.outputs[0].text) == problem["answer"]
        for problem, r in zip(problems, results, strict=False)
    )
    report = {
        "exact_match": round(right / len(problems), 4),
        "against_plain_model": compare(args.checkpoint, args.dtype, prompts, outputs),
    }
    if args.mtp:
        report["acceptance_all_prompts"] = acceptance_metrics(llm)
    print(json.dumps(report, indent=2))
    if args.name:
        path = args.checkpoint / "metrics.json"
        saved = json.loads(path.read_text())
        saved[args.name] = report
        path.write_text(json.dumps(saved, indent=2) + "\n")


if __name__ == "__main__":
    main()
