"""Forward passes alone: steps of several widths, each after a context of one token; and several
sequences verified side by side, against one sequence per forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from engine.batch import Span
from engine.experiments.bench.sections import SectionClock, sections_timed
from engine.machine.device import wait_for
from engine.memory.hybrid import HybridMemory
from engine.model.hybrid import HybridModel
from engine.options import SPLITS, RunOptions
from kernels.dispatch import uses_llvm

if TYPE_CHECKING:
    from kernels.llvm.program import KernelClock

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

    outputs: rows whose logits are computed, "last" or "all". batch_invariant: as in RunOptions.
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
    taken: dict[int, list[tuple[float, float | None]]] = {width: [] for width in widths}
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
            steps.append((ms, 1000 * in_kernels.seconds if in_kernels else None))
            memory.restore(0, start_of_all)
    return [_row(width, steps[_WARM_UP:]) for width, steps in taken.items()]


def _watch(device: torch.device) -> Callable[[], KernelClock | None]:
    """What makes a clock for the kernels of a step, where they can be timed."""
    if device.type != "cpu" or not uses_llvm():
        return lambda: None
    # here, because it loads the compiler
    from kernels.llvm.program import KernelClock

    return KernelClock


def _row(width: int, steps: Sequence[tuple[float, float | None]]) -> StepRow:
    """steps: milliseconds of each, and of the kernels in it."""
    middle = median(ms for ms, _ in steps)
    inside = [ms for _, ms in steps if ms is not None]
    return StepRow(
        width,
        min(ms for ms, _ in steps),
        middle,
        1000 * width / middle,
        median(inside) if inside else None,
    )


@dataclass(frozen=True, slots=True)
class SplitFigures:
    """One way of splitting. ms and tokens_per_second: of the median round, all sequences
    together. n_ubatches: forward passes per round. sections: where the median round's time went,
    ms per engine.experiments.bench.sections.MODEL_SECTIONS."""

    ms: float
    tokens_per_second: float
    n_ubatches: int
    sections: dict[str, float]


@dataclass(frozen=True, slots=True)
class SplitComparison:
    """Figures of both ways, "equal" and "seq", for n_seqs sequences of n_tokens tokens each.

    rollback: the policy. ratio: speed of "equal" over "seq", median of the rounds' ratios.
    """

    n_seqs: int
    n_tokens: int
    rollback: str
    figures: dict[str, SplitFigures]
    ratio: float


@torch.inference_mode()
def bench_splits(
    model: HybridModel, *, n_seqs: int = 5, n_draft: int = 3, rounds: int = 11
) -> SplitComparison:
    """Decode verify batches, n_draft + 1 random tokens per sequence, all of them accepted.

    Both ways decode the same tokens, each with a memory of its own, and take turns in every
    round; which one is first alternates.
    """
    options = RunOptions()
    n_tokens = n_draft + 1
    n_turns = _WARM_UP + rounds
    memories = {
        mode: HybridMemory.for_model(
            model.config,
            n_seqs,
            n_turns * n_tokens,
            model.device,
            policy=options.rollback,
            n_rs_seq=n_draft,
        )
        for mode in SPLITS
    }
    random = torch.Generator().manual_seed(0)
    clock = SectionClock(model.device)
    taken: dict[str, list[dict[str, float]]] = {mode: [] for mode in SPLITS}
    n_ubatches: dict[str, int] = {}
    with sections_timed(model, list(memories.values()), clock):
        for turn in range(n_turns):
            tokens = torch.randint(model.config.n_vocab, (n_seqs, n_tokens), generator=random)
            spans = [
                Span(seq, turn * n_tokens, row, range(n_tokens))
                for seq, row in enumerate(tokens.tolist())
            ]
            for mode in SPLITS[:: 1 if turn % 2 else -1]:
                clock.restart()
                n_ubatches[mode] = _decode(model, memories[mode], spans, mode)
                taken[mode].append(clock.ms())
    totals = {mode: [sum(ms.values()) for ms in taken[mode][_WARM_UP:]] for mode in SPLITS}
    figures = {
        mode: _figures(taken[mode][_WARM_UP:], n_seqs * n_tokens, n_ubatches[mode])
        for mode in SPLITS
    }
    ratios = [seq / equal for seq, equal in zip(totals["seq"], totals["equal"], strict=True)]
    return SplitComparison(n_seqs, n_tokens, options.rollback, figures, median(ratios))


def _decode(model: HybridModel, memory: HybridMemory, spans: Sequence[Span], mode: str) -> int:
    ubatches = memory.split(spans, RunOptions().n_ubatch, mode)
    for ubatch in ubatches:
        model.forward(ubatch, memory)
    return len(ubatches)


def _figures(taken: list[dict[str, float]], n_tokens: int, n_ubatches: int) -> SplitFigures:
    in_order = sorted(taken, key=lambda ms: sum(ms.values()))
    sections = in_order[len(in_order) // 2]
    ms = sum(sections.values())
    return SplitFigures(ms, 1000 * n_tokens / ms, n_ubatches, sections)
