"""Options, the timing of one row, and the report at the end."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import vllm
from cases import BenchRow, threads
from interleaved import OURS, READ, Contenders, Contest, Rounds, provenance, ratio, reader
from pytest_benchmark.fixture import BenchmarkFixture
from report import Result, text_of, write_report
from torch import Tensor

RESULTS = pytest.StashKey[list[Result]]()
WARMUP = 2  # rounds that do not count


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mtp_kernels")
    group.addoption("--quick", action="store_true", help="only tiny shapes, few rounds")
    group.addoption("--output", type=Path, help="folder for bench.json, bench.md and the plots")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RESULTS] = []
    config.option.benchmark_quiet = True  # our table has its times, per call and beside others'


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`row`: each of the module's ROWS, or with --quick each tiny one."""
    if "row" in metafunc.fixturenames:
        quick = metafunc.config.getoption("--quick")
        rows = [row for row in metafunc.module.ROWS if row.tiny or not quick]
        metafunc.parametrize("row", rows, ids=lambda row: row.id)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """The report; it is written if every row that was asked for has a result."""
    results = config.stash[RESULTS]
    if not results:
        return
    peers = {"vllm": vllm.__version__, "transformers": transformers.__version__}
    where = provenance() | peers
    terminalreporter.write_line("\n" + text_of(results, where))
    folder, stats = config.getoption("--output"), terminalreporter.stats
    if folder and not stats.get("failed") and not stats.get("error"):
        write_report(results, where, folder)


@pytest.fixture
def contest(
    row: BenchRow, benchmark: BenchmarkFixture, request: pytest.FixtureRequest
) -> Iterator[Contest]:
    """Times a row's contenders; the row's number of threads holds for the whole test."""
    count = row.threads or torch.get_num_threads()
    results = request.config.stash[RESULTS]
    rounds = 3 if request.config.getoption("--quick") else 15

    def run(
        op: str,
        contenders: Contenders,
        *,
        moved: int | Mapping[str, int],
        read: Tensor | None = None,
        operations: int = 0,
        notes: Mapping[str, str],
    ) -> None:
        """contenders: `ours`, and what it is compared with.

        moved: bytes that must be read and written, of all contenders or by name.
        read: a tensor to read for the ceiling, of about as many bytes as ours moves.
        operations: multiply-adds, counted as two.
        notes: what each contender is.
        """
        if read is not None:
            contenders = {**contenders, READ: reader(read)}
        one = Rounds(contenders)
        benchmark.group = op
        benchmark.pedantic(one.ours, setup=one.before_ours, rounds=rounds, warmup_rounds=WARMUP)
        one.finish()
        data = benchmark.stats.stats.data
        seconds = {OURS: [value / one.calls[OURS] for value in data]}
        seconds |= {name: values[WARMUP:][:rounds] for name, values in one.seconds.items()}
        if isinstance(moved, int):
            moved = dict.fromkeys(contenders, moved)
        moved = {**moved, READ: 0 if read is None else read.nbytes}
        result = Result(
            op=op,
            shape=row.shape,
            threads=count,
            tiny=row.tiny,
            seconds=seconds,
            bytes={name: moved.get(name, moved[OURS]) for name in contenders},
            operations=operations,
            notes={name: notes[name] for name in contenders if name not in (OURS, READ)},
        )
        results.append(result)
        benchmark.extra_info.update(_summary(result, one.calls))

    with threads(count), torch.inference_mode():
        yield run


def _summary(result: Result, calls: Mapping[str, int]) -> dict[str, Any]:
    """What pytest-benchmark's own JSON says of the row. Its times are of calls["ours"] calls."""
    summary: dict[str, Any] = {
        "calls": dict(calls),
        "bytes": result.bytes[OURS],
        "bytes_per_second": result.rate(OURS),
        "share_of_read_ceiling": result.share(OURS),
        "ratios": {},
    }
    for name in result.notes:
        median, bound = ratio(result.seconds[name], result.seconds[OURS])
        summary["ratios"][name] = {"median": median, "lower_bound": bound}
    return summary
