"""drafting.py against a dense oracle, in an engine small enough to read.

The oracle runs every layer from scratch over all tokens known at the end of a round. After each
round the drafts and the KV of every layer, row by row, must equal the oracle's.
"""

import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from mtp_kernels.archs import Feed
from mtp_kernels.drafting import Drafter, RoundBuffers, layer_schedule, row_capacity

VOCAB, HIDDEN, MAX_LEN = 23, 8, 96


class ToyModel:
    """A target whose hidden states depend on all tokens so far, and N MTP layers, in fp64."""

    def __init__(self, num_layers: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.embedding, self.head = weight(VOCAB, HIDDEN), weight(HIDDEN, VOCAB)
        self.mix = weight(HIDDEN, HIDDEN) / HIDDEN
        self.position = weight(MAX_LEN + 8, HIDDEN)
        self.layers = [
            {name: weight(2 * HIDDEN, HIDDEN) for name in ("q", "k", "v", "o")}
            for _ in range(num_layers)
        ]

    def target(self, tokens: list[int]) -> Tensor:
        hidden, rows = torch.zeros(HIDDEN, dtype=torch.float64), []
        for token in tokens:
            hidden = torch.tanh(hidden @ self.mix + self.embedding[token])
            rows.append(hidden)
        return torch.stack(rows)

    def project(self, layer: int, ids: Tensor, positions: Tensor, hidden: Tensor) -> dict:
        entry = torch.cat([self.embedding[ids.long()], hidden], -1)
        out = {name: entry @ w for name, w in self.layers[layer].items()}
        out["k"] = out["k"] + self.position[positions]
        return out

    @staticmethod
    def attend(rows: dict, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
        scores = (rows["q"] @ keys.T).masked_fill(~visible, float("-inf"))
        return torch.tanh(scores.softmax(-1) @ values + rows["o"])


def dense_oracle(
    model: ToyModel, known: list[int], num_rows: int, schedule: list[int], feed: Feed
) -> tuple[list[int], dict[int, tuple[Tensor, Tensor]]]:
    """Drafts at the last of `num_rows` rows and each layer's keys and values, from scratch.

    `known` may reach beyond `t_{num_rows}`: tokens of a prompt that is still being prefilled.
    """
    tokens, positions = list(known[: num_rows + 1]), torch.arange(num_rows)
    hidden = model.target(known[:num_rows])
    visible = positions[:, None] >= positions
    drafts, kv = [], {}
    for step, layer in enumerate(schedule):
        ids = torch.tensor(tokens[1 + step : num_rows + 1 + step])
        rows = model.project(layer, ids, positions, hidden)
        if step == layer:
            kv[layer] = (rows["k"], rows["v"])
        out = model.attend(rows, *kv[layer], visible)
        drafts.append(int((out[-1] @ model.head).argmax()))
        beyond = num_rows + 1 + step
        tokens.append(known[beyond] if beyond < len(known) else drafts[-1])
        if feed is Feed.CHAIN or (step + 1 < len(schedule) and schedule[step + 1] == layer):
            hidden = out
    return drafts, kv


@dataclass
class Request:
    name: str
    tokens: list[int]  # prompt, then what was sampled
    prompt_len: int
    done: int = 0  # rows that are final in the target's KV
    drafts: list[int] = field(default_factory=list)
    keys: Tensor = None
    values: Tensor = None


class ToyEngine:
    """Schedules, accepts and rejects at random, and checks every round against the oracle."""

    def __init__(self, feed: Feed, num_layers: int, num_drafts: int, seed: int, **options) -> None:
        self.model = ToyModel(num_layers)
        self.feed, self.num_drafts, self.rng = feed, num_drafts, random.Random(seed)
        self.buffers = RoundBuffers.allocate(
            max_requests=6,
            max_rows=256,
            num_drafts=num_drafts,
            hidden_size=HIDDEN,
            dtype=torch.float64,
            device=torch.device("cpu"),
        )
        self.drafter = Drafter(
            num_layers=num_layers,
            num_drafts=num_drafts,
            feed=feed,
            num_slots=8,
            buffers=self.buffers,
            **options,
        )
        self.fed: list[tuple[int, Tensor, Tensor]] = []

    def request(self, name: str, prompt_len: int) -> Request:
        tokens = [self.rng.randrange(VOCAB) for _ in range(prompt_len)]
        num_layers = len(self.model.layers)
        shape = (num_layers, MAX_LEN + 8, HIDDEN)
        nan = torch.full(shape, float("nan"), dtype=torch.float64)
        return Request(name, tokens, prompt_len, keys=nan, values=nan.clone())

    def run_round(
        self, batch: list[Request], queries: list[list[int]], accepted: list[int]
    ) -> None:
        """`queries[b]`: ids the target runs; `accepted[b]`: how many drafts in it survive, or the
        whole query is a prompt chunk (-1)."""
        past, device_ids, positions, hidden = self.num_drafts - 1, [], [], []
        rejected, next_ids, lookahead = [], [], []
        for request, query, count in zip(batch, queries, accepted, strict=True):
            context = request.tokens[: request.done] + query
            device_ids += query
            positions += range(request.done, len(context))
            hidden.append(self.model.target(context)[request.done :])
            rejected.append(0 if count < 0 else len(query) - 1 - count)
            end = request.done + len(query) - rejected[-1]
            if end >= len(request.tokens):  # sample: anything but the draft that was rejected
                refused = query[count + 1] if 0 <= count < len(query) - 1 else None
                if count > 0:
                    request.tokens += query[1 : count + 1]
                choice = self.rng.randrange(VOCAB)
                if self.rng.random() < 0.3 and len(request.drafts) > max(count, 0):
                    choice = request.drafts[max(count, 0)]  # unscheduled draft that comes true
                request.tokens.append(choice if choice != refused else (choice + 1) % VOCAB)
            next_ids.append(request.tokens[end])
            ahead = request.tokens[end + 1 : end + 1 + past]
            lookahead.append(ahead + [-1] * (past - len(ahead)))
            request.done = end
        lens = [len(query) for query in queries]
        capacity = row_capacity(lens, self.num_drafts)
        num_rows = sum(capacity)

        def starts(lengths: list[int]) -> Tensor:
            return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)

        self.buffers.hidden.fill_(float("nan"))
        self.drafter.pack(
            slots=torch.tensor(self.drafter.assign_slots([r.name for r in batch])),
            query_start=starts(lens),
            num_rejected=torch.tensor(rejected, dtype=torch.int32),
            target_ids=torch.tensor(device_ids, dtype=torch.int32),
            target_positions=torch.tensor(positions),
            target_hidden=torch.cat(hidden),
            next_ids=torch.tensor(next_ids, dtype=torch.int32),
            lookahead_ids=torch.tensor(lookahead, dtype=torch.int32).view(len(batch), past),
            row_start=starts(capacity),
            num_rows=num_rows,
        )
        self.fed.clear()

        def run_layer(layer, ids, row_positions, row_hidden, wanted, write_kv):
            self.fed.append((layer, ids.clone(), row_hidden.clone()))
            out = torch.full((num_rows, HIDDEN), float("nan"), dtype=torch.float64)
            for b, request in enumerate(batch):
                start, end = self.buffers.row_start[b], self.buffers.last_row[b] + 1
                at = row_positions[start:end]
                rows = self.model.project(layer, ids[start:end], at, row_hidden[start:end])
                if write_kv:
                    request.keys[layer, at], request.values[layer, at] = rows["k"], rows["v"]
                upto = int(at[-1]) + 1
                visible = at[:, None] >= torch.arange(upto)
                keys, values = request.keys[layer, :upto], request.values[layer, :upto]
                out[start:end] = self.model.attend(rows, keys, values, visible)
            out = out if wanted is None else out[wanted]
            return out, out

        def draft_token(step, scored):
            return (scored @ self.model.head).argmax(-1)

        drafts = self.drafter.draft(len(batch), num_rows, run_layer, draft_token)
        for b, request in enumerate(batch):
            request.drafts = drafts[b].tolist()
            assert int(self.buffers.positions[self.buffers.last_row[b]]) == request.done - 1
            assert int(self.buffers.seq_lens[b]) <= MAX_LEN + 8
            want, kv = dense_oracle(
                self.model, request.tokens, request.done, self.drafter.schedule, self.feed
            )
            assert request.drafts == want, request.name
            for layer, (keys, values) in kv.items():
                torch.testing.assert_close(request.keys[layer, : request.done], keys)
                torch.testing.assert_close(request.values[layer, : request.done], values)

    def next_query(self, request: Request, chunk: int) -> tuple[list[int], int]:
        left = len(request.tokens) - request.done
        if left > 1:  # prefill; like vLLM, never stop within K tokens of the end
            size = min(chunk, left)
            if 0 < left - size < self.num_drafts:
                size = max(size - (self.num_drafts - (left - size)), 0) or left
            return request.tokens[request.done : request.done + size], -1
        scheduled = self.rng.choice([self.num_drafts] * 3 + list(range(self.num_drafts)))
        query = [request.tokens[-1], *request.drafts[:scheduled]]
        return query, self.rng.randint(0, len(query) - 1)


@pytest.mark.parametrize("feed", list(Feed))
@pytest.mark.parametrize("num_layers,num_drafts", [(3, 3), (3, 2), (2, 2), (1, 1), (5, 5)])
def test_drafts_and_kv_equal_dense_pass(feed: Feed, num_layers: int, num_drafts: int) -> None:
    """Cases 4, 13, 15: rejections of 0..K, trimmed schedules, chunk ends, preemption, uneven
    counts, joins and leaves."""
    engine = ToyEngine(feed, num_layers, num_drafts, seed=num_layers * 10 + num_drafts)
    rng, born, running, waiting = engine.rng, 0, [], []
    for _ in range(60):
        if len(running) < 4 and rng.random() < 0.5:
            if waiting and rng.random() < 0.5:
                running.append(waiting.pop())
            else:
                running.append(engine.request(f"r{born}", rng.choice([1, 2, 3, 9, 17])))
                born += 1
        running = [r for r in running if len(r.tokens) < r.prompt_len + 30]
        if running and rng.random() < 0.1:  # preempted: everything is recomputed
            victim = running.pop(rng.randrange(len(running)))
            victim.done, victim.drafts = 0, []
            victim.keys.fill_(float("nan"))
            victim.values.fill_(float("nan"))
            waiting.append(victim)
        batch = [r for r in running if rng.random() < 0.8]
        rng.shuffle(batch)
        if batch:
            plan = [engine.next_query(r, chunk=rng.choice([num_drafts + 1, 7, 32])) for r in batch]
            engine.run_round(batch, [query for query, _ in plan], [count for _, count in plan])
    assert born > 5


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_kv_from_rejected_drafts(accepted: int) -> None:
    """Case 4: the repair window is K - 1 - accepted rows, wherever the verdict falls."""
    engine = ToyEngine(Feed.TARGET, 3, 3, seed=accepted)
    request = engine.request("r", 6)
    engine.run_round([request], [request.tokens[:]], [-1])
    engine.rng.random = lambda: 1.0  # never let a recovered token equal a later draft
    engine.run_round([request], [[request.tokens[-1], *request.drafts]], [accepted])
    rows = int(engine.buffers.last_row[0]) + 1
    assert rows - (accepted + 1) == max(0, 3 - accepted - 1)


@pytest.mark.parametrize("scheduled,window", [(0, 2), (1, 1)])
def test_trimmed_schedule_still_repairs(scheduled: int, window: int) -> None:
    """Case 4: K = 3 drafted, fewer scheduled, all of those accepted, the next one wrong."""
    engine = ToyEngine(Feed.TARGET, 3, 3, seed=7)
    request = engine.request("r", 6)
    engine.run_round([request], [request.tokens[:]], [-1])
    engine.rng.random = lambda: 1.0
    wrong = (request.drafts[scheduled] + 1) % VOCAB
    engine.rng.randrange = lambda _: wrong
    query = [request.tokens[-1], *request.drafts[:scheduled]]
    engine.run_round([request], [query], [scheduled])
    assert int(engine.buffers.last_row[0]) + 1 == window + scheduled + 1


@pytest.mark.parametrize("feed", list(Feed))
def test_wrong_feed(feed: Feed) -> None:
    """Cases 1, 2: which layer ran, and on what hidden and ids, over all rows of a prefill."""
    engine = ToyEngine(feed, 3, 3, seed=1)
    request = engine.request("r", 5)
    prompt = request.tokens[:]
    engine.run_round([request], [prompt], [-1])
    target = engine.model.target(prompt)
    assert [layer for layer, _, _ in engine.fed] == [0, 1, 2]
    hidden, sampled = target, request.tokens[-1]
    for step, (layer, ids, fed) in enumerate(engine.fed):
        known = [*prompt[1:], sampled, *request.drafts]
        assert ids[:5].tolist() == known[step : step + 5]
        torch.testing.assert_close(fed[:5], hidden[:5])
        if feed is Feed.CHAIN:
            rows = engine.model.project(layer, ids[:5], torch.arange(5), fed[:5])
            visible = torch.arange(5)[:, None] >= torch.arange(5)
            hidden = engine.model.attend(rows, rows["k"], rows["v"], visible)


def test_wrong_row_scored() -> None:
    """Case 3: requests with 3 and 1 rows are scored at their own last rows, at every step."""
    engine = ToyEngine(Feed.TARGET, 3, 3, seed=2)
    long, short = engine.request("long", 3), engine.request("short", 1)
    engine.run_round([long, short], [long.tokens[:], short.tokens[:]], [-1, -1])
    assert engine.buffers.last_row[:2].tolist() == [2, 3]


def test_chunk_boundary_uses_prompt_ids() -> None:
    """Case 13: prompt of 5, chunk 2: rows 0-1 need ids (1,2), (2,3), (3,4)."""
    engine = ToyEngine(Feed.TARGET, 3, 3, seed=3)
    request = engine.request("r", 5)
    request.tokens[:] = [0, 1, 2, 3, 4]
    engine.run_round([request], [[0, 1]], [-1])
    assert [ids[:2].tolist() for _, ids, _ in engine.fed] == [[1, 2], [2, 3], [3, 4]]


def test_slot_reuse_forgets_the_last_occupant() -> None:
    """A request that starts where another in its slot ended must not repair the other's rows."""
    engine = ToyEngine(Feed.TARGET, 3, 3, seed=4)
    first = engine.request("first", 6)
    engine.run_round([first], [first.tokens[:]], [-1])
    for i in range(7):  # now all slots are taken, and "first" drafted longest ago
        other = engine.request(f"other{i}", 2)
        engine.run_round([other], [other.tokens[:]], [-1])
    cached = engine.request("cached", 9)  # a prefix of six rows is in the cache already
    cached.done = 6
    _, kv = dense_oracle(engine.model, cached.tokens, 8, [0, 1, 2], Feed.TARGET)
    for layer, (keys, values) in kv.items():
        cached.keys[layer, :6], cached.values[layer, :6] = keys[:6], values[:6]
    engine.run_round([cached], [cached.tokens[6:7]], [-1])
    assert int(engine.buffers.last_row[0]) == 0


def test_restart_needs_no_repair() -> None:
    """A preempted request that is computed anew begins at its first row, not before it."""
    engine = ToyEngine(Feed.TARGET, 3, 3, seed=8)
    request = engine.request("r", 1)
    engine.run_round([request], [request.tokens[:]], [-1])
    request.done = 0
    engine.run_round([request], [request.tokens[:]], [-1])
    assert engine.buffers.positions[:2].tolist() == [0, 1]


def test_draft_buffer_aliasing() -> None:
    """Case 6: a layer that overwrites the hidden it returned cannot disturb the next step."""
    engine = ToyEngine(Feed.CHAIN, 3, 3, seed=5)
    request = engine.request("r", 4)
    scratch = torch.zeros(256, HIDDEN, dtype=torch.float64)
    draft = engine.drafter.draft

    def aliasing(num_requests, num_rows, run_layer, draft_token):
        def run(*args):
            scratch.fill_(float("nan"))  # the "kernel" writes into the buffer it returned before
            returned = run_layer(*args)[0]
            out = scratch[: len(returned)]
            out.copy_(returned)
            return out, out

        return draft(num_requests, num_rows, run, draft_token)

    engine.drafter.draft = aliasing
    engine.run_round([request], [request.tokens[:]], [-1])


def test_recycled_hidden_is_not_the_scored_one() -> None:
    """Case 5: the head scores one tensor, CHAIN recycles the other, each exactly as returned."""
    buffers = RoundBuffers.allocate(
        max_requests=1,
        max_rows=4,
        num_drafts=2,
        hidden_size=2,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    drafter = Drafter(num_layers=2, num_drafts=2, feed=Feed.CHAIN, num_slots=1, buffers=buffers)
    drafter.pack(
        slots=torch.tensor([0]),
        query_start=torch.tensor([0, 2]),
        num_rejected=torch.tensor([0]),
        target_ids=torch.tensor([1, 2]),
        target_positions=torch.tensor([0, 1]),
        target_hidden=torch.ones(2, 2),
        next_ids=torch.tensor([3]),
        lookahead_ids=torch.tensor([[-1]]),
        row_start=torch.tensor([0, 2]),
        num_rows=2,
    )
    gain, fed, scored = torch.tensor([0.5, 2.0]), [], []

    def run_layer(layer, ids, positions, hidden, rows, write_kv):
        fed.append(hidden.clone())
        out = hidden + 1 if rows is None else hidden[rows] + 1
        return out * gain, out

    def draft_token(step, rows):
        scored.append(rows.clone())
        return torch.tensor([0])

    drafter.draft(1, 2, run_layer, draft_token)
    assert torch.equal(fed[1], fed[0] + 1)
    assert torch.equal(scored[1], ((fed[1] + 1) * gain)[1:])


@pytest.mark.parametrize(
    ("feed", "num_layers", "of_all"),
    [
        (Feed.TARGET, 3, [False, False, False]),
        (Feed.CHAIN, 3, [True, True, False]),
        (Feed.TARGET, 1, [False, False, False]),  # layer 0 again, which writes no KV
        (Feed.CHAIN, 1, [True, True, False]),
    ],
)
def test_output_is_asked_of_rows_that_draft(
    feed: Feed, num_layers: int, of_all: list[bool]
) -> None:
    """And of all rows only where another layer is fed them."""
    engine = ToyEngine(feed, num_layers, 3, seed=11, repeat_last_layer=num_layers < 3)
    requests, asked = [engine.request("a", 6), engine.request("b", 4)], []
    draft = engine.drafter.draft

    def noted(num_requests, num_rows, run_layer, draft_token):
        def run(layer, ids, positions, hidden, rows, write_kv):
            asked.append(rows if rows is None else rows.tolist())
            return run_layer(layer, ids, positions, hidden, rows, write_kv)

        return draft(num_requests, num_rows, run, draft_token)

    engine.drafter.draft = noted
    engine.run_round(requests, [request.tokens[:] for request in requests], [-1, -1])
    assert asked == [None if all_rows else [5, 9] for all_rows in of_all]


def test_repeat_last_layer_leaves_kv_alone() -> None:
    """K > N with the option: extra steps run the last layer on its own output, writing nothing."""
    engine = ToyEngine(Feed.TARGET, 2, 4, seed=6, repeat_last_layer=True)
    request = engine.request("r", 6)
    engine.run_round([request], [request.tokens[:]], [-1])
    assert [layer for layer, _, _ in engine.fed] == [0, 1, 1, 1]
    engine.run_round([request], [[request.tokens[-1], *request.drafts]], [1])


def test_more_drafts_than_layers_is_an_error() -> None:
    """Case 1: K > N names the option that allows it."""
    with pytest.raises(ValueError, match=r"at most 3.*got 4.*repeat_last_layer"):
        layer_schedule(3, 4, repeat_last_layer=False)
    assert layer_schedule(3, 4, repeat_last_layer=True) == [0, 1, 2, 2]
    with pytest.raises(ValueError, match="num_drafts: expected at least 1, got 0"):
        layer_schedule(3, 0, repeat_last_layer=False)


def test_bad_rounds_are_refused() -> None:
    """Shapes that do not fit name the argument; an unknown feed is no feed."""
    engine = ToyEngine(Feed.TARGET, 3, 3, seed=9)
    buffers, drafter = engine.buffers, engine.drafter
    one = torch.zeros(1, dtype=torch.int64)
    good = {
        "slots": one,
        "query_start": torch.tensor([0, 3]),
        "num_rejected": one,
        "target_ids": torch.zeros(3, dtype=torch.int64),
        "target_positions": torch.arange(3),
        "target_hidden": torch.zeros(3, HIDDEN, dtype=torch.float64),
        "next_ids": one,
        "lookahead_ids": torch.full((1, 2), -1),
        "row_start": torch.tensor([0, 3]),
        "num_rows": 3,
    }
    drafter.pack(**good)
    for name, value, words in (
        ("lookahead_ids", torch.full((1, 3), -1), "lookahead_ids expected shape \\[1, 2\\]"),
        ("row_start", torch.tensor([0]), "row_start expected shape \\[2\\], got \\[1\\]"),
        ("num_rows", 999, "num_rows expected at most 256, got 999"),
    ):
        with pytest.raises(RuntimeError, match=words):
            drafter.pack(**good | {name: value})
    with pytest.raises(ValueError, match="request_ids: expected at most 8 different ones, got 2"):
        drafter.assign_slots(["a", "a"])
    with pytest.raises(ValueError, match="chained"):
        Drafter(num_layers=3, num_drafts=3, feed="chained", num_slots=1, buffers=buffers)
    with pytest.raises(ValueError, match="draft_ids: expected 2 columns"):
        Drafter(num_layers=3, num_drafts=2, feed=Feed.CHAIN, num_slots=1, buffers=buffers)
