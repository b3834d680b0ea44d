"""Plain decoding that a run with drafts is measured against: pairs of runs of the same request,
with drafts and without, in alternation; and another run of the trace, for times of rounds."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import numpy as np

from engine.sampling.options import SamplerOptions
from engine.trace.facts import RunFacts
from engine.trace.run_columns import RunColumns
from engine.trace.run_ref import same_model
from engine.trace.store import TraceStore
from engine.trace.timings import timings

LEAST_PAIRS, MOST_PAIRS = 3, 5


@dataclass(frozen=True, slots=True)
class PlainRatio:
    """Speed with drafts over speed without: the lowest, median and highest of n pairs. plain_speed:
    tokens per second without, the median."""

    low: float
    median: float
    high: float
    n: int
    plain_speed: float

    @classmethod
    def of(cls, facts: RunFacts) -> PlainRatio | None:
        """What was measured of a run; None for fewer pairs than are enough."""
        pairs = [(a, b) for a, b in facts.plain_pairs or () if a > 0 and b > 0]
        if len(pairs) < LEAST_PAIRS:
            return None
        ratios = sorted(with_drafts / plain for with_drafts, plain in pairs)
        plain = statistics.median(plain for _, plain in pairs)
        return cls(ratios[0], statistics.median(ratios), ratios[-1], len(ratios), plain)

    @property
    def is_shown(self) -> bool:
        """Whether all pairs agree on which is faster."""
        return self.low > 1 or self.high < 1

    @property
    def range_text(self) -> str:
        """ "1.10 to 1.36×"."""
        return f"{self.low:.2f} to {self.high:.2f}×"

    @property
    def words(self) -> str:
        """The verdict; none inside the spread."""
        if self.is_shown:
            return f"{self.range_text} plain decoding in {self.n} pairs"
        return f"no difference to plain decoding shown ({self.range_text} in {self.n} pairs)"


def sign_test(wins: int, n: int) -> float:
    """Two-sided probability of at least so lopsided a result of n pairs, were both sides equally
    likely to win each; exact, and 1 without any."""
    if not n:
        return 1.0
    least = min(wins, n - wins)
    return float(min(1.0, 2 * sum(math.comb(n, i) for i in range(least + 1)) / 2**n))


def find_baseline(store: TraceStore, run_id: int) -> int | None:
    """The newest other run without drafters on the same model, prompts, compute mode and sampler.

    Lanes of comparisons are left out: they are timed while other lanes decode too. None where
    there is no such run, or where it did not generate anything yet.
    """
    facts = store.runs.get(run_id)
    if facts is None or facts.options is None:
        return None
    prompts = _prompts(store, run_id)
    for other in sorted(store.runs, reverse=True):
        if other == run_id or not _may_be_baseline(facts, store.runs[other]):
            continue
        if speed(store, other) and np.array_equal(prompts, _prompts(store, other)):
            return other
    return None


def _may_be_baseline(facts: RunFacts, theirs: RunFacts) -> bool:
    return (
        _is_plain(theirs)
        and same_model(facts.model, theirs.model)
        and _setting(facts) == _setting(theirs)
    )


def speed(store: TraceStore, run_id: int) -> float:
    """Tokens per second after the prompt, 0 where none were generated."""
    return float(timings(store, run_id)["predicted_per_second"])


def _is_plain(facts: RunFacts) -> bool:
    return facts.options is not None and not facts.options.spec.types and facts.lane is None


def _setting(facts: RunFacts) -> tuple[str | None, int, SamplerOptions] | None:
    options = facts.options
    return (facts.compute, options.parallel, options.sampler) if options else None


def _prompts(store: TraceStore, run_id: int) -> np.ndarray:
    """Sequence, position and token of every prompt token, int64 [n, 3] in order."""
    rows = RunColumns(store, "tokens", run_id)
    prompt = rows.is_text("kind", "prompt")
    found = np.stack([rows[name][prompt] for name in ("seq_id", "pos", "token_id")], axis=1)
    ordered: np.ndarray = found[np.lexsort((found[:, 1], found[:, 0]))]
    return ordered
