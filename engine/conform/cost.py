"""The cost of a kernel's verify pass: bytes that it must move, by count, and on CUDA its time and
its share of a copy's bandwidth."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from engine.conform.cases import Recurrence, Shape, Source
from engine.conform.packages import Package
from engine.conform.subject import Kernel, Memory

_COPIED = 2**30


def cost_shape(kernel: Kernel, recurrence: Recurrence) -> Shape:
    """64 sequences of 4 tokens, 32 heads of 128; convolutions: 8,192 channels of 4 taps."""
    if recurrence == "conv":
        return Shape(recurrence, 8192, 1, 4, 1, 4, 64)
    groups = 16 if kernel.grouped else 32
    return Shape(recurrence, 32, groups, 128, 128, 4, 64)


def least_bytes(kernel: Kernel, shape: Shape) -> int:
    """Least bytes read and written by a verify pass, each tensor once.

    Rows and outputs in float32; the state before the pass; and what a rollback needs: the state
    after every row (of a prompt, after the last), or the rows if the kernel keeps a log (`ring` or
    `log`), or a window that is longer by the rows of the pass.
    """
    n_rows, size = shape.n_tokens * shape.n_sequences, shape.dtype.itemsize
    state = math.prod(shape.state) * size
    source = Source(replace(shape, n_sequences=1), 1)
    rows = source.rows([0], [1]).tensors
    read = ("q", "k", "v", "a", "b", "x", "dt", "B", "C")
    row = 4 * sum(t.numel() for name, t in rows.items() if name in read)
    output = 4 * shape.n_heads * shape.d_v
    if shape.recurrence == "conv":
        kept = (shape.d_k - 1 + shape.n_tokens) * shape.n_heads * size
    elif kernel.ring or kernel.log:
        kept = shape.n_tokens * row
    else:
        kept = state if kernel.chunk else shape.n_tokens * state
    return n_rows * (row + output) + shape.n_sequences * (state + kept)


def measure(
    kernel: Kernel, package: Package, recurrence: Recurrence, device: str
) -> dict[str, float]:
    """`bytes` by count; on CUDA `ms` of a verify pass, the median of many, and `copy_share`, its
    bandwidth relative to a copy of 1 GiB. Times in the interpreter are meaningless."""
    shape = cost_shape(kernel, recurrence)
    figures: dict[str, float] = {"bytes": least_bytes(kernel, shape)}
    if device != "cuda":
        return figures
    from triton.testing import do_bench

    source = Source(shape, 1, device, kernel.rows_dtype)
    subject = kernel.make(shape, Memory(device), package)
    for sequence in range(shape.n_sequences):
        subject.load(sequence, source.state().to(device))
    every = range(shape.n_sequences)
    rows = source.rows(every, [shape.n_tokens] * shape.n_sequences)
    figures["ms"] = do_bench(lambda: subject.verify(rows), return_mode="median")
    a = torch.empty(_COPIED, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    copy_ms = do_bench(lambda: b.copy_(a), return_mode="median")
    figures["copy_share"] = (figures["bytes"] / figures["ms"]) / (2 * _COPIED / copy_ms)
    return figures
