"""`ops/_exact.py` in Triton: random words, exp2, log, with the same bits.

Launch with `enable_fp_fusion=False`: a fused multiply-add rounds once where this rounds twice.
Shapes are free; only + - * floor and integer operations occur, and no division.
"""

import triton
import triton.language as tl

from mtp_kernels.ops import _exact

TARGET = tl.constexpr(_exact.TARGET)
ACCEPT = tl.constexpr(_exact.ACCEPT)
DRAFT = tl.constexpr(_exact.DRAFT)

_EXP2 = tl.constexpr(_exact.EXP2)
_LOG = tl.constexpr(_exact.LOG)
_LN2_HIGH, _LN2_LOW = tl.constexpr(_exact.LN2_HIGH), tl.constexpr(_exact.LN2_LOW)
_SQRT_2 = tl.constexpr(_exact.SQRT_2)
_LOWEST_EXPONENT = tl.constexpr(_exact.LOWEST_EXPONENT)


@triton.jit
def philox(seed, position, PURPOSE: tl.constexpr, lane):
    """Four random words, uint32 like lane. seed, position: int64 scalars; lane: int32, not < 0."""
    counter = lane.to(tl.uint32)
    zero = counter * 0
    low = zero + (position & 0xFFFFFFFF).to(tl.uint32)
    high = zero + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return tl.philox(seed, counter, zero + PURPOSE, low, high)


@triton.jit
def uniform(high, low):
    """A float64 in [0, 1), a multiple of 2^-53, from two random words."""
    return ((high.to(tl.int64) << 21) | (low >> 11).to(tl.int64)).to(tl.float64) * 2.0**-53


@triton.jit
def exponential(word):
    """A standard exponential variate, fp32, from one random word."""
    upper = word >= 0x80000000
    u = (tl.where(upper, ~word, word).to(tl.int32).to(tl.float32) + 0.5) * 2.0**-32
    rest = 1 - u
    return -(log(tl.where(upper, u, rest)) + tl.where(upper, 0.0, (1 - rest) - u))


@triton.jit
def log(x):
    """Natural logarithm of a normal number > 0, fp32."""
    bits = x.to(tl.int32, bitcast=True)
    mantissa = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    large = mantissa > _SQRT_2
    exponent = ((bits >> 23) - 127 + large.to(tl.int32)).to(tl.float32)
    s = tl.where(large, mantissa * 0.5, mantissa) - 1
    square = s * s
    tail = (s * square) * _polynomial(_LOG, 8, s) - 0.5 * square
    return (s + (tail + exponent * _LN2_LOW)) + exponent * _LN2_HIGH


@triton.jit
def exp2(y):
    """`2^y` for y <= 0, fp32; held at 2^-64 below, and for NaN."""
    y = tl.maximum(y, _LOWEST_EXPONENT)
    n = tl.floor(y + 0.5)
    r = y - n
    mantissa = 1 + r * _polynomial(_EXP2, 6, r)
    return (mantissa.to(tl.int32, bitcast=True) + (n.to(tl.int32) << 23)).to(
        tl.float32, bitcast=True
    )


@triton.jit
def _polynomial(COEFFICIENTS: tl.constexpr, COUNT: tl.constexpr, x):
    total = x * COEFFICIENTS[COUNT - 1] + COEFFICIENTS[COUNT - 2]
    for i in tl.static_range(3, COUNT + 1):
        total = total * x + COEFFICIENTS[COUNT - i]
    return total
