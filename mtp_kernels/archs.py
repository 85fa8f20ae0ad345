"""One row per architecture: what its MTP layers are called and how they are fed.

Adding an architecture is adding a row to :data:`ARCHS`. The number of MTP layers is not in the
table: configs do not state it reliably, so it is counted from the checkpoint's weight names.
"""

import enum
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


class Feed(enum.Enum):
    """Which hidden state MTP layer m >= 1 sees at row j."""

    TARGET = "target"
    """The target's hidden of row j, at every layer (MiMo-V2 family)."""
    CHAIN = "chain"
    """The output of layer m - 1 at row j (DeepSeek-V3, arXiv 2412.19437 section 2.2; Step-3.5)."""


@dataclass(frozen=True)
class MtpSpec:
    """How one architecture lays out and feeds its MTP layers."""

    target_architecture: str
    """`architectures[0]` of the checkpoint's config.json."""
    draft_architecture: str
    """The name under which vLLM looks up the draft model's class."""
    models: str
    """The released models that this row serves, for people."""
    feed: Feed
    weight_prefix: str = "model.mtp.layers."
    """MTP layer m's weights are `<weight_prefix><m>.<name>`."""

    def count_layers(self, weight_names: Iterable[str]) -> int:
        """Number of MTP layers N among `weight_names`; 0 when there are none.

        Raises:
            ValueError: the layers found are not numbered 0..N-1; names the missing ones.
        """
        pattern = re.compile(re.escape(self.weight_prefix) + r"(\d+)\.")
        found = {int(match[1]) for name in weight_names if (match := pattern.match(name))}
        missing = sorted(set(range(max(found, default=-1) + 1)) - found)
        if missing:
            raise ValueError(
                f"checkpoint: expected MTP layers {self.weight_prefix}0..{max(found)}, got no "
                f"weight of layer(s) {missing}"
            )
        return len(found)


_MIMO_V2 = {"feed": Feed.TARGET}

ARCHS: tuple[MtpSpec, ...] = (
    MtpSpec("MiMoV2FlashForCausalLM", "MiMoV2MTPModel", "MiMo-V2-Flash", **_MIMO_V2),
    MtpSpec("MiMoV2ForCausalLM", "MiMoV2MTPModel", "MiMo-V2.5-Pro", **_MIMO_V2),
    MtpSpec("MiMoV2OmniForCausalLM", "MiMoV2OmniMTPModel", "MiMo-V2.5", **_MIMO_V2),
)


def find(architecture: str) -> MtpSpec | None:
    """The row whose target or draft architecture is `architecture`, else None."""
    for spec in ARCHS:
        if architecture in (spec.target_architecture, spec.draft_architecture):
            return spec
    return None


def weight_names(checkpoint: str | Path) -> list[str]:
    """Names of all tensors in a local checkpoint folder, sorted.

    Read from `model.safetensors.index.json` if it exists, else from the headers of the
    `*.safetensors` files; no tensor is loaded.

    Raises:
        FileNotFoundError: the folder holds neither.
        ValueError: a file is not what its name says; names it.
    """
    folder = Path(checkpoint)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            return sorted(json.loads(index.read_text())["weight_map"])
        except (ValueError, KeyError) as error:
            raise ValueError(f"checkpoint: {index} is not a weight index ({error!r})") from error
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"checkpoint: expected model.safetensors.index.json or *.safetensors in {folder}, "
            "got neither"
        )
    names: list[str] = []
    for file in files:
        with file.open("rb") as handle:
            try:
                header = json.loads(handle.read(int.from_bytes(handle.read(8), "little")))
            except ValueError as error:
                raise ValueError(f"checkpoint: {file} is no safetensors file ({error})") from error
        names += [name for name in header if name != "__metadata__"]
    return sorted(names)
