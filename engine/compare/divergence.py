"""How far a lane is from the reference lane: in logits, in recurrent states, in cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.memory.hybrid import HybridMemory


@dataclass(frozen=True, slots=True)
class LogitsDifference:
    """Measures of n positions; every list has n entries.

    max_abs: largest |a - b|. nmse: mean((a - b)^2) / mean(a^2), the measure of llama.cpp's
    backend tests. kl: KL(reference || lane) of the softmaxes, nats. rank: of the chosen token among
    the lane's logits, from 1. top2_gap: of the reference, how near the choice was to another.
    A lane whose logits are not finite gives NaN.
    """

    max_abs: list[float]
    nmse: list[float]
    kl: list[float]
    top1_equal: list[bool]
    rank: list[int]
    top2_gap: list[float]


def compare_logits(
    reference: torch.Tensor, lane: torch.Tensor, chosen: Sequence[int]
) -> LogitsDifference:
    """Measures in float64 between logits [n, n_vocab]; chosen: the reference's n tokens."""
    a, b = reference.double(), lane.double()
    difference = a - b
    error, power = difference.square().mean(1), a.square().mean(1)
    log_p, log_q = torch.log_softmax(a, 1), torch.log_softmax(b, 1)
    # rounding leaves a tiny negative sum where both are equal
    kl = (log_p.exp() * (log_p - log_q)).sum(1).clamp_min(0.0)
    of_chosen = b.gather(1, torch.tensor(chosen, device=b.device).unsqueeze(1))
    top = torch.topk(a, 2).values
    return LogitsDifference(
        difference.abs().amax(1).tolist(),
        _ratio(error, power).tolist(),
        kl.tolist(),
        (a.argmax(1) == b.argmax(1)).tolist(),
        ((b > of_chosen).sum(1) + 1).tolist(),
        (top[:, 0] - top[:, 1]).tolist(),
    )


@dataclass(frozen=True, slots=True)
class MemoryDifference:
    """One sequence in two memories that stand behind the same token.

    state, conv: relative error |a - b| / |a| of S and of the convolution window, one per recurrent
    layer. n_cells: attention cells that only one of them has, or beyond one per position; cells
    are the same in all attention layers.
    """

    layers: tuple[int, ...]
    state: list[float]
    conv: list[float]
    n_cells: int


def compare_memories(reference: HybridMemory, lane: HybridMemory, seq: int = 0) -> MemoryDifference:
    """What differs, as the next token would see it: pending rollbacks count as done."""
    n_cells = cells_that_differ(reference.attention.positions(seq), lane.attention.positions(seq))
    if reference.recurrent is None or lane.recurrent is None:
        return MemoryDifference((), [], [], n_cells)
    states, windows = (
        [_relative(a, b) for a, b in zip(mine, theirs, strict=True)]
        for mine, theirs in zip(
            reference.recurrent.live(seq), lane.recurrent.live(seq), strict=True
        )
    )
    return MemoryDifference(reference.recurrent.shape.layers, states, windows, n_cells)


def cells_that_differ(reference: np.ndarray, lane: np.ndarray) -> int:
    """Cells of either lane without a partner in the other, given the position of each cell."""
    low = min(reference.min(initial=0), lane.min(initial=0))
    length = int(max(reference.max(initial=0), lane.max(initial=0)) - low) + 1
    counts = [np.bincount(positions - low, minlength=length) for positions in (reference, lane)]
    return int(np.abs(counts[0] - counts[1]).sum())


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double(), b.double()
    return float(_ratio((a - b).norm(), a.norm()))


def _ratio(error: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """error / size, where nothing over nothing is no error."""
    return torch.where(error == 0, error, error / size)
