"""draft_pack and draft_step: the cases they must not fail, on every implementation.

In a process with TRITON_INTERPRET=1 this file tests the Triton kernels, else the reference, the CPU
kernels and the CUDA kernels in the emulation; one of its tests starts such a process.
"""

import copy
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cases
import emulation
import interpreter
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from mtp_kernels import ops
from mtp_kernels.archs import Feed
from mtp_kernels.drafting import Drafter, RoundBuffers, row_capacity

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PATHS = ["triton"] if INTERPRETED else ["reference", "cpu", "emulation"]
K, HIDDEN, MOST_REQUESTS, MOST_ROWS = 3, 8, 66, 400


def implementation(path: str, op: str) -> Callable[..., None]:
    if path == "triton":
        return getattr(importlib.import_module(f"mtp_kernels.kernels.{op}"), op)
    if path == "emulation":
        return emulation.op(op)
    module = getattr(ops, op)
    return getattr(module, op) if path == "reference" else module.OP


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes the Drafter use one implementation."""
    for op in ("draft_pack", "draft_step"):
        monkeypatch.setattr(getattr(ops, op), "OP", implementation(request.param, op))
    return request.param


# ---- Rounds -------------------------------------------------------------------------------------


@dataclass
class Request:
    name: str
    first: int  # position of its first row
    ids: list[int]  # the query
    rejected: int
    next_id: int
    lookahead: tuple[int, ...] = (-1,) * (K - 1)

    def hidden(self) -> Tensor:
        generator = torch.Generator().manual_seed(hash((*map(ord, self.name), self.first)) % 2**40)
        return torch.randn(len(self.ids), HIDDEN, generator=generator)

    def rope(self) -> Tensor:
        """Three axes of positions that nobody could guess from the first's."""
        positions = torch.arange(self.first, self.first + len(self.ids))
        return torch.stack([positions, positions**2 % 97, positions // 2])


def random_request(name: str, generator: torch.Generator, first: int | None = None) -> Request:
    def integers(low: int, high: int, count: int = 1) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    length = integers(1, K + 2)[0]
    lookahead = (*integers(-1, 20, K - 2), -1) if integers(0, 2)[0] else (-1,) * (K - 1)
    return Request(
        name,
        integers(0, 40)[0] if first is None else first,
        integers(0, 20, length),
        integers(0, length)[0],
        integers(0, 20)[0],
        lookahead,
    )


def make_drafter(kv_groups: int = 0, rope_axes: int = 0, feed: Feed = Feed.TARGET) -> Drafter:
    buffers = RoundBuffers.allocate(
        max_requests=MOST_REQUESTS,
        max_rows=MOST_ROWS,
        num_drafts=K,
        hidden_size=HIDDEN,
        dtype=torch.float32,
        device=torch.device("cpu"),
        kv_groups=kv_groups,
        rope_axes=rope_axes,
    )
    return Drafter(num_layers=K, num_drafts=K, feed=feed, num_slots=100, buffers=buffers)


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def pack(drafter: Drafter, requests: list[Request], **more: Any) -> int:
    """One round's pack; the number of its rows."""
    lengths = [len(r.ids) for r in requests]
    capacity = row_capacity(lengths, K)
    if drafter.buffers.rope is not None:
        more["target_rope"] = torch.cat(
            [torch.zeros(3, 0).long(), *(r.rope() for r in requests)], 1
        )
    positions = [torch.arange(r.first, r.first + len(r.ids)) for r in requests]
    slots = torch.tensor(drafter.assign_slots([r.name for r in requests]), dtype=torch.int64)
    drafter.pack(
        **{
            "slots": slots,
            "query_start": starts(lengths),
            "num_rejected": torch.tensor([r.rejected for r in requests], dtype=torch.int64),
            "target_ids": torch.tensor([i for r in requests for i in r.ids], dtype=torch.int64),
            "target_positions": torch.cat([torch.arange(0), *positions]),
            "target_hidden": torch.cat([torch.zeros(0, HIDDEN), *(r.hidden() for r in requests)]),
            "next_ids": torch.tensor([r.next_id for r in requests], dtype=torch.int64),
            "lookahead_ids": torch.tensor([r.lookahead for r in requests]).long().view(-1, K - 1),
            "row_start": starts(capacity),
            "num_rows": sum(capacity),
        }
        | more
    )
    return sum(capacity)


def draft(drafter: Drafter, num_requests: int, num_rows: int) -> list[Tensor]:
    """Drafts with layers whose outputs depend on all inputs of a row; the ids fed to each."""
    fed = []

    def run_layer(layer, ids, positions, hidden, rows, write_kv):
        fed.append(ids.clone())
        place = positions.view(-1, len(ids)).sum(0)
        out = hidden * (layer + 2) + (ids % 7)[:, None] + (place % 5)[:, None]
        out = out if rows is None else out[rows]
        return out, out

    def draft_token(step, scored):
        values = scored[:, :4].T.round().contiguous()  # ties among slices
        return values, ((scored[:, 4:].T * 100).long() % 20).contiguous()

    drafter.draft(num_requests, num_rows, run_layer, draft_token)
    return fed


def result(drafter: Drafter, b: int, name: str, fed: list[Tensor]) -> dict[str, Tensor]:
    """All that a round left of request b, in buffers and memory."""
    buffers = drafter.buffers
    start, stop = buffers.row_start[b : b + 2].tolist()
    out = {
        "seq_len": buffers.seq_lens[b],
        "last": buffers.last_row[b] - start,
        "drafts": buffers.draft_ids[b],
        "fed": torch.stack(fed)[:, start:stop],
    }
    for field in ("input_ids", "positions", "hidden", "kv_slots", "rope"):
        if (rows := getattr(buffers, field)) is not None:
            out[field] = rows[start:stop] if field == "hidden" else rows[..., start:stop]
    (slot,) = drafter.assign_slots([name])
    out |= {key: x[slot] for key, x in drafter._memory.items() if x is not None}
    return copy.deepcopy(out)


def run(drafter: Drafter, requests: list[Request], **more: Any) -> list[dict[str, Tensor]]:
    num_rows = pack(drafter, requests, **more)
    fed = draft(drafter, len(requests), num_rows)
    return [result(drafter, b, r.name, fed) for b, r in enumerate(requests)]


def same(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


# ---- The cases ----------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", ["max_len", "table"])
def test_past_the_end(path: str, limit: str) -> None:
    """Case 11: rows past the end write nothing, read nothing, and the others do not notice."""
    blocks, size, columns = 3000, 128, 625
    wide = torch.randperm(blocks * columns).view(blocks, columns)[:4].int()
    # Behind a table that ends too early lie blocks that would give slots.
    tables = torch.cat([wide, wide], 1)[:, :columns]
    last = columns * size - 1
    requests = [
        Request("end", last - 1, [1, 2, 3, 4], 0, 5),
        *(random_request(f"r{i}", torch.Generator().manual_seed(i)) for i in range(3)),
    ]
    more = {"block_sizes": [size], "max_len": last + 1 if limit == "max_len" else None}
    if limit == "max_len":  # the table itself goes on
        tables = torch.cat([tables, tables], 1)
    together = run(make_drafter(kv_groups=1), requests, block_tables=[tables], **more)
    want = tables[0, columns - 1].long() * size + torch.tensor([size - 2, size - 1])
    same(together[0]["kv_slots"][0], torch.cat([want, torch.tensor([-1, -1])]))
    alone = run(make_drafter(kv_groups=1), requests[1:], block_tables=[tables[1:]], **more)
    same(together[1:], alone)
    for b, request in enumerate(requests[1:], 1):
        positions = together[b]["positions"]
        slots = tables[b, positions // size] * size + positions % size
        unused = torch.arange(len(positions)) >= len(request.ids) - request.rejected
        same(together[b]["kv_slots"][0], slots.long().masked_fill(unused, -1))


def test_holes_in_a_table_and_several_groups(path: str) -> None:
    request = Request("r", 6, [1, 2, 3, 4], 0, 5)
    tables = [torch.tensor([[3, -1, 2]], dtype=torch.int32), torch.tensor([[9]], dtype=torch.int32)]
    (out,) = run(
        make_drafter(kv_groups=2), [request], block_tables=tables, block_sizes=[4, 8], max_len=None
    )
    assert out["positions"].tolist() == [6, 7, 8, 9]
    assert out["kv_slots"].tolist() == [[-1, -1, 8, 9], [78, 79, -1, -1]]


def test_padding_is_minus_one(path: str) -> None:
    """Case 12: what is not there is -1, never id or slot 0, and is remembered nowhere."""
    drafter = make_drafter(kv_groups=1)
    buffers = drafter.buffers
    for tensor in (buffers.kv_slots, buffers.draft_ids, drafter._slots, drafter._lookahead):
        tensor.fill_(cases.POISON)
    before = copy.deepcopy(drafter._memory)
    requests = [random_request(f"r{i}", torch.Generator().manual_seed(i)) for i in range(3)]
    num_rows = pack(
        drafter,
        requests,
        slots=torch.tensor([-1, 7, -1]),
        block_tables=[torch.ones(3, 20, dtype=torch.int32)],
        block_sizes=[16],
    )
    draft(drafter, 5, num_rows + 4)  # a graph for more
    start = int(buffers.row_start[1])
    outside = torch.ones(MOST_ROWS, dtype=torch.bool)
    outside[start : start + len(requests[1].ids) - requests[1].rejected] = False
    assert (buffers.kv_slots[0, outside] == -1).all() and (buffers.kv_slots[0, ~outside] >= 0).all()
    assert buffers.draft_ids[3:5].tolist() == [[-1] * K] * 2
    assert (buffers.draft_ids[:3] >= 0).all() and (buffers.draft_ids[5:] == cases.POISON).all()
    assert (drafter._slots[[0, *range(2, MOST_REQUESTS)]] == -1).all()
    assert (drafter._lookahead[3:] == -1).all()
    assert buffers.row_start[3:].eq(num_rows).all()
    for tensor in (buffers.seq_lens[3:], buffers.last_row[3:]):
        assert not tensor.any()
    for name, tensor in drafter._memory.items():
        if tensor is not None:
            others = torch.arange(len(tensor)) != 7
            same(tensor[others], before[name][others])
    assert drafter._memory["end"][7] == buffers.positions[buffers.last_row[1]] + 1


def test_nothing_survives(path: str) -> None:
    """A request whose rows were all rejected is padding, wherever it stands."""
    good = random_request("good", torch.Generator().manual_seed(1))
    none = Request("none", 30, [1, 2], 2, 3)
    (alone,) = run(make_drafter(), [good])
    for requests in ([none, good], [good, none]):
        drafter = make_drafter()
        outs = dict(zip((r.name for r in requests), run(drafter, requests), strict=True))
        same(outs["good"], alone)
        assert outs["none"]["end"] == -1 and outs["none"]["last"] == 0
        assert outs["none"]["fed"][0].tolist() == [0] * K and not outs["none"]["hidden"].any()


def test_chunk_boundaries(path: str) -> None:
    """Case 13: a chunk's last rows are fed the prompt's next ids, and equal an unchunked prompt."""
    prompt, sampled = [0, 1, 2, 3, 4], 5
    (whole,) = run(make_drafter(), [Request("r", 0, prompt, 0, sampled)])
    drafter = make_drafter()
    (chunk,) = run(drafter, [Request("r", 0, prompt[:2], 0, 2, (3, 4))])
    assert chunk["fed"][:, :2].tolist() == [[1, 2], [2, 3], [3, 4]]
    same(chunk["fed"][:, :2], whole["fed"][:, :2])
    (rest,) = run(drafter, [Request("r", 2, prompt[2:], 0, sampled)])
    assert rest["last"] == 2  # nothing to repair
    same(rest["fed"][0, :3], whole["fed"][0, 2:])


def test_replay_with_changed_inputs(path: str) -> None:
    """Case 14: other ids, counts and padding at the same addresses equal fresh buffers."""
    generator = torch.Generator().manual_seed(3)
    reused = make_drafter(kv_groups=1, rope_axes=3)
    tables = {"block_tables": [torch.arange(900).view(-1, 9).int()], "block_sizes": [16]}
    requests = [random_request(f"r{i}", generator) for i in range(9)]
    addresses = [getattr(reused.buffers, f).data_ptr() for f in vars(reused.buffers)]
    for count in (9, 2, 0, 7):
        batch = requests[:count]
        fresh = make_drafter(kv_groups=1, rope_axes=3)
        for field in ("_memory", "_slot_of", "_free_slots"):
            setattr(fresh, field, copy.deepcopy(getattr(reused, field)))
        outs = []
        for drafter in (reused, fresh):
            num_rows = pack(drafter, batch, **tables)
            draft(drafter, 12, 60)  # the size of the graph
            outs.append({f: getattr(drafter.buffers, f) for f in vars(drafter.buffers)})
        for name, got in outs[0].items():
            if name == "kv_slots":
                same(got, outs[1][name])
            elif name in ("input_ids", "positions", "hidden", "rope"):
                rows = 0 if name == "hidden" else -1
                same(got.narrow(rows, 0, num_rows), outs[1][name].narrow(rows, 0, num_rows))
            else:
                same(got[:12], outs[1][name][:12])
        same(reused._memory, fresh._memory)
        requests = [
            random_request(r.name, generator, r.first + len(r.ids) - r.rejected) for r in requests
        ]
    assert addresses == [getattr(reused.buffers, f).data_ptr() for f in vars(reused.buffers)]


def test_uneven_counts(path: str) -> None:
    """Case 15: a request alone equals itself in a batch of 64, through windows of all lengths."""
    generator = torch.Generator().manual_seed(4)
    batch = [random_request(f"r{i}", generator) for i in range(64)]
    batch[17] = Request("r17", 5, [1] * (K + 1), 0, 2)  # leaves no unused row between it and
    batch[18] = Request("r18", 7, [3], 0, 4)  # whose rows are fewer than can be kept
    chosen, windows = (0, 5, 17, 18, 40, 63), set()
    together = make_drafter(rope_axes=3, feed=Feed.CHAIN)
    alone = {b: make_drafter(rope_axes=3, feed=Feed.CHAIN) for b in chosen}
    for _ in range(3):
        outs = run(together, batch)
        for b in chosen:
            same(outs[b], run(alone[b], [batch[b]])[0])
        lengths = [len(r.ids) - r.rejected for r in batch]
        windows |= {int(o["last"]) + 1 - n for o, n in zip(outs, lengths, strict=True)}
        batch = [
            random_request(r.name, generator, r.first + len(r.ids) - r.rejected) for r in batch
        ]
    assert windows == {0, 1, 2}


def test_window_has_the_rope_positions_it_had(path: str) -> None:
    drafter = make_drafter(rope_axes=3)
    first = Request("r", 10, [1, 2, 3], 0, 4)
    run(drafter, [first])
    wrong = (drafter.buffers.draft_ids[0, 0] + 1) % 20
    (out,) = run(drafter, [Request("r", 13, [4], 0, int(wrong))])
    assert out["last"] == 2
    same(out["rope"], torch.cat([first.rope()[:, 1:], Request("r", 13, [4], 0, 0).rope()], 1))


def test_winners_of_slices(path: str) -> None:
    """The highest value wins, the lowest id of equals, NaN never, and ids alone are S = 1."""
    nan, inf, none = torch.nan, torch.inf, 2**63 - 1
    values = torch.tensor([[1.0, nan, -inf, -inf], [2.0, 0.0, nan, -inf], [2.0, -1.0, -inf, -inf]])
    ids = torch.tensor([[1, 2, 9, none], [8, 3, 7, none], [5, 4, 8, none]])
    want = torch.tensor([5, 3, 7, 0])
    for drafted in ((values, ids), want, want.int()):
        drafter = make_drafter()
        generator = torch.Generator().manual_seed(5)
        num_rows = pack(drafter, [random_request(f"r{i}", generator) for i in range(4)])
        out = drafter.draft(4, num_rows, lambda *a: (a[3], a[3]), lambda *_, d=drafted: d)
        same(out, want[:, None].expand(4, K))


# ---- Memory, the host, and arguments ------------------------------------------------------------


def guarded(x: Tensor, guard: int) -> Tensor:
    """A copy with memory around it that holds the guard only."""
    around = torch.full((x.numel() + 4096,), guard, dtype=x.dtype)
    return around[2048:-2048].view(x.shape).copy_(x)


@pytest.mark.parametrize("op", ["draft_pack", "draft_step"])
def test_wrong_values_stay_within_the_tensors(path: str, op: str) -> None:
    """Whatever the integers are, nothing outside of the tensors is written or has an effect.

    And the effect is the reference's.
    """
    row = cases.DraftRow("", cases.FP32, 6, K, HIDDEN, frozenset({"kv", "rope"}))
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        inputs = getattr(cases, f"{op}_inputs")(row, seed)
        tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
        for name, x in tensors.items():
            if not x.is_floating_point():
                wild = torch.randint(-(10**6), 10**6, x.shape, generator=generator)
                near = torch.randint(-3, 80, x.shape, generator=generator)
                if name == "slots":  # which of two requests is remembered is not defined
                    near = torch.randperm(83, generator=generator)[: len(x)] - 3
                pick = torch.rand(x.shape, generator=generator)
                wild = torch.where(pick < 0.2, wild, near)
                tensors[name] = torch.where(pick < 0.6, wild, x).to(x.dtype)
        if seed % 2:  # what the others are worth only shows in rows that are a request's
            tensors["row_start"] = tensors["row_start"].sort().values
        slots = tensors["slots"]
        slots[(slots[:, None] == slots).sum(1) > 1] = -1
        left = []
        for by, guard in ((path, cases.POISON), (path, 55), ("reference", 55)):
            copies = {name: guarded(x, guard) for name, x in tensors.items()}
            implementation(by, op)(**inputs | copies)
            for name, x in copies.items():
                whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
                assert (whole[:2048] == guard).all() and (whole[-2048:] == guard).all(), name
            left.append(copies)
        same(left[0], left[1])
        same(left[1], left[2])


# Of three requests and 12 rows -> whose each row is, -1 = nobody's.
ROW_STARTS = {
    "good": ([0, 4, 8, 12], [0] * 4 + [1] * 4 + [2] * 4),
    "ends early": ([0, 4, 4, 9], [0] * 4 + [2] * 5 + [-1] * 3),
    "ends late": ([0, 4, 8, 40], [0] * 4 + [1] * 4 + [2] * 4),
    "begins late": ([2, 4, 8, 12], [-1] * 2 + [0] * 2 + [1] * 4 + [2] * 4),
    "begins early": ([-30, 4, 8, 12], [0] * 4 + [1] * 4 + [2] * 4),
    "empty": ([5, 5, 5, 5], [-1] * 12),
    "overlap": ([0, 8, 4, 12], [-1] * 12),
    "overlap beyond": ([0, 60, 50, 70], [-1] * 12),
    "descends": ([12, 8, 4, 0], [-1] * 12),
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("starts, owners", ROW_STARTS.values(), ids=ROW_STARTS)
def test_every_row_is_written(
    path: str, starts: list[int], owners: list[int], dtype: torch.dtype
) -> None:
    """Whatever row_start is: rows of nobody are padding, and one that descends gives no rows."""
    row = cases.DraftRow("", cases.FP32, 3, K, HIDDEN, frozenset({"kv", "rope"}))
    left = []
    for by in (path, "reference"):
        inputs = cases.draft_pack_inputs(row)
        inputs |= {"row_start": torch.tensor(starts).to(dtype), "num_rows": 12}
        inputs["target_positions"] += 100  # all tokens have a KV slot
        inputs["block_tables"] = [torch.ones(3, 99, dtype=torch.int32)] * 2
        for name in ("out_ids", "out_positions", "out_rope", "out_kv_slots"):
            inputs[name] = inputs[name][..., :15]
        inputs["out_hidden"] = inputs["out_hidden"][:15]
        implementation(by, "draft_pack")(**inputs)
        left.append({name: x for name, x in inputs.items() if name.startswith("out_")})
    out = left[0]
    same(out, left[1])
    nobodys = torch.tensor(owners) < 0
    for name in ("out_ids", "out_positions", "out_rope"):
        rows = out[name][..., :12]
        assert (rows != cases.POISON).all() and not rows[..., nobodys].any()
        assert (out[name][..., 12:] == cases.POISON).all()
    rows = out["out_hidden"]
    assert (rows[:12] != cases.POISON).all() and not rows[:12][nobodys].any()
    assert (rows[12:] == cases.POISON).all()
    assert (out["out_kv_slots"] >= -1).all()
    assert (out["out_kv_slots"][:, :12][:, nobodys] == -1).all()
    assert (out["out_kv_slots"][:, 12:] == -1).all()
    lengths = [owners.count(b) for b in range(3)]
    assert (out["out_seq_lens"][:3] > 0).tolist() == [n > 0 for n in lengths]
    assert out["out_row_start"].diff()[:3].tolist() == lengths
    assert (out["out_row_start"][4:] == 12).all()
    assert all(out["out_row_start"][b] == owners.index(b) for b in range(3) if lengths[b])


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("starts, owners", ROW_STARTS.values(), ids=ROW_STARTS)
def test_no_draft_without_rows(path: str, starts: list[int], owners: list[int], step: int) -> None:
    """A row_start that descends gives no request rows: no draft, and nothing is remembered."""
    row = cases.DraftRow("", cases.FP32, 3, K, HIDDEN, frozenset({"rope"}), {"step": step})
    before, got, want = (cases.draft_step_inputs(row) for _ in range(3))
    for inputs, by in ((got, path), (want, "reference")):
        inputs["row_start"][:] = 40
        inputs["row_start"][:4] = torch.tensor(starts)
        inputs["last_row"][:3] = torch.tensor([3, 7, 8])
        implementation(by, "draft_step")(**inputs)
    same(got, want)
    has_none = [starts[b] < 0 or b not in owners for b in range(3)]
    assert (got["draft_ids"][:3, step] == -1).tolist() == has_none
    if starts != sorted(starts):
        for name in ("input_ids", "kept_ids", "kept_hidden", "num_kept", "end", "assumed"):
            same(got[name], before[name])


def test_int32_does_not_wrap(path: str) -> None:
    """Differences and ends of int32 values are of 64 bits."""
    row = cases.DraftRow("", cases.FP32, 3, K, HIDDEN, frozenset({"int32"}))
    inputs = cases.draft_pack_inputs(row)
    inputs["query_start"][1] = 0
    inputs["query_start"][0] = inputs["query_start"][-1]
    inputs["num_rejected"][0] = 2**31 - 1
    implementation(path, "draft_pack")(**inputs)
    assert not inputs["out_hidden"][: inputs["row_start"][1]].any()
    inputs = cases.draft_step_inputs(row)
    inputs["positions"][:] = 2**31 - 1
    implementation(path, "draft_step")(**inputs)
    assert (inputs["end"][inputs["slots"][:3].long()] == 2**31).all()


class Recorded(TorchDispatchMode):
    """The torch ops that do something on a device."""

    VIEWS = ("slice", "select", "unsqueeze", "view", "detach")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        if name not in self.VIEWS:
            self.names.append(name)
        return func(*args, **kwargs or {})


@pytest.mark.skipif(INTERPRETED, reason="of the dispatcher")
@pytest.mark.parametrize("feed", list(Feed))
def test_a_round_is_one_launch_and_one_per_draft(feed: Feed) -> None:
    """Besides what CHAIN needs: the gather of what to score, and the copy of what is recycled."""
    drafter = make_drafter(feed=feed)
    request = random_request("r", torch.Generator().manual_seed(6))
    drafter.assign_slots(["r"])
    hidden, drafts = torch.zeros(MOST_ROWS, HIDDEN), torch.zeros(1, dtype=torch.int64)
    arguments: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter, "pack", lambda **x: arguments.update(x))
        num_rows = pack(drafter, [request])
    rows = hidden[:num_rows]
    with Recorded() as recorded:
        drafter.pack(**arguments)
        drafter.draft(1, num_rows, lambda *_: (rows, rows), lambda *_: drafts)
    step = ["index", "draft_step", "copy_"] if feed is Feed.CHAIN else ["draft_step"]
    assert recorded.names == ["draft_pack", *step * (K - 1), "draft_step"]


@pytest.mark.skipif(INTERPRETED, reason="of tensors without data")
def test_no_host_synchronisation() -> None:
    """A round on tensors without data: nothing reads a value, or has a shape that depends on one.

    The ops' fakes are the references themselves.
    """
    with FakeTensorMode():
        drafter = make_drafter(kv_groups=1, rope_axes=3)
        for _ in range(2):
            drafter.assign_slots(["r0", "r1"])
            drafter.pack(
                slots=torch.zeros(2, dtype=torch.int64),
                query_start=torch.zeros(3, dtype=torch.int32),
                num_rejected=torch.zeros(2, dtype=torch.int32),
                target_ids=torch.zeros(7, dtype=torch.int32),
                target_positions=torch.zeros(7, dtype=torch.int64),
                target_hidden=torch.zeros(7, HIDDEN),
                next_ids=torch.zeros(2, dtype=torch.int64),
                lookahead_ids=torch.zeros(2, K - 1, dtype=torch.int64),
                row_start=torch.zeros(3, dtype=torch.int32),
                num_rows=7,
                block_tables=[torch.zeros(2, 9, dtype=torch.int32)],
                block_sizes=[16],
                target_rope=torch.zeros(3, 7, dtype=torch.int64),
            )
            draft(drafter, 4, 12)
        for read in (lambda x: int(x[0]), lambda x: x.tolist(), lambda x: bool(x.any())):
            with pytest.raises(DataDependentOutputException):
                read(drafter.buffers.last_row)


PACK_ERRORS = [
    ("slots", torch.zeros(3), "slots expected dtype int32 or int64, got float32"),
    (
        "query_start",
        torch.zeros(3, dtype=torch.int64),
        r"query_start expected shape \[4\], got \[3\]",
    ),
    ("next_ids", torch.zeros(6, dtype=torch.int64)[::2], "next_ids expected last stride 1, got 2"),
    ("num_rows", 1000, "num_rows expected at most .*, got 1000"),
    ("num_rows", -1, "num_rows expected at most .*, got -1"),
    (
        "target_hidden",
        torch.zeros(2, 8),
        r"target_hidden expected shape \[>= .*, H\], got \[2, 8\]",
    ),
    ("out_hidden", torch.zeros(2, 8), "out_hidden expected dtype bfloat16, got float32"),
    ("out_slots", torch.zeros(2, dtype=torch.int64), r"out_slots expected shape \[67\], got \[2\]"),
    (
        "assumed",
        torch.zeros(9, dtype=torch.int64),
        r"assumed expected shape \[S, K - 1\], got \[9\]",
    ),
    (
        "kept_ids",
        torch.zeros(2, 70, dtype=torch.int64).T,
        "kept_ids expected last stride 1, got 70",
    ),
    (
        "kept_ids",
        torch.zeros(70, 4, dtype=torch.int64)[:, :2],
        "kept_ids expected a contiguous tensor",
    ),
    ("end", torch.zeros(0, dtype=torch.int64), "end expected at least one slot, got none"),
    (
        "target_hidden",
        torch.zeros(()).bfloat16(),
        r"target_hidden expected shape \[>= .*, H\], got \[\]",
    ),
    (
        "target_rope",
        torch.zeros(9, dtype=torch.int64),
        r"target_rope expected shape \[A, Tq\], got \[9\]",
    ),
    ("kept_rope", None, "target_rope, kept_rope and out_rope expected all or none"),
    ("out_kv_slots", None, "block_sizes and out_kv_slots expected one for each of 2 block_tables"),
    ("block_sizes", [16], "block_sizes and out_kv_slots expected one for each of 2 block_tables"),
    ("block_sizes", [16, 0], "block_sizes expected a number >= 1, got 0"),
    ("block_tables", [torch.zeros(3, 1)] * 2, "block_tables expected dtype int32, got float32"),
    (
        "block_tables",
        [torch.zeros(2, 1, dtype=torch.int32)] * 2,
        r"block_tables expected shape \[>= 3, C >= 1\], got \[2, 1\]",
    ),
]
STEP_ERRORS = [
    ("ids", torch.zeros(3, dtype=torch.int64), r"ids expected shape \[S >= 1, B\], got \[3\]"),
    ("values", None, r"ids expected shape \[1, B\], got \[5, 3\]"),
    (
        "values",
        torch.zeros(5, 3, dtype=torch.float64),
        "values expected dtype float32, got float64",
    ),
    ("step", 3, "step expected 0 to 2, got 3"),
    ("step", -1, "step expected 0 to 2, got -1"),
    ("draft_ids", torch.zeros(2, 3), r"ids expected B <= 2, got \[5, 3\]"),
    ("last_row", torch.zeros(2, dtype=torch.int64), r"last_row expected shape \[67\], got \[2\]"),
    ("input_ids", torch.zeros(0, dtype=torch.int32), r"positions expected shape \[0\]"),
    ("hidden", torch.zeros(()), r"hidden expected shape \[[0-9]+, H\], got \[\]"),
    ("hidden", torch.zeros(20), r"hidden expected shape \[[0-9]+, H\], got \[20\]"),
    ("hidden", torch.zeros(3, 8), r"hidden expected shape \[[0-9]+, 8\], got \[3, 8\]"),
    ("rope", None, "rope and kept_rope expected both or neither"),
    ("rope", torch.zeros(9, dtype=torch.int64), r"rope expected shape \[A, R\], got \[9\]"),
    ("kept_hidden", torch.zeros(70, 2, 8), "kept_hidden expected dtype bfloat16, got float32"),
]


@pytest.mark.parametrize(
    "op, name, value, words",
    [("draft_pack", *e) for e in PACK_ERRORS] + [("draft_step", *e) for e in STEP_ERRORS],
)
def test_bad_arguments_are_named(path: str, op: str, name: str, value: Any, words: str) -> None:
    row = cases.DraftRow("", cases.BF16, 3, K, HIDDEN, frozenset({"kv", "rope"}))
    inputs = getattr(cases, f"{op}_inputs")(row) | {name: value}
    messages = []
    for by in (path, "reference"):
        with pytest.raises(RuntimeError, match=f"^{op}: {words}") as error:
            implementation(by, op)(**inputs)
        messages.append(str(error.value).splitlines()[0])
    assert messages[0] == messages[1]


# ---- CUDA kernels -------------------------------------------------------------------------------

ROWS = [("draft_pack", row) for row in cases.DRAFT_PACK_ROWS]
ROWS += [("draft_step", row) for row in cases.DRAFT_STEP_ROWS]


@pytest.mark.parametrize("op, row", ROWS, ids=[f"{op}-{row.id}" for op, row in ROWS])
@pytest.mark.parametrize("by", ["triton"] if INTERPRETED else ["emulation"])
def test_equals_the_reference(by: str, op: str, row: cases.DraftRow) -> None:
    """What is written, and in the whole of its storage. (Of the CPU kernels: test_ops.py.)"""
    inputs = [getattr(cases, f"{op}_inputs")(row) for _ in range(2)]
    for path, x in zip((by, "reference"), inputs, strict=True):
        implementation(path, op)(**x)
    for argument in getattr(torch.ops.mtp_kernels, op).default._schema.arguments:
        got, want = (x.get(argument.name) for x in inputs)
        if argument.is_write and got is not None:
            same(*(torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()) for x in (got, want)))


# ---- Triton -------------------------------------------------------------------------------------

if not INTERPRETED:

    def test_triton_in_its_interpreter() -> None:
        """All tests of this file that an implementation can pass or fail."""
        interpreter.run_tests(__file__)
