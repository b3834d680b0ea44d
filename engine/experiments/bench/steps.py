"""Plain forward steps of several widths, each behind a context of one token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import torch

from engine.batch import Span
from engine.machine.device import wait_for
from engine.memory.hybrid import HybridMemory
from engine.model.hybrid import HybridModel
from kernels.dispatch import uses_llvm

if TYPE_CHECKING:
    from kernels.llvm.program import KernelClock

STEP_OUTPUTS = ("last", "all")
"""Rows whose logits are computed: the last one, as for a prompt, or all, as for a draft."""

# the first compiles kernels, the second is recorded
_WARM_UP = 2


@dataclass(frozen=True, slots=True)
class StepRow:
    """Steps of `width` tokens: fastest and median time, tokens per second at the median.

    kernels_ms: the median of the part of each that compiled kernels took; None on other devices
    and where kernels are not compiled.
    """

    width: int
    min_ms: float
    median_ms: float
    tokens_per_second: float
    kernels_ms: float | None


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
    watch = _watch(model.device)
    taken: dict[int, list[_Step]] = {width: [] for width in widths}
    for _ in range(_WARM_UP + repeats):
        for width, steps in taken.items():
            wanted = range(width) if outputs == "all" else [width - 1]
            (ubatch,) = memory.split([Span(0, 1, tokens[:width], wanted)], width, "seq")
            in_kernels = watch()
            start = perf_counter()
            with in_kernels.running() if in_kernels else nullcontext():
                model.forward(ubatch, memory)
                wait_for(model.device)
            ms = 1000 * (perf_counter() - start)
            steps.append(_Step(ms, 1000 * in_kernels.seconds if in_kernels else None))
            memory.restore(0, start_of_all)
    return [_row(width, steps[_WARM_UP:]) for width, steps in taken.items()]


class _Step(NamedTuple):
    """Milliseconds of a step, and of the kernels in it."""

    ms: float
    kernels_ms: float | None


def _watch(device: torch.device) -> Callable[[], KernelClock | None]:
    """What makes a clock for the kernels of a step, where they can be timed."""
    if device.type != "cpu" or not uses_llvm():
        return lambda: None
    # here, because it loads the compiler
    from kernels.llvm.program import KernelClock

    return KernelClock


def _row(width: int, steps: Sequence[_Step]) -> StepRow:
    middle = median(step.ms for step in steps)
    inside = [step.kernels_ms for step in steps if step.kernels_ms is not None]
    return StepRow(
        width,
        min(step.ms for step in steps),
        middle,
        1000 * width / middle,
        median(inside) if inside else None,
    )
