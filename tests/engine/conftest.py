"""Engine runs shared by the tests of this folder.

One process per runner does all runs of that runner one after the other, and the processes run
side by side: starting vLLM costs more than most runs.
"""

import json
from collections.abc import Callable

import pytest
from harness import LAST, MAX_LEN, SPEC, start_worker
from oracle import CHECKPOINT, EXAMPLE, plain_model
from transformers import AutoTokenizer


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


def _engine(workload: dict, spec: dict | None = SPEC, **llm) -> dict:
    llm = {"dtype": "float32", "max_num_seqs": 12} | llm
    llm = {"model": str(CHECKPOINT), "max_model_len": MAX_LEN} | llm
    return {"llm": llm | {"speculative_config": spec}, **workload}


@pytest.fixture(scope="session")
def runs(workload, arithmetic, tmp_path_factory) -> dict[str, dict[str, dict]]:
    """process -> run name -> result of `worker.py`."""
    tmp = tmp_path_factory.mktemp("engines")
    some = {"prompts": arithmetic[:12], "sampling": {"temperature": 0, "max_tokens": 32}}
    full = {"prompts": arithmetic[:32], "sampling": {"temperature": 0, "max_tokens": 90}}
    last = {name: values[-LAST:] for name, values in workload.items()}
    # Small blocks, chunks shorter than most prompts, and room for about three requests.
    tight = {"block_size": 32, "max_num_batched_tokens": 48, "enable_prefix_caching": True}
    plan = {
        "plain": _engine(workload, spec=None),
        "mtp": _engine(workload, enable_prefix_caching=False),
        "tight": _engine(workload, **tight),
        "preempted": _engine(last, **tight, num_gpu_blocks_override=24),
        "chain": _engine(some) | {"feed": "chain"},
        "arithmetic": _engine(full, dtype="bfloat16"),
    }
    # One at a time, so that who finds whose blocks in the cache does not depend on timing. The
    # first prompt ends within K tokens of the end of a block that the others share.
    chosen = [32, *range(52, 64)]
    shared = {name: [values[i] for i in chosen] for name, values in workload.items()}
    alone = _engine(shared, **tight | {"max_num_seqs": 1})
    unfused = _engine(some, compilation_config={"custom_ops": ["-mtp_entry"]})
    asynchronous = _engine(workload, **tight) | {"async": True}
    # As served: the engine in a process that starts from nothing and loads the plugin itself.
    spawn = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    stock = {"MTP_KERNELS_DISABLE": "layers"}
    processes = {  # name -> (runner, engines, environment)
        "v1": ("v1", plan | {"unfused": unfused, "alone": alone}, {}),
        "v2": ("v2", plan | {"tight": asynchronous}, {}),
        "spawned": ("v1", {"alone": alone}, spawn),
        "stock": ("v1", {"arithmetic": plan["arithmetic"]}, stock),
    }
    waits = {
        name: start_worker(tmp, name, {"runner": runner, "engines": list(engines.values())}, **env)
        for name, (runner, engines, env) in processes.items()
    }
    return {
        name: dict(zip(processes[name][1], wait(), strict=True)) for name, wait in waits.items()
    }


@pytest.fixture(scope="session")
def model():
    return plain_model()
