"""The CUDA kernels on CPU tensors, in an emulation, under sanitizers; and what that would find.

Tests of other files whose ids hold "emulation" run the ops' CUDA kernels too. The sanitizer jobs
here run those of this file, test_draft_ops.py and test_entry.py again in processes of their own;
the others, random requests of test_verify_backends.py among them, are too many for that.
"""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cases
import emulation
import pytest
import test_exact
import torch
import verify_cases

from mtp_kernels import ops

TESTS = Path(__file__).parent


def draft_row(op: str, id: str) -> cases.DraftRow:
    rows = {"draft_pack": cases.DRAFT_PACK_ROWS, "draft_step": cases.DRAFT_STEP_ROWS}[op]
    return next(row for row in rows if row.id == id)


# ---- The emulation itself -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_every_function_of_the_emulation(seed: int) -> None:
    emulation.seed(seed)
    assert not emulation.run("everything", torch.zeros(64)).any()
    x = torch.arange(256.0)
    assert torch.equal(emulation.run("sums", x), x.view(4, 64).sum(1).repeat_interleave(64))
    assert emulation.run("add_up", x)[0] == 3 * 64


def test_threads_come_in_the_order_of_the_seed() -> None:
    orders = []
    for seed in (1, 2, 1):
        emulation.seed(seed)
        orders.append(emulation.run("arrivals", torch.zeros(64)).int().tolist())
    assert orders[0] == orders[2] != orders[1] and sorted(orders[1]) == list(range(64))


@pytest.mark.parametrize(
    "kernel, words",
    [
        (
            "some_skip_the_barrier",
            r"deadlock: threads 40-63 have exited; threads 0-39 wait in a barrier at faults.cpp:",
        ),
        (
            "two_barriers",
            r"divergent barrier: threads 0-39 wait in a barrier at faults.cpp:(\d+); "
            r"threads 40-63 wait in a barrier at faults.cpp:(?!\1)\d+",
        ),
        (
            "half_a_warp",
            "deadlock: threads 16-31, 48-63 have exited; threads 0-15, 32-47 wait in a warp",
        ),
        ("lane_outside_of_mask", r"thread \d reads a lane that is not in the mask at faults.cpp"),
    ],
)
def test_divergence_is_an_error_that_names_the_threads(kernel: str, words: str) -> None:
    with pytest.raises(RuntimeError, match=rf"^block \(0, 0, 0\): {words}"):
        emulation.run(kernel, torch.zeros(64))
    assert not emulation.run("everything", torch.zeros(64)).any()  # the next launch is sound


def test_bytes_are_counted() -> None:
    x = torch.arange(100.0)
    emulation.traffic()
    assert torch.equal(emulation.run("copy", x), x)
    assert emulation.traffic() == (400, 400)


# ---- The ops ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row", [row for row in cases.ENTRY_ROWS if "packed" not in row.features], ids=lambda row: row.id
)
def test_entry_matches_the_reference(row: cases.EntryRow) -> None:
    for seed in range(3):
        inputs = cases.entry_inputs(row, seed)
        rtol, atol = cases.TOLERANCES[row.dtype]
        got, want = emulation.op("entry")(**inputs), ops.entry.entry(**inputs)
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [cases.BF16, cases.FP16, cases.FP32])
@pytest.mark.parametrize("size", [1, 71, 72, 8192, 8193, 8200])
def test_entry_does_not_depend_on_how_rows_lie_in_memory(dtype: torch.dtype, size: int) -> None:
    """Bit for bit: rows that begin at multiples of 16 bytes, and the same rows where none does."""
    row = cases.EntryRow("", dtype, 3, size, 2, frozenset({"embed_norm", "bias"}))
    inputs = cases.entry_inputs(row)
    shifted = {}
    for name, x in inputs.items():
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            stride = -(-x.shape[-1] // 8) * 8
            rows = x.new_full((x.shape[:-1].numel(), stride), torch.nan)
            whole = torch.cat([rows.flatten(), x.new_full((1,), torch.nan)])
            strides = (stride, 1)[-x.dim() :]
            inputs[name] = whole.as_strided(x.shape, strides).copy_(x)
            shifted[name] = whole.clone().as_strided(x.shape, strides, 1).copy_(x)
    got = emulation.op("entry")(**inputs)
    assert not got.isnan().any()
    torch.testing.assert_close(emulation.op("entry")(**inputs | shifted), got, rtol=0, atol=0)


VERIFY_INPUTS = dict(verify_cases.all_inputs())
if emulation.SANITIZER:
    del VERIFY_INPUTS["far-rows"]  # gigabytes, of which a sanitizer keeps a record


@pytest.mark.parametrize("name", VERIFY_INPUTS)
def test_verify_equals_the_reference(name: str) -> None:
    inputs = VERIFY_INPUTS[name]
    emulation.seed(len(name))
    with cases.threads(1):
        want = ops.verify.verify(**inputs)
    for got, wanted in zip(emulation.op("verify")(**inputs), want, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_a_request_without_rows_gets_no_token() -> None:
    """Nor is anything read for it: the sanitizers run this too."""
    inputs, sound = verify_cases.unchecked()
    got, want = emulation.op("verify")(**inputs), ops.verify.verify(**sound)
    for x, wanted, nothing in zip(got, want, (-1, 0, 0), strict=True):
        assert torch.equal(x[::2], wanted) and (x[1::2] == nothing).all()


@pytest.mark.parametrize("method", ["standard", "coupled"])
def test_values_that_no_one_has_checked_lead_to_no_other_id(method: str) -> None:
    """On a GPU; a CPU op refuses them."""
    base = cases.verify_inputs(cases.VERIFY_ROWS[2]) | {"method": method}
    nan = torch.full_like(base["temperature"], torch.nan)
    for change in ({"temperature": nan}, {"min_p": nan + 2}, {"min_p": torch.full_like(nan, 2)}):
        token_ids, num_accepted, _ = emulation.op("verify")(**base | change)
        sampled = token_ids.gather(1, num_accepted[:, None].long())
        assert ((0 <= sampled) & (sampled < base["logits"].shape[1])).all()


def test_exact_functions_have_the_reference_bits() -> None:
    table = test_exact.make_table()
    for *counter, words in table.pop("philox"):
        assert emulation.philox(*counter) == words
    for function, (bits, results) in table.items():
        assert emulation.exact(function, bits) == results, function


@pytest.mark.parametrize("op", ["draft_pack", "draft_step"])
def test_the_order_of_threads_and_blocks_does_not_show(op: str) -> None:
    row = draft_row(op, "bf16-all")
    left = []
    for seed in range(5):
        emulation.seed(seed)
        inputs = getattr(cases, f"{op}_inputs")(row)
        emulation.op(op)(**inputs)
        left.append({name: x for name, x in inputs.items() if isinstance(x, torch.Tensor)})
    for other in left[1:]:
        torch.testing.assert_close(other, left[0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("drafts", [1, 3])
def test_nothing_behind_the_last_row_is_read(drafts: int) -> None:
    """Buffers that end with the last row of the last request."""
    row = cases.DraftRow("", cases.BF16, 4, drafts, 8, frozenset({"rope"}))
    inputs = [cases.draft_step_inputs(row) for _ in range(2)]
    rows = int(inputs[0]["last_row"].max()) + 1
    for x, call in zip(
        inputs, (emulation.op("draft_step"), ops.draft_step.draft_step), strict=True
    ):
        for name in ("input_ids", "positions", "hidden"):
            x[name] = x[name][:rows].clone()
        x["rope"] = x["rope"][:, :rows].clone()
        call(**x)
    torch.testing.assert_close(*inputs, rtol=0, atol=0)


def test_more_kv_groups_than_a_kernel_takes_are_refused() -> None:
    inputs = cases.draft_pack_inputs(draft_row("draft_pack", "bf16-kv"))
    inputs["block_tables"] = inputs["block_tables"][:1] * 33
    inputs["block_sizes"] = [16] * 33
    inputs["out_kv_slots"] = inputs["out_kv_slots"][:1].repeat(33, 1)
    with pytest.raises(RuntimeError, match="block_tables expected at most 32 on CUDA, got 33"):
        emulation.op("draft_pack")(**inputs)


# ---- In other processes -------------------------------------------------------------------------

if not emulation.SANITIZER:

    def sanitized(sanitizer: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        try:
            env = emulation.preload(sanitizer)
        except FileNotFoundError as missing:
            pytest.skip(f"no sanitizer: {missing}")
        path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
        return subprocess.run(
            [sys.executable, *arguments],
            env=os.environ | env | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
        )

    def test_kernels_under_sanitizers() -> None:
        """Of every CUDA kernel all rows, by two jobs side by side; "address" is with that for
        undefined behaviour."""
        files = [Path(__file__), TESTS / "test_draft_ops.py", TESTS / "test_entry.py"]
        # Without capture: a report ends the process before captured output is shown.
        options = ["-q", "-s", "-k", "emulation", "-p", "no:cacheprovider"]
        command = ["-m", "pytest", *options, *map(str, files)]
        with ThreadPoolExecutor() as pool:
            runs = pool.map(lambda sanitizer: sanitized(sanitizer, *command), ["address", "thread"])
            for run in runs:
                output = run.stdout[-6000:] + run.stderr[-6000:]
                assert run.returncode == 0, output
                assert int(re.findall(r"(\d+) passed", output)[0]) >= 150, output

    @pytest.mark.parametrize(
        "sanitizer, kernel, n, words",
        [
            ("address", "copy", 65, "heap-buffer-overflow.*copy"),
            ("address", "misaligned", 1, "misaligned address.*misaligned"),
            ("address", "read_past_shared", 1, "index 64 out of bounds for type 'float \\[64\\]'"),
            ("address", "read_past_dynamic", 1, "heap-buffer-overflow.*read_past_dynamic"),
            ("thread", "sums_without_barrier", 128, "data race.*block_sum"),
            ("thread", "add_up_without_atomic", 64, "data race.*add_up"),
        ],
    )
    def test_a_planted_fault_is_found(sanitizer: str, kernel: str, n: int, words: str) -> None:
        code = f"import emulation, torch; emulation.run('{kernel}', torch.zeros({{}}), {n})"
        run = sanitized(sanitizer, "-c", code.format(n // 64 * 64 or 64))
        assert run.returncode != 0
        assert re.search(words, run.stderr, re.DOTALL), run.stderr[-3000:]
