"""Rotary position embedding, NEOX pairing, over the first dimensions of a head."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.dispatch import operation, runs_triton
from kernels.llvm import F32X16, Code, Program, Value, kernel
from kernels.llvm.functions import LANES, run, start, vectors
from kernels.norm import head_norm
from kernels.rows.cells import CellPlaces


@operation()
def rope_table(
    positions: Tensor, n_rot: int, inv_freq: Tensor, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position * inv_freq, both times `scale`.

    positions: int64, any shape; inv_freq: [n_rot / 2], radians per position (0 = no rotation,
    scaling of the context already in it). Angles are formed in f64, since a long position times
    a rounded frequency would lose the phase. Returns (cos, sin), each f32
    [*positions.shape, n_rot / 2].
    """
    angle = positions.unsqueeze(-1) * inv_freq[: n_rot // 2].double()
    return (angle.cos() * scale).float(), (angle.sin() * scale).float()


@operation(triton="kernels.rope.with_triton", llvm=__name__)
def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (x[j], x[j + n_rot / 2]) of every head (Su et al. 2021, arXiv 2104.09864).

    x: f32 [B, T, H, hd]; cos, sin: f32 [B, T, n_rot / 2] with n_rot <= hd, as from rope_table.
    Dimensions from n_rot on pass through. Returns a new [B, T, H, hd]. Differentiable in x.
    """
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def norm_and_rope(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """apply_rope(head_norm(x, weight, eps), cos, sin), on a GPU in one launch."""
    if runs_triton(x):
        from kernels.rope import with_triton

        return with_triton.norm_and_rope(x, weight, eps, cos, sin)
    return apply_rope(head_norm(x, weight, eps), cos, sin)


def rope_into_cells(
    x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor, places: CellPlaces
) -> Tensor:
    """In one launch, on a GPU alone: apply_rope, after head_norm if there is a weight, of queries
    and keys, and keys and values into their cells.

    x: f32 [B, T, H + 2 H_kv, hd], queries, keys and values; weight: [H + H_kv, hd]. Returns the
    queries [B, T, H, hd].
    """
    from kernels.rope import with_triton

    return with_triton.rope_into_cells(x, weight, eps, cos, sin, places)


@operation(triton="kernels.rope.with_triton", llvm=__name__)
def rope_at_end(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    """Rotates neighbours at the end of every head, (x[hd - n_rot + 2 j], x[hd - n_rot + 2 j + 1]).

    back: the other way round, which undoes it. Otherwise as apply_rope.
    """
    n_rot = 2 * cos.shape[-1]
    cos, sin = cos.unsqueeze(2), (-sin if back else sin).unsqueeze(2)
    a, b = x[..., -n_rot:].unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((x[..., :-n_rot], turned.flatten(-2)), -1)


# Rotary position embedding pair by pair.


def rope_table_naive(
    positions: Tensor, n_rot: int, inv_freq: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    frequencies = [float(f) for f in inv_freq]
    angles = [[int(p) * frequencies[j] for j in range(n_rot // 2)] for p in positions.flatten()]
    shape = (*positions.shape, n_rot // 2)
    cos = torch.tensor([[scale * math.cos(a) for a in row] for row in angles])
    sin = torch.tensor([[scale * math.sin(a) for a in row] for row in angles])
    return cos.reshape(shape), sin.reshape(shape)


def apply_rope_naive(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    columns = list(x.unbind(-1))
    for j in range(half):
        a, b = x[..., j], x[..., j + half]
        cos_j, sin_j = cos[..., j].unsqueeze(-1), sin[..., j].unsqueeze(-1)
        columns[j] = a * cos_j - b * sin_j
        columns[j + half] = b * cos_j + a * sin_j
    return torch.stack(columns, -1)


def rope_at_end_naive(x: Tensor, cos: Tensor, sin: Tensor, back: bool = False) -> Tensor:
    half, sign = cos.shape[-1], -1 if back else 1
    columns = list(x.unbind(-1))
    for j in range(half):
        at = len(columns) - 2 * (half - j)
        a, b = x[..., at], x[..., at + 1]
        cos_j, sin_j = cos[..., j].unsqueeze(-1), sign * sin[..., j].unsqueeze(-1)
        columns[at], columns[at + 1] = a * cos_j - b * sin_j, b * cos_j + a * sin_j
    return torch.stack(columns, -1)


def apply_rope_with_llvm(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding on a CPU; torch makes the table."""
    return _turned(_program, x, cos, sin)


def rope_at_end_with_llvm(x: Tensor, cos: Tensor, sin: Tensor, back: bool = False) -> Tensor:
    return _turned(_end_program, x, cos, sin, -1 if back else 1)


def _turned(
    program: Callable[..., Program], x: Tensor, cos: Tensor, sin: Tensor, *sign: int
) -> Tensor:
    n_heads, head_dim = x.shape[2:]
    y = x.new_empty(*x.shape)
    turn = program(n_heads, head_dim, cos.shape[-1], *sign)
    run(turn, y.numel() // head_dim, head_dim, (x, cos, sin), y)
    return y


@kernel(13)
def _program(
    code: Code, args: Sequence[Value], row: Value, n_heads: int, head_dim: int, half: int
) -> None:
    """A task is one head of a token. Arguments: x, cos and sin in RowPlaces, y."""
    token = row // n_heads
    source, target = start(args[:4], row), args[12] + row * (4 * head_dim)
    cos, sin = start(args[4:8], token), start(args[8:12], token)
    for at, count in vectors(code, half):
        a, b, c, s = (
            code.load_first(base + at, F32X16, count)
            for base in (source, source + 4 * half, cos, sin)
        )
        code.store_first(a * c - b * s, target + at, count)
        code.store_first(b * c + a * s, target + 4 * half + at, count)
    for at, count in vectors(code, head_dim - 2 * half):
        rest = code.load_first(source + 8 * half + at, F32X16, count)
        code.store_first(rest, target + 8 * half + at, count)


@kernel(13)
def _end_program(
    code: Code, args: Sequence[Value], row: Value, n_heads: int, head_dim: int, half: int, sign: int
) -> None:
    """As in _program. sign: of the sines."""
    even, odd = range(0, 2 * LANES, 2), range(1, 2 * LANES, 2)
    token = row // n_heads
    source, target = start(args[:4], row), args[12] + row * (4 * head_dim)
    cos, sin = start(args[4:8], token), start(args[8:12], token)
    for at, count in vectors(code, head_dim - 2 * half):
        code.store_first(code.load_first(source + at, F32X16, count), target + at, count)
    source, target = (place + 4 * (head_dim - 2 * half) for place in (source, target))
    for at, count in vectors(code, half):
        low, high = min(LANES, 2 * count), max(0, 2 * count - LANES)
        x = code.load_first(source + at * 2, F32X16, low)
        y = x
        if high:
            y = code.load_first(source + at * 2 + 4 * LANES, F32X16, high)
        a, b = x.take(even, y), x.take(odd, y)
        c, s = (code.load_first(base + at, F32X16, count) for base in (cos, sin))
        s = s * float(sign)
        x, y = (a * c - b * s).interleaved(b * c + a * s)
        code.store_first(x, target + at * 2, low)
        if high:
            code.store_first(y, target + at * 2 + 4 * LANES, high)
