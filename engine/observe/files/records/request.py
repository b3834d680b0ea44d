"""Requests as recorded by other engines: counts under this program's names, and consistency
checks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, zip_longest
from operator import ge, mul
from typing import Any

import numpy as np
from msgspec import Struct

from engine.observe.rounds.counters import ACCEPTED, DRAFTED, DRAFTS, PREDICTED, PROMPT, Movement
from engine.observe.rounds.trace_rows import TokenColumns
from engine.trace.timings import BY_STEP, at_least, per_position, rates_by_index, speeds

_WHOLE = 1e-9
_MOST_STEPS = 1000
"""Numbers of steps that are tried."""
_OWN = "one more per step: the target's own token"
_SUMMED = ("cache_n", "prompt_n", "predicted_n")
TIMINGS = (
    *(*_SUMMED, "prompt_ms", *speeds("prompt", 0.0, 0)),
    *("predicted_ms", *speeds("predicted", 0.0, 0)),
)
"""llama-server's names, which mlx-vlm also uses."""
ALL_TIMINGS = (*TIMINGS, "predicted_per_token_ms_n_gen", "predicted_per_second_n_gen")
_NO_TIMINGS = dict.fromkeys(ALL_TIMINGS)
_NOT_BY_INDEX = dict.fromkeys(BY_STEP[2:])


class RecordedRequest(Struct):
    """A recorded request; None = not given.

    place: in the file. histogram[k]: steps that accepted k tokens. by_length[d]: the same for steps
    that drafted d. per_pos[i]: steps that accepted the token at index i. rates: the same as shares
    of the steps, as given. given: figures without their counts. judged[i]: drafts whose
    token at index i was judged, if not all drafts have one. n_merged: number of requests, or
    intervals. per_step_*: one entry per verification, in order. chunks: ids and text of each chunk
    of a stream. tokens: of the output, prompt_ids: of the prompt, if given. text: the output, if
    tokens do not give it. asked: the request as sent, if kept. timings: given figures of
    `engine.trace.timings.timings`. derived: figures that follow from others. record: the object
    itself. unknown: unread keys by path. contradictions: keys, by the engine's names, of
    inconsistent numbers, each with a sentence.
    """

    engine: str
    place: str
    model: str = ""
    stop: str = ""
    prompt_tokens: int | None = None
    num_spec_steps: int | None = None
    num_draft_tokens: int | None = None
    num_accepted_draft_tokens: int | None = None
    num_spec_tokens: int | None = None
    histogram: list[int] | None = None
    by_length: dict[int, list[int]] | None = None
    per_pos: list[int] | None = None
    judged: list[int] | None = None
    rates: list[float] | None = None
    given: dict[str, float] = {}
    per_step_drafted: list[int] | None = None
    per_step_accepted: list[int] | None = None
    chunks: Sequence[tuple[Sequence[int], str]] = ()
    tokens: TokenColumns = ((), ())
    prompt_ids: Sequence[int] = ()
    text: str = ""
    asked: Mapping[str, Any] = {}
    n_merged: int = 1
    timings: dict[str, int | float] = {}
    derived: tuple[str, ...] = ()
    record: dict[str, Any] = {}
    unknown: dict[str, Any] = {}
    contradictions: list[tuple[tuple[str, ...], str]] = []

    @property
    def has_steps(self) -> bool:
        """Whether every step is given, not only sums, without contradictions."""
        lists = self.per_step_drafted, self.per_step_accepted
        return None not in lists and not self.contradictions

    def set_tokens(self, prompt: int | None, cached: int | None, completion: int | None) -> None:
        """Set token counts under the names of `timings`, where the prompt is the uncached part."""
        self.prompt_tokens = prompt
        if prompt is not None and cached is not None and cached <= prompt:
            self.timings |= {"cache_n": cached, "prompt_n": prompt - cached}
        if completion is not None:
            self.timings["predicted_n"] = completion

    def learn_steps(self) -> None:
        """Derive steps from a stream's chunks, the first of which is the prompt's token, if there
        is one per step and all drafted equally many tokens: a chunk has the accepted tokens plus
        one. A limit may cut the last one."""
        steps, drafted = self.num_spec_steps, self.num_draft_tokens
        first, *sizes = [len(ids) for ids, _ in self.chunks if ids] or [0]
        if self.has_steps or first != 1 or not sizes or len(sizes) != steps or not drafted:
            return
        length, rest = divmod(drafted, len(sizes))
        if rest or max(sizes) > length + 1:
            return
        accepted = [n - 1 for n in sizes]
        left = (self.num_accepted_draft_tokens or 0) - sum(accepted)
        if 0 < left <= length - accepted[-1]:
            accepted[-1] += left
        self.per_step_accepted, self.per_step_drafted = accepted, [length] * len(sizes)

    def check(self, holds: bool, keys: Sequence[str], sentence: str) -> None:
        """Note a contradiction unless it holds."""
        if not holds:
            self.contradictions.append((tuple(keys), sentence))

    def steps_of(self, mean: float, half: float, rates: Sequence[float] = ()) -> int | None:
        """The only number of steps for which the accepted tokens have this mean length, within half
        a unit of its last digit, or the only one that also gives the shares by draft index, with
        three digits."""
        accepted = self.num_accepted_draft_tokens
        if accepted is None or mean - half <= 1:
            return None
        least = math.ceil(accepted / (mean - 1 + half))
        most = math.floor(accepted / (mean - 1 - half))
        if least < most < least + _MOST_STEPS and rates:
            found = [n for n in range(least, most + 1) if _makes(n, accepted, rates)]
            least, most = (found[0], found[-1]) if found else (0, 0)
        return least if least == most and least else None

    def set_rates(self, rates: Sequence[float], digits: int = 3) -> None:
        """Set shares of steps that accepted the token at each index: as counts if only these
        integers have the sum. Not if drafts were longer and accepted more: the list was cut."""
        steps, accepted = self.num_spec_steps, self.num_accepted_draft_tokens
        if not rates:
            return
        self.rates, self.num_spec_tokens = list(rates), len(rates)
        if not steps or accepted is None:
            return
        counts = [round(rate * steps) for rate in rates]
        total = sum(counts)
        if total == accepted:
            if all(map(ge, [steps, *counts], counts)):
                self.per_pos = counts
        elif total < accepted and (self.num_draft_tokens or 0) > steps * len(rates):
            self.rates = None
        elif abs(total - accepted) > len(rates) * (0.6 * 10.0**-digits * steps + 0.5):
            said = f"the acceptance rates per position give {total:,} accepted tokens in "
            said += f"{steps:,} drafts, but {accepted:,} are recorded"
            self.check(False, ("acceptance rate per position", "accepted"), said)

    def check_ratio(
        self,
        key: str,
        given: float | None,
        part: float | None,
        whole: float | None,
        *others: str,
        within: float = _WHOLE,
    ) -> None:
        """Note a contradiction unless a ratio equals that of the counts, within its digits.

        others: keys of the counts. A missing ratio, or one without counts, contradicts nothing.
        within: minimum tolerance.
        """
        if given is None or part is None or not whole:
            return
        ratio = part / whole
        off = abs(given - ratio)
        if off > max(within, _rounding(given)):
            sentence = f"{key} is {given:.6g}, but {' and '.join(others)} give {ratio:.6g}"
            self.check(False, (key, *others), sentence)

    def check_rate(
        self, key: str, given: float | None, keys: Mapping[str, str], of: int = 1, own: int = 0
    ) -> None:
        """The same for accepted / drafted tokens, `of` times, or per step, with one own token each.
        keys: see `check_counts`."""
        whole = "num_spec_steps" if own else "num_draft_tokens"
        accepted, n = self.num_accepted_draft_tokens, getattr(self, whole)
        part = None if accepted is None or n is None else of * accepted + own * n
        self.check_ratio(key, given, part, n, keys["num_accepted_draft_tokens"], keys[whole])

    def check_counts(self, keys: Mapping[str, str]) -> None:
        """Check the counts against each other. keys: this record's name of each field."""
        steps, drafted = self.num_spec_steps, self.num_draft_tokens
        accepted, histogram = self.num_accepted_draft_tokens, self.histogram

        def say(holds: bool, sentence: str, *fields: str) -> None:
            """sentence: with {} for the name of each field."""
            if not holds:
                names = [keys[one] for one in fields]
                self.check(False, names, sentence.format(*names))

        def same(field: str, of: str, sum_: int, what: str, own: str = "") -> None:
            """own: a total that has one more per step."""
            if (total := getattr(self, of)) not in (None, sum_):
                more = f", {own}" if own and steps and total - sum_ == steps else ""
                say(False, f"{{}} {what} {sum_:,}, but {{}} is {total:,}{more}", field, of)

        if histogram is not None:
            same("histogram", "num_spec_steps", sum(histogram), "counts steps:")
            n_all = sum(j * n for j, n in enumerate(histogram))
            same("histogram", "num_accepted_draft_tokens", n_all, "counts accepted tokens:", _OWN)
            most = max((j for j, n in enumerate(histogram) if n), default=0)
            holds = self.num_spec_tokens is None or most <= self.num_spec_tokens
            said = f"{{}} has steps with {most} accepted tokens, more than {{}}"
            say(holds, said, "histogram", "num_spec_tokens")
        if self.per_pos is not None and "per_pos" in keys:
            same("per_pos", "num_accepted_draft_tokens", sum(self.per_pos), "sums to")
            reached = ([] if steps is None else [steps]) + self.per_pos
            said = "{} increases with the position, or is more than {}"
            say(all(map(ge, reached, reached[1:])), said, "per_pos", "num_spec_steps")
        if drafted is not None and accepted is not None:
            said = f"{{}} is {accepted:,}, more than {{}}, {drafted:,}"
            say(accepted <= drafted, said, "num_accepted_draft_tokens", "num_draft_tokens")
        self._check_lengths(say, same)
        self._check_steps(say, same)

    def _check_lengths(self, say: Callable[..., None], same: Callable[..., None]) -> None:
        if self.by_length is None:
            return
        found = _added([*self.by_length.values()]) or []
        for length, row in self.by_length.items():
            said = f"{{}} has steps that accepted more than the {length} drafted tokens"
            say(not any(row[length + 1 :]), said, "by_length")
        if self.histogram is not None:
            holds = all(n == m for n, m in zip_longest(found, self.histogram, fillvalue=0))
            say(holds, "the sums of {} do not equal {}", "by_length", "histogram")
        same("by_length", "num_spec_steps", sum(found), "counts steps:")
        drafted = sum(length * sum(row) for length, row in self.by_length.items())
        same("by_length", "num_draft_tokens", drafted, "counts drafted:")

    def _check_steps(self, say: Callable[..., None], same: Callable[..., None]) -> None:
        drafted, accepted = self.per_step_drafted, self.per_step_accepted
        names = "per_step_accepted", "per_step_drafted"
        for name, values, total, own in (
            (names[1], drafted, "num_draft_tokens", ""),
            (names[0], accepted, "num_accepted_draft_tokens", _OWN),
        ):
            if values is not None:
                same(name, "num_spec_steps", len(values), "has entries:")
                same(name, total, sum(values), "sums to", own)
        if accepted is not None and self.histogram is not None:
            counts = {n: steps for n, steps in enumerate(self.histogram) if steps}
            said = "{} and {} do not have the same counts"
            say(counts == Counter(accepted), said, names[0], "histogram")
        if drafted is None or accepted is None:
            return
        holds = len(drafted) == len(accepted) and all(map(ge, drafted, accepted))
        say(holds, "{} and {} differ in length, or a step accepted more than it drafted", *names)
        if self.by_length is not None:
            lengths = {d: sum(row) for d, row in self.by_length.items() if any(row)}
            said = "{} and {} do not have the same draft lengths"
            say(lengths == Counter(drafted), said, names[1], "by_length")

    def figures(self) -> dict[str, Any]:
        """Given or derived figures of `engine.trace.timings.summary`; the others are None. Empty if
        the record contradicts itself."""
        if self.contradictions:
            return {}
        figures = _figures(self)
        if self.per_pos is None and self.histogram is None:
            figures.update(_NOT_BY_INDEX)
        else:
            figures.update(_by_index([self]))
        if self.rates and figures["acceptance_per_position"] is None:
            figures["acceptance_per_position"] = _as_given(self.rates)
        return figures | {k: one for k, one in self.given.items() if figures.get(k) is None}


def _makes(steps: int, accepted: int, rates: Sequence[float]) -> bool:
    """Whether integer numbers of steps have these shares, with three digits, and the sum."""
    counts = [round(rate * steps) for rate in rates]
    pairs = zip(counts, rates, strict=True)
    return sum(counts) == accepted and all(abs(n / steps - one) <= 0.000501 for n, one in pairs)


def sums_of(moved: Movement) -> RecordedRequest:
    """Change of a server's counters, as a request."""
    found = RecordedRequest("", "")
    found.num_spec_steps = moved.count(DRAFTS)
    found.num_draft_tokens = moved.count(DRAFTED)
    found.num_accepted_draft_tokens = moved.count(ACCEPTED)
    if found.num_spec_steps is not None:
        found.per_pos = [int(one) for one in moved.per_position] or None
    counts = ("predicted_n", moved.count(PREDICTED)), ("prompt_n", moved.count(PROMPT))
    found.timings = {name: value for name, value in counts if value is not None}
    return found


def sum_figures(requests: Sequence[RecordedRequest]) -> dict[str, Any]:
    """The figures of several requests together, by the names of `engine.trace.timings.summary`.

    A sum is None if a request lacks its part. Self-contradictory records are left out.
    """
    sound = [request for request in requests if not request.contradictions]
    if len(sound) == 1:
        return sound[0].figures()
    # rates and times of several requests do not add up
    return _figures(merged(sound or [RecordedRequest("", "")], "")) | _by_index(sound)


def _figures(one: RecordedRequest) -> dict[str, Any]:
    """The figures that follow from counts and timings."""
    steps, drafted = one.num_spec_steps, one.num_draft_tokens
    accepted = one.num_accepted_draft_tokens
    figures: dict[str, Any] = {**_NO_TIMINGS, **one.timings}
    if drafted is not None and accepted is not None:
        figures |= {"draft_n": drafted, "draft_n_accepted": accepted}
    n, is_known = accepted or 0, accepted is not None
    return figures | {
        "num_spec_steps": steps,
        "num_draft_tokens": drafted,
        "num_accepted_draft_tokens": accepted,
        "mean_acceptance_length": 1 + n / steps if steps and is_known else None,
        "draft_acceptance_rate": n / drafted if drafted and is_known else None,
    }


def merged(requests: Sequence[RecordedRequest], place: str) -> RecordedRequest:
    """Several requests as one: sums if all have them. Figures without counts are averaged over
    those that have them."""
    first = requests[0]
    found = RecordedRequest(first.engine, place, first.model, first.stop)
    for name in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens"):
        setattr(found, name, _sum([getattr(one, name) for one in requests]))
    for name in _SUMMED if first.timings else ():
        if (total := _sum([one.timings.get(name) for one in requests])) is not None:
            found.timings[name] = total
    found.per_pos = _added([one.per_pos for one in requests])
    found.judged = _added([one.judged for one in requests])
    counts = [one.n_merged for one in requests]
    found.n_merged = sum(counts)
    for name in first.given:
        numbers = [n for one, n in zip(requests, counts, strict=True) if name in one.given]
        values = [one.given[name] for one in requests if name in one.given]
        found.given[name] = sum(map(mul, values, numbers)) / sum(numbers)
    found.contradictions = [c for one in requests for c in one.contradictions][:1]
    return found


def _as_given(rates: Sequence[float]) -> dict[str, list[float | None]]:
    """Rates by index as given by a record, and what follows from these alone."""
    pairs = zip([1.0, *rates], rates, strict=False)
    return {
        "unconditional": list(rates),
        "unconditional_given_drafted": [None] * len(rates),
        "conditional": [min(one / before, 1.0) if before else None for before, one in pairs],
    }


def joint_counts(requests: Sequence[RecordedRequest]) -> np.ndarray | None:
    """Steps by tokens drafted (rows) and accepted (columns), int64 [K + 1, K + 1]; None if one has
    no draft lengths."""
    n_of = Counter[tuple[int, int]]()
    for one in requests:
        if one.per_step_drafted is not None and one.per_step_accepted is not None:
            n_of.update(zip(one.per_step_drafted, one.per_step_accepted, strict=True))
        elif one.by_length is not None:
            for drafted, row in one.by_length.items():
                n_of.update({(drafted, a): n for a, n in enumerate(row) if n})
        else:
            return None
    size = 1 + max((drafted for drafted, _ in n_of), default=0)
    counts = np.zeros((size, size), np.int64)
    for cell, n in n_of.items():
        counts[cell] = n
    return counts


def _by_index(requests: Sequence[RecordedRequest]) -> dict[str, Any]:
    """Histogram and rates by draft index, if every record with drafts has them."""
    requests = [r for r in requests if r.num_spec_steps != 0 or r.histogram or r.per_pos]
    summed = _added(list(map(_histogram, requests))) if requests else None
    if summed is None:
        return dict(_NOT_BY_INDEX)
    if (joint := joint_counts(requests)) is not None:
        found = per_position(joint)
    else:  # the number drafted at an index is unknown
        reached = at_least(summed)
        judged = _added([request.judged for request in requests])
        whole = [n - of for n, of in zip(reached, judged or (), strict=False)]
        found = rates_by_index([0] * len(summed), reached, whole)
        found["num_draft_tokens_per_pos"] = None
        found |= {"num_judged_tokens_per_pos": judged} if judged else {}
    return {"acceptance_histogram": summed, **found}


def _histogram(request: RecordedRequest) -> list[int] | None:
    if request.histogram is not None or request.per_pos is None:
        return request.histogram
    if request.num_spec_steps is None:
        return None
    reached = [request.num_spec_steps, *request.per_pos, 0]
    found = [one - more for one, more in pairwise(reached)]
    return found if min(found) >= 0 else None


def _added(lists: Sequence[Sequence[int] | None]) -> list[int] | None:
    """Sums of counts by index; None if one has none."""
    return None if None in lists else list(map(sum, zip_longest(*lists, fillvalue=0)))  # type: ignore[arg-type]


def _sum(values: Sequence[int | float | None]) -> Any:
    return sum(values) if values and None not in values else None


def _rounding(given: float) -> float:
    """Tolerance of a number written with three decimals or more."""
    text = repr(given)
    if isinstance(given, int) or "e" in text:
        return _WHOLE * max(1.0, abs(given))
    decimals = len(text.partition(".")[2])
    return max(0.5001 * 10.0**-decimals, _WHOLE) if decimals >= 3 else _WHOLE
