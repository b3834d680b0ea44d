"""Shapes with a state and rows that are drawn for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.conform.cases import Shape, Source
from engine.conform.packages import Package
from engine.conform.reference import token
from engine.conform.subject import Kernel

KERNEL = Kernel("kernel", ("gdn", "kda"), None)
PACKAGE = Package("kernels", Path("."), "")
SHAPES = {
    "gdn": Shape("gdn", 4, 2, 8, 8, 3, 3),
    "kda": Shape("kda", 4, 2, 8, 8, 3, 3),
    "mamba2": Shape("mamba2", 4, 2, 8, 8, 3, 3),
    "conv": Shape("conv", 6, 1, 4, 1, 3, 3),
}


def drawn(recurrence, n, **sizes):
    """A shape, a state and n rows of one sequence."""
    shape = replace(SHAPES[recurrence], n_tokens=n, **sizes)
    source = Source(shape, 1)
    rows = source.rows([0], [n])
    return shape, source.state().double(), [token(rows, i) for i in range(n)]
