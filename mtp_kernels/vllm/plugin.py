"""What `pip install mtp-kernels` changes in vLLM, part by part.

`layers`  all MTP layers of a checkpoint are built and loaded, and their number is published.
`draft`   every draft step runs its own layer, on the right hidden state, with its KV repaired.
`prefix`  a cached prefix serves only requests for which its MTP KV is exact.
`entry`   the layers' embedding + norms + projection run as the fused op.
`head`    drafts are chosen by the fused head_argmax op, from a part of the vocabulary if wanted.
`verify`  drafts of any speculative method are judged by the verify op.

`MTP_KERNELS_DISABLE=part,...` leaves parts as vLLM ships them. `MTP_KERNELS_REPEAT_LAST_LAYER=1`
allows more drafts than MTP layers. `MTP_KERNELS_DRAFT_VOCAB=FILE[:M]` drafts only the (first M)
token ids in a file, see :mod:`mtp_kernels.draft_vocab`. `MTP_KERNELS_ENTRY_TABLE=1` keeps each
layer's embeddings projected, which takes memory. `MTP_KERNELS_METHOD=coupled` makes a
request's text depend on its seed alone, not on whether or how it was drafted.
"""

import functools
from collections.abc import Callable
from typing import Any

from mtp_kernels import archs
from mtp_kernels.vllm import compat, config, prefix_cache, verify
from mtp_kernels.vllm.compat import Patch
from mtp_kernels.vllm.settings import (
    METHOD,
    NEEDS,
    PARTS,
    disabled_parts,
    draft_spec,
    draft_vocab,
    entry_table,
    is_coupled,
    repeat_last_layer,
)


def _route_proposer(original: Callable[..., Any]) -> Callable[..., Any]:
    """`EagleProposer(...)` makes our subclass where the draft model is ours.

    The class stays the name that vLLM's isinstance checks know.
    """

    @functools.wraps(original)
    def __init__(self: Any, vllm_config: Any, device: Any, runner: Any = None) -> None:
        from vllm.v1.spec_decode.eagle import EagleProposer

        if type(self) is EagleProposer and draft_spec(vllm_config.speculative_config):
            from mtp_kernels.vllm.proposer import MtpProposer

            self.__class__ = MtpProposer
            MtpProposer.__init__(self, vllm_config, device, runner)
        else:
            original(self, vllm_config, device, runner)

    return __init__


def _route_speculator(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init_speculator(vllm_config: Any, device: Any, req_states: Any) -> Any:
        if draft_spec(vllm_config.speculative_config):
            from mtp_kernels.vllm.speculator import MtpSpeculator

            return MtpSpeculator(vllm_config, device)
        return original(vllm_config, device, req_states)

    return init_speculator


def _introduce_samplers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Our speculator samples its drafts as the runner's samplers do."""

    @functools.wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if hasattr(self.speculator, "use_samplers"):
            self.speculator.use_samplers(self.sampler, self.rejection_sampler)
        return result

    return load_model


_SPECULATOR_PARAMETERS = ("vllm_config", "device", "req_states")

PATCHES = (
    *config.PATCHES,
    Patch(
        "draft",
        "vllm.v1.spec_decode.eagle",
        "EagleProposer.__init__",
        ("self", "vllm_config", "device", "runner"),
        _route_proposer,
    ),
    Patch(
        "draft",
        "vllm.v1.worker.gpu.spec_decode",
        "init_speculator",
        _SPECULATOR_PARAMETERS,
        _route_speculator,
    ),
    Patch(  # the runner binds the name at import
        "draft",
        "vllm.v1.worker.gpu.model_runner",
        "init_speculator",
        _SPECULATOR_PARAMETERS,
        _route_speculator,
    ),
    Patch(
        "draft",
        "vllm.v1.worker.gpu.model_runner",
        "GPUModelRunner.load_model",
        ("self", "load_dummy_weights", "args", "model", "kwargs"),
        _introduce_samplers,
    ),
    *prefix_cache.PATCHES,
    *verify.PATCHES,
)


def unsupported_parts() -> dict[str, str]:
    """Parts whose symbols the installed vLLM does not have as we know them, with the reason."""
    found: dict[str, str] = {}
    for patch in PATCHES:
        try:
            patch.check()
        except compat.Unsupported as error:
            found.setdefault(patch.part, str(error))
    for part, needed in NEEDS.items():
        if needed in found:
            found.setdefault(part, f"needs {needed}, which is off")
    return found


def _check_environment() -> None:
    """A bad value stops here, not in the middle of a start."""
    repeat_last_layer()
    draft_vocab()
    entry_table()
    is_coupled()


def install() -> None:
    """Apply every part that is neither disabled nor unsupported; safe to call again.

    Raises:
        ValueError: a bad environment variable, or one that asks for a part that cannot work.
    """
    _check_environment()
    off = disabled_parts()
    unsupported = {part: why for part, why in unsupported_parts().items() if part not in off}
    for part, why in unsupported.items():
        compat.warn_once(
            f"mtp_kernels: part '{part}' is off with vLLM {compat.vllm_version()}: {why}"
        )
    active = [part for part in PARTS if part not in off and part not in unsupported]
    if is_coupled() and "verify" not in active:
        raise ValueError(f"{METHOD}: coupled needs part verify: {unsupported['verify']}")
    for patch in PATCHES:
        if patch.part in active:
            patch.apply()
    if "layers" in active:
        from vllm import ModelRegistry

        for name in {spec.draft_architecture for spec in archs.ARCHS}:
            ModelRegistry.register_model(name, f"mtp_kernels.vllm.models:{name}")


def report() -> list[tuple[str, str, str, str]]:
    """One row per patch for `mtp-kernels doctor`: (part, symbol, status, reason).

    Status is "active" (applied in this process), "would patch", "disabled" or "skipped"; only
    the last one is a fault.
    """
    _check_environment()
    off, rows = disabled_parts(), []
    for patch in PATCHES:
        status, why = "would patch", ""
        if patch.part in off:
            status, why = "disabled", off[patch.part]
        elif patch.is_applied():
            status = "active"
        else:
            try:
                patch.check()
            except compat.Unsupported as error:
                status, why = "skipped", str(error)
        rows.append((patch.part, patch.target, status, why))
    return rows
