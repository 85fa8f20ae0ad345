"""Engine runs shared by the tests of this folder.

One process per runner does all runs of that runner one after the other, and the processes run
side by side: starting vLLM costs more than most runs.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import (
    LAST,
    LAW,
    LAW_PROMPT,
    MAX_LEN,
    NUM_COUPLED,
    SAMPLED_DRAFTS,
    SPEC,
    start_worker,
    variants,
)
from oracle import CHECKPOINT, EXAMPLE, plain_model
from transformers import AutoTokenizer

from mtp_kernels import cli


@pytest.fixture(scope="session")
def encode() -> Callable[[str], list[int]]:
    """Text to ids, as the checkpoint's tokenizer does it."""
    return AutoTokenizer.from_pretrained(CHECKPOINT).encode


def _heldout(name: str) -> list[str]:
    lines = (EXAMPLE / f"heldout_{name}.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines]


@pytest.fixture(scope="session")
def arithmetic(encode) -> list[list[int]]:
    return [encode(text) for text in _heldout("arithmetic")]


@pytest.fixture(scope="session")
def workload(encode, arithmetic) -> dict:
    """64 requests: arithmetic, Python text, prompts of one token, ends at max_model_len, and a
    long shared prefix."""
    python = [encode(text) for text in _heldout("python")]
    short = {"temperature": 0, "max_tokens": 24}
    to_the_end = {"temperature": 0, "max_tokens": 1000, "ignore_eos": True}
    shared = python[0] + python[1][1:]  # 193 tokens with bos
    prompts = arithmetic[:32] + python[:12]
    sampling = [short] * len(prompts)
    for i in range(4):
        prompts.append([81 + i])
        sampling.append(to_the_end)
    for i in range(4):
        prompts.append(arithmetic[40 + i] + python[2 + i][1:60])
        sampling.append(to_the_end)
    for i in range(12):
        prompts.append(shared[:150] + arithmetic[50 + i][1 : 20 + i])
        sampling.append({"temperature": 0, "max_tokens": 16})
    return {"prompts": prompts, "sampling": sampling}


@pytest.fixture(scope="session")
def pruned_vocab(tmp_path_factory) -> Path:
    """The 32 of 320 ids that are most frequent in the workload's texts, as the tool counts."""
    folder = tmp_path_factory.mktemp("vocab")
    text, out = folder / "text.txt", folder / "vocab.txt"
    text.write_text("\n".join(_heldout("arithmetic") + _heldout("python")))
    args = ["--tokenizer", str(CHECKPOINT), "--size", "32", "--output", str(out), str(text)]
    assert cli.main(["draft-vocab", *args]) == 0
    return out


def _engine(workload: dict, spec: dict | None = SPEC, **llm) -> dict:
    llm = {"dtype": "float32", "max_num_seqs": 12} | llm
    llm = {"model": str(CHECKPOINT), "max_model_len": MAX_LEN} | llm
    return {"llm": llm | {"speculative_config": spec}, **workload}


@pytest.fixture(scope="session")
def runs(workload, arithmetic, pruned_vocab, tmp_path_factory) -> dict[str, dict[str, dict]]:
    """process -> run name -> result of `worker.py`."""
    tmp = tmp_path_factory.mktemp("engines")
    some = {"prompts": arithmetic[:12], "sampling": {"temperature": 0, "max_tokens": 32}}
    full = {"prompts": arithmetic[:32], "sampling": {"temperature": 0, "max_tokens": 90}}
    last = {name: values[-LAST:] for name, values in workload.items()}
    # Small blocks, chunks shorter than most prompts, and room for about three requests.
    tight = {"block_size": 32, "max_num_batched_tokens": 48, "enable_prefix_caching": True}
    pruned = {"env": {"MTP_KERNELS_DRAFT_VOCAB": str(pruned_vocab)}}
    first = {name: values[:32] for name, values in workload.items()}
    plan = {
        "plain": _engine(workload, spec=None),
        "mtp": _engine(workload, enable_prefix_caching=False),
        "tight": _engine(workload, **tight),
        "preempted": _engine(last, **tight, num_gpu_blocks_override=24),
        "chain": _engine(some) | {"feed": "chain"},
        "pruned": _engine(first) | pruned,
        "table": _engine(full, dtype="bfloat16") | {"env": {"MTP_KERNELS_ENTRY_TABLE": "1"}},
        "chain table": _engine(some) | {"feed": "chain", "env": {"MTP_KERNELS_ENTRY_TABLE": "1"}},
        "arithmetic": _engine(full, dtype="bfloat16"),
    }
    # One at a time, so that who finds whose blocks in the cache does not depend on timing. The
    # first prompt ends within K tokens of the end of a block that the others share.
    chosen = [32, *range(52, 64)]
    shared = {name: [values[i] for i in chosen] for name, values in workload.items()}
    alone = _engine(shared, **tight | {"max_num_seqs": 1})
    # More drafts than layers, and the last one's table.
    deep = _engine(some, SPEC | {"num_speculative_tokens": 5})
    repeated = {"MTP_KERNELS_REPEAT_LAST_LAYER": "1"}
    deep = {
        "deep": deep | {"env": repeated},
        "deep table": deep | {"env": repeated | {"MTP_KERNELS_ENTRY_TABLE": "1"}},
    }
    unfused = _engine(some, compilation_config={"custom_ops": ["-mtp_entry"]})
    unfused["env"] = {"MTP_KERNELS_DISABLE": "head"}
    drawn = {"prompts": arithmetic[:12], "sampling": {"temperature": 0.9, "max_tokens": 60}}
    ranks = {
        "greedy": _engine(first, tensor_parallel_size=2) | {"ranks": True},
        "pruned": _engine(first, tensor_parallel_size=2) | pruned,
        "sampled": _engine(drawn, SAMPLED_DRAFTS, tensor_parallel_size=2) | {"ranks": True},
    }
    four = {name: values[:4] for name, values in workload.items()}
    asynchronous = _engine(workload, **tight) | {"async": True}
    # As served: the engine in a process that starts from nothing and loads the plugin itself.
    spawn = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    stock = {"MTP_KERNELS_DISABLE": "layers,verify"}
    processes = {  # name -> (runner, engines, environment)
        "v1": ("v1", plan | deep | {"unfused": unfused, "alone": alone}, {}),
        "v2": ("v2", plan | {"tight": asynchronous}, {}),
        "spawned": ("v1", {"alone": alone}, spawn),
        "stock": ("v1", {"arithmetic": plan["arithmetic"]}, stock),
        "ranks": ("v1", ranks, {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}),
        "ours": ("v2", {"launches": _engine(four) | {"launches": "ours"}}, {}),
        "vllm's": (
            "v2",
            {"launches": _engine(four) | {"launches": "vllm"}},
            {"MTP_KERNELS_DISABLE": "draft"},
        ),
    }
    return _run_all(tmp, processes)


def _run_all(tmp: Path, processes: dict[str, tuple]) -> dict[str, dict[str, dict]]:
    waits = {
        name: start_worker(tmp, name, {"runner": runner, "engines": list(engines.values())}, **env)
        for name, (runner, engines, env) in processes.items()
    }
    return {
        name: dict(zip(processes[name][1], wait(), strict=True)) for name, wait in waits.items()
    }


def _coupled(encode, num_drafts: int, runner: str, **llm) -> dict:
    """Seeded texts, plain ones first and then every variant of the sampling parameters."""
    texts = ["Q: ", "def ", "import ", "return self."]
    tokens = 16 if runner == "v1" else 5  # its kernels are interpreted, request by request
    prompts = [encode(text) for text in texts for _ in range(NUM_COUPLED // len(texts))]
    plain = {"temperature": 0.8, "max_tokens": tokens}
    sampling = [plain | {"seed": seed} for seed in range(NUM_COUPLED)]
    for variant in variants(runner).values():
        prompts += [encode(text) for text in texts[:2]]
        sampling += [{"temperature": 0.8, "seed": 7, "max_tokens": 12} | variant] * 2
    if num_drafts == 2:  # another order, and so other neighbours
        prompts, sampling = prompts[::-1], sampling[::-1]
    spec = SPEC | {"num_speculative_tokens": num_drafts} if num_drafts else None
    workload = {"prompts": prompts, "sampling": sampling}
    return _engine(workload, spec, **llm) | {"env": {"MTP_KERNELS_METHOD": "coupled"}}


def _law(encode, runner: str, spec: dict | None, **env: str) -> dict:
    """The same prompt many times, half of them seeded, and as often again with top_p."""
    num, length = LAW[runner]
    base = {"temperature": 0.8, "max_tokens": length, "ignore_eos": True}
    sampling = [base | ({"seed": i} if i % 2 else {}) for i in range(num)]
    sampling += [one | {"top_p": 0.9} for one in sampling]
    workload = {"prompts": [encode(LAW_PROMPT)] * len(sampling), "sampling": sampling}
    return _engine(workload, spec, max_num_seqs=128) | {"env": env}


@pytest.fixture(scope="session")
def sampled(encode, arithmetic, pruned_vocab, tmp_path_factory) -> dict[str, dict[str, dict]]:
    """runner or "stock" -> run name -> result of `worker.py`, for `test_sampling.py`."""
    block = SAMPLED_DRAFTS | {"rejection_sample_method": "block"}
    # So hot that drafts sampled without the filter would seldom pass it.
    filtered = {"temperature": 2.0, "min_p": 0.3, "max_tokens": 24}
    filtered = {"prompts": arithmetic[:12], "sampling": filtered}

    def coupled(runner: str) -> dict[str, dict]:
        processed = {"logprobs_mode": "processed_logprobs"}
        return {
            "K=0": _coupled(encode, 0, runner, max_num_seqs=128),
            "K=1": _coupled(encode, 1, runner, max_num_seqs=50, **processed),
            "K=2": _coupled(encode, 2, runner, max_num_seqs=128, **processed),
            "K=3": _coupled(encode, 3, runner, max_num_seqs=128),
        }

    def law(runner: str) -> dict[str, dict]:
        return {
            "filtered": _engine(filtered, SAMPLED_DRAFTS),
            "greedy drafts": _law(encode, runner, SPEC),
            "sampled drafts": _law(encode, runner, SAMPLED_DRAFTS),
            "block": _law(encode, runner, block),
        }

    noise = {"MTP_KERNELS_METHOD": "coupled"}
    pruned = {"MTP_KERNELS_DRAFT_VOCAB": str(pruned_vocab)}
    more = {
        "no drafts": _law(encode, "v1", None, **noise),
        "coupled": _law(encode, "v1", SAMPLED_DRAFTS, **noise),
        "coupled, pruned": _law(encode, "v1", SAMPLED_DRAFTS, **noise, **pruned),
        "pruned": _law(encode, "v1", SAMPLED_DRAFTS, **pruned),
    }
    stock = {"greedy drafts": _law(encode, "v1", SPEC)}
    processes = {
        "v1": ("v1", coupled("v1") | law("v1") | more, {}),
        "v2": ("v2", coupled("v2"), {}),
        "v2 law": ("v2", law("v2"), {}),
        "stock": ("v1", stock, {"MTP_KERNELS_DISABLE": "layers,verify"}),
    }
    results = _run_all(tmp_path_factory.mktemp("sampled"), processes)
    results["v2"] |= results.pop("v2 law")
    return results


@pytest.fixture(scope="session")
def model():
    return plain_model()
