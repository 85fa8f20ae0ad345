"""Dot products of few activation rows with many weight rows: the inner loop of several kernels.

Weights are the dot's first operand: an MMA instruction has 16 to 64 rows there, and as few as 8
columns.
"""

import triton
import triton.language as tl


@triton.jit
def products(hidden, hidden_stride, weight, weight_stride, rows, tokens, is_row, is_token, size,
             BLOCK_K: tl.constexpr):  # fmt: skip
    """Of weight rows and tokens, over `size` inputs, in fp32: [rows, tokens]."""
    total = tl.zeros((rows.shape[0], tokens.shape[0]), tl.float32)
    for start in range(0, size, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        w = tl.load(
            weight + rows[:, None] * weight_stride + k[None, :],
            mask=is_row[:, None] & (k < size)[None, :],
            other=0.0,
        )
        x = tl.load(
            hidden + tokens[None, :] * hidden_stride + k[:, None],
            mask=is_token[None, :] & (k < size)[:, None],
            other=0.0,
        )
        total = tl.dot(w, x, total, input_precision="ieee")
    return total
