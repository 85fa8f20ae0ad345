"""Triton's interpreter on CPU tensors: in a process of its own, or at twice its speed."""

import os
import subprocess
import sys


def run_tests(file: str) -> None:
    """All tests of the file, where Triton was imported with TRITON_INTERPRET=1; they must pass."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", file],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-6000:]


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
