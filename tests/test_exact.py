"""The arithmetic that every backend shares: known answers, accuracy, and one table for all.

`python tests/test_exact.py` writes the table anew, from the Python code. The Triton and C++ code
is held against the same file.
"""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mtp_kernels.ops import _exact as exact

TABLE = Path(__file__).with_name("exact_vectors.json")

# From the Random123 library's kat_vectors, philox4x32 10: (key, counter) -> words.
RANDOM123 = [
    ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def signed64(low: int, high: int) -> int:
    value = (high << 32) | low
    return value - (1 << 64) if value >> 63 else value


def words_of(seed: int, position: int, purpose: int, lane: int) -> list[int]:
    tensors = (torch.tensor(x) for x in (seed, position, lane))
    s, p, v = tensors
    return [int(word) for word in exact.philox(s, p, purpose, v)]


def bits_of(x: Tensor) -> list[int]:
    return (x.view(torch.int32).long() & 0xFFFFFFFF).tolist()


def floats_of(bits: list[int]) -> Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def make_table() -> dict:
    gen = torch.Generator().manual_seed(0)
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF]
    philox = []
    for i in range(24):
        position = [1, 80_000, 2**32 + 5][i % 3]
        lane = [0, 1, 38_143, 2**20][i % 4]
        key = (seeds[i % 6], position, i % 3, lane)
        philox.append([*key, words_of(*key)])
    words = torch.randint(0, 2**32, (60,), generator=gen).tolist()
    words += [0, 1, 2, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1]
    y = torch.cat([-torch.rand(60, generator=gen) * 70, -torch.arange(66.0), torch.tensor([-1e9])])
    y = torch.cat([y, torch.tensor([-0.5, -1.5, -(2.0**-24), -0.49999997])])
    x = torch.cat([torch.rand(60, generator=gen), torch.tensor([1.0, 0.5, 2.0**-33, 0.70710677])])
    return {
        "philox": philox,
        "exponential": [words, bits_of(exact.exponential(torch.tensor(words)))],
        "exp2": [bits_of(y), bits_of(exact.exp2(y))],
        "log": [bits_of(x), bits_of(exact.log(x))],
    }


@pytest.fixture(scope="module")
def table() -> dict:
    return json.loads(TABLE.read_text())


def test_the_table_is_what_the_reference_computes(table: dict) -> None:
    assert table == make_table()


@pytest.mark.parametrize("key, counter, words", RANDOM123)
def test_philox_known_answers(key: tuple, counter: tuple, words: tuple) -> None:
    lane, purpose, low, high = counter
    assert words_of(signed64(*key), signed64(low, high), purpose, lane) == list(words)


def test_accuracy() -> None:
    """Against float64; the unit is the relative rounding error of fp32."""
    ulp = 2.0**-24
    y = -torch.linspace(0, 40, 200_001)
    error = exact.exp2(y).double() / torch.exp2(y.double()) - 1
    assert error.abs().max() < 2 * ulp
    x = torch.linspace(1e-6, 1, 200_001)
    error = (exact.log(x).double() - x.double().log()) / x.double().log().abs().clamp(min=1e-30)
    assert error.abs().max() < 2 * ulp
    words = torch.cat([torch.arange(0, 2**32, 21_001), torch.tensor([0, 1, 2**32 - 1])])
    true = -torch.log1p(-(words.double() + 0.5) * 2.0**-32)
    assert (exact.exponential(words).double() / true - 1).abs().max() < 4 * ulp


def test_uniform_reaches_both_ends() -> None:
    ends = torch.tensor([0, 0xFFFFFFFF])
    assert exact.uniform(ends, ends).tolist() == [0.0, 1 - 2.0**-53]


if __name__ == "__main__":
    TABLE.write_text(json.dumps(make_table()) + "\n")
