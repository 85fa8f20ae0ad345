"""Arithmetic that has the same bits on every backend: random words, exp2, log.

`csrc/exact.h` and `kernels/exact.py` say the same in C++ and Triton; tests/exact_vectors.json holds
inputs and results that all of them must reproduce. Floats are fp32, each operation is rounded by
itself (no fused multiply-add), and only + - * / floor and integer operations occur.
"""

import torch
from torch import Tensor

# Purposes of random words: separate streams of one request. The numbers are part of the stream
# definition.
TARGET, ACCEPT, DRAFT = 0, 1, 2

# exp2(r) = 1 + r P(r) for |r| <= 1/2, and log(1 + s) = s - s^2/2 + s^3 Q(s) for 1 + s between
# sqrt(1/2) and sqrt(2); minimax fits, relative errors 2e-9 and 6e-9 before rounding.
EXP2 = (
    0.6931471824645996,
    0.24022650718688965,
    0.055503278970718384,
    0.009618003852665424,
    0.001340026967227459,
    0.00015476297994609922,
)
LOG = (
    0.3333333134651184,
    -0.2500081956386566,
    0.20001226663589478,
    -0.16623356938362122,
    0.14201757311820984,
    -0.13160179555416107,
    0.1276157945394516,
    -0.07634507119655609,
)
LOG2_E = 1.4426950216293335
LN2_HIGH, LN2_LOW = 0.693359375, -0.00021219444170128554  # the first times an exponent is exact
SQRT_2 = 1.4142135381698608

LOWEST_EXPONENT = -64.0


def philox(seed: Tensor, position: Tensor, purpose: int, lane: Tensor) -> list[Tensor]:
    """Four random 32-bit words per element, by Philox4x32-10.

    Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011). The key is the seed, low
    word first; the counter is (lane, purpose, position low, position high).

    seed, position, lane: int64, broadcast against each other; lane below 2^32.
    Returns four int64 tensors with values in [0, 2^32).
    """
    mask = 0xFFFFFFFF
    seed, position, lane = torch.broadcast_tensors(seed, position, lane)
    key = [seed & mask, (seed >> 32) & mask]
    c = [lane, torch.full_like(lane, purpose), position & mask, (position >> 32) & mask]
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57  # wraps, the 64 bits are the product's
        c = [
            ((b >> 32) & mask) ^ c[1] ^ key[0],
            b & mask,
            ((a >> 32) & mask) ^ c[3] ^ key[1],
            a & mask,
        ]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return c


def uniform(high: Tensor, low: Tensor) -> Tensor:
    """A float64 in [0, 1), a multiple of 2^-53, from two random words."""
    return ((high << 21) | (low >> 11)).double() * 2.0**-53


def exponential(word: Tensor) -> Tensor:
    """A standard exponential variate from one random word: -log(1 - u), u = (word + 1/2) 2^-32.

    Relative precision of fp32 at both ends: a word from the upper half gives 1 - u by itself; one
    from the lower half gives u, and what 1 - u loses of it to rounding is added back.
    """
    upper = word >= 1 << 31
    u = (torch.where(upper, 0xFFFFFFFF - word, word).float() + 0.5) * 2.0**-32
    rest = 1 - u
    return -(log(torch.where(upper, u, rest)) + torch.where(upper, 0.0, (1 - rest) - u))


def log(x: Tensor) -> Tensor:
    """Natural logarithm of a normal number > 0, fp32."""
    bits = x.view(torch.int32)
    exponent = (bits >> 23) - 127
    mantissa = ((bits & 0x7FFFFF) | 0x3F800000).view(torch.float32)
    large = mantissa > SQRT_2
    exponent = (exponent + large).float()
    s = torch.where(large, mantissa * 0.5, mantissa) - 1
    square = s * s
    tail = (s * square) * _polynomial(LOG, s) - 0.5 * square
    return (s + (tail + exponent * LN2_LOW)) + exponent * LN2_HIGH


def exp2(y: Tensor, scale: int = 0) -> Tensor:
    """`2^(y + scale)` for y <= 0, fp32; below 2^-64 it is held there."""
    y = y.clamp(min=LOWEST_EXPONENT)
    n = torch.floor(y + 0.5)
    r = y - n
    mantissa = 1 + r * _polynomial(EXP2, r)
    return (mantissa.view(torch.int32) + ((n.int() + scale) << 23)).view(torch.float32)


def _polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    total = torch.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = total * x + c
    return total
