"""Real runs of a few settings beside plain decoding, in alternation.

Within a round of measurements every prompt is decoded in every configuration, and which one is
first changes from prompt to prompt, so what else the machine does hits them alike. A round gives
one speed for each configuration; two configurations are compared round by round with a sign test,
which assumes nothing about how times are distributed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb
from typing import TYPE_CHECKING

from engine.bench.request import PLAIN, Configuration, RequestResult, measure_request
from engine.options import Prompt

if TYPE_CHECKING:
    from engine.session import Session

SIGNIFICANT = 0.05
"""A probability below this shows a difference; six rounds all of one sign have 0.031."""


@dataclass(frozen=True, slots=True)
class Confirmed:
    """One configuration. speeds: tokens per second, one for each round. same: prompts whose tokens
    are plain decoding's. requests: of all rounds, prompt by prompt."""

    name: str
    speeds: tuple[float, ...]
    same: int
    n_prompts: int
    requests: tuple[RequestResult, ...]

    @property
    def median(self) -> float:
        """Of the speeds."""
        return statistics.median(self.speeds)


@dataclass(frozen=True, slots=True)
class Comparison:
    """a against b, round by round. wins: rounds in which a was faster. p: two-sided. ratio: the
    median of a's speed over b's."""

    a: str
    b: str
    wins: int
    n: int
    p: float
    ratio: float

    @property
    def is_shown(self) -> bool:
        """Whether there is a difference that is not put down to chance."""
        return self.p < SIGNIFICANT

    @property
    def words(self) -> str:
        """The verdict in a sentence."""
        odds = f"{self.wins} of {self.n} pairs, p {self.p:.3f}"
        if not self.is_shown:
            return f"no difference shown between {self.a} and {self.b} ({odds})"
        word = "faster" if self.wins * 2 > self.n else "slower"
        return f"{self.a} is {word} than {self.b}: {self.ratio:.2f} times its speed ({odds})"


def confirm(
    session: Session,
    prompts: Sequence[tuple[str, Prompt]],
    configurations: Sequence[Configuration],
    pairs: int,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> list[Confirmed]:
    """Measure. configurations: the plain one first. pairs: rounds. report: is told requests done
    and in all. Raises what Session.start raises."""
    if [one.name for one in configurations[:1]] != [PLAIN]:
        raise ValueError("the first configuration is not the plain one")
    taken: dict[str, list[list[RequestResult]]] = {one.name: [] for one in configurations}
    total, done = pairs * len(prompts) * len(configurations), 0
    for number in range(pairs):
        for rows in taken.values():
            rows.append([])
        for i, (name, prompt) in enumerate(prompts):
            first = (number + i) % len(configurations)
            for one in [*configurations[first:], *configurations[:first]]:
                taken[one.name][-1].append(measure_request(session, prompt, name, one))
                done += 1
                report(done, total)
    plain = [request.tokens for request in taken[PLAIN][0]]
    return [_confirmed(name, rounds, plain) for name, rounds in taken.items()]


def _confirmed(
    name: str, rounds: Sequence[Sequence[RequestResult]], plain: Sequence[tuple[int, ...]]
) -> Confirmed:
    same = sum(
        all(requests[i].tokens == tokens for requests in rounds) for i, tokens in enumerate(plain)
    )
    every = tuple(request for requests in rounds for request in requests)
    return Confirmed(name, tuple(map(speed, rounds)), same, len(plain), every)


def speed(requests: Sequence[RequestResult]) -> float:
    """Tokens per second over requests, the free first token of each left out; 0 where nothing was
    timed."""
    ms = sum(request.predicted_ms for request in requests)
    return 1e3 * sum(request.predicted_n - 1 for request in requests) / ms if ms else 0.0


def compare(a: Confirmed, b: Confirmed) -> Comparison:
    """Round by round, as many as both have; ties count for neither."""
    pairs = [(x, y) for x, y in zip(a.speeds, b.speeds, strict=True) if x != y]
    wins = sum(x > y for x, y in pairs)
    ratios = [x / y for x, y in zip(a.speeds, b.speeds, strict=True) if y]
    ratio = statistics.median(ratios) if ratios else float("nan")
    return Comparison(a.name, b.name, wins, len(pairs), sign_test(wins, len(pairs)), ratio)


def sign_test(wins: int, n: int) -> float:
    """Two-sided probability of at least so lopsided a result of n fair coins."""
    if not n:
        return 1.0
    least = min(wins, n - wins)
    return float(min(1.0, 2 * sum(comb(n, i) for i in range(least + 1)) / 2**n))
