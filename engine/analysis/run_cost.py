"""Cost of a run after its prompts: time by phase, forward passes, rollbacks, bytes of state; and
the time ratio of two lanes.

Lanes of a comparison are led: they verify the same drafts in the same rounds, one lane after the
other, so equal rounds of two lanes form a pair. Drafts are made once for all lanes; that time is
added to each lane, so that a round is as long as in a run of its own. Lanes with copies of
sequences do the work of several, and reference and noise lanes do no work of a run: they have no
time here.

Then the comparison with plain decoding: pairs of runs of the same request, with and without drafts,
in alternation; and another run of the trace, for times of rounds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from engine.plain_text import counted, size_text, three_digits
from engine.sampling.options import SamplerOptions
from engine.trace.facts import RunFacts
from engine.trace.records import MISSING, PHASES, POLICY
from engine.trace.run_ref import RunColumns, RunRef, same_model
from engine.trace.store import TraceStore
from engine.trace.timings import timings

N_PARTS = 5
"""Number of interleaved parts of the rounds, for the spread of a ratio of two lanes."""
COST_HEADS = (
    "lane",
    "ms/round",
    *PHASES,
    "passes",
    "restores",
    "seq_rm",
    "refused",
    "replayed",
    "moved",
    "held",
)
COST_NOTE = (
    "ms/round and its phases: means after the prompt, including the shared draft; replayed: "
    "tokens decoded again; moved: state copied, restored and saved"
)
_LEAST_ROUNDS = 2 * N_PARTS
_OUTLIER = 3.0
"""Passes longer than this multiple of the median are outliers."""
_MOVED = ("state_bytes_copied", "state_bytes_restored", "checkpoint_bytes")
_RESTORES = ("restore", "restore_depth")


@dataclass(frozen=True, eq=False, slots=True)
class RunCost:
    """Cost over all sequences of a run, prompt rounds excluded; None = not observed.

    rounds: round numbers, int64 [n] ascending. round_ms: time of each by phase, float64 [n],
    without phases never observed, and empty where times mean nothing (see above). n_passes: forward
    passes of the target. n_restores, n_removed, n_refused: rounds of a sequence undone from a
    checkpoint, by partial removal, and refused. n_replayed: tokens decoded again. bytes_moved:
    state copied, restored and saved in checkpoints; bytes_written: by passes; bytes_held: peak of
    cells and states.
    """

    run: RunRef
    rounds: np.ndarray
    round_ms: dict[str, np.ndarray]
    n_passes: int | None
    n_restores: int | None
    n_removed: int | None
    n_refused: int | None
    n_replayed: int | None
    bytes_moved: int | None
    bytes_written: int | None
    bytes_held: int | None

    @property
    def name(self) -> str:
        """The lane."""
        return self.run.facts.lane or ""

    @property
    def total_ms(self) -> np.ndarray:
        """Time of each round, all phases, float64 [n]."""
        return np.sum([*self.round_ms.values(), np.zeros(len(self.rounds))], axis=0)

    def per_round(self, phase: str = "") -> float | None:
        """Mean milliseconds per round; of one phase, or of all."""
        if not self.round_ms or not len(self.rounds):
            return None
        if not phase:
            return float(self.total_ms.mean())
        ms = self.round_ms.get(phase)
        return None if ms is None else float(ms.mean())

    def figures(self) -> dict[str, Any]:
        """All figures by name, times in milliseconds per round."""
        names = [field.name for field in fields(self)][3:]
        phases = {phase: self.per_round(phase) for phase in self.round_ms}
        counts = {name: getattr(self, name) for name in names}
        whole = {"num_rounds": len(self.rounds), "round_ms": self.per_round()}
        return {**whole, "phase_ms": phases, **counts}

    @classmethod
    def of(cls, run: RunRef, first: int = 0, last: int | None = None) -> RunCost:
        """From the current trace. first, last: range of rounds, inclusive; None: to the end."""
        rows = RunColumns(run.store, "rounds", run.run_id)
        later = ~rows.is_prompt & (rows["round"] >= first)
        later &= True if last is None else rows["round"] <= last
        rounds, at = np.unique(rows["round"][later], return_inverse=True)
        is_known = bool((rows["rollback_path"][later] > 0).any())  # code 0: an empty text

        def n_of(*paths: str) -> int | None:
            return int((later & rows.is_text("rollback_path", *paths)).sum()) if is_known else None

        passes = RunColumns(run.store, "ubatches", run.run_id)
        mine = np.isin(passes["round"], rounds)
        replay = mine & passes.is_text("purpose", "replay")
        n_tokens = passes["n_seqs"] * passes["n_seq_tokens"] - np.maximum(passes["n_padding"], 0)
        return cls(
            run,
            rounds,
            _round_ms(run, rows, later, rounds, at),
            int(mine.sum()) if passes.n else None,
            n_of(*_RESTORES),
            n_of("seq_rm"),
            n_of("refused"),
            int(n_tokens[replay].sum()) if passes.n else None,
            _sum(rows, _MOVED, later),
            _sum(rows, ("state_bytes_written",), later),
            _most(rows["memory_bytes_held"]),
        )


def _round_ms(
    run: RunRef, rows: RunColumns, later: np.ndarray, rounds: np.ndarray, at: np.ndarray
) -> dict[str, np.ndarray]:
    facts = run.facts
    if facts.lane and not is_timed(facts):
        return {}
    found: dict[str, np.ndarray] = {}
    for phase in PHASES:
        ms = rows[f"{phase}_ms"][later]
        if np.isfinite(ms).any():
            found[phase] = np.bincount(at, np.nan_to_num(ms), len(rounds))
    if found and facts.lane and not facts.lane_free:
        drafts = RunColumns(run.store, "drafts", _leader(run.store, run.run_id))
        place = np.searchsorted(rounds, drafts["round"])
        place = np.minimum(place, max(len(rounds) - 1, 0))
        known = np.isfinite(drafts["draft_ms"])
        known &= rounds[place] == drafts["round"] if len(rounds) else False
        found["draft"] = np.bincount(place[known], drafts["draft_ms"][known], len(rounds))
    return {phase: found[phase] for phase in PHASES if phase in found}


def is_timed(facts: RunFacts) -> bool:
    """Whether a lane does what a run does, so that its times are meaningful."""
    return facts.lane_kind == POLICY and facts.lane_copies is None


def _leader(store: TraceStore, run_id: int) -> int:
    """The lane that drafts for a lane: the one without a reference of its own."""
    for _ in range(len(store.runs)):  # an untrusted trace may contain cycles
        against = store.runs[run_id].lane_against
        if against is None or against not in store.runs:
            break
        run_id = against
    return run_id


def _sum(rows: RunColumns, names: Sequence[str], later: np.ndarray) -> int | None:
    values = np.concatenate([rows[name][later] for name in names])
    known = values[values != MISSING]
    return int(known.sum()) if len(known) else None


def _most(values: np.ndarray) -> int | None:
    known = values[values != MISSING]
    return int(known.max()) if len(known) else None


@dataclass(frozen=True, slots=True)
class TimeRatio:
    """Time ratio of two lanes: overall, and the lowest and highest of N_PARTS. more_ms: extra time
    per round. n_rounds: rounds compared; n_left_out: the others."""

    ratio: float
    low: float
    high: float
    more_ms: float
    n_rounds: int
    n_left_out: int

    @property
    def is_shown(self) -> bool:
        """Whether all parts agree on which lane takes longer."""
        return self.low > 1 or self.high < 1

    @property
    def spread(self) -> str:
        """The lowest and the highest, in words."""
        of = "the rounds"
        if self.n_left_out:
            slow = counted(self.n_left_out, "unusually slow one")
            of = f"{self.n_rounds:,} rounds, {slow} left out"
        return f"{self.low:.2f} to {self.high:.2f} over {N_PARTS} parts of {of}"


def time_ratio(one: RunCost, other: RunCost) -> TimeRatio | None:
    """Ratio over common rounds; None if they are few or untimed. Rounds with an outlier pass are
    left out: another program was running."""
    if not one.round_ms or not other.round_ms:
        return None
    _, mine, theirs = np.intersect1d(one.rounds, other.rounds, return_indices=True)
    n = len(mine)
    if n < _LEAST_ROUNDS:
        return None
    usual = _is_usual(one)[mine] & _is_usual(other)[theirs]
    if 2 * usual.sum() > n:
        mine, theirs = mine[usual], theirs[usual]
    a, b = one.total_ms[mine], other.total_ms[theirs]
    if not b.sum():
        return None
    part = np.arange(len(mine)) % N_PARTS
    sums = [np.bincount(part, ms, N_PARTS) for ms in (a, b)]
    if not sums[1].all():
        return None
    ratios = sums[0] / sums[1]
    low, high, more = float(ratios.min()), float(ratios.max()), float((a - b).mean())
    return TimeRatio(float(a.sum() / b.sum()), low, high, more, len(mine), n - len(mine))


def _is_usual(cost: RunCost) -> np.ndarray:
    """Rounds whose verify time is not an outlier, bool [n]."""
    ms = cost.round_ms.get("verify", np.zeros(len(cost.rounds)))
    usual: np.ndarray = ms <= _OUTLIER * np.median(ms)
    return usual


def cost_sentence(costs: Sequence[RunCost], run_id: int) -> str:
    """A lane's cost against the fastest other one, or against the slowest if it is the fastest;
    empty if nothing can be said."""
    timed = sorted(
        (c for c in costs if c.round_ms and len(c.rounds)), key=lambda c: c.per_round() or 0.0
    )
    mine = next((cost for cost in timed if cost.run.run_id == run_id), None)
    if mine is None or len(timed) < 2:
        return ""
    slow, fast = (mine, timed[0]) if mine is not timed[0] else (timed[-1], mine)
    found = time_ratio(slow, fast)
    if found and found.ratio < 1:  # over the compared rounds, without those left out
        slow, fast = fast, slow
        found = time_ratio(slow, fast)
    if found is None:
        return ""
    if not found.is_shown:
        words = f"No significant difference between the times of {slow.name} and {fast.name}: "
        words += f"{found.spread}"
    else:
        words = f"{slow.name}: {found.ratio:.2f} times the time of {fast.name} here "
        words += f"({found.spread}), {three_digits(found.more_ms)} ms per round more"
    if found.n_left_out:  # the means shown include those and may disagree
        means = " and ".join(three_digits(cost.per_round() or 0.0) for cost in (slow, fast))
        words += f"; means of all rounds: {means} ms"
    return f"{words}; {work_words(slow)}."


def work_words(cost: RunCost) -> str:
    """ "11 restores, 22.6 MiB moved, 262 ms of replay": a lane's rollback work."""
    replay_ms = cost.round_ms["replay"].sum() if "replay" in cost.round_ms else 0
    parts = [
        _count(cost.n_restores, "restore"),
        _count(cost.n_removed, "seq_rm", ""),
        _count(cost.n_refused, "refused", ""),
        None if cost.bytes_moved is None else f"{size_text(cost.bytes_moved)} moved",
        f"{three_digits(replay_ms)} ms of replay" if replay_ms else None,
    ]
    return ", ".join(part for part in parts if part) or "nothing rolled back"


def _count(n: int | None, word: str, plural: str = "s") -> str:
    return f"{n:,} {word}{plural if n != 1 else ''}" if n else ""


def cost_cells(cost: RunCost) -> tuple[str, ...]:
    """A row of the table under COST_HEADS; "-" = not observed or meaningless."""
    times = (cost.per_round(), *map(cost.per_round, PHASES))
    counts = (cost.n_passes, cost.n_restores, cost.n_removed, cost.n_refused, cost.n_replayed)
    return (
        cost.name,
        *("-" if ms is None else three_digits(ms) for ms in times),
        *("-" if n is None else str(n) for n in counts),
        *("-" if n is None else size_text(n) for n in (cost.bytes_moved, cost.bytes_held)),
    )


def cost_notes(costs: Sequence[RunCost]) -> Iterator[str]:
    """A sentence for each lane that takes longer than the fastest one, or as long."""
    said = (cost_sentence(costs, cost.run.run_id) for cost in costs)
    yield from dict.fromkeys(filter(None, said))


LEAST_PAIRS, MOST_PAIRS = 3, 5


@dataclass(frozen=True, slots=True)
class PlainRatio:
    """Speed with drafts divided by speed without: lowest, median and highest of n pairs.
    plain_speed: median tokens per second without."""

    low: float
    median: float
    high: float
    n: int
    plain_speed: float

    @classmethod
    def of(cls, facts: RunFacts) -> PlainRatio | None:
        """The pairs measured for a run; None if there are too few."""
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
        """The verdict; none within the spread."""
        if self.is_shown:
            return f"{self.range_text} plain decoding in {self.n} pairs"
        return f"no clear difference from plain decoding ({self.range_text} in {self.n} pairs)"


def sign_test(wins: int, n: int) -> float:
    """Two-sided exact sign test: probability of at least this imbalance in n pairs if both sides
    were equally likely to win; 1 without pairs."""
    if not n:
        return 1.0
    least = min(wins, n - wins)
    return float(min(1.0, 2 * sum(math.comb(n, i) for i in range(least + 1)) / 2**n))


def find_baseline(store: TraceStore, run_id: int) -> int | None:
    """The newest other run without drafters on the same model, prompts, compute mode and sampler.

    Lanes of comparisons are left out, because other lanes decode at the same time. None without
    such a run, or if it has generated nothing yet.
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
