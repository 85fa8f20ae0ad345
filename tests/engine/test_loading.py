"""What is loaded: all layers, each its own weights, or an error that names what is wrong."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import SPEC, start_worker
from oracle import CHECKPOINT
from safetensors.torch import load_file, save_file
from torch import Tensor

LAYER = "model.mtp.layers."


def _rewritten(folder: Path, change: Callable[[dict[str, Tensor]], None], index=True) -> str:
    """A copy of the checkpoint with its tensors changed."""
    shutil.copytree(CHECKPOINT, folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    index_file = folder / "model.safetensors.index.json"
    if index:
        weight_map = dict.fromkeys(weights, "model.safetensors")
        index_file.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    else:
        index_file.unlink()
    return str(folder)


def _drop(prefix: str) -> Callable[[dict[str, Tensor]], None]:
    def change(weights: dict[str, Tensor]) -> None:
        for name in [name for name in weights if name.startswith(LAYER + prefix)]:
            del weights[name]

    return change


def _add_gate(weights: dict[str, Tensor]) -> None:
    weights[LAYER + "1.gate.weight"] = weights[LAYER + "1.enorm.weight"].clone()


def _halve_projection(weights: dict[str, Tensor]) -> None:
    name = LAYER + "2.eh_proj.weight"
    weights[name] = weights[name][:, :128].contiguous()


def _swap_layers(weights: dict[str, Tensor]) -> None:
    for name in [name for name in weights if name.startswith(LAYER + "1.")]:
        other = name.replace(LAYER + "1.", LAYER + "2.")
        weights[name], weights[other] = weights[other], weights[name]


@pytest.fixture(scope="module")
def loaded(arithmetic, tmp_path_factory) -> dict[str, dict]:
    tmp = tmp_path_factory.mktemp("loading")
    some = {"prompts": arithmetic[:12], "sampling": {"temperature": 0, "max_tokens": 24}}

    def engine(model=CHECKPOINT, num_drafts=3, env=None, **llm) -> dict:
        spec = SPEC | {"num_speculative_tokens": num_drafts}
        llm = {"model": str(model), "max_model_len": 192, "dtype": "float32"} | llm
        return {"llm": llm | {"speculative_config": spec}, "env": env or {}, **some}

    engines = {
        "normal": engine(),
        "swapped": engine(_rewritten(tmp / "swapped", _swap_layers)),
        "no_index": engine(_rewritten(tmp / "no_index", lambda weights: None, index=False)),
        "two_drafts": engine(num_drafts=2),
        "four_drafts": engine(num_drafts=4),
        "six_drafts": engine(num_drafts=6),
        "no_layer_1": engine(_rewritten(tmp / "no_layer_1", _drop("1."))),
        "no_weight": engine(_rewritten(tmp / "no_weight", _drop("1.hnorm."))),
        "no_mtp": engine(_rewritten(tmp / "no_mtp", _drop(""))),
        "extra": engine(_rewritten(tmp / "extra", _add_gate)),
        "wrong_shape": engine(_rewritten(tmp / "wrong_shape", _halve_projection)),
        "too_short": engine(max_model_len=5),
        "small_chunks": engine(long_prefill_token_threshold=2),
        "repeated": engine(num_drafts=4, env={"MTP_KERNELS_REPEAT_LAST_LAYER": "1"}),
    }
    job = {"runner": "v1", "engines": list(engines.values())}
    return dict(zip(engines, start_worker(tmp, "loading", job)(), strict=True))


@pytest.mark.parametrize(
    "name,words",
    [
        ("four_drafts", ["at most 3", "got 4", "MTP_KERNELS_REPEAT_LAST_LAYER"]),
        ("six_drafts", ["at most 3", "got 6"]),
        ("no_layer_1", ["no weight of layer(s) [1]"]),
        ("no_weight", ["without a weight", "model.mtp.layers.1.hnorm.weight"]),
        ("no_mtp", ["expected weights named model.mtp.layers."]),
        ("extra", ["without a parameter", "model.mtp.layers.1.gate.weight"]),
        ("wrong_shape", ["model.mtp.layers.2.eh_proj.weight", "(128, 128)"]),
        ("too_short", ["max_model_len", ">= 6, got 5"]),
        ("small_chunks", ["long_prefill_token_threshold", ">= 3, got 2"]),
    ],
)
def test_error_names_the_cause(loaded, name: str, words: list[str]) -> None:
    """Case 1: nothing is dropped, reused or left unwritten in silence."""
    error = loaded[name].get("error", "no error")
    assert all(word in error for word in words), error


def test_later_layers_run_on_their_own_weights(loaded) -> None:
    """Case 1: with layers 1 and 2 swapped, the text stays and drafts 2 and 3 change."""
    normal, swapped = loaded["normal"], loaded["swapped"]
    assert normal["tokens"] == swapped["tokens"]
    ours = {(request, row): drafts for request, row, _, drafts in normal["rounds"]}
    pairs = [(ours.get((r, row)), drafts) for r, row, _, drafts in swapped["rounds"]]
    pairs = [(a, b) for a, b in pairs if a is not None]
    assert len(pairs) >= 24
    assert all(a[0] == b[0] for a, b in pairs)
    assert sum(a[1] != b[1] for a, b in pairs) > len(pairs) // 10
    assert sum(a[2] != b[2] for a, b in pairs) > len(pairs) // 10


def test_layers_are_counted_without_an_index(loaded) -> None:
    assert loaded["no_index"]["rounds"] == loaded["normal"]["rounds"]


def test_fewer_drafts_than_layers(loaded) -> None:
    run = loaded["two_drafts"]
    assert run["tokens"] == loaded["normal"]["tokens"]
    assert all(layers == [0, 1] for _, _, layers, _ in run["rounds"])


def test_repeated_last_layer(loaded) -> None:
    """More drafts than layers, by the option: same text, and the last layer runs twice."""
    run = loaded["repeated"]
    assert run["tokens"] == loaded["normal"]["tokens"]
    assert all(layers == [0, 1, 2, 2] for _, _, layers, _ in run["rounds"])
    firsts = {(request, row): drafts for request, row, _, drafts in loaded["normal"]["rounds"]}
    same = [firsts[r, row] == d[:3] for r, row, _, d in run["rounds"] if (r, row) in firsts]
    assert len(same) > 12 and all(same)  # the extra step leaves the layers' KV alone
