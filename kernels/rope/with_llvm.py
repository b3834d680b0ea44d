"""Rotary position embedding on a processor; torch makes the table."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from kernels.llvm import F32X16, Code, Program, Value
from kernels.llvm.rows import rows, run, start, vectors


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See kernels.rope.apply_rope."""
    n_heads, head_dim = x.shape[2:]
    y = x.new_empty(*x.shape)
    x, x_rows = rows(x)
    cos, cos_rows = rows(cos)
    sin, sin_rows = rows(sin)
    run(
        _program(n_heads, head_dim, cos.shape[-1]),
        y.numel() // head_dim,
        head_dim,
        *x_rows,
        *cos_rows,
        *sin_rows,
        y.data_ptr(),
    )
    return y


@functools.cache
def _program(n_heads: int, head_dim: int, half: int) -> Program:
    return Program(functools.partial(_body, n_heads, head_dim, half), 13)


def _body(
    n_heads: int,
    head_dim: int,
    half: int,
    code: Code,
    args: Sequence[Value],
    first: Value,
    last: Value,
) -> None:
    """A task is one head of a token. Arguments: x, cos and sin in RowPlaces, y."""
    with code.loop(first, last) as row:
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
