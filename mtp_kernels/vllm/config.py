"""What vLLM's `SpeculativeConfig` says: how many MTP layers there are, and which K they allow."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mtp_kernels import archs
from mtp_kernels.vllm.compat import Patch
from mtp_kernels.vllm.settings import DISABLE, REPEAT_LAST_LAYER, draft_spec, repeat_last_layer


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
            # vLLM wants K to be a multiple of n_predict, to go round the layers again. Which K
            # is allowed here, _check_num_drafts says.
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
        elif requested > num_layers and not repeat_last_layer():
            raise ValueError(
                f"num_speculative_tokens: expected at most {num_layers}, the number of MTP layers "
                f"in the checkpoint, got {requested}; {REPEAT_LAST_LAYER}=1 in the environment "
                "allows more, by running the last layer again, which drafts worse"
            )
        for option in ("num_speculative_tokens_per_batch_size", "enable_adaptive_verification"):
            if getattr(self, option, None):
                raise ValueError(
                    f"speculative_config.{option}: not supported by mtp_kernels' multi-layer "
                    f"drafting; leave it out, or set {DISABLE}=layers for vLLM's own"
                )

    return __post_init__


_CONFIG = "vllm.config.speculative"

PATCHES = (
    Patch(
        "layers", _CONFIG, "SpeculativeConfig.hf_config_override", ("hf_config",), _publish_layers
    ),
    Patch("layers", _CONFIG, "SpeculativeConfig.__post_init__", ("self",), _check_num_drafts),
)
