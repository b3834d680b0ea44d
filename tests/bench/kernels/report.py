"""Cases measured, as rows of a table that shows how near each comes to the device's limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from tests.bench.kernels.measure import KernelCase, seconds

NAIVE_STEPS = 2048
"""The most turns of its Python loops for which the naive version is timed, once."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The device at its best: copied bytes per second, operations per second by type."""

    bytes_per_second: float
    operations_per_second: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Row:
    """A case measured. Not measured is None.

    share: the least time the device would need for the bytes or for the operations, whichever is
    longer and named by `bound` ("copy" or "matrix"), divided by the time taken. naive_ms and
    fla_ms: the same work in the naive version and in fla-core.
    """

    name: str
    shape: str
    ms: float
    n_bytes: int
    n_operations: int
    bound: str
    share: float
    naive_ms: float | None
    fla_ms: float | None


def measure(case: KernelCase, limits: Limits, evict: torch.Tensor, repeats: int) -> Row:
    """Times a case, fla-core, and where that can be borne its naive version.

    evict: see tests.bench.kernels.measure.seconds.
    """
    taken = seconds(case.run, evict, repeats)
    bound, share = bound_and_share(case, limits, taken)
    naive = seconds(case.naive, evict, 1) if case.n_steps <= NAIVE_STEPS else None
    fla = seconds(case.fla, evict, repeats) if case.fla else None
    return Row(
        case.name,
        case.shape,
        1000 * taken,
        case.n_bytes,
        case.n_operations,
        bound,
        share,
        None if naive is None else 1000 * naive,
        None if fla is None else 1000 * fla,
    )


def bound_and_share(case: KernelCase, limits: Limits, taken: float) -> tuple[str, float]:
    """Which limit bounds a case, "copy" or "matrix", and the share of it that is reached."""
    moving = case.n_bytes / limits.bytes_per_second
    counting = case.n_operations / limits.operations_per_second[case.rate]
    return ("copy", moving / taken) if moving >= counting else ("matrix", counting / taken)


HEAD = ("kernel", "shape", "ms", "MB", "bound", "share", "naive ms", "fla ms")


def table(rows: Iterable[Row]) -> str:
    """The rows as aligned text with a head line; what was not measured is empty."""
    cells: list[tuple[str, ...]] = [HEAD]
    for row in rows:
        others = ("" if x is None else f"{x:.3f}" for x in (row.naive_ms, row.fla_ms))
        megabytes, share = f"{row.n_bytes / 1e6:.2f}", f"{100 * row.share:.0f} %"
        cells.append((row.name, row.shape, f"{row.ms:.3f}", megabytes, row.bound, share, *others))
    widths = [max(len(line[i]) for line in cells) for i in range(len(HEAD))]
    lines = (
        "  ".join(
            cell.ljust(width) if i in (0, 1, 4) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )
    return "\n".join(lines)
