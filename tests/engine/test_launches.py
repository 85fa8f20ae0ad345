"""What a V2 draft round starts on the device, between and besides the model's own operations."""

import pytest
from harness import K

GLUE = {
    "mtp_kernels.draft_pack.default": 1,
    "mtp_kernels.draft_step.default": K,
    # K times the rows to draft from, of what a layer attended to and of its residual: the MLP and
    # the head run on those only. And each request's last sampled token, from the runner's table.
    "aten.index.Tensor": 2 * K + 1,
    # Which slot of the drafter's memory is whose, decided on the host.
    "copy to the device": 1,
}
"""Of ours, all that is neither the model's nor the attention metadata's."""


def _decode_rounds(runs: dict, whose: str) -> list[dict]:
    rounds = runs[whose]["launches"]["launches"]
    rounds = [one for one in rounds if one["longest"] == K + 1]
    assert len(rounds) > 5
    return rounds


def test_glue_of_a_round(runs) -> None:
    """K + 1 launches of ours, whatever the requests are; vLLM's own multi-module speculator,
    counted in the same way on the same model, has more than 30."""
    for ours in _decode_rounds(runs, "ours"):
        assert ours["glue"] == GLUE
    vllms = _decode_rounds(runs, "vllm's")[-1]["glue"]
    assert sum(vllms.values()) > 30 > 2 * sum(GLUE.values()), vllms
    assert vllms["triton _shift_input_ids_kernel"] == K - 1  # it is the speculator we mean


def test_head_is_one_launch(runs) -> None:
    """No logits: vLLM's head writes them for the argmax."""
    assert _decode_rounds(runs, "ours")[-1]["head"] == {"mtp_kernels.head_argmax.default": K}
    assert _decode_rounds(runs, "vllm's")[-1]["head"]["aten.argmax.default"] == K


@pytest.mark.parametrize("place", ["model", "metadata"])
def test_the_rest_is_vllms(runs, place: str) -> None:
    """So that the counts above are of the same work."""
    ours, vllms = (_decode_rounds(runs, whose)[-1][place] for whose in ("ours", "vllm's"))
    assert ours == vllms


def test_no_host_synchronisation(runs) -> None:
    """In chunks of prompts too. What is read on the host, the longest sequence, lies there."""
    for one in runs["ours"]["launches"]["launches"]:
        assert one["host reads"] == ["numpy"]
        assert not {"aten.item.default", "aten._local_scalar_dense.default"} & one["glue"].keys()
