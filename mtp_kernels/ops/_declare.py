"""How an op is declared: its PyTorch reference is schema, fallback, fake and documentation.

C++ adds kernels under the CPU and CUDA keys, which the dispatcher prefers to the fallback. A Triton
launcher takes the CUDA key where the build has no compiled kernel.
"""

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("mtp_kernels", "DEF")


def declare(
    reference: Callable[..., Any],
    *,
    mutates_args: Sequence[str] = (),
    fake: Callable[..., Any] | None = None,
    triton: str | None = None,
) -> torch._ops.OpOverload:
    """Register `reference` as op `mtp_kernels::<its name>` and return the op.

    reference: plain PyTorch on tensors of any device; type annotations give the schema.
    mutates_args: names of the arguments that are written.
    fake: runs on tensors without data, and takes all arguments by name; only for a reference that
        reads values.
    triton: "module:function" of a launcher with the reference's signature, for CUDA tensors. It is
        imported, and Triton with it, at the first call; without Triton the reference runs.
    """
    name = reference.__name__
    warned: set[str] = set()

    def fallback(*args: Any, **kwargs: Any) -> Any:
        tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        device = next(tensors).device.type
        if device != "meta" and device not in warned:
            warned.add(device)
            warnings.warn(
                f"mtp_kernels::{name} has no {device} kernel in this build and runs its PyTorch "
                "reference there",
                stacklevel=2,
            )
        return reference(*args, **kwargs)

    schema = torch.library.infer_schema(reference, mutates_args=mutates_args)
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, fallback, "CompositeExplicitAutograd")
    # Compiled kernels are registered by now: _C is loaded before the ops are declared.
    compiled = torch._C._dispatch_has_kernel_for_dispatch_key(f"mtp_kernels::{name}", "CUDA")
    if triton is not None and not compiled:
        LIBRARY.impl(name, _lazy(triton, fallback), "CUDA")
    named = reference if fake is None else _by_name(fake, reference)
    torch.library.register_fake(f"mtp_kernels::{name}", named, lib=LIBRARY)
    return getattr(torch.ops.mtp_kernels, name).default


def _by_name(fake: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    """`fake`, called with every argument of the reference by its name, defaults filled in."""
    signature = inspect.signature(reference)

    def call(*args: Any, **kwargs: Any) -> Any:
        inputs = signature.bind(*args, **kwargs)
        inputs.apply_defaults()
        return fake(**inputs.arguments)

    return call


def _lazy(launcher: str, fallback: Callable[..., Any]) -> Callable[..., Any]:
    """`launcher`, imported when it is first called; `fallback` on a machine without Triton."""

    @functools.cache
    def load() -> Callable[..., Any]:
        module, function = launcher.split(":")
        try:
            return getattr(importlib.import_module(module), function)
        except ModuleNotFoundError as error:
            if error.name != "triton":
                raise
            return fallback

    def call(*args: Any, **kwargs: Any) -> Any:
        return load()(*args, **kwargs)

    return call


class Expect:
    """Argument checks of one op call; csrc/common.h says the same in C++."""

    def __init__(self, op: str, first: Tensor) -> None:
        self.op = op
        self.device_of_first = first.device

    def that(self, ok: bool, text: str) -> None:
        if not ok:
            raise RuntimeError(f"{self.op}: {text}")

    def device(self, name: str, x: Tensor) -> None:
        wanted = self.device_of_first
        self.that(x.device == wanted, f"{name} expected device {wanted}, got {x.device}")

    def dtype(self, name: str, x: Tensor, *dtypes: torch.dtype) -> None:
        wanted = " or ".join(_short(dtype) for dtype in dtypes)
        self.that(x.dtype in dtypes, f"{name} expected dtype {wanted}, got {_short(x.dtype)}")

    def shape(self, name: str, x: Tensor, *shape: int) -> None:
        wanted, got = list(shape), list(x.shape)
        self.that(got == wanted, f"{name} expected shape {wanted}, got {got}")

    def unit_stride(self, name: str, x: Tensor) -> None:
        ok = x.dim() == 0 or x.shape[-1] <= 1 or x.stride(-1) == 1
        self.that(ok, f"{name} expected last stride 1, got {x.stride(-1) if x.dim() else 0}")

    def tensor(self, name: str, x: Tensor, dtype: torch.dtype, *shape: int) -> None:
        self.device(name, x)
        self.dtype(name, x, dtype)
        self.shape(name, x, *shape)
        self.unit_stride(name, x)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
