"""This program's kernels of some backends, as `draftscope conform` checks them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.conform import passes
from engine.conform.adapters import own
from engine.conform.checks import CHECKS, Fault, check, has_check
from engine.conform.packages import Package


def kernels(*backends: str) -> list[tuple[str, str, str]]:
    """Their names, backends and recurrences."""
    return [
        (name, backend, recurrence)
        for kernel in own.ENGINE.kernels
        for name, backend in [kernel.name.split(".")]
        if backend in backends
        for recurrence in kernel.recurrences
    ]


def faults(
    name: str, recurrence: str, device: str = "cpu", n_shapes: int = 2, without: Sequence[str] = ()
) -> list[Fault]:
    """What all checks but some find in the first of the shapes; notes are left out where
    torch computes, whose bits depend on the number of rows."""
    kernel = next(kernel for kernel in own.ENGINE.kernels if kernel.name == name)
    package = Package("kernels", Path(), "")
    invariant = name.endswith((".llvm", ".triton"))
    return [
        fault
        for shape in passes.shapes(kernel, recurrence, "cpu")[:n_shapes]
        for one in CHECKS
        if one not in without and has_check(kernel, one)
        for fault in check(kernel, package, shape, one, 1, device, 6)
        if invariant or not fault.note
    ]
