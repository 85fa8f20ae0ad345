"""Triton's interpreter on CPU tensors: in a process of its own, counting bytes, or quicker."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np


def run_tests(file: str) -> None:
    """All tests of the file, where Triton was imported with TRITON_INTERPRET=1; they must pass."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", file],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-6000:]


class Launch:
    """The bytes that the programs of one launch load and store."""

    def __init__(self) -> None:
        self._loads: list[tuple[int, np.ndarray]] = []  # bytes of an element, where they are
        self._stores: list[tuple[int, np.ndarray]] = []

    def add(self, is_store: bool, pointers: Any, mask: Any) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        inside, at = np.broadcast_arrays(mask.data, pointers.data)
        (self._stores if is_store else self._loads).append((size, at[inside]))

    def asked_for(self) -> int:
        """All of them."""
        return sum(size * at.size for size, at in self._loads + self._stores)

    def moved(self) -> int:
        """Each address read once and written once."""
        return sum(
            size * np.unique(np.concatenate([at for s, at in one if s == size])).size
            for one in (self._loads, self._stores)
            for size in {size for size, _ in one}
        )


@contextlib.contextmanager
def counted() -> Iterator[list[Launch]]:
    """The launches within."""
    from triton.runtime.interpreter import GridExecutor
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    launches: list[Launch] = []
    run, load, store = (
        GridExecutor.__call__,
        Builder.create_masked_load,
        Builder.create_masked_store,
    )

    def counting_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        launches.append(Launch())
        return run(self, *args, **kwargs)

    def counting_load(self: Any, pointers: Any, mask: Any, *args: Any) -> Any:
        launches[-1].add(False, pointers, mask)
        return load(self, pointers, mask, *args)

    def counting_store(self: Any, pointers: Any, value: Any, mask: Any, *args: Any) -> Any:
        launches[-1].add(True, pointers, mask)
        return store(self, pointers, value, mask, *args)

    with (
        mock.patch.object(GridExecutor, "__call__", counting_run),
        mock.patch.object(Builder, "create_masked_load", counting_load),
        mock.patch.object(Builder, "create_masked_store", counting_store),
    ):
        yield launches


def quicken() -> None:
    """At twice its speed, without its copies.

    Call once, after importing triton with TRITON_INTERPRET=1.

    The interpreter (3.9) replaces the functions of `triton.language` at every call of a device
    function, though the launch has done so; and it copies the storage of all arguments onto itself
    after a launch, which for a view with gibibytes between its rows takes long.
    """
    from triton.runtime import interpreter

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()

    def patch_once(fn):
        if id(fn.__globals__) in patched:
            return interpreter._LangPatchScope()
        patched.add(id(fn.__globals__))
        return patch(fn)

    def launch_anew(self, *args, **kwargs):
        patched.clear()
        return launch(self, *args, **kwargs)

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_anew
    interpreter.GridExecutor._restore_args_dev = lambda *_: None
