"""What `pip install mtp-kernels` changes in vLLM, part by part.

`layers`  all MTP layers of a checkpoint are built and loaded, and their number is published.
`draft`   every draft step runs its own layer, on the right hidden state, with its KV repaired.
`entry`   the layers' embedding + norms + projection run as the fused op.

`MTP_KERNELS_DISABLE=part,...` leaves parts as vLLM ships them. `MTP_KERNELS_REPEAT_LAST_LAYER=1`
allows more drafts than MTP layers.
"""

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mtp_kernels import archs
from mtp_kernels.drafting import layer_schedule
from mtp_kernels.vllm import compat
from mtp_kernels.vllm.compat import Patch

logger = logging.getLogger("vllm.mtp_kernels")

PARTS = ("layers", "draft", "entry")
_NEEDS = {"draft": "layers", "entry": "layers"}

DISABLE = "MTP_KERNELS_DISABLE"
REPEAT_LAST_LAYER = "MTP_KERNELS_REPEAT_LAST_LAYER"


def disabled_parts() -> dict[str, str]:
    """Parts switched off by the environment, each with the reason.

    Raises:
        ValueError: `MTP_KERNELS_DISABLE` names a part that does not exist.
    """
    named = [name.strip() for name in os.environ.get(DISABLE, "").split(",") if name.strip()]
    unknown = sorted(set(named) - set(PARTS))
    if unknown:
        raise ValueError(f"{DISABLE}: expected any of {','.join(PARTS)}, got {','.join(unknown)}")
    off = dict.fromkeys(named, f"{DISABLE} names it")
    for part, needed in _NEEDS.items():
        if needed in off and part not in off:
            off[part] = f"needs {needed}, which is off"
    return off


def repeat_last_layer() -> bool:
    """Whether the user allows more drafts than MTP layers.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    value = os.environ.get(REPEAT_LAST_LAYER, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{REPEAT_LAST_LAYER}: expected 0 or 1, got {value!r}")
    return value == "1"


def draft_spec(speculative_config: Any) -> archs.MtpSpec | None:
    """The row of the draft model of a vLLM `SpeculativeConfig`, None if it is not ours."""
    draft = getattr(speculative_config, "draft_model_config", None)
    if draft is None or speculative_config.method != "mtp":
        return None
    names = draft.hf_config.architectures
    return archs.find(names[0]) if names else None


def count_checkpoint_layers(hf_config: Any, spec: archs.MtpSpec, declared: int | None) -> int:
    """Number of MTP layers in the checkpoint that `hf_config` was read from.

    Counted from the safetensors index, else from the header of a local safetensors file, else
    taken from `declared` (the config's own `num_nextn_predict_layers`, which is how a config
    without weights, `load_format=dummy`, states it).

    Raises:
        ValueError: none of these can be had, or the checkpoint has no MTP layer.
    """
    source = hf_config._name_or_path
    try:
        count = spec.count_layers(_weight_names(source, getattr(hf_config, "_commit_hash", None)))
    except FileNotFoundError as error:
        if declared is None:
            raise ValueError(
                f"{source}: cannot count the MTP layers ({error}); for a config without weights "
                'pass hf_overrides={"num_nextn_predict_layers": N}'
            ) from error
        return declared
    if count == 0:
        raise ValueError(f"{source}: expected weights named {spec.weight_prefix}*, got none")
    return count


def _weight_names(source: str, revision: str | None) -> list[str]:
    from vllm.transformers_utils.repo_utils import get_hf_file_to_dict, try_get_local_file

    if Path(source).is_dir():
        return archs.weight_names(source)
    index = get_hf_file_to_dict("model.safetensors.index.json", source, revision)
    if index is not None:
        return sorted(index["weight_map"])
    file = try_get_local_file(source, "model.safetensors", revision)
    if file is None:
        raise FileNotFoundError("no model.safetensors.index.json, and no weights downloaded yet")
    return archs.weight_names(Path(file).parent)


def _publish_layers(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def hf_config_override(hf_config: Any) -> Any:
        declared = getattr(hf_config, "num_nextn_predict_layers", None)
        hf_config = original(hf_config)
        spec = archs.find(hf_config.architectures[0]) if hf_config.architectures else None
        if spec is not None and hf_config.architectures[0] == spec.draft_architecture:
            count = count_checkpoint_layers(hf_config, spec, declared)
            # vLLM wants K to be a multiple of n_predict, for reuse of layers that it does not
            # do here; which K is allowed is for check_num_drafts.
            hf_config.update({"num_nextn_predict_layers": count, "n_predict": 1})
        return hf_config

    return hf_config_override


def _check_num_drafts(original: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(original)
    def __post_init__(self: Any) -> None:
        requested = self.num_speculative_tokens
        original(self)
        if draft_spec(self) is None:
            return
        num_layers = self.draft_model_config.hf_config.num_nextn_predict_layers
        if requested is None:
            self.num_speculative_tokens = num_layers
        try:
            layer_schedule(num_layers, self.num_speculative_tokens, repeat_last_layer())
        except ValueError as error:
            raise ValueError(
                f"num_speculative_tokens: {error}, as {REPEAT_LAST_LAYER}=1 in the environment"
            ) from error
        for option in ("num_speculative_tokens_per_batch_size", "enable_adaptive_verification"):
            if getattr(self, option, None):
                raise ValueError(
                    f"speculative_config.{option}: not supported by mtp_kernels' multi-layer "
                    f"drafting; leave it out, or set {DISABLE}=layers for vLLM's own"
                )

    return __post_init__


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


_SPECULATOR_PARAMETERS = ("vllm_config", "device", "req_states")

PATCHES = (
    Patch(
        "layers",
        "vllm.config.speculative",
        "SpeculativeConfig.hf_config_override",
        ("hf_config",),
        _publish_layers,
    ),
    Patch(
        "layers",
        "vllm.config.speculative",
        "SpeculativeConfig.__post_init__",
        ("self",),
        _check_num_drafts,
    ),
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
    Patch(
        "draft",
        "vllm.v1.worker.gpu.model_runner",
        "init_speculator",
        _SPECULATOR_PARAMETERS,
        _route_speculator,
    ),
)


def unsupported_parts() -> dict[str, str]:
    """Parts whose symbols the installed vLLM does not have as we know them, with the reason."""
    found: dict[str, str] = {}
    for patch in PATCHES:
        try:
            patch.check()
        except compat.Unsupported as error:
            found.setdefault(patch.part, str(error))
    for part, needed in _NEEDS.items():
        if needed in found:
            found.setdefault(part, f"needs {needed}, which is off")
    return found


def install() -> None:
    """Apply every part that is neither disabled nor unsupported; safe to call again."""
    off = disabled_parts()
    unsupported = {part: why for part, why in unsupported_parts().items() if part not in off}
    for part, why in unsupported.items():
        logger.warning(
            "mtp_kernels: part '%s' is off with vLLM %s: %s", part, compat.vllm_version(), why
        )
    active = [part for part in PARTS if part not in off and part not in unsupported]
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
