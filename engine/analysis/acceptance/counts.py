"""Draft counts, and statistical tests of acceptance rates."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import zip_longest
from typing import Any

import numpy as np

from engine.trace.facts import RequestFacts, RunFacts
from engine.trace.records import MISSING
from engine.trace.run_ref import RunColumns

_MOST_TERMS = 1 << 17
"""Terms of a sum; later ones are far below its last digit."""


def binomial_at_most(k: int, n: int, p: float) -> float:
    """Binomial tail: probability of k or fewer of n, each with probability p."""
    if k >= n or p <= 0:
        return 1.0
    if k < 0 or p >= 1:
        return 0.0
    log_first = _log_choose(n, k) + k * math.log(p) + (n - k) * math.log1p(-p)
    x = k - np.arange(min(k, _MOST_TERMS), dtype=float)
    return _sum_down(log_first, x * (1 - p) / ((n - x + 1) * p))


def fisher_less(k: int, n: int, other_k: int, other_n: int) -> float:
    """Fisher's exact test, one-sided: probability of k or fewer of n if both groups together have k
    + other_k of n + other_n."""
    total, right = n + other_n, k + other_k
    least = max(0, right - other_n)
    log_first = _log_choose(right, k) + _log_choose(total - right, n - k) - _log_choose(total, n)
    x = k - np.arange(min(k - least, _MOST_TERMS), dtype=float)
    return _sum_down(log_first, x * (total - right - n + x) / ((right - x + 1) * (n - x + 1)))


def wilson(k: int, n: int, z: float) -> float:
    """Bound of the share k / n, the lower one for z < 0 (score interval of E. B. Wilson, 1927)."""
    if not n:
        return 0.0 if z < 0 else 1.0
    p, zz = k / n, z * z / n
    middle = p + zz / 2 + math.copysign(math.sqrt(zz * (p * (1 - p) + zz / 4)), z)
    return min(1.0, max(0.0, middle / (1 + zz)))


Logistic = tuple[float, float, float, float]
"""A logistic fit over x: the slope with its standard error, the rates at the smallest and largest
x."""


def logistic(x: np.ndarray, k: np.ndarray, n: np.ndarray) -> Logistic | None:
    """Logistic regression of k successes of n at each x, float [m]; None if x or the outcome does
    not vary."""
    if not len(x) or x.min() == x.max() or k.sum() in (0, n.sum()):
        return None
    p, (slope, error), _ = fitted(x, k, n)
    return slope, error, float(p[np.argmin(x)]), float(p[np.argmax(x)])


def fitted(
    x: np.ndarray, k: np.ndarray, n: np.ndarray
) -> tuple[np.ndarray, tuple[float, float], float]:
    """Rates at each x from a logistic regression (Newton's method), the slope with its standard
    error, and the log-likelihood. x must vary."""
    scale = float(x.std())
    design = np.stack([np.ones_like(x), (x - x.mean()) / scale])
    weights = np.zeros(2)
    for _ in range(25):
        p = 1 / (1 + np.exp(-(weights @ design)))
        curve = design * (n * p * (1 - p)) @ design.T + 1e-6 * np.eye(2)
        weights = np.clip(weights + np.linalg.solve(curve, design @ (k - n * p)), -20, 20)
    p = np.clip(1 / (1 + np.exp(-(weights @ design))), 1e-9, 1 - 1e-9)
    error = math.sqrt(float(np.linalg.inv(curve)[1, 1])) / scale
    likelihood = float((k * np.log(p) + (n - k) * np.log1p(-p)).sum())
    return p, (float(weights[1]) / scale, error), likelihood


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _sum_down(log_first: float, ratios: np.ndarray) -> float:
    """Sum of a term and its successors, each `ratios` times its predecessor."""
    with np.errstate(divide="ignore"):
        logs = log_first + np.concatenate([[0.0], np.cumsum(np.log(np.maximum(ratios, 0.0)))])
    top = float(logs.max())
    return min(1.0, math.exp(top) * float(np.exp(logs - top).sum()))


_LONGEST_USUAL = 8
"""Usual longest draft, tokens, where only the sum over all drafts is known."""
_INTERVALS = ("vllm-log", "sglang-log", "atom-log")
"""Records whose requests are time intervals, each over all requests then."""
_ENGINE = re.compile(r"engine (\d{1,6}),")
"""Prefix of the place of an interval of one of several engines."""
_ROWS = "benchmark"
"""The record whose requests are table rows or program runs, between which everything may differ."""
_LOOKS_UP = ("ngram", "suffix", "lookup")
"""Part of the names of drafters without a model."""


@dataclass(frozen=True, slots=True)
class Survival:
    """Survival of drafts by index, int64 [K] each. judged: drafts whose token there was judged,
    after correct ones. accepted: drafts whose token was accepted."""

    judged: np.ndarray
    accepted: np.ndarray

    @classmethod
    def of(
        cls, drafted: np.ndarray, accepted: np.ndarray, n: np.ndarray | None = None, size: int = 0
    ) -> Survival:
        """From tokens drafted and accepted, [m] each: the first rejected one is judged, later ones
        are not. n: multiplicity of each draft. size: minimum K."""
        size = max(size, int(drafted.max(initial=0)))
        if not (some := drafted > 0).all():
            drafted, accepted, n = drafted[some], accepted[some], None if n is None else n[some]
        ended = np.bincount(np.minimum(accepted, drafted - 1), n, size)  # the last one judged
        passed = np.bincount(accepted, n, size + 1)[1:]
        judged, right = (one[::-1].cumsum()[::-1].astype(np.int64) for one in (ended, passed))
        return cls(judged, right)

    @property
    def rate(self) -> np.ndarray:
        """Share of drafts accepted through each index, float64 [K]; NaN from the first index
        without judged drafts."""
        steps = np.full(len(self.judged), np.nan)
        np.divide(self.accepted, self.judged, out=steps, where=self.judged > 0)
        return np.cumprod(steps)

    @property
    def conditional(self) -> np.ndarray:
        """Share accepted at each index given correct predecessors, or that of the index before if
        none was judged: float64 [K]."""
        known = np.where(self.judged > 0, np.arange(len(self.judged)), -1)
        rates = np.append(self.accepted / np.maximum(self.judged, 1), 0.0)  # -1: none before
        return rates[np.maximum.accumulate(known)]


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Drafts of one drafter, integers [u] each: number of drafts, those with an accepted first
    token, tokens drafted and accepted, sequence, slot, round (for sums: request number), position
    of the first token (for sums: prompt length; MISSING if unknown), and whether sampler settings
    equal the others'.

    survival: for sums as far as they determine it. is_by_round: one row per draft; else unit says
    what a row is. has_first: whether drafts and first tokens were counted; else their number is a
    bound or, with is_estimate, derived from averages and speeds.
    """

    drafter: str
    n: np.ndarray
    first: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray
    seq: np.ndarray
    slot: np.ndarray
    at: np.ndarray
    pos: np.ndarray
    setting: np.ndarray
    survival: Survival
    is_by_round: bool
    unit: str = "request"
    has_first: bool = True
    is_estimate: bool = False

    @property
    def looks_up(self) -> bool:
        """Whether drafts are looked up in the text, where unrepeated text gives no match."""
        return any(word in self.drafter for word in _LOOKS_UP)

    def only(self, rows: np.ndarray) -> DraftCounts:
        """Selected rows, bool or indices; for sums the survival is unchanged."""
        names = ("n", "first", "drafted", "accepted", "seq", "slot", "at", "pos", "setting")
        mine: dict[str, Any] = {name: getattr(self, name)[rows] for name in names}
        if self.is_by_round:
            mine["survival"] = Survival.of(mine["drafted"], mine["accepted"])
        return replace(self, **mine)

    def by_sequence(self, least: int = 1, most: int | None = None) -> Iterator[DraftCounts]:
        """Each sequence with at least this many rows by itself; with `most`, the longest ones."""
        order = np.argsort(self.seq, kind="stable")
        starts = np.flatnonzero(np.diff(self.seq[order])) + 1
        bounds = np.concatenate([[0], starts, [len(order)]])
        is_long = np.diff(bounds) >= least
        pairs = list(zip(bounds[:-1][is_long].tolist(), bounds[1:][is_long].tolist(), strict=True))
        if most is not None:
            pairs = sorted(pairs, key=lambda pair: pair[0] - pair[1])[:most]
        return (self.only(order[begin:end]) for begin, end in pairs)


def draft_counts(
    facts: RunFacts, rounds: RunColumns, is_later: np.ndarray, drafters: Sequence[str]
) -> Iterator[DraftCounts]:
    """Per drafter of a run: from its rounds, or from sums for requests without rounds.

    is_later: rounds after the prompt, bool [n]. drafters: the run's, for rounds that name none.
    """
    requests = facts.requests or []
    ids, texts = [one.seq_ids for one in requests], list(map(_setting, requests))
    slots = dict(_slots(facts, requests))
    named = ", ".join(drafters)
    settings = {seq: text for text, mine in zip(texts, ids, strict=True) for seq in mine}
    known = {text: i for i, text in enumerate(dict.fromkeys(settings.values()))}
    numbers = dict.fromkeys(_ids(rounds["seq_id"]).tolist(), 0)
    numbers |= {seq: known[text] for seq, text in settings.items()}
    judged = is_later & (rounds["num_draft_tokens"] > 0)
    judged &= (rounds["num_accepted_draft_tokens"] >= 0) & (rounds["n_merged"] == MISSING)
    judged &= ~rounds.is_text("stop_kind", "end")  # cut before its end
    for code in _ids(rounds["drafter"][judged]).tolist():
        rows = np.flatnonzero(judged & (rounds["drafter"] == code))
        names = "num_draft_tokens", "num_accepted_draft_tokens", "seq_id", "round", "pos0"
        drafted, accepted, seq, at, pos = (rounds[name][rows].astype(np.int32) for name in names)
        accepted = np.minimum(accepted, drafted)
        yield DraftCounts(
            rounds.texts("drafter", rows[:1])[0] or named,
            np.ones_like(drafted),
            (accepted > 0).astype(np.int32),
            drafted,
            accepted,
            seq,
            _mapped(seq, slots),
            at,
            pos,
            _mapped(seq, numbers),
            Survival.of(drafted, accepted),
            is_by_round=True,
        )
    with_rounds = set(_ids(rounds["seq_id"][judged]).tolist())
    averages = list(_estimates(requests)) if facts.record is not None else []
    if sum(map(bool, averages)) < _LEAST_AVERAGES:
        averages = [{} for _ in requests]
    sums = [
        (r.told | more if more else r.told, next(iter(mine), None), known.get(text, 0), _longest(r))
        for r, mine, text, more in zip(requests, ids, texts, averages, strict=True)
        if with_rounds.isdisjoint(mine)
    ]
    shape = "" if facts.record is None else facts.record.shape
    unit = "interval" if shape in _INTERVALS else "row" if shape == _ROWS else "request"
    if (found := _of_sums(named, sums, slots, unit)) is not None:
        yield replace(found, is_estimate=any(averages))


def _of_sums(
    drafter: str,
    requests: list[tuple[dict[str, Any], int | None, int, int]],
    slots: Mapping[int, int],
    unit: str,
) -> DraftCounts | None:
    """requests: figures, sequence, number of the settings, and longest possible draft of each."""
    rows: list[tuple[int, ...]] = []
    came, passes = [], []
    has_first = True
    for number, (told, seq, setting, longest) in enumerate(requests):
        if not (drafted := _count(told, *_DRAFTED)):
            continue
        if (accepted := _count(told, *_ACCEPTED)) is None:
            if (rate := told.get("draft_acceptance_rate")) is None:
                continue
            accepted = round(rate * drafted)
        accepted = min(accepted, drafted)
        per_pos = _list(told, "num_accepted_tokens_per_pos")
        steps = _count(told, "num_spec_steps")
        has_first &= bool(steps and per_pos)
        rates = (told.get("acceptance_per_position") or {}).get("unconditional") or [None]
        longest = longest if rates[0] is None else len(rates)
        emitted = _count(told, "predicted_n")  # each draft is followed by one that was not drafted
        most = drafted if emitted is None else max(min(drafted, emitted - accepted), 1)
        n = min(steps or min(-(-drafted // longest), most), drafted)
        of_all = accepted if rates[0] is None else round(rates[0] * n)
        first = min(per_pos[0] if per_pos else of_all, n)
        pos = (_count(told, "prompt_n") or 0) + (_count(told, "cache_n") or 0) or MISSING
        seq = number if seq is None else seq
        slot = slots.get(seq, seq if unit == "request" else 0)
        rows.append((n, first, drafted, accepted, seq, slot, number, pos, setting))
        if steps and per_pos:
            if judged := _list(told, "num_judged_tokens_per_pos"):
                came.append(judged)
                passes.append(per_pos)
                continue
            offered = _list(told, "num_draft_tokens_per_pos")
            offered = offered or _least_offered(drafted, steps, len(per_pos))
            pairs = zip((steps, *per_pos[:-1]), offered, strict=False)
            came.append([max(c - max(steps - offer, 0), 0) for c, offer in pairs])
            passes.append(per_pos)
    sums = [list(map(sum, zip_longest(*one, fillvalue=0))) for one in (came, passes)]
    if not rows:
        return None
    n, first, drafts, taken, seqs, slot, at, at_pos, which = np.array(rows, np.int64).T
    reached, passed = (
        np.array([min(one, _MOST_SUM) for one in part[: min(map(len, sums))]], np.int64)
        for part in sums
    )
    return DraftCounts(
        drafter,
        n,
        first,
        drafts,
        taken,
        seqs,
        slot,
        at,
        at_pos,
        which,
        Survival(reached, np.minimum(passed, reached)),
        is_by_round=False,
        unit=unit,
        has_first=has_first,
    )


def _estimates(requests: list[RequestFacts]) -> Iterator[dict[str, int]]:
    """For intervals with averages only, the counts implied by these, the speed and the time since
    the previous interval; empty without. Good enough for significance."""
    before: dict[str, datetime] = {}
    for one in requests:
        names = "mean_acceptance_length", "predicted_per_second"
        mean, speed = map(one.told.get, names)
        if (time := one.record.get("time")) is None:
            yield {}
            continue
        engine = one.place.removesuffix(time := str(time))
        try:
            now = datetime.fromisoformat(time)
            seconds = (now - before.get(engine, now)).total_seconds()
        except (ValueError, TypeError):  # some have a time zone
            yield {}
            continue
        before[engine] = now
        steps = int(speed * min(max(seconds, 0), _LONGEST_INTERVAL) / mean) if speed and mean else 0
        if mean is None or mean < 1 or steps < 1 or _count(one.told, *_DRAFTED):
            yield {}
            continue
        accepted = round(steps * (mean - 1))
        rate = one.told.get("draft_acceptance_rate")
        drafted = max(round(accepted / rate) if rate and accepted else steps, steps, accepted)
        yield {"num_spec_steps": steps, _DRAFTED[0]: drafted, _ACCEPTED[0]: accepted}


_LONGEST_INTERVAL, _LEAST_AVERAGES = 600, 8
_MOST_SUM = 2**62
_DRAFTED = ("num_draft_tokens", "draft_n")
_ACCEPTED = ("num_accepted_draft_tokens", "draft_n_accepted")


def _least_offered(drafted: int, steps: int, n_pos: int) -> list[int]:
    """Lower bound of drafts with a token at each index, from their sum."""
    if drafted == steps * n_pos:
        return [steps] * n_pos
    return [
        min(steps, max(0, -(-(drafted - i * steps) // (n_pos - i)))) if n_pos > i else 0
        for i in range(n_pos)
    ]


def _slots(facts: RunFacts, requests: list[RequestFacts]) -> Iterator[tuple[int, int]]:
    """The slot of each sequence, if known, or an interval's engine."""
    for record in facts.prompt_reuse or ():
        yield record.seq_id, record.slot
    for one in requests:
        engine = _ENGINE.match(one.place)
        slot = one.slot if engine is None else int(engine[1])
        if slot is not None:
            yield from ((seq, slot) for seq in one.seq_ids)


def _setting(request: RequestFacts) -> str:
    """The settings of a request that acceptance depends on."""
    for one in (request.generation_settings, request.settings):
        if "temperature" in one:
            return str(one["temperature"])[:20]
    return ""


def _longest(request: RequestFacts) -> int:
    n_max = request.generation_settings.get("speculative.n_max")
    return n_max if isinstance(n_max, int) and n_max > 0 else _LONGEST_USUAL


def _count(told: dict[str, Any], *names: str) -> int | None:
    for name in names:
        value = told.get(name)
        if value is not None and isinstance(value, (int, float)) and 0 <= value < 2**53:
            return int(value)
    return None


def _list(told: dict[str, Any], name: str) -> list[int]:
    value = told.get(name)
    if not isinstance(value, list) or not {int, bool}.issuperset(map(type, value)):
        return []
    return value


def _ids(numbers: np.ndarray) -> np.ndarray:
    """Distinct small numbers renumbered from 0."""
    return np.flatnonzero(np.bincount(numbers))


def _mapped(seq: np.ndarray, names: Mapping[int, int]) -> np.ndarray:
    ids = _ids(seq)
    found = np.zeros(int(ids[-1]) + 1 if len(ids) else 0, np.int64)
    found[ids] = [names.get(one, one) for one in ids.tolist()]
    return found[seq]
