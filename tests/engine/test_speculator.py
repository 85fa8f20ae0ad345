"""`vllm.speculator.MtpSpeculator` without an engine: what the runs here cannot reach."""

from types import SimpleNamespace

import torch

from mtp_kernels.vllm.speculator import MtpSpeculator


def test_filters_are_where_a_captured_graph_reads_them() -> None:
    """vLLM keeps a request's top_k, top_p and min_p in buffers that take turns."""
    speculator = object.__new__(MtpSpeculator)
    speculator.device, speculator._method = torch.device("cpu"), "standard"
    speculator._samples_drafts = True
    speculator.idx_mapping = torch.tensor([2, 0, -1, -1])
    speculator.temperature, speculator.seeds = torch.zeros(4), torch.zeros(4, dtype=torch.int64)
    states = {
        "top_k": SimpleNamespace(gpu=torch.tensor([320, 320, 5, 320], dtype=torch.int32)),
        "top_p": SimpleNamespace(gpu=torch.tensor([1.0, 1.0, 0.9, 1.0])),
        "min_p": SimpleNamespace(gpu=torch.zeros(4)),
    }
    verifier = SimpleNamespace()
    speculator.use_samplers(SimpleNamespace(sampling_states=SimpleNamespace(**states)), verifier)
    assert verifier.draft_kind == "filtered_logits"
    addresses = {name: values.data_ptr() for name, values in speculator._filters.items()}
    states["top_k"].gpu = torch.tensor([7, 320, 6, 320], dtype=torch.int32)
    states["min_p"].gpu = torch.tensor([0.5, 0, 0, 0])
    requests = torch.tensor([2, 0])
    speculator._copy_request_inputs(2, requests, torch.ones(4), torch.arange(4))
    sampling = speculator._sampling(2)
    assert sampling.top_k.tolist() == [6, 7]
    assert sampling.top_p.tolist() == [0.8999999761581421, 1.0]
    assert sampling.min_p.tolist() == [0.0, 0.5] and sampling.seeds.tolist() == [2, 0]
    assert addresses == {name: values.data_ptr() for name, values in speculator._filters.items()}
    assert not {states[name].gpu.data_ptr() for name in states} & set(addresses.values())
