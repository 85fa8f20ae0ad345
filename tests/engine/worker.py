"""Runs vLLM engines in a process of their own: a JSON job on stdin, a JSON result in a file.

    python worker.py RESULT < job.json

A job is `{"runner": "v1" | "v2", "engines": [...]}`, run one after the other; each engine is

    llm       keyword arguments of `vllm.LLM`
    prompts   list of token id lists
    sampling  keyword arguments of `SamplingParams`, or a list of them; those of
              `StructuredOutputsParams` and `logit_bias` as JSON has them
    env       environment variables, for this engine
    feed      replaces the architecture's feed rule ("target" | "chain")
    launches  "ours" | "vllm": count what a V2 draft round launches, with whose speculator; ends
              the process's use for anything else
    ranks     true: report what every tensor-parallel rank sampled and drafted
    async     true: keep async scheduling on, which vLLM's CPU platform switches off

and gives `{"tokens": [...], "logprobs": [...], "rounds": [...], "metrics": {...},
"config": {...}, "launches": [...], "ranks": [...]}`, or `{"error": text}` where the engine could
not be made. A round is `[request index, last row, [layers run], [drafts]]`; launches are
`launches.Launches.rounds`; a rank's are `[[known token per request], [drafts per request]]` per
round; a token's logprobs are `[[id, logprob, rank], ...]`.

V2 is the GPU model runner. On a machine without a GPU its Triton kernels run in Triton's
interpreter; vLLM wants to see an active Triton driver for that, so it is shown one.
"""

import contextlib
import dataclasses
import gc
import json
import os
import sys
from unittest import mock


def start(runner: str) -> None:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    # In-process engines leave OpenMP as it is, and its threads then fight over the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions, to all ranks
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(runner == "v2"))
    if runner == "v2":
        os.environ["TRITON_INTERPRET"] = "1"
        import triton.backends

        class Driver:
            @staticmethod
            def is_active() -> bool:
                return True

        class Backend:
            driver, compiler = Driver, None

        triton.backends.backends["cpu"] = Backend()


@contextlib.contextmanager
def async_scheduling_kept(kept: bool):
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.__dict__["check_and_update_config"]

    def check_and_update_config(cls, vllm_config):
        original.__func__(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    if kept:
        CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    try:
        yield
    finally:
        CpuPlatform.check_and_update_config = original


def record_rounds(rounds: list) -> None:
    """Have every drafter note what it drafted, for which request, after which row."""
    from mtp_kernels import drafting

    class Recorded(drafting.Drafter):
        def assign_slots(self, request_ids):
            self.request_ids = list(request_ids)
            return super().assign_slots(request_ids)

        def draft(self, num_requests, num_rows, run_layer, draft_token):
            layers = []

            def run(layer, *args):
                layers.append(layer)
                return run_layer(layer, *args)

            out = super().draft(num_requests, num_rows, run, draft_token)
            last = self.buffers.positions[self.buffers.last_row[:num_requests]].tolist()
            ids = getattr(self, "request_ids", [])
            rounds.extend(
                [request, row, layers, drafts]
                for request, row, drafts in zip(ids, last, out.tolist(), strict=False)
            )
            self.request_ids = []  # dummy rounds have none
            return out

    from mtp_kernels.vllm import adapter

    adapter.Drafter = Recorded


def record_rank(worker) -> None:
    """In each rank's process: keep what its V1 proposer is given as sampled, and drafts."""
    proposer = worker.model_runner.drafter
    proposer.record, propose = [], proposer.propose

    def recorded(**kwargs):
        drafts = propose(**kwargs)
        proposer.record.append([kwargs["next_token_ids"].tolist(), drafts.tolist()])
        return drafts

    proposer.propose = recorded


def rank_record(worker) -> list:
    return worker.model_runner.drafter.record


def sampling_params(one: dict):
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    one = dict(one)
    if "logit_bias" in one:
        one["logit_bias"] = {int(token): bias for token, bias in one["logit_bias"].items()}
    if "structured_outputs" in one:
        one["structured_outputs"] = StructuredOutputsParams(**one["structured_outputs"])
    return SamplingParams(**one)


def token_logprobs(completion) -> list | None:
    return completion.logprobs and [
        sorted([token, value.logprob, value.rank] for token, value in of_token.items())
        for of_token in completion.logprobs
    ]


def run(engine: dict) -> dict:
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    from mtp_kernels import archs

    rounds: list = []
    launches = None
    if "launches" in engine:
        from launches import count_launches

        launches = count_launches(engine["launches"])
    elif engine["llm"].get("speculative_config"):
        record_rounds(rounds)
    feed = archs.Feed(engine.get("feed", "target"))
    archs.ARCHS = tuple(dataclasses.replace(spec, feed=feed) for spec in archs.ARCHS)
    try:
        with async_scheduling_kept(engine.get("async", False)):
            llm = LLM(disable_log_stats=False, enforce_eager=True, **engine["llm"])
    except Exception as error:  # the text is what the test is about
        cleanup_dist_env_and_memory()
        return {"error": f"{type(error).__name__}: {error}"}
    sampling = engine.get("sampling", {})
    if isinstance(sampling, list):
        params = [sampling_params(one) for one in sampling]
    else:
        params = sampling_params(sampling)
    if engine.get("ranks"):
        llm.collective_rpc(record_rank)
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in engine["prompts"]], params, use_tqdm=False
    )
    metrics = {}
    for metric in llm.get_metrics():
        if metric.name.startswith(("vllm:spec_decode", "vllm:num_pre", "vllm:prefix_cache")):
            metrics[metric.name] = getattr(metric, "values", None) or getattr(metric, "value", None)
    config = llm.llm_engine.vllm_config
    index = {}
    for position, output in enumerate(outputs):
        index[output.request_id] = position
    for entry in rounds:  # vLLM may append a suffix to the id
        entry[0] = index.get(entry[0], index.get(entry[0].rsplit("-", 1)[0], -1))
    result = {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "logprobs": [token_logprobs(output.outputs[0]) for output in outputs],
        "rounds": rounds,
        "metrics": metrics,
        "launches": launches and launches.rounds,
        "ranks": llm.collective_rpc(rank_record) if engine.get("ranks") else None,
        "config": {
            "async_scheduling": config.scheduler_config.async_scheduling,
            "chunked_prefill": config.scheduler_config.enable_chunked_prefill,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "prefix_caching": config.cache_config.enable_prefix_caching,
            "block_size": config.cache_config.block_size,
            "dtype": str(config.model_config.dtype),
        },
    }
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return result


if __name__ == "__main__":
    job = json.load(sys.stdin)
    start(job["runner"])
    results = []
    for engine in job["engines"]:
        with mock.patch.dict(os.environ, engine.get("env", {})):
            results.append(run(engine))
    with open(sys.argv[1], "w") as file:
        json.dump(results, file)
