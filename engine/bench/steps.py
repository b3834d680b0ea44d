"""Plain forward steps of several widths, each behind a context of one token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

from engine.batch import Span
from engine.device import wait_for
from engine.memory.hybrid import HybridMemory
from engine.model.hybrid import HybridModel

STEP_OUTPUTS = ("last", "all")
"""Rows whose logits are computed: the last one, as for a prompt, or all, as for a draft."""

# on a CUDA device the first compiles kernels, the second records a graph
_WARM_UP = 2


@dataclass(frozen=True, slots=True)
class StepRow:
    """Steps of `width` tokens: fastest and median time, tokens per second at the median."""

    width: int
    min_ms: float
    median_ms: float
    tokens_per_second: float


@torch.inference_mode()
def bench_steps(
    model: HybridModel,
    widths: Sequence[int],
    *,
    repeats: int = 7,
    outputs: str = "last",
    batch_invariant: bool = False,
) -> list[StepRow]:
    """Time one sequence's step of every width; the widths take turns in each repetition.

    outputs: one of STEP_OUTPUTS. batch_invariant: as in RunOptions.
    """
    memory = HybridMemory.for_model(
        model.config, 1, max(widths) + 1, model.device, batch_invariant=batch_invariant
    )
    random = torch.Generator().manual_seed(0)
    first, *tokens = torch.randint(
        model.config.n_vocab, (max(widths) + 1,), generator=random
    ).tolist()
    (ubatch,) = memory.split([Span(0, 0, [first], [])], 1, "seq")
    model.forward(ubatch, memory)
    start_of_all = memory.save(0)
    taken: dict[int, list[float]] = {width: [] for width in widths}
    for _ in range(_WARM_UP + repeats):
        for width, times in taken.items():
            wanted = range(width) if outputs == "all" else [width - 1]
            (ubatch,) = memory.split([Span(0, 1, tokens[:width], wanted)], width, "seq")
            start = perf_counter()
            model.forward(ubatch, memory)
            wait_for(model.device)
            times.append(1000 * (perf_counter() - start))
            memory.restore(0, start_of_all)
    return [_row(width, times[_WARM_UP:]) for width, times in taken.items()]


def _row(width: int, times: list[float]) -> StepRow:
    middle = median(times)
    return StepRow(width, min(times), middle, 1000 * width / middle)
