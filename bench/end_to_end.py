"""Real vLLM on CPU, bandwidth-bound: what a round spends on drafting and verifying, ours and stock.

python bench/end_to_end.py [--quick] [--drafts K ...]

The model has MiMo-V2's shape and random weights, so what is accepted is drawn, and planted in the
logits that the rejection sampler gets; every engine is a process of its own, in an order drawn
anew. Times are taken in vLLM's worker, around the proposer and the rejection sampler.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from interleaved import provenance, write

from mtp_kernels import demo

N = 3  # MTP layers
VARIANTS = {  # name -> environment
    "stock": {"MTP_KERNELS_DISABLE": "layers,verify"},
    "ours": {},
    "pruned": {"MTP_KERNELS_DRAFT_VOCAB": "{vocab}"},
}
ACCEPTANCE_LENGTH = {1: 1.8, 2: 2.4, 3: 2.9, 7: 4.0}  # by K
TEMPERATURES = (0.7, 0.0)


def make_model(folder: Path, hidden: int, vocab: int, kept: int) -> None:
    """A config without weights, which vLLM then draws; and a draft vocabulary."""
    config = json.loads((demo.EXAMPLE / "checkpoint" / "config.json").read_text())
    heads = hidden // 128
    config |= {
        "num_nextn_predict_layers": N,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": max(heads // 4, 1),
        "head_dim": 128,
        "v_head_dim": 128,
        "swa_num_attention_heads": heads,
        "swa_num_key_value_heads": max(heads // 4, 1),
        "swa_head_dim": 128,
        "swa_v_head_dim": 128,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "vocab.txt").write_text("\n".join(map(str, range(kept))))


def run_engine(variant: str, k: int, folder: Path, shape: dict[str, Any]) -> list[dict[str, Any]]:
    env = {
        name: value.format(vocab=folder / "vocab.txt") for name, value in VARIANTS[variant].items()
    }
    env |= {
        "MTP_KERNELS_REPEAT_LAST_LAYER": str(int(k > N and variant != "stock")),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions, to the worker
    }
    result = folder / "rows.json"
    job = shape | {"k": k, "model": str(folder), "result": str(result)}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, "--worker"],
        input=json.dumps(job),
        env=os.environ | env,
        capture_output=True,
        text=True,
    )
    if run.returncode:
        raise SystemExit(f"{variant}, K={k}: {run.stderr[-3000:]}")
    return [row | {"variant": variant, "K": k} for row in json.loads(result.read_text())]


def watch(worker: Any, k: int, length: float) -> None:
    """In the engine's worker: time the proposer and the rejection sampler; plant acceptances.

    A draft is accepted with a probability that makes `length` tokens per round, whatever it is.
    """
    import random
    import time

    runner = worker.model_runner
    runner.spent = {"draft": 0.0, "verify": 0.0, "rounds": 0}
    propose, verify = runner.drafter.propose, runner.rejection_sampler.forward
    low, high = 0.0, 1.0
    for _ in range(50):
        chance = (low + high) / 2
        too_many = sum(chance**i for i in range(1, k + 1)) > length - 1
        low, high = (low, chance) if too_many else (chance, high)
    rng = random.Random(0)

    def timed_propose(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = propose(*args, **kwargs)
        runner.spent["draft"] += time.perf_counter() - start
        return result

    def timed_verify(metadata: Any, draft_probs: Any, logits: Any, sampling: Any) -> Any:
        planned, row, draft = [], 0, 0
        ids = metadata.draft_token_ids.tolist()
        for count in metadata.num_draft_tokens:
            passes = [rng.random() < chance for _ in range(count)] + [False]
            accepted = passes.index(False)
            for i in range(count):
                logits[row + i, ids[draft + i]] = 30.0 if i < accepted else -30.0
            planned.append(ids[draft : draft + accepted])
            row, draft = row + count + 1, draft + count
        start = time.perf_counter()
        result = verify(metadata, draft_probs, logits, sampling)
        runner.spent["verify"] += time.perf_counter() - start
        runner.spent["rounds"] += 1
        # Stock judges sampled requests at temperatures from uninitialised memory.
        tokens = result.sampled_token_ids
        for request, drafts in enumerate(planned):
            tokens[request, : len(drafts)] = tokens.new_tensor(drafts)
            tokens[request, len(drafts)].clamp_(min=0)
            tokens[request, len(drafts) + 1 :] = -1
        return result

    runner.drafter.propose = timed_propose
    runner.rejection_sampler.forward = timed_verify


def spent(worker: Any) -> dict[str, float]:
    """What has been spent since the last call."""
    runner = worker.model_runner
    result = runner.spent.copy()
    runner.spent.update(draft=0.0, verify=0.0, rounds=0)
    return result


def work() -> None:
    """One engine: a job on stdin, its rows into a file."""
    job = json.load(sys.stdin)
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=job["model"],
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=max(job["batches"]),
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config={"method": "mtp", "num_speculative_tokens": job["k"]},
    )
    rng = random.Random(0)
    llm.collective_rpc(watch, args=(job["k"], job["length"]))
    rows = []
    for temperature in TEMPERATURES:
        for batch in job["batches"]:
            prompts = [
                {"prompt_token_ids": [rng.randrange(1000) for _ in range(16)]} for _ in range(batch)
            ]
            sampling = SamplingParams(
                temperature=temperature, max_tokens=job["tokens"], ignore_eos=True, detokenize=False
            )
            for repeat in range(job["repeats"] + 1):
                llm.collective_rpc(spent)
                start = time.perf_counter()
                llm.generate(prompts, sampling, use_tqdm=False)
                seconds = time.perf_counter() - start
                if repeat:  # the first one warms up
                    row = llm.collective_rpc(spent)[0] | {"seconds": seconds}
                    rows.append(row | {"temperature": temperature, "batch": batch})
    Path(job["result"]).write_text(json.dumps(rows))


def busy(row: dict[str, Any]) -> float:
    """Seconds of drafting and verifying."""
    return row["draft"] + row["verify"]


def table(rows: list[dict[str, Any]], tokens: int) -> list[str]:
    """Per temperature, K and batch: tokens per second; time busy a round, and its share of all."""
    lines = [
        "| T | K | batch | tokens/s: stock | ours | pruned | draft + verify, ms a round: stock "
        "| ours | pruned | ours / stock | pruned / stock | share of the time: stock | ours "
        "| pruned |",
        "|" + "---|" * 14,
    ]
    for key in sorted({(row["temperature"], row["K"], row["batch"]) for row in rows}):
        speed, cost, share = [], [], []
        for variant in VARIANTS:
            mine = [
                row
                for row in rows
                if (row["temperature"], row["K"], row["batch"]) == key and row["variant"] == variant
            ]
            speed.append(median(key[2] * tokens / row["seconds"] for row in mine))
            cost.append(median(1e3 * busy(row) / row["rounds"] for row in mine))
            share.append(median(busy(row) / row["seconds"] for row in mine))
        cells = [*map(str, key), *(f"{x:.1f}" for x in speed), *(f"{x:.1f}" for x in cost)]
        cells += [f"{cost[1] / cost[0]:.2f}", f"{cost[2] / cost[0]:.2f}"]
        cells += [f"{x:.0%}" for x in share]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that it runs")
    parser.add_argument(
        "--drafts",
        type=int,
        nargs="+",
        metavar="K",
        choices=[*ACCEPTANCE_LENGTH],
        default=[*ACCEPTANCE_LENGTH],
        help="of 1 2 3 7, which is also how the result is named",
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work()
    drafts = [3] if args.quick else sorted(set(args.drafts))
    hidden, vocab, kept = (128, 1024, 256) if args.quick else (2048, 152_576, 32_000)
    shape = {"batches": [1] if args.quick else [1, 4, 16], "tokens": 24 if args.quick else 48}
    shape |= {"repeats": 1 if args.quick else 3}
    engines = [(variant, k) for variant in VARIANTS for k in drafts]
    random.Random(time.time_ns()).shuffle(engines)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name), hidden, vocab, kept)
        for variant, k in engines:
            length = ACCEPTANCE_LENGTH[k]
            rows += run_engine(variant, k, Path(name), shape | {"length": length})
            print(f"{variant}, K={k}: done", file=sys.stderr)
    where = provenance()
    lines = [
        f"MiMo-V2's shape, 4 layers and {N} MTP layers, hidden {hidden}, V={vocab:,}, bf16, random "
        f"weights, V1 runner; pruned: {kept:,} ids. Acceptance lengths are set: "
        + ", ".join(f"{ACCEPTANCE_LENGTH[k]} at K={k}" for k in drafts),
        "",
        *table(rows, shape["tokens"]),
        "",
        f"Medians of {shape['repeats']}. {where['date']}, {where['cpu']}, {where['cores']} cores, "
        f"torch {where['torch']}, commit {where['commit']}.",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if not args.quick:
        ran = "".join(map(str, drafts))
        write(f"end_to_end_K{ran}", {"where": where, "rows": rows}, text)


if __name__ == "__main__":
    main()
