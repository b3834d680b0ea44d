"""Intervals with sums of other engines, line by line or in columns of a block; a run keeps a
limited number, then merges neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, repeat, zip_longest
from operator import add, ge, itemgetter
from statistics import median
from typing import Any, TypeAlias

import numpy as np

from engine.foreign import OutOfRangeError
from engine.observe.files.records.column_names import SUM_DIGITS, mean_of
from engine.observe.files.records.request import RecordedRequest, merged
from engine.observe.rounds.log_lines import OfShape, time_of

MOST_INTERVALS = 8192
"""Intervals per run; neighbours are merged above this, so that a log of months is one run."""
_FEW = 8
"""Fewer lines are not read by column, or not compared."""
_SLOWER, _HALF = 0.9, 0.5

_Part: TypeAlias = tuple[Any, ...]
"""Merged lines of an engine: text before the first line, number of lines, and vLLM's drafts,
accepted and drafted tokens, and accepted by position, or SGLang's averages by name."""
_Waiting: TypeAlias = tuple[str, _Part | None, Callable[[], RecordedRequest]]
"""A line that becomes an interval only in a short log: its engine, its part (None if it has more
than that), and what makes the interval."""


@dataclass(slots=True)
class LineRun:
    """Requests, or intervals, that become a run. last: previous values of cumulative counts.
    speeds: from the engine's latest speed line, with the requests if no drafts are known. per:
    lines per interval; waiting: those of the next one, by engine. on_NAME: applies a line by its
    name in `line_words`; raises OutOfRangeError before it changes anything, and returns whether the
    line was accepted."""

    shape: str
    name: str
    requests: list[RecordedRequest | _Waiting] = field(default_factory=list)
    findings: list[dict[str, Any]] = field(default_factory=list)
    last: dict[str, list[int]] = field(default_factory=dict)
    per: int = 1
    waiting: dict[str, list[RecordedRequest | _Part]] = field(default_factory=dict)
    speeds: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    plain: dict[float, list[float]] = field(default_factory=dict)
    """Tokens per second of decode batches, or intervals, without drafts, by number of requests."""
    engine: str = ""
    open: RecordedRequest | None = None
    """A request that following lines may add to."""
    n_unread: int = 0
    first_unread: str = ""

    def opens(self, request: RecordedRequest | None) -> None:
        """Start the next such request, if any."""
        if self.open is not None:
            self.add("", None, partial(made, self.open))
        self.open = request

    def add(self, label: str, part: _Part | None, make: Callable[[], RecordedRequest]) -> None:
        """Add a line of an engine, see _Waiting."""
        if self.per == 1:
            self._keep((label, part, make))
        else:
            self._wait(label, make() if part is None else part)

    def _wait(self, label: str, one: RecordedRequest | _Part) -> None:
        """Add lines of an engine that fit its next interval."""
        waiting = self.waiting.setdefault(label, [])
        if waiting and isinstance(one, tuple) and isinstance(waiting[-1], tuple):
            waiting[-1] = _plus(waiting[-1], one)
        else:
            waiting.append(one)
        if self._room(label) <= 0:
            self.close(label)

    def _room(self, label: str) -> int:
        """Lines missing from an engine's next interval."""
        waiting = self.waiting.get(label, ())
        return self.per - sum(one[1] if isinstance(one, tuple) else 1 for one in waiting)

    def _keep(self, one: RecordedRequest | _Waiting) -> None:
        self.requests.append(one)
        if len(self.requests) >= MOST_INTERVALS:
            self.requests = _thinned(self.requests)
            self.per *= 2

    def has_unread(self, number: int, why: str) -> None:
        """Count an unreadable line."""
        self.n_unread += 1
        self.first_unread = self.first_unread or f"line {number}: {why}"

    def close(self, label: str) -> None:
        """Make the waiting lines of an engine an interval."""
        if found := [_interval(label, one) for one in self.waiting.pop(label, [])]:
            more = len(found) > 1
            self._keep(merged(found, f"{found[0].place} and after") if more else found[0])

    def on_speed(self, _kind: str, _prefix: str, engine: str | None, *speeds: Any) -> bool:
        """An engine's speed line, which precedes the line about drafts of the same seconds, if
        any."""
        self.engine = engine or self.engine
        _, speed, running = self.speeds.get(self.engine, (0.0, 0.0, None))
        self._is_plain(running, speed or None)
        self.speeds[self.engine] = speeds
        return True

    def _is_plain(self, running: float | None, speed: float | None) -> None:
        """Note the speed of this number of requests without drafts, if both are known."""
        if running is not None and speed is not None and len(self.plain) < MOST_INTERVALS:
            self.plain.setdefault(running, []).append(speed)
            del self.plain[running][MOST_INTERVALS:]

    def on_vllm(
        self,
        kind: str,
        prefix: str,
        engine: str | None,
        accepted: int | None,
        drafted: int | None,
        emitted: int | None,
        length: int | None,
        mean: str | None,
        rate: float | None,
        accepted_speed: float | None,
        drafted_speed: float | None,
        *rates: float,
    ) -> bool:
        """Sums of an interval. kind: "%" for a rate in percent, "since" for counts since the
        engine's start."""
        if drafted is None or accepted is None:
            return False
        if accepted > drafted:
            raise OutOfRangeError(f"{accepted:,} is more than {drafted:,}")
        self.engine = engine or self.engine
        label = _label("vllm", self.engine)
        ratio = None if rate is None else rate / 100 if kind == "%" else rate
        if kind == "since":
            ratio, now = None, [accepted, drafted, emitted or 0]
            before = self.last.get(self.engine, [0, 0, 0])
            self.last[self.engine] = now
            if all(one <= more for one, more in zip(before, now, strict=True)):
                accepted, drafted = accepted - before[0], drafted - before[1]
                emitted = None if emitted is None else emitted - before[2]
        speeds = self.speeds.pop(self.engine, None)
        self.speeds = {of: (*one[:2], None) for of, one in self.speeds.items()}  # possibly theirs
        counts = None
        if emitted is None and rates and drafted:
            counts = _exact_counts(accepted, drafted, mean, ratio, rates)

        n_accepted, n_drafted = accepted, drafted

        def make() -> RecordedRequest:
            found = _started(_engine_of(prefix), label, prefix)
            found.num_draft_tokens, found.num_accepted_draft_tokens = n_drafted, n_accepted
            if emitted is not None:
                found.timings["predicted_n"] = emitted
            found.rates, found.num_spec_tokens = list(rates) or None, length or len(rates) or None
            found.num_spec_steps = _steps(found, mean or "", n_drafted, n_accepted)
            found.set_rates(rates)
            keys = "Draft acceptance rate", ratio, n_accepted, n_drafted, "Accepted", "Drafted"
            found.check_ratio(*keys, within=SUM_DIGITS)
            told = {"accepted_per_second": accepted_speed, "drafted_per_second": drafted_speed}
            found.record |= {name: one for name, one in told.items() if one is not None}
            if speeds is not None:
                found.timings |= {"prompt_per_second": speeds[0], "predicted_per_second": speeds[1]}
                found.record["running"] = speeds[2]
            return found

        part = None
        if counts is not None:
            part = prefix, 1, drafted // len(rates), accepted, drafted, counts
        self.add(label, part, make)
        return True

    def on_batch(
        self,
        kind: str,
        prefix: str,
        rank: str | None,
        mean: float | None,
        rate: float | None,
        speed: float | None,
        running: float | None,
    ) -> bool:
        """Averages of an SGLang decode batch."""
        if mean is None and rate is None:
            self._is_plain(running, speed)
            return kind == "plain"
        if rate is not None and rate > 1:
            raise OutOfRangeError(f"accept rate {rate:g} is more than 1")
        label = _label("batch", rank)
        given = {"mean_acceptance_length": mean, "draft_acceptance_rate": rate}
        known = {name: value for name, value in given.items() if value is not None}

        def make() -> RecordedRequest:
            found = _started("sglang", label, prefix)
            found.given = known
            if speed is not None:
                found.timings["predicted_per_second"] = speed
            if running is not None:
                found.record["running"] = running
            return found

        self.add(label, (prefix, 1, {name: [value] for name, value in known.items()}), make)
        return True

    def slower(self) -> Iterator[dict[str, Any]]:
        """A finding if batches, or intervals, with drafts of which at least half were accepted had
        fewer tokens per second than those without, for as many requests."""
        rate_of, speed_of = "draft_acceptance_rate", "predicted_per_second"
        requests = map(made, self.requests if self.plain else ())
        drafted = [one.record | one.figures() for one in requests]
        drafted = [one for one in drafted if None not in map(one.get, (rate_of, speed_of))]
        for n, plain in self.plain.items():
            known = [(one[rate_of], one[speed_of]) for one in drafted if one.get("running") == n]
            if min(len(plain), len(known)) < _FEW:
                continue
            rate, speed, without = map(median, (*zip(*known, strict=True), plain))
            if rate >= _HALF and speed < _SLOWER * without:
                yield {
                    "rule": "slower-than-plain",
                    "message": f"{rate:.0%} of the drafted tokens are accepted, but log lines "
                    f"with drafts show only {speed / without:.2f} times the tokens per "
                    "second of lines without drafts.",
                    "evidence": f"{n:g} running: {speed:g} tokens per second in {len(known):,} "
                    f"lines, {without:g} in {len(plain):,} without drafts (medians)",
                }

    # -- the lines of a block ------------------------------------------------------------------

    def says(self, name: str, kind: str, *values: Any) -> bool:
        """Whether a line was accepted. Raises OutOfRangeError."""
        is_said: bool = getattr(self, f"on_{name}")(kind, *values)
        return is_said

    def take(self, parts: Sequence[OfShape]) -> list[int]:
        """Apply lines in order; returns those that are not accepted."""
        speeds = [one for one in parts if one[0] == "speed"]
        sums = [one for one in parts if one[0] != "speed"]
        n = len(sums[0][2]) if sums else 0
        becomes_sums = self.per > 1 or len(self.requests) + n >= MOST_INTERVALS
        if len(sums) == 1 and len(speeds) <= 1 and n >= _FEW and becomes_sums:
            return self._take(*sums, *speeds)
        lines = [
            (n, one, row)
            for one in parts
            for n, row in zip(one[2].tolist(), _rows(one), strict=True)
        ]
        lines.sort(key=itemgetter(0))
        return [n for n, (name, kind, *_), row in lines if not self._takes(name, kind, row)]

    def _takes(self, name: str, kind: str, values: tuple[Any, ...]) -> bool:
        """Whether a line is accepted."""
        try:
            return self.says(name, kind, *values)
        except OutOfRangeError:
            return False

    def _take(self, part: OfShape, speeds: OfShape | None = None) -> list[int]:
        """Apply lines of a shape, with speed lines between them."""
        name, kind, lines, columns = part
        prefixes, engines = columns[0], _listed(columns[1])
        speed_lines, said = (
            (speeds[2], speeds[3]) if speeds is not None else (lines[:0], [None] * 5)
        )
        heard_of = _listed(said[1])
        parts = (repeat(None) if one is None else one.tolist() for one in said[2:])
        heard = zip(speed_lines.tolist(), heard_of or repeat(None), *parts, strict=False)
        hears = [next(heard, None)]

        def hear(before: int) -> None:
            while (one := hears[0]) is not None and one[0] < before:
                self.on_speed("", "", *one[1:-1], None)
                hears[0] = next(heard, None)

        if engines is None and heard_of is not None:
            after = np.searchsorted(speed_lines, lines).tolist()
            engines = list(map([self.engine, *heard_of].__getitem__, after))
        engines = engines or [self.engine if name == "vllm" else ""] * len(lines)
        labels = list(dict.fromkeys(engines))
        of = np.array(list(map({one: i for i, one in enumerate(labels)}.__getitem__, engines)))
        rows = _rows(part) if self.per == 1 else []
        is_plain, sums = _plain_lines(name, kind, columns, len(lines))
        bad, i = [], 0
        while i < len(lines):
            stops = np.flatnonzero(~is_plain[i:])
            end = i + int(stops[0]) if len(stops) else len(lines)
            if self.per == 1 or end == i:
                hear(int(lines[i]))
                (row,) = rows[i : i + 1] if rows else _rows(part, i)
                bad += [] if self._takes(name, kind, row) else [int(lines[i])]
                i += 1
                continue
            begin, i = (
                i,
                self._wait_for(
                    i,
                    end,
                    [_label(name, one) for one in labels],
                    of,
                    lambda rows: (prefixes[rows[0]], len(rows), *sums(rows)),
                ),
            )
            last = [
                (int(mine[-1]), one)
                for j, one in enumerate(labels)
                if len(mine := begin + np.flatnonzero(of[begin:i] == j))
            ]
            for at, engine in sorted(last):
                hear(int(lines[at]))
                self.speeds.pop(engine, None)
                self.engine = engine if name == "vllm" else self.engine
        hear(1 << 62)
        return bad

    def _wait_for(
        self,
        begin: int,
        end: int,
        labels: list[str],
        of: np.ndarray,
        part: Callable[[np.ndarray], _Part],
    ) -> int:
        """Add a range of lines, up to where they fill an interval; returns that place. of: each
        line's engine."""
        whole, rest = [], []
        for number, label in enumerate(labels):
            mine = begin + np.flatnonzero(of[begin:end] == number)
            cuts = [0, *range(self._room(label), len(mine) + 1, self.per), len(mine)]
            *full, last = ((label, mine[a:b]) for a, b in pairwise(cuts))
            whole += full
            rest += [last] if len(last[1]) else []
        per, left = self.per, iter(sorted(whole, key=lambda one: int(one[1][-1])))
        for label, rows in left:
            self._wait(label, part(rows))
            if self.per != per:
                end = int(rows[-1]) + 1
                break
        rest += left
        for label, rows in sorted(rest, key=lambda one: int(one[1][0])):
            if len(rows := rows[rows < end]):
                self._wait(label, part(rows))
        return end


def _plain_lines(
    name: str, kind: str, columns: Sequence[Any], n: int
) -> tuple[np.ndarray, Callable[[np.ndarray], tuple[Any, ...]]]:
    """Lines of a shape with plain sums, or averages, and a function that returns these."""
    if name == "batch":
        _, _, mean, rate, *_ = columns
        known = {"mean_acceptance_length": mean, "draft_acceptance_rate": rate}
        known = {key: one for key, one in known.items() if one is not None}
        is_plain = np.full(n, bool(known)) if rate is None else rate <= 1
        return is_plain, lambda rows: ({key: one[rows].tolist() for key, one in known.items()},)
    _, _, accepted, drafted, emitted, _, mean, rate, _, _, *rates = columns
    if kind == "since" or accepted is None or drafted is None or emitted is not None or not rates:
        return np.zeros(n, bool), lambda rows: ()
    steps = drafted // len(rates)
    counts = np.rint(np.array(rates) * steps).astype(np.int64)
    is_plain = (steps * len(rates) == drafted) & (drafted > 0) & (counts.sum(0) == accepted)
    is_plain &= (np.diff(counts, axis=0, prepend=steps[None]) <= 0).all(0)
    if mean is not None:
        means = np.array(list(map(mean_of, mean.tolist())))
        is_plain &= abs(1 + accepted / np.maximum(steps, 1) - means[:, 0]) <= means[:, 1]
    if rate is not None:
        share = accepted / np.maximum(drafted, 1)
        is_plain &= abs((rate / 100 if kind == "%" else rate) - share) <= SUM_DIGITS

    def sums(rows: np.ndarray) -> tuple[Any, ...]:
        totals = (int(one[rows].sum()) for one in (steps, accepted, drafted))
        return *totals, counts[:, rows].sum(1).tolist()

    return is_plain, sums


def _label(name: str, engine: str | None) -> str:
    """An engine's, or SGLang rank's, part of a place."""
    return f"{'rank' if name == 'batch' else 'engine'} {engine}" if engine else ""


def _rows(part: OfShape, at: int | None = None) -> list[tuple[Any, ...]]:
    """Values of lines, or of one."""
    cut = slice(None) if at is None else slice(at, at + 1)
    columns = (repeat(None) if one is None else one[cut].tolist() for one in part[3])
    return list(zip(*columns, strict=False))


def _listed(column: Any) -> list[str] | None:
    return None if column is None else column.tolist()


def _plus(one: _Part, more: _Part) -> _Part:
    """The union of two parts; the first may be modified."""
    prefix, n, *sums = one
    if len(sums) == 1:
        for name, values in more[2].items():
            sums[0].setdefault(name, []).extend(values)
        return prefix, n + more[1], sums[0]
    counts = [a + b for a, b in zip_longest(sums[-1], more[-1], fillvalue=0)]
    return prefix, n + more[1], *map(add, sums[:-1], more[2:-1]), counts


def _interval(label: str, part: RecordedRequest | _Part) -> RecordedRequest:
    """Consecutive lines of an engine as one interval."""
    if isinstance(part, RecordedRequest):
        return part
    prefix, n, *sums = part
    found = _started("sglang" if len(sums) == 1 else _engine_of(prefix), label, prefix, n)
    if len(sums) == 1:
        for name, values in sorted(sums[0].items()):
            found.given[name] = sum(values) / len(values)
        return found
    found.num_spec_steps, found.num_accepted_draft_tokens, found.num_draft_tokens = sums[:3]
    found.per_pos = sums[3]
    return found


def _started(engine: str, label: str, prefix: str, n: int = 1) -> RecordedRequest:
    """An interval, or n neighbours as one, without draft figures."""
    time = time_of(prefix)
    place = ", ".join(filter(None, (label, time))) + " and after" * (n > 1)
    record = {"time": time} if time else {}
    return RecordedRequest(engine, place, stop="interval", n_merged=n, record=record)


def _engine_of(prefix: str) -> str:
    """LMDeploy prints vLLM's line after its own about throughput."""
    return "lmdeploy" if "Avg thr (in/out)" in prefix else "vllm"


def _exact_counts(
    accepted: int, drafted: int, mean: str | None, ratio: float | None, rates: Sequence[float]
) -> list[int] | None:
    """Number of drafts accepted at each position, if all drafts have as many tokens as positions
    and everything in a line is consistent."""
    steps, rest = divmod(drafted, len(rates))
    counts = [round(rate * steps) for rate in rates]
    holds = not rest and sum(counts) == accepted and all(map(ge, [steps, *counts], counts))
    holds = holds and (not mean or _is_mean(1 + accepted / steps, mean))
    holds = holds and (ratio is None or abs(ratio - accepted / drafted) <= SUM_DIGITS)
    return counts if holds else None


def _is_mean(value: float, mean: str) -> bool:
    """Whether a mean length would be printed this way."""
    number, half = mean_of(mean)
    return abs(value - number) <= half


def _thinned(requests: list[RecordedRequest | _Waiting]) -> list[RecordedRequest | _Waiting]:
    """Half as many, by merging pairs of neighbours of one engine."""
    by_engine: dict[str, list[RecordedRequest | _Waiting]] = {}
    for one in requests:
        label = one[0] if isinstance(one, tuple) else one.place.partition(", ")[0]
        by_engine.setdefault(label if label.startswith(("engine ", "rank ")) else "", []).append(
            one
        )
    return [
        _together(label, group[i : i + 2])
        for label, group in by_engine.items()
        for i in range(0, len(group), 2)
    ]


def _together(label: str, pair: Sequence[RecordedRequest | _Waiting]) -> RecordedRequest:
    """Two neighbours, or a single one, as one."""
    parts = [one[1] for one in pair if isinstance(one, tuple) and one[1] is not None]
    if len(parts) == 2 and (len(parts[0]) > 3 or parts[0][2].keys() == parts[1][2].keys()):
        return _interval(label, _plus(*parts))
    whole = list(map(made, pair))
    return merged(whole, f"{whole[0].place} and after")


def made(one: RecordedRequest | _Waiting) -> RecordedRequest:
    """A waiting line as an interval."""
    return one[2]() if isinstance(one, tuple) else one


def _steps(found: RecordedRequest, mean: str, drafted: int, accepted: int) -> int | None:
    """Number of drafts: all with as many tokens as positions, if that gives the mean length; else
    the number that does, if any."""
    n = found.num_spec_tokens
    if n and drafted and drafted % n == 0:
        steps = drafted // n
        if not mean or _is_mean(1 + accepted / steps, mean):
            return steps
    if not mean:
        return None
    found.given["mean_acceptance_length"] = mean_of(mean)[0]  # if the counts contradict it
    return found.steps_of(*mean_of(mean), found.rates or ())
