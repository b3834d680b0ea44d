"""Rows of tables found by numbers that lie in memory, and rows copied to where they are wanted.

Nothing is computed. The host learns none of the numbers, so a call can be recorded and repeated
with others in them (engine.machine.graphs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels.dispatch import uses_llvm
from kernels.rows import with_torch


def take_rows(table: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """table[numbers]. table: [n, *row], any dtype, any distance from row to row; numbers: int64,
    any shape, 0 .. n - 1, not looked at. Returns [*numbers.shape, *row]."""
    return _of(table, "take_rows")(table, numbers)


def put_rows(table: torch.Tensor, numbers: torch.Tensor, rows: torch.Tensor) -> None:
    """table[numbers] = rows. rows: [*numbers.shape, *row]; the numbers differ. What is written must
    not overlap `rows`."""
    _of(table, "put_rows")(table, numbers, rows)


def copy_rows(target: torch.Tensor, source: torch.Tensor) -> None:
    """target[:] = source. f32 of one shape, not overlapping, any strides."""
    _of(target, "copy_rows")(target, source)


def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts f32 [..., d_i] side by side: [..., sum of d_i]."""
    joined: torch.Tensor = _of(parts[0], "join")(parts)
    return joined


def _of(x: torch.Tensor, name: str) -> Callable[..., Any]:
    if x.device.type != "cpu" or not uses_llvm() or (torch.is_grad_enabled() and x.requires_grad):
        return getattr(with_torch, name)
    # here, because it loads the compiler
    from kernels.rows import with_llvm

    return getattr(with_llvm, name)
