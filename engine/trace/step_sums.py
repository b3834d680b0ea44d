"""Sums over the steps of a run that grow row by row, and the figures that need nothing else.

What counts as a prompt row or a step is defined in `engine.trace.timings`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from engine.trace.records import MISSING


class StepSums:
    """Counts and milliseconds of a run's rows after the prompts.

    counts[d, a]: steps that drafted d >= 1 tokens of which a were accepted, int64 [K + 1, K + 1]
    with K the longest draft so far. widths: the verify widths seen, ascending; width_n, width_ms:
    rows and verify time of each. step_ms: time in steps by phase; plain_ms: by phase in the n_plain
    rows without a draft. n_untimed: rows without a verify time.
    """

    def __init__(self) -> None:
        self.counts = np.zeros((1, 1), np.int64)
        self.widths: np.ndarray = np.zeros(0, np.int64)
        self.width_n: np.ndarray = np.zeros(0, np.int64)
        self.width_ms: np.ndarray = np.zeros(0)
        self.step_ms: dict[str, float] = {}
        self.plain_ms: dict[str, float] = {}
        self.step_tokens = 0
        self.n_plain = 0
        self.n_untimed = 0
        self._begun: set[int] = set()

    @property
    def n_steps(self) -> int:
        """Rows that verified a draft."""
        return int(self.counts.sum())

    @property
    def n_max(self) -> int:
        """The longest draft."""
        return len(self.counts) - 1

    def is_prompt(self, seq_ids: np.ndarray, drafted: np.ndarray) -> np.ndarray:
        """Which of the rows that follow those seen before decode a prompt, bool [n]."""
        prompt = drafted == MISSING
        ids, first = np.unique(seq_ids, return_index=True)
        for seq_id, row in zip(ids.tolist(), first.tolist(), strict=True):
            if seq_id not in self._begun:
                self._begun.add(seq_id)
                prompt[row] = True
        return prompt

    def add(
        self,
        seq_ids: np.ndarray,
        drafted: np.ndarray,
        accepted: np.ndarray,
        widths: np.ndarray,
        phases: dict[str, np.ndarray],
    ) -> np.ndarray:
        """Take in the next rows of one run, [n] each; returns which of them are steps, bool [n].

        widths: verify_width. phases: milliseconds by phase, NaN where not observed.
        """
        later = ~self.is_prompt(seq_ids, drafted)
        # a row that sums several rounds has no width and is neither
        steps = later & (drafted > 0) & (widths != MISSING)
        plain = later & (drafted <= 0)
        self.counts = _joint(self.counts, drafted[steps], accepted[steps])
        self.n_plain += int(plain.sum())
        known = later & (widths > 0) & np.isfinite(phases["verify"])
        self.n_untimed += int(later.sum() - known.sum())
        self._time(widths[known], phases["verify"][known])
        self.step_tokens += int(np.maximum(widths[steps], 0).sum())
        for sums, chosen in ((self.step_ms, steps), (self.plain_ms, plain)):
            for phase, values in phases.items():
                sums[phase] = sums.get(phase, 0.0) + float(np.nansum(values[chosen]))
        return steps

    def _time(self, widths: np.ndarray, ms: np.ndarray) -> None:
        """Add verify times, [n], to those of their widths."""
        every = np.concatenate([self.widths, widths])
        self.widths, at = np.unique(every, return_inverse=True)
        every_n = np.concatenate([self.width_n, np.ones(len(widths), np.int64)])
        every_ms = np.concatenate([self.width_ms, ms])
        self.width_n = np.bincount(at, every_n, len(self.widths)).astype(np.int64)
        self.width_ms = np.bincount(at, every_ms, len(self.widths))


def joint_counts(drafted: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    """Steps by tokens drafted (rows) and accepted (columns), int64 [K + 1, K + 1]."""
    return _joint(np.zeros((1, 1), np.int64), drafted, accepted)


def per_position(counts: np.ndarray) -> dict[str, Any]:
    """How the tokens at each index of a draft fared, from counts of `joint_counts`.

    num_draft_tokens_per_pos, num_accepted_tokens_per_pos: steps that drafted and accepted a token
    there; acceptance_per_position: the three rates that `engine.trace.timings.acceptance` tells.
    """
    by_drafted, by_accepted = counts.sum(1).tolist(), counts.sum(0).tolist()
    return rates_by_index(at_least(by_drafted), at_least(by_accepted))


def rates_by_index(offered: list[int], reached: list[int]) -> dict[str, Any]:
    """The same from how many steps drafted and accepted at least k tokens, k from 0."""
    _, *offered = offered
    steps = reached[0]
    return {
        "num_draft_tokens_per_pos": offered,
        "num_accepted_tokens_per_pos": reached[1:],
        "acceptance_per_position": {
            "unconditional": [_ratio(n, steps) for n in reached[1:]],
            "unconditional_given_drafted": [
                _ratio(n, of) for n, of in zip(reached[1:], offered, strict=True)
            ],
            "conditional": [_ratio(n, of) for n, of in zip(reached[1:], reached[:-1], strict=True)],
        },
    }


def at_least(n_of: Sequence[int]) -> list[int]:
    """How many are k or more, from how many are k, k from 0."""
    return list(accumulate(reversed(n_of)))[::-1]


def _joint(counts: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    accepted = np.clip(accepted, 0, drafted)  # a step cut short counts as 0
    size = max(len(counts), int(drafted.max(initial=0)) + 1)
    cells = np.bincount(drafted * size + accepted, minlength=size * size).reshape(size, size)
    cells[: len(counts), : len(counts)] += counts
    return cells


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
