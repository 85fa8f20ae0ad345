"""What the suite has measured, as JSON, as tables and as plots.

python bench/report.py [FOLDER]     makes bench.md and the plots from FOLDER/bench.json again
"""

import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from interleaved import OURS, PRUNED, READ, RESULTS, VLLM, ratio, write
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

Table = list[list[str]]


@dataclass(frozen=True)
class Result:
    """One row: who took how long, and for how much."""

    op: str
    shape: Mapping[str, int | str]
    threads: int
    tiny: bool
    seconds: Mapping[str, Sequence[float]]  # per call, [rounds] for each contender
    bytes: Mapping[str, int]  # that must be moved
    operations: int  # multiply-adds count as two; 0: not counted
    notes: Mapping[str, str]  # what the contenders other than ours are

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def rate(self, name: str) -> float:
        """Bytes per second."""
        return self.bytes[name] / self.median(name)

    def share(self, name: str) -> float | None:
        """Of the rate at which the same round read; None where no read was timed."""
        if READ not in self.seconds:
            return None
        times = ratio(self.seconds[READ], self.seconds[name])[0]
        return times * self.bytes[name] / self.bytes[READ]

    def label(self) -> str:
        return labels(self.shape.items())


def labels(values: Iterable[tuple[str, int | str]]) -> str:
    return ", ".join(f"{name}={x:,}" if isinstance(x, int) else x for name, x in values)


# ---- Tables ---------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    for unit, size in (("s", 1), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def against(result: Result, name: str) -> str:
    """Its time, and how many times longer than ours; of the pruned one, vLLM's over it too."""
    if name not in result.seconds:
        return ""
    text = f"{duration(result.median(name))}, {quotient(result, name, OURS)}"
    if name == PRUNED:
        text += f"; {VLLM} / it {quotient(result, VLLM, name)}"
    return text


def quotient(result: Result, peer: str, ours: str) -> str:
    """The median of the paired ratios, and its lower bound."""
    median, bound = ratio(result.seconds[peer], result.seconds[ours])
    return f"{median:.2f} (>= {bound:.2f})"


def achieved(result: Result, cache: int) -> str:
    """GB/s and the share of the read ceiling, or where the data was."""
    text = f"{result.rate(OURS) / 1e9:.1f} GB/s"
    share = result.share(OURS)
    if result.bytes[OURS] < cache or share is None:
        return f"{text}, in cache"
    return f"{text}, {share:.0%}"


def by_op(results: Sequence[Result]) -> dict[str, list[Result]]:
    ops: dict[str, list[Result]] = {}
    for result in results:
        ops.setdefault(result.op, []).append(result)
    return ops


def contenders(results: Sequence[Result]) -> dict[str, str]:
    """Name -> note of all but ours, in the order they were given."""
    return {name: note for result in results for name, note in result.notes.items()}


def op_tables(results: Sequence[Result], where: Mapping[str, Any]) -> Iterator[str]:
    for op, rows in by_op(results).items():
        names = contenders(rows)
        table = [["", "threads", OURS, "moved", *names]]
        for one in rows:
            cells = [one.label(), str(one.threads), duration(one.median(OURS))]
            cells.append(achieved(one, where["cache"]))
            table.append(cells + [against(one, name) for name in names])
        yield f"## {op}"
        yield "\n".join(f"- {name}: {note}" for name, note in names.items())
        yield markdown(table)


def markdown(table: Table) -> str:
    rows = [table[0], ["---"] * len(table[0]), *table[1:]]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def text_of(results: Sequence[Result], where: Mapping[str, Any]) -> str:
    """bench.md. Without the scaling where only tiny rows were run."""
    tiny = [one for one in results if one.tiny]
    large = [one for one in results if not one.tiny]
    reads = [
        one.bytes[READ] / one.median(READ) / 1e9
        for one in large
        if READ in one.seconds and one.bytes[READ] > where["cache"]
    ]
    parts = [
        "# The ops on CPU",
        f"{where['date']}, commit {where['commit']}, {where['cpu']}, {where['threads']} threads, "
        f"{where['build']['cpu_isa']}, bfloat16. torch {where['torch']}, vLLM {where['vllm']}, "
        f"transformers {where['transformers']}, Python {where['python']}.",
        "Medians. A ratio is how many times longer the contender takes: the median of ratios "
        "within rounds, in brackets its lower 97.5% bound. Moved: the bytes that must be read and "
        "written, and in percent the share of the rate at which all threads read and sum such "
        f"bytes in the same rounds. In cache: less than the {where['cache'] >> 20} MB that the "
        "last cache holds, or nothing to compare with.",
    ]
    if reads:
        parts.append(
            f"Read from memory in these rounds: {min(reads):.1f} to {max(reads):.1f} GB/s."
        )
    parts += op_tables(large, where)
    if large and (fits := list(sweeps(large))):
        table = [["op", "axis", "the rest", "fitted", "furthest from it"]]
        table += [fit.cells() for fit in fits]
        parts += ["## How cost grows", SCALING, markdown(table)]
        bent = [fit.op_axis for fit in fits if np.abs(fit.errors).max() >= BENT]
        reasons = dict.fromkeys(WHY[op_axis] for op_axis in bent if op_axis in WHY)
        if reasons:
            parts.append(f"Off the line by {BENT:.0%} or more; on an idle machine this is why:")
            parts.append("\n".join(f"- {reason}" for reason in reasons))
    if tiny:
        parts += ["## What a call costs", "Tiny shapes: the time is the call's."]
        names = contenders(tiny)
        table = [["op", "", OURS, *names]]
        for one in tiny:
            cells = [one.op, one.label(), duration(one.median(OURS))]
            table.append(cells + [against(one, name) for name in names])
        parts.append(markdown(table))
    return "\n\n".join(part for part in parts if part) + "\n"


# ---- How cost grows -------------------------------------------------------------------------

SCALING = (
    "Ours, a line fitted to the times of rows that differ in one axis, by least squares of "
    "relative errors. Over T it is the longer of the read, which is the same for all T, and the "
    "arithmetic; over threads, what they do not share and what they do."
)
BENT = 0.1  # from here on a kernel is off its line, and the report says why
WHY = {
    ("entry", "T"): "entry and head_argmax over T: near the corner, where the read takes about as "
    "long as the arithmetic, they do not overlap entirely.",
    ("verify", "B"): "verify over B: a request is judged up to its first rejection, so that the "
    "rows that are read are in proportion to B only on average.",
    ("verify", "K"): "verify over K: rows behind a first rejection are not read, and the more "
    "drafts there are, the more rows are.",
    ("draft_pack", "B"): "draft_pack over B: few requests are copied by one thread.",
    ("draft_step", "K"): "draft_step over K: with K=1 its only step is the last one, which has "
    "nothing to shift and nothing to remember.",
}
WHY["head_argmax", "T"] = WHY["entry", "T"]


@dataclass(frozen=True)
class Sweep:
    """Rows of an op that differ in one axis only, by its values; seconds fitted by a and b."""

    op: str
    axis: str
    rest: str
    x: np.ndarray
    seconds: np.ndarray
    a: float
    b: float

    @property
    def op_axis(self) -> tuple[str, str]:
        return self.op, self.axis

    @property
    def errors(self) -> np.ndarray:
        """How much longer the line says that it takes, relative to what it took."""
        return fitted(self.axis, self.a, self.b, self.x) / self.seconds - 1

    def cells(self) -> list[str]:
        a, b = duration(abs(self.a)), duration(abs(self.b))
        a, sign = "-" * (self.a < 0) + a, "-" if self.b < 0 else "+"
        line = f"{a} {sign} {b} {self.axis}"
        if self.axis == "T":
            line = f"max({a}, {b} T)"
        if self.axis == "threads":
            line = f"{a} {sign} {b} / threads"
        cells = [self.op, self.axis, self.rest, line]
        if self.x.size == 2:
            return [*cells, "two points"]
        worst = int(np.abs(self.errors).argmax())
        error = self.errors[worst]
        side = "below" if error > 0 else "above"
        return [*cells, f"{self.axis}={self.x[worst]:,}: {abs(error):.0%} {side}"]


def fitted(axis: str, a: float, b: float, x: np.ndarray) -> np.ndarray:
    if axis == "T":
        return np.maximum(a, b * x)
    return a + b * (1 / x if axis == "threads" else x)


def fit(axis: str, x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    if axis == "T":

        def scale(part: slice, unit: np.ndarray) -> float:
            relative = unit[part] / y[part]
            return float(relative.sum() / (relative**2).sum())

        corners = [
            (scale(slice(0, i), np.ones(len(x))), scale(slice(i, None), x))
            for i in range(1, len(x))
        ]
        return min(corners, key=lambda ab: float(((fitted(axis, *ab, x) / y - 1) ** 2).sum()))
    columns = np.stack([np.ones(len(x)), 1 / x if axis == "threads" else x], axis=1)
    a, b = np.linalg.lstsq(columns / y[:, None], np.ones(len(x)), rcond=None)[0]
    return float(a), float(b)


def sweeps(results: Sequence[Result]) -> Iterator[Sweep]:
    """Every axis that at least three rows differ in, or two for threads."""
    groups: dict[tuple[str, str, str], dict[int, float]] = {}
    for one in results:
        values = {**one.shape, "threads": one.threads}
        for axis, x in values.items():
            if isinstance(x, int):
                rest = labels(y for y in values.items() if y[0] != axis)
                groups.setdefault((one.op, axis, rest), {})[x] = one.median(OURS)
    for (op, axis, rest), points in groups.items():
        if len(points) >= (2 if axis == "threads" else 3):
            x = np.array(sorted(points))
            y = np.array([points[i] for i in sorted(points)])
            yield Sweep(op, axis, rest, x, y, *fit(axis, x, y))


# ---- Plots ----------------------------------------------------------------------------------

MARKERS = {"entry": "o", "head_argmax": "s"}
COLORS = {
    OURS: "tab:blue",
    VLLM: "tab:orange",
    "torch": "tab:green",
    "torch.compile": "tab:olive",
}


def roofline(axes: Axes, results: Sequence[Result]) -> None:
    """Operations per second against operations per byte, under what was read and computed."""
    rows = [one for one in results if one.operations and one.notes and READ in one.seconds]
    if not rows:
        return
    read = statistics.median(one.bytes[READ] / one.median(READ) for one in rows)
    peak = 0.0
    for one in rows:
        for name, color in COLORS.items():
            if name in one.seconds:
                x = one.operations / one.bytes[name]
                rate = one.operations / one.median(name) / 1e9
                peak = max(peak, rate)
                axes.plot(x, rate, MARKERS[one.op], color=color, markersize=5, alpha=0.8)
    intensities = [one.operations / one.bytes[OURS] for one in rows]
    x = np.array(sorted([min(intensities), max(intensities), peak * 1e9 / read]))
    axes.plot(x, np.minimum(read * x / 1e9, peak), color="black", linewidth=1)
    for name, color in COLORS.items():
        axes.plot([], [], "o", color=color, label=name)
    for op, marker in MARKERS.items():
        axes.plot([], [], marker, color="gray", label=op)
    title = (
        f"Roof: {read / 1e9:.0f} GB/s, as read in the same rounds; highest rate of any contender"
    )
    axes.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="GFLOP/s")
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


def speedups(axes: Axes, results: Sequence[Result]) -> None:
    """How many times longer vLLM takes than ours, whole and pruned: medians, and lower bounds."""
    bars = [
        (one, name)
        for one in results
        if VLLM in one.seconds
        for name in (OURS, PRUNED)
        if name in one.seconds
    ]
    for i, (one, name) in enumerate(bars):
        median, bound = ratio(one.seconds[VLLM], one.seconds[name])
        axes.barh(-i, median, color=COLORS[OURS], alpha=0.7 if name == OURS else 0.3)
        axes.plot([bound, median], [-i, -i], color="black", linewidth=1)
        axes.text(median, -i, f" {median:.2f}", va="center", fontsize=6)
    labels = [f"{one.op}: {one.label()}{name.removeprefix(OURS)}" for one, name in bars]
    axes.set_yticks(range(0, -len(bars), -1), labels, fontsize=6)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set(xscale="log", xlabel="vLLM's time / ours")
    axes.margins(x=0.15, y=0.01)


def plot(results: Sequence[Result], path: Path) -> None:
    figure = Figure(figsize=(14, 9), layout="constrained")
    left, right = figure.subplots(1, 2)
    roofline(left, results)
    speedups(right, results)
    figure.savefig(path, dpi=110)


def plot_scaling(results: Sequence[Result], path: Path) -> None:
    """One panel for each op and axis, with the fitted line."""
    panels: dict[tuple[str, str], list[Sweep]] = {}
    for sweep in sweeps(results):
        panels.setdefault(sweep.op_axis, []).append(sweep)
    if not panels:
        return
    columns = 4
    figure = Figure(figsize=(14, 3 * -(-len(panels) // columns)), layout="constrained")
    for i, ((op, axis), lines) in enumerate(panels.items()):
        axes = figure.add_subplot(-(-len(panels) // columns), columns, i + 1)
        for sweep in lines:
            (points,) = axes.plot(sweep.x, sweep.seconds * 1e3, "o", label=sweep.rest, markersize=4)
            x = np.geomspace(sweep.x[0], sweep.x[-1])
            y = fitted(axis, sweep.a, sweep.b, x) * 1e3
            axes.plot(x, y, color=points.get_color(), linewidth=1)
        axes.set(xscale="log", yscale="log", xlabel=axis, ylabel="ms", title=op)
        ticks = sorted({int(x) for sweep in lines for x in sweep.x})
        axes.set_xticks(ticks, [f"{x:,}" for x in ticks], rotation=45, fontsize=7)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.legend(fontsize=5)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def write_report(results: Sequence[Result], where: Mapping[str, Any], folder: Path) -> None:
    """bench.json, bench.md, bench.png and, where a shape was varied, bench_scaling.png."""
    rows = [asdict(one) for one in results]
    write("bench", {"where": where, "rows": rows}, text_of(results, where), folder)
    large = [one for one in results if not one.tiny]
    plot(large or results, folder / "bench.png")
    plot_scaling(large, folder / "bench_scaling.png")


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    stored = json.loads((folder / "bench.json").read_text())
    write_report([Result(**row) for row in stored["rows"]], stored["where"], folder)


if __name__ == "__main__":
    main()
