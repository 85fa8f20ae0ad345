"""entry: the first step of an MTP layer, from a token and a hidden state to the layer's input."""

import contextlib
import math
import mmap
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mtp_kernels.ops._declare import Expect, declare

PANEL = 16  # output features side by side in a packed weight


def entry(
    hidden: Tensor,
    enorm_weight: Tensor,
    hnorm_weight: Tensor,
    proj_weight: Tensor,
    *,
    input_ids: Tensor | None = None,
    embed_weight: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    proj_bias: Tensor | None = None,
    positions: Tensor | None = None,
    embed_norm_weight: Tensor | None = None,
    enorm_eps: float,
    hnorm_eps: float,
    embed_norm_eps: float = 1e-6,
    gamma_offset: int = 0,
    hidden_first: bool = False,
    zero_at_position_0: bool = False,
    vocab_start: int = 0,
    strict_ids: bool = False,
) -> Tensor:
    """`out[t] = proj @ concat(rmsnorm(embed[ids[t]]), rmsnorm(hidden[t])) + bias`.

    hidden: [T, H] bfloat16, float16 or float32, the model dtype; rows may be strided. Or [H].
    enorm_weight, hnorm_weight: [H], gains of the embedding norm and the hidden norm.
    proj_weight: [H_out, 2H], rows may be strided; or what `pack_projection` made of it.
    input_ids: [T] int32 or int64, with embed_weight: [V, H], rows may be strided.
    inputs_embeds: [T, H], instead of input_ids and embed_weight; rows may be strided.
    proj_bias: [H_out].
    positions: [T] int32 or int64, read only with zero_at_position_0.
    embed_norm_weight: [H], gain of one more norm on the embedding, before the embedding norm.
    enorm_eps, hnorm_eps, embed_norm_eps: added to the mean square, >= 0.
    gamma_offset: 0, or 1 for zero-centred gains (gain = 1 + weight); for all norms.
    hidden_first: concat(hidden, embedding) instead of concat(embedding, hidden).
    zero_at_position_0: rows at position 0 get a zero embedding.
    vocab_start: embed_weight holds ids [vocab_start, vocab_start + V).
    strict_ids: an id outside the table is an error naming it, instead of a zero embedding (reads
        ids on the host; not on CUDA).

    Returns [T, H_out] ([H_out] for hidden [H]), a fresh tensor. T = 0 is allowed. Everything but
    integers and `eps` has the model dtype. A zero embedding stays zero through its norms, also with
    eps 0.

    Norms are computed in fp32 and rounded to the model dtype where RMSNorm rounds: before the gain,
    and after it (gamma_offset 1: only after it, as Gemma's does). Products are summed in fp32. On
    CPU a row's result does not depend on the other rows nor on the number of threads, bit for bit.
    For inference, under `torch.no_grad`: there is no gradient formula. On CUDA a compiled kernel
    and torch's linear run where the build has the kernel, else one Triton launch, which rounds a
    normed activation once, before its scale. Both are compiled in our tests, not run on a GPU yet.
    """
    single = _check(**locals())
    embeds = normed_embedding("entry", **locals())
    halves = [embeds, rms_norm(torch.atleast_2d(hidden), hnorm_weight, hnorm_eps, gamma_offset)]
    if hidden_first:
        halves.reverse()
    if proj_weight.dim() == 4:
        proj_weight = unpack_projection(proj_weight)
    out = F.linear(torch.cat(halves, dim=-1), proj_weight, proj_bias)
    return out.squeeze(0) if single else out


def pack_projection(weight: Tensor) -> Tensor:
    """Rearrange a weight once, so that `entry` or `head_argmax` on CPU reads it as one stream.

    weight: [N, K] bfloat16, a projection or an lm_head, N a multiple of 16 and K even.
    Returns a fresh [N/16, K/2, 16, 2]: pairs of inputs, for 16 output features side by side.
    """
    ok = weight.dim() == 2 and weight.dtype == torch.bfloat16
    if not ok or weight.shape[0] % PANEL or weight.shape[1] % 2:
        raise ValueError(
            "pack_projection: weight expected bfloat16 [multiple of 16, multiple of 2], got "
            f"{weight.dtype} {list(weight.shape)}"
        )
    panels = weight.detach().reshape(-1, PANEL, weight.shape[1] // 2, 2).transpose(1, 2)
    if weight.device.type != "cpu":
        return panels.clone(memory_format=torch.contiguous_format)
    return _on_huge_pages(panels.shape, weight.dtype).copy_(panels)


def _on_huge_pages(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Uninitialised memory on 2 MiB pages, where the system has them to give.

    A stream over much memory is read up to 9% faster: the processor looks up fewer addresses.
    """
    size = shape.numel() * dtype.itemsize
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or size < 2 << 20:
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(advice)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def unpack_projection(packed: Tensor) -> Tensor:
    """The inverse of `pack_projection`: [N/16, K/2, 16, 2] to [N, K]."""
    return packed.transpose(1, 2).reshape(-1, 2 * packed.shape[1])


# ---- What entry_hidden, entry_embed and entry_lookup share with it -------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float, gamma_offset: int) -> Tensor:
    wide = x.float()
    mean = wide.pow(2).mean(-1, keepdim=True) + eps
    normed = wide * torch.rsqrt(mean).masked_fill(mean == 0, 0)  # 0 * inf would be NaN
    if gamma_offset:
        return (normed * (1 + weight.float())).to(x.dtype)
    return normed.to(x.dtype) * weight


def look_up(
    op: str,
    table: Tensor,
    input_ids: Tensor | None,
    positions: Tensor | None,
    zero_at_position_0: bool,
    vocab_start: int,
    strict_ids: bool,
) -> Tensor:
    """The table's row of each token, or row t without ids; zeros where the embedding is zero."""
    if input_ids is None:
        rows = torch.atleast_2d(table)
    else:
        index = input_ids.reshape(-1).to(torch.int64) - vocab_start
        unknown = (index < 0) | (index >= table.shape[0])
        if strict_ids and bool(unknown.any()):
            row = int(unknown.nonzero()[0])
            raise RuntimeError(
                f"{op}: input_ids expected ids in [{vocab_start}, {vocab_start + table.shape[0]}), "
                f"got {int(index[row]) + vocab_start} at row {row}"
            )
        rows = table[index.masked_fill(unknown, 0)].masked_fill(unknown.unsqueeze(-1), 0)
    if zero_at_position_0:
        assert positions is not None  # by check_lookup
        rows = rows.masked_fill((positions.reshape(-1) == 0).unsqueeze(-1), 0)
    return rows


def normed_embedding(
    op: str,
    *,
    enorm_weight: Tensor,
    input_ids: Tensor | None,
    embed_weight: Tensor | None,
    inputs_embeds: Tensor | None,
    positions: Tensor | None,
    embed_norm_weight: Tensor | None,
    enorm_eps: float,
    embed_norm_eps: float,
    gamma_offset: int,
    zero_at_position_0: bool,
    vocab_start: int,
    strict_ids: bool,
    **_: Any,
) -> Tensor:
    table = inputs_embeds if embed_weight is None else embed_weight
    assert table is not None  # by check_embedding
    rows = look_up(op, table, input_ids, positions, zero_at_position_0, vocab_start, strict_ids)
    if embed_norm_weight is not None:
        rows = rms_norm(rows, embed_norm_weight, embed_norm_eps, gamma_offset)
    return rms_norm(rows, enorm_weight, enorm_eps, gamma_offset)


def project_half(x: Tensor, proj_weight: Tensor, second: bool) -> Tensor:
    """The product with the first or second half of a projection's inputs, in fp32."""
    if proj_weight.dim() == 4:
        proj_weight = unpack_projection(proj_weight)
    return F.linear(x.float(), proj_weight.chunk(2, dim=1)[second].float())


# Checks, the same as in csrc/entry_args.h, with the same messages.

MODEL_DTYPES = torch.bfloat16, torch.float16, torch.float32


class Rows(NamedTuple):
    """How many tokens; `single`: one, which may come without its T axis."""

    count: int
    single: bool = False


def check_per_row(expect: Expect, name: str, x: Tensor, rows: Rows) -> None:
    expect.device(name, x)
    expect.dtype(name, x, torch.int32, torch.int64)
    if not (rows.single and x.dim() == 0):
        expect.shape(name, x, rows.count)
        expect.unit_stride(name, x)


def check_gamma_offset(expect: Expect, gamma_offset: int) -> None:
    expect.that(gamma_offset in (0, 1), f"gamma_offset expected 0 or 1, got {gamma_offset}")


def check_norm(
    expect: Expect,
    name: str,
    weight: Tensor | None,
    eps_name: str,
    eps: float,
    dtype: torch.dtype,
    size: int,
) -> None:
    if weight is not None:
        expect.tensor(name, weight, dtype, size)
    expect.that(
        math.isfinite(eps) and eps >= 0, f"{eps_name} expected a finite number >= 0, got {eps:g}"
    )


def check_projection(
    expect: Expect, name: str, weight: Tensor, dtype: torch.dtype, size: int
) -> int:
    """Returns H_out."""
    expect.device(name, weight)
    expect.dtype(name, weight, dtype)
    shape = list(weight.shape)
    packed = len(shape) == 4
    expect.that(
        shape[1:] == ([size, PANEL, 2] if packed else [2 * size]),
        f"{name} expected shape [H_out, {2 * size}] or packed [H_out/16, {size}, 16, 2], "
        f"got {shape}",
    )
    if packed:
        expect.dtype(f"packed {name}", weight, torch.bfloat16)
        expect.that(weight.is_contiguous(), f"packed {name} expected a contiguous tensor")
    else:
        expect.unit_stride(name, weight)
    return shape[0] * (PANEL if packed else 1)


def check_half(expect: Expect, name: str, weight: Tensor, dtype: torch.dtype, size: int) -> int:
    """Of a projection that is used by halves. Returns H_out."""
    out_features = check_projection(expect, name, weight, dtype, size)
    expect.that(weight.dim() != 4 or size % 2 == 0, f"packed {name} expected an even H, got {size}")
    return out_features


def check_hidden_part(expect: Expect, hidden_part: Tensor) -> Rows:
    """Of entry_embed and entry_lookup."""
    expect.dtype("hidden_part", hidden_part, torch.float32)
    expect.that(
        hidden_part.dim() == 2,
        f"hidden_part expected shape [T, H_out], got {list(hidden_part.shape)}",
    )
    expect.unit_stride("hidden_part", hidden_part)
    return Rows(hidden_part.shape[0])


def check_lookup(
    expect: Expect,
    name: str,
    table: Tensor,
    dtype: torch.dtype,
    columns: int,
    rows: Rows,
    *,
    input_ids: Tensor | None,
    positions: Tensor | None,
    zero_at_position_0: bool,
    vocab_start: int,
    **_: Any,
) -> None:
    """`table`: [V, columns] with input_ids, else [T, columns]."""
    if input_ids is not None:
        check_per_row(expect, "input_ids", input_ids, rows)
        expect.device(name, table)
        expect.dtype(name, table, dtype)
        shape = list(table.shape)
        expect.that(
            len(shape) == 2 and shape[0] >= 1 and shape[1] == columns,
            f"{name} expected shape [V >= 1, {columns}], got {shape}",
        )
        expect.unit_stride(name, table)
    else:
        flat = rows.single and table.dim() == 1
        expect.tensor(name, table, dtype, *([columns] if flat else [rows.count, columns]))
    if positions is not None:
        check_per_row(expect, "positions", positions, rows)
    expect.that(
        positions is not None or not zero_at_position_0,
        "positions expected a tensor with zero_at_position_0, got None",
    )
    expect.that(vocab_start >= 0, f"vocab_start expected a number >= 0, got {vocab_start}")


def check_embedding(
    expect: Expect,
    dtype: torch.dtype,
    size: int,
    rows: Rows,
    *,
    enorm_weight: Tensor,
    input_ids: Tensor | None,
    embed_weight: Tensor | None,
    inputs_embeds: Tensor | None,
    embed_norm_weight: Tensor | None,
    enorm_eps: float,
    embed_norm_eps: float,
    **lookup: Any,
) -> None:
    check_norm(expect, "enorm_weight", enorm_weight, "enorm_eps", enorm_eps, dtype, size)
    check_norm(
        expect,
        "embed_norm_weight",
        embed_norm_weight,
        "embed_norm_eps",
        embed_norm_eps,
        dtype,
        size,
    )
    has_ids = input_ids is not None
    expect.that(
        has_ids != (inputs_embeds is not None),
        "expected exactly one of input_ids and inputs_embeds, got "
        + ("both" if has_ids else "neither"),
    )
    expect.that(
        has_ids == (embed_weight is not None),
        "embed_weight expected a table for input_ids, got None"
        if has_ids
        else "embed_weight expected None, got a table beside inputs_embeds",
    )
    name, table = ("embed_weight", embed_weight) if has_ids else ("inputs_embeds", inputs_embeds)
    assert table is not None
    check_lookup(expect, name, table, dtype, size, rows, input_ids=input_ids, **lookup)


# ---- The declaration ----------------------------------------------------------------------------


def _check(
    hidden: Tensor,
    hnorm_weight: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor | None,
    hnorm_eps: float,
    gamma_offset: int,
    hidden_first: bool,
    **embedding: Any,
) -> bool:
    """Returns whether hidden is [H]."""
    expect = Expect("entry", hidden)
    expect.dtype("hidden", hidden, *MODEL_DTYPES)
    expect.that(
        hidden.dim() in (1, 2), f"hidden expected shape [T, H] or [H], got {list(hidden.shape)}"
    )
    expect.that(hidden.shape[-1] >= 1, f"hidden expected H >= 1, got {list(hidden.shape)}")
    expect.unit_stride("hidden", hidden)
    check_gamma_offset(expect, gamma_offset)
    dtype, size = hidden.dtype, hidden.shape[-1]
    single = hidden.dim() == 1
    check_embedding(
        expect, dtype, size, Rows(1 if single else hidden.shape[0], single), **embedding
    )
    check_norm(expect, "hnorm_weight", hnorm_weight, "hnorm_eps", hnorm_eps, dtype, size)
    out_features = check_projection(expect, "proj_weight", proj_weight, dtype, size)
    if proj_bias is not None:
        expect.tensor("proj_bias", proj_bias, dtype, out_features)
    return single


def _fake(**inputs: Any) -> Tensor:
    return entry(**{**inputs, "strict_ids": False})  # there are no values to check


OP = declare(entry, fake=_fake, triton="mtp_kernels.kernels.entry:entry")
