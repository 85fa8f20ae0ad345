"""Everything in the plugin that depends on vLLM's version: which symbols are replaced, and how.

Each :class:`Patch` names one symbol and the parameters it must have. A symbol that is missing or
has other parameters is left alone, with one warning that says which part is therefore off.
"""

import functools
import importlib
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("vllm.mtp_kernels")

_ORIGINAL = "_mtp_kernels_original"


@functools.cache
def warn_once(text: str) -> None:
    logger.warning(text)


class Unsupported(Exception):
    """The installed vLLM is not one that a patch was written for; the text says in what way."""


@dataclass(frozen=True)
class Patch:
    """One replaced symbol of vLLM."""

    part: str
    module: str
    symbol: str
    parameters: tuple[str, ...]
    wrap: Callable[[Any], Any]
    """Makes the replacement from the original."""

    @property
    def target(self) -> str:
        return f"{self.module}.{self.symbol}"

    def _resolve(self) -> tuple[Any, str, Any]:
        """(owner, attribute name, attribute as stored on the owner)."""
        *path, name = self.symbol.split(".")
        try:
            owner = importlib.import_module(self.module)
            for attribute in path:
                owner = getattr(owner, attribute)
            return owner, name, inspect.getattr_static(owner, name)
        except (ImportError, AttributeError) as error:
            raise Unsupported(f"{self.target} not found ({error})") from error

    def check(self) -> None:
        """Raise :class:`Unsupported` unless the symbol is there with the parameters we know."""
        _, _, stored = self._resolve()
        function = getattr(stored, "__func__", stored)
        function = getattr(function, _ORIGINAL, function)
        found = tuple(inspect.signature(function).parameters)
        if found != self.parameters:
            raise Unsupported(
                f"{self.target} has parameters ({', '.join(found)}), "
                f"expected ({', '.join(self.parameters)})"
            )

    def is_applied(self) -> bool:
        """Whether the symbol is our replacement now."""
        try:
            _, _, stored = self._resolve()
        except Unsupported:
            return False
        return hasattr(getattr(stored, "__func__", stored), _ORIGINAL)

    def apply(self) -> None:
        """Replace the symbol; does nothing the second time."""
        if self.is_applied():
            return
        owner, name, stored = self._resolve()
        original = getattr(stored, "__func__", stored)
        replacement = self.wrap(original)
        setattr(replacement, _ORIGINAL, original)
        static = isinstance(stored, staticmethod)
        setattr(owner, name, staticmethod(replacement) if static else replacement)


def vllm_version() -> str:
    """Version of the installed vLLM, without its local suffix."""
    import vllm

    return vllm.__version__.split("+")[0]
