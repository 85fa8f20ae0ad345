"""What the compilers make of every GPU kernel at its serving sizes, without a GPU: into results.

python bench/static.py [--json FILE]

Triton kernels are launched by their launchers, on a driver that only compiles; CUDA files go
through nvcc. A row holds a kernel's registers, memory and instructions for one architecture, and
`faults` says which of the kernel's claims below they break. tests/test_static.py wants none.
"""

import argparse
import json
import multiprocessing
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests"))
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ARCHS = (80, 90, 100)  # compute capabilities

# ---- What is compiled, and what is claimed of it ------------------------------------------------

# Of what another row compiles for all.
ONE_ARCH = (90,)
TENSOR_CORES = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}  # of 64 rows from sm_90 on
FEW_ROWS = dict.fromkeys(ARCHS, "HMMA")  # weight rows below 64


@dataclass(frozen=True)
class Claim:
    """Of a kernel in a configuration, beside that nothing is spilled or kept in local memory."""

    mma: Mapping[int, str] | None = None
    loads: int = 0  # at least so many 16-byte loads from global memory to registers
    copies: int = 0  # ... and to shared memory, asynchronous
    stores: int = 0
    registers: int = 255  # at most
    programs: Mapping[int, int] = field(default_factory=dict)  # at least, on an SM, by architecture
    is_exact: bool = False  # no instruction that rounds as it likes


@dataclass(frozen=True)
class Case:
    op: str
    configuration: str
    inputs: Callable[[], dict[str, Any]]
    kernels: Mapping[str, Claim]  # in the order of their launches
    archs: tuple[int, ...] = ARCHS


SIZE, VOCAB = 4096, 152_576  # MiMo-V2-Flash's; memory is never touched


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int64)


def lookup(tokens: int) -> dict[str, Any]:
    return {
        "input_ids": ints(tokens),
        "positions": ints(tokens),
        "zero_at_position_0": True,
    }


def entry_inputs(
    tokens: int, dtype: torch.dtype = BF16, out: int = SIZE, embed_norm: bool = False
) -> dict[str, Any]:
    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype)

    return lookup(tokens) | {
        "hidden": empty(tokens, SIZE),
        "enorm_weight": empty(SIZE),
        "hnorm_weight": empty(SIZE),
        "proj_weight": empty(out, 2 * SIZE),
        "embed_weight": empty(1000, SIZE),
        "proj_bias": empty(out),
        "embed_norm_weight": empty(SIZE) if embed_norm else None,
        "enorm_eps": 1e-6,
        "hnorm_eps": 1e-6,
    }


def entry_hidden_inputs(tokens: int) -> dict[str, Any]:
    proj = torch.empty(SIZE, 2 * SIZE, dtype=BF16)
    return {
        "hidden": torch.empty(tokens, SIZE, dtype=BF16),
        "hnorm_weights": [torch.empty(SIZE, dtype=BF16)] * 3,
        "proj_weights": [proj] * 3,
        "hnorm_eps": 1e-6,
    }


def entry_embed_inputs(tokens: int) -> dict[str, Any]:
    inputs = entry_inputs(tokens, embed_norm=True) | {"hidden_part": torch.empty(tokens, SIZE)}
    return {k: x for k, x in inputs.items() if k not in ("hidden", "hnorm_weight", "hnorm_eps")}


def entry_lookup_inputs(tokens: int) -> dict[str, Any]:
    return lookup(tokens) | {
        "hidden_part": torch.empty(tokens, SIZE),
        "projected": torch.empty(1000, SIZE, dtype=BF16),
        "proj_bias": torch.empty(SIZE, dtype=BF16),
    }


def head_inputs(tokens: int, is_sampled: bool) -> dict[str, Any]:
    sampling = {"temperature": torch.ones(tokens), "seeds": ints(tokens), "positions": ints(tokens)}
    return {
        "hidden": torch.empty(tokens, SIZE, dtype=BF16),
        "head_weight": torch.empty(VOCAB, SIZE, dtype=BF16),
    } | (sampling if is_sampled else {})


def draft_inputs(op: str) -> dict[str, Any]:
    import cases

    row = cases.DraftRow("", cases.BF16, 64, 3, SIZE, frozenset({"kv", "rope"}))
    inputs: dict[str, Any] = getattr(cases, f"{op}_inputs")(row)
    return inputs


def verify_inputs(name: str) -> dict[str, Any]:
    """64 requests of 3 drafts."""
    b, k = 64, 3
    rows = b * (k + 1)
    inputs: dict[str, Any] = {
        "logits": torch.empty(rows, VOCAB, dtype=BF16),
        "draft_ids": ints(b, k),
        "cu_rows": torch.arange(0, rows + 1, k + 1, dtype=torch.int32),
        "positions": ints(rows),
        "temperature": torch.ones(b),
        "seeds": ints(b),
        "method": "coupled" if name == "coupled" else "standard",
    }
    if name in ("filters", "filtered_draft_logits"):
        inputs |= {
            "top_k": torch.ones(b, dtype=torch.int32),
            "top_p": torch.ones(b),
            "min_p": torch.zeros(b),
        }
    if "draft_logits" in name:
        inputs["draft_logits"] = torch.empty(b * k, VOCAB, dtype=BF16)
        inputs["draft_kind"] = name.removesuffix("draft_logits") + "logits"
    return inputs


ONE = dict.fromkeys(ARCHS, 1)
NORMS = Claim(loads=1)
PROJECT = {
    4: Claim(FEW_ROWS, copies=1, programs=ONE),
    64: Claim(TENSOR_CORES, copies=1, programs=ONE),
}
ENTRY = Claim(TENSOR_CORES, loads=1, copies=1, programs=ONE)
SKINNY_HEAD = Claim(TENSOR_CORES, copies=1, registers=80, programs={90: 3, 100: 3})


def table() -> Iterator[Case]:
    entry: list[tuple[str, dict[str, Any], Claim]] = [
        ("4 tokens", {"tokens": 4}, ENTRY),
        ("4 tokens, embed_norm", {"tokens": 4, "embed_norm": True}, ENTRY),
        (
            "4 tokens, 2048 outputs",
            {"tokens": 4, "out": 2048},
            Claim(FEW_ROWS, loads=1, copies=1, programs=ONE),
        ),
        ("4 tokens, 8192 outputs", {"tokens": 4, "out": 8192}, ENTRY),  # halves are not shared
        ("64 tokens", {"tokens": 64}, ENTRY),
        ("256 tokens", {"tokens": 256}, ENTRY),
        ("256 tokens, embed_norm", {"tokens": 256, "embed_norm": True}, ENTRY),
        (
            "4 tokens, float16",  # as TF32, out of the registers
            {"tokens": 4, "dtype": FP16},
            Claim(TENSOR_CORES, loads=1, programs=ONE),
        ),
        ("4 tokens, float32", {"tokens": 4, "dtype": FP32}, Claim(loads=1, copies=1, programs=ONE)),
    ]
    for name, options, claim in entry:
        is_common = not any(x in name for x in ("embed_norm", "8192", "float32", "64"))
        yield Case(
            "entry",
            name,
            lambda o=options: entry_inputs(**o),
            {"entry_kernel": claim},
            ARCHS if is_common else ONE_ARCH,
        )
    for t in (4, 64):
        yield Case(
            "entry_hidden",
            f"{t} tokens",
            lambda t=t: entry_hidden_inputs(t),
            {"entry_hidden_norm_kernel": NORMS, "project_kernel": PROJECT[t]},
            ARCHS if t == 4 else ONE_ARCH,
        )
        yield Case(
            "entry_embed",
            f"{t} tokens",
            lambda t=t: entry_embed_inputs(t),
            {"entry_embed_norm_kernel": NORMS, "project_kernel": PROJECT[t]},
        )
        yield Case(
            "entry_lookup",
            f"{t} tokens",
            lambda t=t: entry_lookup_inputs(t),
            {"entry_lookup_kernel": NORMS},
        )
    head = Claim(TENSOR_CORES, copies=1, programs=ONE)
    sampled = Claim(TENSOR_CORES, copies=1, programs={80: 2, 90: 2, 100: 1})
    for name, tokens, is_sampled, claim in [
        ("4 tokens", 4, False, SKINNY_HEAD),
        ("16 tokens, sampled", 16, True, sampled),
        ("64 tokens", 64, False, head),
        ("64 tokens, sampled", 64, True, sampled),
    ]:
        yield Case(
            "head_argmax",
            name,
            lambda t=tokens, s=is_sampled: head_inputs(t, s),
            {"head_argmax_kernel": claim},
        )
    for op in ("draft_pack", "draft_step"):
        yield Case(
            op,
            "64 requests",
            lambda op=op: draft_inputs(op),
            {f"{op}_kernel": Claim(loads=1, stores=1)},
            ONE_ARCH,
        )
    for name in ("plain", "filters", "draft_logits", "filtered_draft_logits", "coupled"):
        # 4096 bfloat16 on 128 or 256 threads.
        reduce = Claim(loads=2 if name == "coupled" else 4, registers=128, is_exact=True)
        yield Case(
            "verify",
            f"64 requests, {name}",
            lambda name=name: verify_inputs(name),
            {"reduce_blocks_kernel": reduce, "decide_kernel": Claim(programs=ONE, is_exact=True)},
            ARCHS if name in ("plain", "filters") else ONE_ARCH,
        )


TABLE = list(table())
CUDA_FILES = sorted(path.name for path in (ROOT / "csrc").glob("*.cu"))
CUDA_CLAIMS = dict.fromkeys(  # by op
    ("draft_pack", "draft_step", "entry"), Claim(loads=1, stores=1, programs=ONE)
) | {"verify": Claim(loads=4, programs=ONE, is_exact=True)}


def kernel_names(source: str) -> list[str]:
    """Of the Triton kernels that a text defines."""
    return re.findall(r"^def (\w+_kernel)\(", source, re.M)


# ---- What the compilers make of it --------------------------------------------------------------

# Fused, approximate or flushing; floor, which is cvt.rmi.ftz, never meets a denormal in verify.
INEXACT = r"^\s*(?:@\S+ )?(?:fma|ex2|lg2|rcp|\w+\.\S*(?:approx|full)|(?!cvt\.rmi)\w+\.\S*ftz)\b"


@dataclass(frozen=True)
class Row:
    op: str
    configuration: str
    kernel: str
    arch: int
    registers: int
    shared: int  # bytes
    stack: int  # bytes, of local memory
    spills: int  # loads and stores of local memory
    threads: int
    programs: int  # on an SM
    mma: dict[str, int]  # instruction -> how many
    loads: int  # of 16 bytes
    copies: int
    stores: int
    inexact: int


def programs_on_an_sm(arch: int, threads: int, registers: int, shared: int) -> int:
    """By the limits of sm_80, sm_90 and sm_100; each block keeps 1 KB of shared memory more."""
    warps = threads // 32
    per_warp = -(-registers * 32 // 256) * 256
    memory = {80: 164, 90: 228, 100: 228}[arch] * 1024
    return min(65536 // (warps * per_warp), memory // (shared + 1024), 64 // warps, 32)


def tool(name: str) -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends/nvidia/bin" / name)


def measured(cubin: Path, arch: int, shared: int | None, **known: Any) -> list[Row]:
    """A row for each kernel of a file; shared: dynamic, beside what the file declares."""
    command = [tool("cuobjdump"), "--dump-resource-usage", "--dump-sass", str(cubin)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {
        name: (int(reg), int(stack) + int(local), int(static))
        for name, reg, stack, static, local in re.findall(
            r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text
        )
    }
    rows = []
    for name, sass in re.findall(r"Function : (\S+)\n(.*?)(?=\n\s*Function : |\Z)", text, re.S):
        registers, stack, static = usage[name]
        total = static if shared is None else shared
        instructions = Counter(re.findall(r"^\s+/\*\w+\*/\s+(?:@\S+ )?([\w.]+)", sass, re.M))

        def count(pattern: str, instructions: Counter[str] = instructions) -> int:
            return sum(n for name, n in instructions.items() if re.match(pattern, name))

        mma = {name.split(".")[0] for name in instructions if re.match(r"U?\w*MMA\b", name)}
        rows.append(
            Row(
                **{"kernel": name} | known,
                arch=arch,
                registers=registers,
                shared=total,
                stack=stack,
                spills=count(r"(?:STL|LDL)\b"),
                programs=programs_on_an_sm(arch, known["threads"], registers, total),
                mma={name: count(rf"{name}\b") for name in sorted(mma)},
                loads=count(r"LDG\.E\S*\.128"),
                copies=count(r"LDGSTS\.E\S*\.128"),
                stores=count(r"STG\.E\S*\.128"),
            )
        )
    return rows


def triton_rows(case: Case, arch: int) -> list[Row]:
    """Of the kernels that a launcher launches, in a process whose driver it replaces."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class CompileOnly:
        get_current_device = staticmethod(lambda: arch)
        get_current_stream = staticmethod(lambda device: 0)
        get_current_target = staticmethod(lambda: GPUTarget("cuda", arch, 32))

    compiled, launch = [], JITFunction.run

    def compile_only(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> None:
        compiled.append(launch(self, *args, warmup=True, **kwargs))

    JITFunction.run = compile_only
    driver.set_active(CompileOnly())
    try:
        getattr(import_module(f"mtp_kernels.kernels.{case.op}"), case.op)(**case.inputs())
    finally:
        JITFunction.run = launch
    rows = []
    for kernel in compiled:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            cubin.write(kernel.asm["cubin"])
            cubin.flush()
            rows += measured(
                Path(cubin.name),
                arch,
                kernel.metadata.shared,
                threads=32 * kernel.metadata.num_warps,
                op=case.op,
                configuration=case.configuration,
                kernel=kernel.name,
                inexact=len(re.findall(INEXACT, kernel.asm["ptx"], re.M)),
            )
    return rows


def nvcc() -> str | None:
    return shutil.which("nvcc")


def cuda_rows(file: str, arch: int) -> list[Row]:
    """With the options of CMakeLists.txt that matter to device code."""
    include = Path(torch.__file__).parent / "include"
    command = ["nvcc", "-cubin", f"-arch=sm_{arch}", "-std=c++17", "-O3", "-DUSE_CUDA"]
    command += ["-Werror=all-warnings", "-isystem", str(include)]
    command += ["-DTORCH_TARGET_VERSION=0x020b000000000000"]
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernels.cubin"
        command += ["-keep", "-keep-dir", folder, "-o", str(cubin), str(ROOT / "csrc" / file)]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(f"nvcc {file} for sm_{arch}: {run.stderr[-3000:]}")
        ptx = cubin.with_name(file.replace(".cu", ".ptx")).read_text()
        inexact = {
            name: len(re.findall(INEXACT, code, re.M))
            for name, code in re.findall(r"\.entry (\w+)(.*?)(?=\.entry|\Z)", ptx, re.S)
        }
        elf = subprocess.check_output([tool("cuobjdump"), "--dump-elf", str(cubin)], text=True)
        threads = {
            name: int(bound, 16)
            for name, bound in re.findall(
                r"^\.nv\.info\.(\w+)(?:(?!^\.nv).)*?EIATTR_MAX_THREADS.*?Value:\s+0x(\w+)",
                elf,
                re.M | re.S,
            )
        }
        rows = []
        for name, bound in threads.items():
            known = {"op": file.removesuffix("_cuda.cu"), "configuration": "CUDA"}
            known |= {"threads": bound, "inexact": inexact[name]}
            rows += [row for row in measured(cubin, arch, None, **known) if row.kernel == name]
    return [replace(row, kernel=demangled(row.kernel)) for row in rows]


def demangled(name: str) -> str:
    """Of a kernel, or a kernel template over a type: "entry_norm_kernel<float>"."""
    for length in re.finditer(r"\d+", name):
        word, rest = name[length.end() :][: int(length[0])], name[length.end() + int(length[0]) :]
        if word.endswith("_kernel"):
            argument = re.match(r"I\d*(\w+?)EE", rest)
            types = {"f": "float", "Lb0": "false", "Lb1": "true"}
            return f"{word}<{types.get(argument[1], argument[1])}>" if argument else word
    return name


def faults(row: Row) -> list[str]:
    """The claims that a row breaks."""
    case = next((x for x in TABLE if (x.op, x.configuration) == (row.op, row.configuration)), None)
    claim = CUDA_CLAIMS[row.op] if case is None else case.kernels[row.kernel]
    found = [
        f"{name} expected none, got {got}"
        for name, got in [("stack", row.stack), ("spills", row.spills)]
        if got
    ]
    for name in ("loads", "copies", "stores"):
        wanted, got = getattr(claim, name), getattr(row, name)
        if got < wanted:
            found.append(f"16-byte {name} expected at least {wanted}, got {got}")
    mma = claim.mma and claim.mma[row.arch]
    if mma and not row.mma.get(mma):
        found.append(f"{mma} expected, got {row.mma}")
    if row.registers > claim.registers:
        found.append(f"registers expected at most {claim.registers}, got {row.registers}")
    programs = claim.programs.get(row.arch, 0)
    if row.programs < programs:
        found.append(f"programs on an SM expected at least {programs}, got {row.programs}")
    if claim.is_exact and row.inexact:
        found.append(f"exact instructions expected, got {row.inexact} others")
    return found


Job = tuple[Callable[..., list[Row]], Any, int]


def _run(job: Job) -> list[Row]:
    torch.set_num_threads(1)
    function, what, arch = job
    return function(TABLE[what] if function is triton_rows else what, arch)


def all_rows() -> list[Row]:
    """Compiled by two processes; Triton keeps what it compiled, by a hash of its source.

    Configurations that share a kernel are apart, for one of them to find it kept.
    """
    jobs: list[Job] = [(triton_rows, i, arch) for i, x in enumerate(TABLE) for arch in x.archs]
    if nvcc():
        jobs += [(cuda_rows, file, arch) for file in CUDA_FILES for arch in ARCHS]
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        return [row for rows in pool.map(_run, jobs) for row in rows]


HEAD = ["op", "configuration", "kernel", "arch", "registers", "shared", "spills", "programs per SM"]
HEAD += ["MMA", "16-byte loads / copies / stores"]


def cells(row: Row) -> list[str]:
    mma = ", ".join(f"{count} {name}" for name, count in row.mma.items()) or "-"
    return [
        row.op,
        row.configuration,
        row.kernel,
        f"sm_{row.arch}",
        f"{row.registers}",
        f"{row.shared / 1024:.1f} KB",
        f"{row.spills}",
        f"{row.programs} of {row.threads} threads",
        mma,
        f"{row.loads} / {row.copies} / {row.stores}",
    ]


def nvcc_version() -> str:
    if not nvcc():
        return "not found: csrc/*.cu are left out"
    text = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release ([\d.]+)", text)
    return found[1] if found else "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="only write the rows there")
    file = parser.parse_args().json
    rows = all_rows()
    if file:
        file.write_text(json.dumps([asdict(row) for row in rows]))
        return
    import triton
    from interleaved import provenance, write

    where = provenance() | {"triton": triton.__version__, "nvcc": nvcc_version()}
    lines = ["| " + " | ".join(line) + " |" for line in [HEAD, ["---"] * len(HEAD)]]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
    broken = [f"{row.kernel}, sm_{row.arch}: {text}" for row in rows for text in faults(row)]
    text = "\n".join(
        [
            f"Every GPU kernel at its serving sizes, hidden {SIZE}, vocabulary {VOCAB:,}, bf16 "
            "unless said: compiled, not run. Instructions are counted in the whole kernel's code.",
            "",
            *lines,
            "",
            f"Claims broken: {'; '.join(broken) or 'none'}. {where['date']}, commit "
            f"{where['commit']}, triton {where['triton']} with its ptxas, nvcc {where['nvcc']}.",
            "",
        ]
    )
    print(text)
    write("static", {"where": where, "rows": [asdict(row) for row in rows]}, text)


if __name__ == "__main__":
    main()
