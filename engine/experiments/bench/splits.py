"""Several sequences verified side by side, against one sequence per forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from engine.batch import Span
from engine.experiments.bench.sections import SectionClock, sections_timed
from engine.memory.hybrid import HybridMemory
from engine.model.hybrid import HybridModel
from engine.options import SPLITS, RunOptions

_WARM_UP = 2


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
