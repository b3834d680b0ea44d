"""What the speed of a run would have been with a smaller n_max, estimated from its trace.

A draft cut to K' tokens has min(a, K') of its tokens accepted where the recorded one had a: the
target judges the first K' tokens in the same way. So the expected length follows from the
conditional rates c_i of the run without further assumption about the draft itself,

    E[accepted] = sum over i < K' of c_0 * c_1 * … * c_i.

What is assumed is told in words by `ASSUMPTIONS`; the result stays an estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.trace.step_sums import StepSums, per_position

ASSUMPTIONS = (
    "drafts are accepted at the same rates wherever a step begins",
    "drafting costs the same for every token, and nothing at n_max 0",
    "verifying costs what rows of the same width took on average",
    "an undone draft costs as much as the run's undone drafts did on average",
    "rounds without a draft stay as they were, except at n_max 0",
)


@dataclass(frozen=True, slots=True)
class DraftLengthEstimate:
    """One n_max. expected_length: tokens per step, 1 + accepted. Times: milliseconds per step.

    rest_ms: sampling, checkpoint, rollback, restore and replay. tokens_per_second: of the whole
    run, rounds without a draft included. Times are None where the run was not timed.
    """

    n_max: int
    expected_length: float
    draft_ms: float | None
    verify_ms: float | None
    rest_ms: float | None
    tokens_per_second: float | None

    @property
    def step_ms(self) -> float | None:
        """Time of a step."""
        if self.draft_ms is None or self.verify_ms is None or self.rest_ms is None:
            return None
        return self.draft_ms + self.verify_ms + self.rest_ms


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Estimates for n_max 0 … K in order, K being the longest draft seen.

    unmeasured_widths: verify widths that an estimate needs and no row had; their cost is
    interpolated between the nearest that were measured, or taken from the nearest one.
    """

    n_steps: int
    estimates: tuple[DraftLengthEstimate, ...]
    unmeasured_widths: tuple[int, ...]

    @property
    def recorded(self) -> DraftLengthEstimate:
        """The n_max that the run had."""
        return self.estimates[-1]

    @property
    def best(self) -> DraftLengthEstimate | None:
        """The fastest; the smaller n_max where two are equal. None without times."""
        timed = [e for e in self.estimates if e.tokens_per_second is not None]
        return max(timed, key=lambda e: (e.tokens_per_second or 0.0, -e.n_max), default=None)


def what_if(sums: StepSums) -> WhatIf | None:
    """Estimates from the sums of one run; None without a single step."""
    if not sums.n_steps:
        return None
    lengths = expected_lengths(sums.counts)
    undone = _undone(sums.counts)
    timed = not sums.n_untimed and bool(len(sums.widths))
    estimates = tuple(
        _estimate(sums, n_max, length, undone)
        if timed
        else DraftLengthEstimate(n_max, length, None, None, None, None)
        for n_max, length in enumerate(lengths)
    )
    needed = range(1, sums.n_max + 2)
    missing = tuple(sorted(set(needed).difference(sums.widths.tolist())))
    return WhatIf(sums.n_steps, estimates, missing if timed else ())


def expected_lengths(counts: np.ndarray) -> list[float]:
    """Tokens per step for n_max 0 … K from counts [K + 1, K + 1] of drafted and accepted."""
    lengths, reached = [1.0], 1.0
    for rate in per_position(counts)["acceptance_per_position"]["conditional"]:
        reached *= rate or 0.0
        lengths.append(lengths[-1] + reached)
    return lengths


def verify_cost(sums: StepSums, widths: np.ndarray) -> np.ndarray:
    """Milliseconds of a row by its width, float64 of the same shape: the mean of rows as wide,
    between measured widths a straight line, beyond them the nearest."""
    return np.interp(widths, sums.widths, sums.width_ms / sums.width_n)


def _estimate(sums: StepSums, n_max: int, length: float, undone: np.ndarray) -> DraftLengthEstimate:
    counts, n_steps = sums.counts, sums.n_steps
    recorded = np.arange(sums.n_max + 1)
    drafted = np.minimum(recorded, n_max)
    by_drafted = counts.sum(1)
    n_drafted = float(drafted @ by_drafted)
    all_drafted = float(recorded @ by_drafted)

    draft_ms = sums.step_ms["draft"] * n_drafted / all_drafted
    verify_ms = float(verify_cost(sums, drafted + 1) @ by_drafted)
    width = (n_drafted + n_steps) / (all_drafted + n_steps)
    undone_share = float(undone[n_max]) / max(int(undone[-1]), 1)
    undoing = sum(sums.step_ms[phase] for phase in ("rollback", "restore", "replay"))
    save_ms = sums.step_ms["save"] if n_max else 0.0
    rest_ms = sums.step_ms["sample"] * width + undoing * undone_share + save_ms

    # looking for drafts that were not found costs nothing where none is looked for
    plain_ms = sum(ms for phase, ms in sums.plain_ms.items() if n_max or phase != "draft")
    total_ms = draft_ms + verify_ms + rest_ms + plain_ms
    tokens = n_steps * length + sums.n_plain
    return DraftLengthEstimate(
        n_max,
        length,
        draft_ms / n_steps,
        verify_ms / n_steps,
        rest_ms / n_steps,
        1e3 * tokens / total_ms if total_ms else None,
    )


def _undone(counts: np.ndarray) -> np.ndarray:
    """Steps in which a draft cut to n_max tokens is not accepted as a whole, by n_max, [K + 1]."""
    not_whole = np.tril(counts, -1).sum(axis=0)  # by the number accepted
    return np.concatenate([[0], np.cumsum(not_whole)[:-1]])
