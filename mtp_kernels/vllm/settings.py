"""What the environment and vLLM's config say about the plugin."""

import os
from typing import Any

from mtp_kernels import archs
from mtp_kernels import draft_vocab as vocab_file

PARTS = ("layers", "draft", "prefix", "entry", "head", "verify")
NEEDS = {"draft": "layers", "prefix": "draft", "entry": "layers", "head": "draft"}
"""A part cannot work without the one it needs; in the order of `PARTS`."""

DISABLE = "MTP_KERNELS_DISABLE"
REPEAT_LAST_LAYER = "MTP_KERNELS_REPEAT_LAST_LAYER"
METHOD = "MTP_KERNELS_METHOD"
DRAFT_VOCAB = "MTP_KERNELS_DRAFT_VOCAB"
ENTRY_TABLE = "MTP_KERNELS_ENTRY_TABLE"


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
    for part, needed in NEEDS.items():
        if needed in off and part not in off:
            off[part] = f"needs {needed}, which is off"
    return off


def repeat_last_layer() -> bool:
    """Whether the user allows more drafts than MTP layers.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    return _is_on(REPEAT_LAST_LAYER)


def entry_table() -> bool:
    """Whether the user wants tables of projected embeddings.

    Raises:
        ValueError: the variable is neither 0 nor 1, or a part that it needs is disabled.
    """
    wanted = _is_on(ENTRY_TABLE)
    for part in ("draft", "entry"):
        if wanted and part in disabled_parts():
            raise ValueError(f"{ENTRY_TABLE}: needs part {part}, which {DISABLE} switches off")
    return wanted


def _is_on(variable: str) -> bool:
    value = os.environ.get(variable, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{variable}: expected 0 or 1, got {value!r}")
    return value == "1"


def is_coupled() -> bool:
    """Whether the user wants all sampling coupled, whatever `speculative_config` says.

    Raises:
        ValueError: the variable is neither "vllm" nor "coupled", or part `verify` is disabled.
    """
    value = os.environ.get(METHOD, "vllm")
    if value not in ("vllm", "coupled"):
        raise ValueError(f"{METHOD}: expected vllm or coupled, got {value!r}")
    if value == "coupled" and "verify" in disabled_parts():
        raise ValueError(f"{METHOD}: coupled needs part verify, which {DISABLE} names")
    return value == "coupled"


def draft_vocab(vocab_size: int = 2**31) -> list[int] | None:
    """The token ids that may be drafted, most frequent first; None: all may.

    Raises:
        ValueError: the variable is not `FILE` or `FILE:COUNT`, or part `head` is disabled, or the
            file is not a list of at least COUNT ids below vocab_size.
    """
    value = os.environ.get(DRAFT_VOCAB, "")
    if not value:
        return None
    if "head" in disabled_parts():
        raise ValueError(f"{DRAFT_VOCAB}: needs part head, which {DISABLE} switches off")
    path, colon, count = value.rpartition(":")
    has_count = bool(colon) and count.isdecimal()
    try:
        return vocab_file.read(
            path if has_count else value, vocab_size, int(count) if has_count else None
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"{DRAFT_VOCAB}={value}: {error}") from error


def draft_spec(speculative_config: Any) -> archs.MtpSpec | None:
    """The row of the draft model of a vLLM `SpeculativeConfig`, None if it is not ours."""
    draft = getattr(speculative_config, "draft_model_config", None)
    if draft is None or speculative_config.method != "mtp":
        return None
    names = draft.hf_config.architectures
    if not names or archs.find(names[0]) is None:
        return None
    # Several targets may share a draft class and still be fed differently.
    target = speculative_config.target_model_config.hf_config.architectures
    return archs.find(target[0]) or archs.find(names[0])
