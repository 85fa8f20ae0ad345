"""head_argmax: ties, padding, pruned and sharded vocabularies, numerics, the law of a sample."""

from collections.abc import Callable
from typing import Any

import cases
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mtp_kernels.ops import _exact as exact
from mtp_kernels.ops import head_argmax as op
from mtp_kernels.ops import pack_projection

head_argmax = torch.ops.mtp_kernels.head_argmax.default

Outputs = tuple[Tensor, Tensor]

# Every CPU path, and the reference, which is also the fallback of other devices.
PATHS = [*cases.CPU_ISAS, "reference"]


@pytest.fixture(params=PATHS)
def run(request: pytest.FixtureRequest) -> Callable[..., Outputs]:
    if request.param == "reference":
        return op.head_argmax

    def on_isa(**inputs: Any) -> Outputs:
        with cases.cpu_isa(request.param):
            return head_argmax(**inputs)

    return on_isa


def inputs_of(
    features: str = "",
    dtype: torch.dtype = cases.BF16,
    tokens: int = 7,
    vocab: int = 1200,
    hidden_size: int = 64,
    **options: Any,
) -> dict[str, Any]:
    row = cases.HeadRow("", dtype, tokens, hidden_size, vocab, frozenset(features.split()), options)
    return cases.head_inputs(row)


def of_logits(logits: Tensor, packed: bool = False) -> dict[str, Any]:
    """Inputs whose logits are these, [T, V], exactly: row t of hidden is a unit vector."""
    weight = logits.T.contiguous()
    return {
        "hidden": torch.eye(logits.shape[0], dtype=logits.dtype),
        "head_weight": pack_projection(weight) if packed else weight,
    }


def same(got: Outputs, want: Outputs) -> None:
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=0, atol=0)


# ---- Who wins -----------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_ties_go_to_the_lowest_id(run: Callable[..., Outputs], packed: bool) -> None:
    logits = torch.full((2, 1040), -1.0).to(cases.BF16)
    logits[0, [700, 513, 1023, 1039, 1030]] = 5
    values, ids = run(**of_logits(logits, packed))
    assert values.T.tolist() == [[-1, 5, 5], [-1, -1, -1]]
    assert ids.T.tolist() == [[0, 513, 1030], [0, 512, 1024]]
    assert op.best_ids(values, ids).tolist() == [513, 0]

    backwards = torch.arange(1039, -1, -1)
    values, ids = run(**of_logits(logits, packed), id_map=backwards)
    assert ids.T.tolist() == [[528, 1039 - 1023, 0], [528, 16, 0]]
    assert op.best_ids(values, ids).tolist() == [0, 0]


def test_logits_tie_as_the_unfused_head_writes_them(run: Callable[..., Outputs]) -> None:
    """1 + 2^-9 is 1 in bfloat16, so the later row does not win by it; in float32 it does."""
    weight = torch.zeros(20, 2)
    weight[3, 0] = 1
    weight[11] = torch.tensor([1, 2**-9])
    for dtype, want in ((cases.BF16, 3), (cases.FP16, 11), (cases.FP32, 11)):
        _, ids = run(hidden=torch.ones(1, 2, dtype=dtype), head_weight=weight.to(dtype))
        assert ids.tolist() == [[want]]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("vocab_size", [0, 1, 100, 512, 513, 1039, 1040])
def test_padding_never_wins(run: Callable[..., Outputs], vocab_size: int, packed: bool) -> None:
    logits = torch.randn(4, 1040).to(cases.BF16)
    logits[:, vocab_size:] = 1000
    values, ids = run(**of_logits(logits, packed), vocab_size=vocab_size)
    logits[:, vocab_size:] = -torch.inf
    for part in range(3):
        lanes = logits[:, 512 * part : 512 * (part + 1)].float()
        assert torch.equal(values[part], lanes.amax(1))
        is_empty = vocab_size <= 512 * part
        want = torch.full((4,), op.NO_ID) if is_empty else lanes.argmax(1) + 512 * part
        assert torch.equal(ids[part], want)
    best = op.best_ids(values, ids)
    assert torch.equal(best, logits.float().argmax(1) if vocab_size else torch.zeros_like(best))


@pytest.mark.parametrize("features", ["", "sampled", "id_map sampled"])
def test_nan_never_wins(run: Callable[..., Outputs], features: str) -> None:
    inputs = inputs_of(features, tokens=4)
    logits = torch.randn(4, 1200)
    nan = torch.rand(4, 1200) < 0.3
    nan[1] = True
    nan[2, :512] = True
    inputs |= of_logits(logits)
    want = run(**inputs | of_logits(logits.masked_fill(nan, -1000)))
    # A row that is NaN makes 0 * NaN of the others: each by itself.
    for t in range(4):
        one = {k: v[t : t + 1] for k, v in inputs.items() if k in ROWWISE}
        one["hidden"] = torch.ones(1, 1)
        weight = logits[t].masked_fill(nan[t], torch.nan)[:, None]
        values, ids = run(**inputs | one | {"head_weight": weight})
        for part in range(3):
            if nan[t, 512 * part : 512 * (part + 1)].all():
                assert (values[part, 0], ids[part, 0]) == (-torch.inf, op.NO_ID)
            else:
                assert (values[part, 0], ids[part, 0]) == (want[0][part, t], want[1][part, t])
        assert t != 1 or op.best_ids(values, ids).tolist() == [0]


ROWWISE = ("hidden", "temperature", "seeds", "positions")


def test_infinities(run: Callable[..., Outputs]) -> None:
    logits = torch.randn(2, 600)
    logits[0, [70, 90]] = torch.inf
    for t, want in ((0, [70, None]), (1, [0, 512])):
        weight = logits[t] if t == 0 else torch.full((600,), -torch.inf)
        values, ids = run(hidden=torch.ones(1, 1), head_weight=weight[:, None])
        assert values[0, 0] == (torch.inf if t == 0 else -torch.inf)
        assert ids[0, 0] == want[0] and want[1] in (None, int(ids[1, 0]))


# ---- Pruned and sharded vocabularies ------------------------------------------------------------


@pytest.mark.parametrize("dtype", [cases.BF16, cases.FP16, cases.FP32])
@pytest.mark.parametrize("features", ["", "sampled"])
def test_shards_concatenated_equal_the_whole(
    run: Callable[..., Outputs], features: str, dtype: torch.dtype
) -> None:
    """Slice by slice where shards end on one, and as tokens however they are cut."""
    inputs = inputs_of(features, dtype, vocab_size=1190)
    whole = run(**inputs)
    for ends in ([512, 1200], [512, 1024, 1200], [300, 301, 1000, 1200]):
        parts = []
        for start, end in zip([0, *ends], ends, strict=False):
            weight = inputs["head_weight"][start:end]
            shard = {"head_weight": weight, "vocab_start": start}
            parts.append(run(**inputs | shard | {"vocab_size": min(end, 1190) - start}))
        values, ids = (torch.cat(x) for x in zip(*parts, strict=True))
        if all(end % 512 == 0 for end in ends[:-1]):
            same((values, ids), whole)
        assert torch.equal(op.best_ids(values, ids), op.best_ids(*whole))


@pytest.mark.parametrize("features", ["", "sampled"])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_a_pruned_vocabulary_has_the_ids_and_the_noise_of_the_whole(
    run: Callable[..., Outputs], ids_dtype: torch.dtype, features: str
) -> None:
    inputs = inputs_of(features, vocab=2000)
    kept = torch.randperm(2000)[:700]
    pruned = inputs | {"head_weight": inputs["head_weight"][kept], "id_map": kept.to(ids_dtype)}
    got = op.best_ids(*run(**pruned))
    # The other rows of the whole cannot win: they are as far below as bfloat16 goes.
    hidden = torch.cat([inputs["hidden"], torch.ones(7, 1).to(cases.BF16)], 1)
    dropped = torch.full((2000, 1), -1e30)
    dropped[kept] = 0
    weight = torch.cat([inputs["head_weight"], dropped.to(cases.BF16)], 1)
    whole = op.best_ids(*run(**inputs | {"hidden": hidden, "head_weight": weight}))
    assert torch.equal(got, whole)


# ---- Shapes -------------------------------------------------------------------------------------


def test_no_rows(run: Callable[..., Outputs]) -> None:
    values, ids = run(**inputs_of("sampled", tokens=0))
    assert values.shape == ids.shape == (3, 0)
    assert op.best_ids(values, ids).shape == (0,)


@pytest.mark.parametrize("dtype", [cases.BF16, cases.FP16, cases.FP32])
def test_rows_of_a_wider_tensor(run: Callable[..., Outputs], dtype: torch.dtype) -> None:
    (values, ids), (want, want_ids) = (
        run(**inputs_of("strided", dtype)),
        run(**inputs_of("", dtype)),
    )
    # torch's linear, in the reference, may sum strided fp32 rows in another order.
    torch.testing.assert_close(values, want, rtol=1e-6, atol=1e-6)
    assert torch.equal(ids, want_ids)


def test_every_second_row_and_a_repeated_row(run: Callable[..., Outputs]) -> None:
    inputs = inputs_of(tokens=8)
    values, ids = run(**inputs)
    every_second = inputs | {"hidden": inputs["hidden"][::2]}
    same(run(**every_second), (values[:, ::2], ids[:, ::2]))
    repeated = inputs | {"hidden": inputs["hidden"][:1].expand(8, -1)}
    same(run(**repeated), (values[:, :1].expand(-1, 8), ids[:, :1].expand(-1, 8)))
    same_weights = inputs | {"head_weight": inputs["head_weight"][:1].expand(1200, -1)}
    assert (run(**same_weights)[1] == torch.tensor([[0], [512], [1024]])).all()


# ---- Numerics -----------------------------------------------------------------------------------

INVARIANCE = [
    pytest.param(
        {"features": features, "dtype": dtype, "hidden_size": 2100, "vocab": vocab},
        id=id,
    )
    for id, dtype, vocab, features in [
        ("bf16", cases.BF16, 531, "sampled"),
        ("bf16-packed", cases.BF16, 544, "packed"),
        ("fp16", cases.FP16, 531, ""),
        ("fp32", cases.FP32, 531, "sampled"),
    ]
]


@pytest.mark.parametrize("isa", cases.CPU_ISAS)
@pytest.mark.parametrize("arguments", INVARIANCE)
def test_a_row_alone_equals_the_row_in_a_batch(arguments: dict[str, Any], isa: str) -> None:
    """Bit for bit, for any batch around it, and at any place in it."""
    inputs = inputs_of(**arguments, tokens=70)
    with cases.cpu_isa(isa):
        values, ids = head_argmax(**inputs)
        ranges = [(0, 2), (3, 6), (1, 18), (30, 63), (5, 12), *((t, t + 1) for t in range(70))]
        for begin, end in ranges:
            part = {k: v[begin:end] for k, v in inputs.items() if k in ROWWISE}
            same(head_argmax(**inputs | part), (values[:, begin:end], ids[:, begin:end]))


@pytest.mark.parametrize("isa", cases.CPU_ISAS)
@pytest.mark.parametrize("arguments", INVARIANCE)
def test_any_number_of_threads_gives_the_same_bits(arguments: dict[str, Any], isa: str) -> None:
    inputs = inputs_of(**arguments | {"vocab": 16 * 130})
    with cases.cpu_isa(isa), cases.threads(1):
        want = head_argmax(**inputs)
    for count in (2, 3, 5):
        with cases.cpu_isa(isa), cases.threads(count):
            same(head_argmax(**inputs), want)


# ---- Sampling -----------------------------------------------------------------------------------


def test_the_noise_is_that_of_the_shared_arithmetic(run: Callable[..., Outputs]) -> None:
    """Bit for bit, with logits that the fp32 sum cannot round: one token per slice is enough."""
    inputs = inputs_of("sampled", cases.FP32, tokens=5, vocab=1)
    ids = torch.tensor([0, 1, 2, 3, 77_777, 152_575, 2**31 + 6])
    for token in ids.tolist():
        logits = torch.randn(5, 1)
        values, winners = run(**inputs | of_logits(logits) | {"id_map": torch.tensor([token])})
        assert winners.tolist() == [[token] * 5]
        for t in range(5):
            temperature, seed, position = (inputs[k][t] for k in ROWWISE[1:])
            words = exact.philox(seed, position + 1, exact.DRAFT, torch.tensor(token // 4))
            noise = exact.log(exact.exponential(words[token % 4]))
            want = logits[t, 0] * (1 / temperature) - noise
            assert values[0, t] == (logits[t, 0] if temperature < 1e-5 else want)


def test_ids_at_the_end_and_beyond(run: Callable[..., Outputs]) -> None:
    """The last ids that can be numbered; ids that cannot have the noise of those modulo 2^34."""
    inputs = inputs_of("sampled", cases.FP32, tokens=5)
    inputs["head_weight"].zero_()
    start = 2**34 - 1200
    last = torch.arange(start, 2**34)
    want = run(**inputs, id_map=last)
    same(run(**inputs, vocab_start=start), want)
    assert not torch.equal(want[0], run(**inputs)[0])
    for away in (2**34, -(2**34), 2**40):
        values, ids = run(**inputs, id_map=last + away)
        same((values, ids - away), want)


def test_greedy_rows_beside_sampled_ones(run: Callable[..., Outputs]) -> None:
    inputs = inputs_of("sampled", tokens=4)
    inputs["temperature"] = torch.tensor([0, 1e-6, 0.7, 9e-6])
    values, ids = run(**inputs)
    greedy = run(hidden=inputs["hidden"], head_weight=inputs["head_weight"])
    rows = torch.tensor([0, 1, 3])
    same((values[:, rows], ids[:, rows]), (greedy[0][:, rows], greedy[1][:, rows]))
    assert (values[:, 2] != greedy[0][:, 2]).all()


@pytest.mark.parametrize("isa", cases.CPU_ISAS)
@pytest.mark.parametrize("stream", ["draft", "target"])
def test_the_law_of_a_sample(stream: str, isa: str) -> None:
    """Chi-square of 100,000 draws against softmax(logits / temperature); false alarm 1e-6."""
    gen = torch.Generator().manual_seed(1)
    vocab, draws, temperature = 600, 100_000, 0.8
    logits = 0.5 * torch.randn(vocab, generator=gen)
    p = (logits / temperature).softmax(0).double()
    counts = torch.zeros(vocab)
    with cases.cpu_isa(isa):
        for seed in range(draws // 1000):
            values, ids = head_argmax(
                torch.ones(1, 1).expand(1000, -1),
                logits[:, None],
                temperature=torch.full((1000,), temperature),
                seeds=torch.full((1000,), seed),
                positions=torch.arange(1000),
                stream=stream,
            )
            counts += op.best_ids(values, ids).bincount(minlength=vocab)
    chi2 = float(((counts - draws * p) ** 2 / (draws * p)).sum())
    degrees, z = vocab - 1, 4.753  # of the normal law, 1e-6
    # Wilson and Hilferty 1931
    limit = degrees * (1 - 2 / (9 * degrees) + z * (2 / (9 * degrees)) ** 0.5) ** 3
    assert (draws * p).min() > 5 and chi2 < limit


def test_streams_are_independent_and_repeatable(run: Callable[..., Outputs]) -> None:
    inputs = inputs_of("sampled", tokens=40, hidden_size=4)
    inputs["hidden"].zero_()  # uniform
    draft = op.best_ids(*run(**inputs))
    assert torch.equal(draft, op.best_ids(*run(**inputs)))
    target = op.best_ids(*run(**inputs, stream="target"))
    assert (draft == target).sum() <= 2  # the greedy row, and one by chance


# ---- Checks -------------------------------------------------------------------------------------


def bf16(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=cases.BF16)


WEIGHT = "head_weight expected shape [V >= 1, 64] or packed [V/16, 32, 16, 2], got"
LAST_START = 2**34 - 1200
BAD = [  # what is changed in a good sampled call with T = 7, H = 64, V = 1200; the message
    (
        {"hidden": torch.zeros(7, 64).double()},
        "hidden expected dtype bfloat16 or float16 or float32, got float64",
    ),
    ({"hidden": bf16(64)}, "hidden expected shape [T, H >= 1], got [64]"),
    ({"hidden": bf16(7, 0)}, "hidden expected shape [T, H >= 1], got [7, 0]"),
    ({"hidden": bf16(64, 7).T}, "hidden expected last stride 1, got 7"),
    ({"head_weight": torch.zeros(9, 64)}, "head_weight expected dtype bfloat16, got float32"),
    ({"head_weight": bf16(9, 63)}, f"{WEIGHT} [9, 63]"),
    ({"head_weight": bf16(0, 64)}, f"{WEIGHT} [0, 64]"),
    ({"head_weight": bf16(2, 32, 2, 16)}, f"{WEIGHT} [2, 32, 2, 16]"),
    ({"head_weight": bf16(64, 9).T}, "head_weight expected last stride 1, got 9"),
    (
        {"head_weight": bf16(2, 16, 32, 2).transpose(1, 2)},
        "packed head_weight expected a contiguous tensor",
    ),
    (
        {"hidden": torch.zeros(7, 64).half(), "head_weight": torch.zeros(2, 32, 16, 2).half()},
        "packed head_weight expected dtype bfloat16, got float16",
    ),
    ({"vocab_size": 1201}, "vocab_size expected a number in [0, 1200], got 1201"),
    ({"vocab_size": -1}, "vocab_size expected a number in [0, 1200], got -1"),
    ({"vocab_start": -1}, f"vocab_start expected a number in [0, {LAST_START}], got -1"),
    (
        {"vocab_start": LAST_START + 1},
        f"vocab_start expected a number in [0, {LAST_START}], got {LAST_START + 1}",
    ),
    (
        {"vocab_start": 2**63 - 1},
        f"vocab_start expected a number in [0, {LAST_START}], got {2**63 - 1}",
    ),
    ({"id_map": torch.zeros(1199).long()}, "id_map expected shape [1200], got [1199]"),
    ({"id_map": torch.zeros(1200)}, "id_map expected dtype int32 or int64, got float32"),
    ({"id_map": torch.zeros(2400).long()[::2]}, "id_map expected last stride 1, got 2"),
    (
        {"id_map": torch.zeros(1200).long(), "vocab_start": 3},
        "vocab_start expected 0 with id_map, got 3",
    ),
    ({"seeds": None}, "expected all of temperature, seeds and positions or none, got 2 of them"),
    ({"temperature": bf16(7)}, "temperature expected dtype float32, got bfloat16"),
    ({"temperature": torch.zeros(6)}, "temperature expected shape [7], got [6]"),
    ({"seeds": torch.zeros(7).int()}, "seeds expected dtype int64, got int32"),
    ({"positions": torch.zeros(7)}, "positions expected dtype int32 or int64, got float32"),
    ({"positions": torch.zeros(8).int()}, "positions expected shape [7], got [8]"),
    ({"stream": "accept"}, "stream expected one of target, draft, got 'accept'"),
]


@pytest.mark.parametrize("change, message", BAD, ids=[message for _, message in BAD])
@pytest.mark.parametrize("call", [head_argmax, op.head_argmax], ids=["op", "reference"])
def test_bad_input_is_named(call: Callable[..., Outputs], change: dict, message: str) -> None:
    with pytest.raises(RuntimeError) as error:
        call(**inputs_of("sampled") | change)
    assert str(error.value).splitlines()[0] == f"head_argmax: {message}"


def test_the_fake_names_bad_input_too() -> None:
    with FakeTensorMode() as mode:
        inputs = {
            name: mode.from_tensor(x) if isinstance(x, Tensor) else x
            for name, x in inputs_of("sampled").items()
        }
        head_argmax(**inputs, vocab_start=LAST_START)
        with pytest.raises(RuntimeError, match=r"vocab_start expected a number in \[0, "):
            head_argmax(**inputs, vocab_start=LAST_START + 1)


def test_tensors_of_another_device_are_named() -> None:
    inputs = inputs_of()
    inputs["head_weight"] = inputs["head_weight"].to("meta")
    with pytest.raises(RuntimeError, match="head_weight expected device cpu, got meta"):
        op.head_argmax(**inputs)
