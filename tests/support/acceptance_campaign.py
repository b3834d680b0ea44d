"""Runs with a planted cause of low acceptance, and runs without one, drawn by seed.

The suite plays some; `python -m tests.support.acceptance_campaign N [--seed S]` plays N of each and
prints how many causes are named rightly, by cause, and every clean run that is accused. With --real
it also plays N clean runs of the demo model.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np

from engine.analysis.acceptance import shapes
from engine.analysis.findings.acceptance import CHECKS
from engine.analysis.findings.check import find
from engine.errors import OptionError
from engine.options import ROLLBACK_POLICIES, RunOptions, SamplerOptions, SpecOptions
from engine.trace.store import TraceStore
from resources import demo_prompts
from tests.support.clean_settings import DEMO, TEXTS, drafters_of, opened, pick

_IDS = set(CHECKS) - {"degenerate-repetition"}
_TRUE = ("slower-than-plain", shapes.ALWAYS)
"""Of real runs: what was measured is so."""
Odds = Callable[[int, int, int, "np.ndarray"], float]
"""Chance of a drafted token by sequence, index in the draft, position, and the accepted and drafted
tokens of the draft before."""


class Records:
    """A run made by hand: rows of `rounds` as an engine would have written them."""

    def __init__(self, random: np.random.Generator, n_max: int, n_seqs: int = 1) -> None:
        self.random, self.n_max, self.n_seqs = random, n_max, n_seqs
        self.pos = [int(random.integers(4, 300)) for _ in range(n_seqs)]
        self.last = [np.array([0, 0]) for _ in range(n_seqs)]
        self.rows: list[tuple[int, ...]] = []

    def play(
        self, n_rounds: int, odds: Odds, length: Callable[[], int] | None = None
    ) -> TraceStore:
        """Rounds of all sequences; length: tokens of the next draft, None: n_max."""
        for number in range(1, n_rounds + 1):
            for seq in range(self.n_seqs):
                drafted = self.n_max if length is None else length()
                accepted = 0
                while accepted < drafted and self.random.random() < odds(
                    seq, accepted, self.pos[seq], self.last[seq]
                ):
                    accepted += 1
                self.rows.append((number, seq, self.pos[seq], drafted, accepted))
                self.last[seq] = np.array([accepted, drafted])
                self.pos[seq] += accepted + 1
        return self.store()

    def store(self, drafter: str = "draft-mtp") -> TraceStore:
        store = TraceStore()
        store.begin_run({"speculative_types": [drafter]})
        number, seq, pos, drafted, accepted = np.array(self.rows, np.int64).T
        n = len(number)
        for one in range(self.n_seqs):
            store.rounds.append(run_id=0, round=0, seq_id=one, num_emitted=1, pos0=0)
        store.rounds.extend(
            {
                "run_id": np.zeros(n, np.int64),
                "round": number,
                "seq_id": seq,
                "pos0": pos,
                "num_draft_tokens": drafted,
                "num_accepted_draft_tokens": accepted,
                "num_emitted": accepted + 1,
                "drafter": [drafter if d else "" for d in drafted.tolist()],
            }
        )
        return store


def _drawn(random: np.random.Generator, n_seqs: int = 1, least: int = 96) -> tuple[Records, int]:
    n_rounds = int(np.exp(random.uniform(np.log(least), np.log(2000))))
    return Records(random, int(random.integers(1, 17)), n_seqs), n_rounds


def _good(random: np.random.Generator) -> tuple[float, float]:
    """Acceptance of the first index, and how much of it each later one keeps."""
    return float(random.uniform(0.45, 0.95)), float(random.uniform(0.8, 1.0))


# -- planted -----------------------------------------------------------------------------------


def _zero(random: np.random.Generator) -> TraceStore:
    records, n = _drawn(random, int(random.integers(1, 4)), 64)
    chance = float(random.choice([0.0, 0.002, 0.01]))
    return records.play(n, lambda *_: chance)


def _one_slot(random: np.random.Generator) -> TraceStore:
    records, n = _drawn(random, int(random.integers(2, 7)))
    bad, low = int(random.integers(records.n_seqs)), float(random.uniform(0, 0.05))
    first, kept = _good(random)
    return records.play(min(n, 600), lambda seq, i, *_: low if seq == bad else first * kept**i)


def _zero_from(random: np.random.Generator) -> TraceStore:
    records, n = _drawn(random, int(random.integers(1, 3)), 128)
    first, kept = _good(random)
    since = int(n * random.uniform(0.2, 0.7))

    def odds(seq: int, i: int, *_: object) -> float:
        return first * kept**i if len(records.rows) < since * records.n_seqs else 0.0

    return records.play(n, odds)


def _zero_from_position(random: np.random.Generator) -> TraceStore:
    records, n = _drawn(random, int(random.integers(1, 5)), 128)
    first, kept = _good(random)
    end = records.pos[0] + int(n * random.uniform(0.3, 0.6))
    return records.play(n, lambda seq, i, pos, _: first * kept**i if pos < end else 0.005)


def _after_partial(random: np.random.Generator) -> TraceStore:
    records, n = _drawn(random, 1, 200)
    records.n_max = max(2, records.n_max)
    first, kept = _good(random)
    low = float(random.uniform(0, 0.12))

    def odds(seq: int, i: int, pos: int, last: np.ndarray) -> float:
        return low if 0 < last[0] < last[1] else first * kept**i

    return records.play(n, odds)


def _after_rejection(random: np.random.Generator) -> TraceStore:
    records, n = _drawn(random, 1, 300)
    records.n_max = int(random.integers(1, 3))
    first, low = float(random.uniform(0.7, 0.95)), float(random.uniform(0.1, 0.2))
    return records.play(n, lambda seq, i, pos, last: low if last[0] < last[1] else first)


def _with_depth(random: np.random.Generator) -> TraceStore:
    records, n = _drawn(random, int(random.integers(1, 3)), 300)
    first, _ = _good(random)
    last = first * float(random.uniform(0.05, 0.3))
    records.n_max = min(records.n_max, 8)
    start = list(records.pos)
    span = n * (1 + 0.5 * min(records.n_max, 2) * first)

    def odds(seq: int, i: int, pos: int, _: np.ndarray) -> float:
        return first + (last - first) * min(1.0, (pos - start[seq]) / span)

    return records.play(n, odds)


def _first_only(random: np.random.Generator) -> TraceStore:
    records, n = _drawn(random, int(random.integers(1, 3)), 160)
    records.n_max = max(2, records.n_max)
    first, low = float(random.uniform(0.4, 0.95)), float(random.choice([0.0, 0.0, 0.01]))
    return records.play(n, lambda seq, i, *_: low if i else first)


def _cliff(random: np.random.Generator) -> TraceStore:
    records, n = _drawn(random, int(random.integers(1, 3)), 300)
    edge = int(random.integers(2, 5))
    records.n_max = max(edge + 1, records.n_max)
    first, kept = float(random.uniform(0.75, 0.95)), float(random.uniform(0.95, 1))
    low = float(random.uniform(0, 0.15))
    return records.play(n, lambda seq, i, *_: low if i >= edge else first * kept**i)


def _never(random: np.random.Generator) -> TraceStore:
    records, n = _drawn(random, 1, 64)
    store = records.play(n, lambda *_: 0.0, lambda: 0)
    store.runs[0]["told"] = {"predicted_n": n + 1}
    return store


PLANTED: dict[str, tuple[str, Callable[[np.random.Generator], TraceStore]]] = {
    "zero": (shapes.ZERO, _zero),
    "one slot": (shapes.ONE_SLOT, _one_slot),
    "zero from a time on": (shapes.ZERO_FROM, _zero_from),
    "zero from a position on": (shapes.ZERO_FROM, _zero_from_position),
    "after a partial acceptance": (shapes.AFTER_PARTIAL, _after_partial),
    "after a rejection": (shapes.AFTER_PARTIAL, _after_rejection),
    "with depth": (shapes.WITH_DEPTH, _with_depth),
    "first only": (shapes.FIRST_ONLY, _first_only),
    "cliff": (shapes.CLIFF, _cliff),
    "never drafts": ("never-drafts", _never),
}


# -- clean -------------------------------------------------------------------------------------


def _alike(random: np.random.Generator) -> TraceStore:
    records, n = _drawn(random, int(random.integers(1, 5)), 20)
    p = float(random.uniform(0.15, 0.99))
    return records.play(min(n, 800), lambda *_: p)


def _decaying(random: np.random.Generator) -> TraceStore:
    records, n = _drawn(random, int(random.integers(1, 3)), 20)
    first, kept = float(random.uniform(0.2, 0.98)), float(random.uniform(0.6, 0.99))
    return records.play(n, lambda seq, i, *_: first * kept**i)


def _mixed(random: np.random.Generator) -> TraceStore:
    """Easy and hard stretches of text."""
    records, n = _drawn(random, int(random.integers(1, 4)), 20)
    levels = random.uniform(0.15, 0.97, int(random.integers(2, 5)))
    stretch = float(np.exp(random.uniform(np.log(3), np.log(400))))
    now = [float(random.choice(levels)) for _ in range(records.n_seqs)]

    def odds(seq: int, i: int, *_: object) -> float:
        if not i and random.random() < 1 / stretch:
            now[seq] = float(random.choice(levels))
        return now[seq]

    return records.play(min(n, 1000), odds)


def _two_halves(random: np.random.Generator) -> TraceStore:
    """Code and then prose, or the other way about."""
    records, n = _drawn(random, 1, 40)
    parts = random.uniform(0.15, 0.95, int(random.integers(2, 4)))
    return records.play(
        n, lambda *_: float(parts[min(len(records.rows) * len(parts) // n, len(parts) - 1)])
    )


def _by_prompt(random: np.random.Generator) -> TraceStore:
    """Prompts of different kinds side by side."""
    records, n = _drawn(random, int(random.integers(2, 9)), 20)
    levels = random.uniform(0.15, 0.97, records.n_seqs)
    return records.play(min(n, 400), lambda seq, *_: float(levels[seq]))


def _weak(random: np.random.Generator) -> TraceStore:
    records, n = _drawn(random, 1, 20)
    p = float(random.uniform(0.1, 0.3))
    return records.play(n, lambda *_: p)


def _rare(random: np.random.Generator) -> TraceStore:
    """N-grams that recur now and then: long drafts, right or wrong as a whole."""
    records, n = _drawn(random, 1, 20)
    share, right = float(random.uniform(0.02, 0.3)), float(random.uniform(0.1, 0.9))
    good = [0.0]

    def odds(seq: int, i: int, *_: object) -> float:
        if not i:
            good[0] = 0.97 if random.random() < right else 0.1
        return good[0]

    records.play(n, odds, lambda: records.n_max if random.random() < share else 0)
    return records.store("ngram-simple")


def _confident(random: np.random.Generator) -> TraceStore:
    """p_min: a draft ends where the drafter is unsure, so what is drafted is mostly right."""
    records, n = _drawn(random, int(random.integers(1, 3)), 20)
    sure, right = float(random.uniform(0.3, 0.95)), float(random.uniform(0.5, 0.97))

    def length() -> int:
        drafted = 0
        while drafted < records.n_max and random.random() < sure:
            drafted += 1
        return drafted

    return records.play(n, lambda *_: right, length)


def _adaptive(random: np.random.Generator) -> TraceStore:
    """n follows what was accepted before."""
    records, n = _drawn(random, 1, 20)
    first, kept = float(random.uniform(0.2, 0.95)), float(random.uniform(0.7, 1))

    def length() -> int:
        accepted, drafted = records.last[0].tolist()
        longer = drafted + 1 if accepted == drafted else max(1, accepted)
        return min(records.n_max, longer)

    return records.play(n, lambda seq, i, *_: first * kept**i, length)


CLEAN: dict[str, Callable[[np.random.Generator], TraceStore]] = {
    "alike": _alike,
    "decaying": _decaying,
    "mixed": _mixed,
    "two halves": _two_halves,
    "by prompt": _by_prompt,
    "weak": _weak,
    "rare": _rare,
    "p_min": _confident,
    "adaptive": _adaptive,
}


@cache
def _prompts() -> list[str]:
    return [*TEXTS, *demo_prompts()]


def real(number: int, seed: int) -> tuple[str, TraceStore]:
    """A run of the demo model with any drafter, policy, temperature and prompts; what it was."""
    random = np.random.default_rng((seed, number, 3))
    drafted = pick(random, drafters_of(DEMO))
    session = opened(DEMO, "blocks", drafted.file)
    n_prompts = int(pick(random, (1, 1, 1, 2, 4)))
    texts = [str(pick(random, _prompts())) for _ in range(n_prompts)]
    spec = SpecOptions(
        types=drafted.types,
        n_max=int(random.integers(1, 17)),
        p_min=float(pick(random, (0.0, 0.0, 0.3, 0.7))),
        accept=str(pick(random, ("match", "match", "rejection"))),
    )
    options = RunOptions(
        n_predict=int(random.integers(60, 400)),
        ignore_eos=bool(random.random() < 0.7),
        parallel=int(random.integers(1, n_prompts + 1)),
        rollback=str(pick(random, list(ROLLBACK_POLICIES))),
        spec=spec,
        sampler=SamplerOptions(
            temp=float(pick(random, (0.0, 0.0, 0.5, 1.0, 1.5))), seed=int(random.integers(99))
        ),
    )
    what = f"{', '.join(drafted.types)} {spec.n_max} {options.sampler.temp} {texts}"
    try:
        run = session.start([session.prompt(text) for text in texts], options)
    except OptionError:  # settings that exclude each other
        return what, TraceStore()
    while run.advance():
        pass
    return what, run.trace


def named(store: TraceStore) -> list[str]:
    """The rules of acceptance that fire, in order."""
    return [one.rule for one in find(store) if one.rule in _IDS]


def planted(n: int, seed: int) -> Iterator[tuple[str, bool, list[str]]]:
    """Cause, whether it alone is named, and what is."""
    for number in range(n):
        cause = list(PLANTED)[number % len(PLANTED)]
        rule, make = PLANTED[cause]
        found = named(make(np.random.default_rng((seed, number, 1))))
        yield cause, found == [rule], found


def clean(n: int, seed: int) -> Iterator[tuple[str, int, list[str]]]:
    """Kind, number, and the rules that accuse it."""
    for number in range(n):
        kind = list(CLEAN)[number % len(CLEAN)]
        yield kind, number, named(CLEAN[kind](np.random.default_rng((seed, number, 2))))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("n", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--real", type=int, default=0, metavar="N")
    args = parser.parse_args()
    say = sys.stdout.write
    right, of, accused, n_drafted = Counter[str](), Counter[str](), 0, 0
    for cause, is_right, found in planted(args.n, args.seed):
        of[cause] += 1
        right[cause] += is_right
        if not is_right:
            say(f"planted {cause}: named {found}\n")
    for kind, number, found in clean(args.n, args.seed):
        if accusing := [rule for rule in found if rule not in _TRUE]:
            accused += 1
            say(f"clean {kind} {number}: accused of {accusing}\n")
    for number in range(args.real):
        what, store = real(number, args.seed)
        n_drafted += bool((store.rounds.column("num_draft_tokens") > 0).sum() >= shapes.LEAST)
        if accusing := [rule for rule in named(store) if rule not in _TRUE]:
            accused += 1
            said = [f"{one.message} {one.evidence}" for one in find(store) if one.rule in accusing]
            say(f"real run {number}: accused of {accusing}: {what}: {said}\n")
    for cause, n in of.items():
        say(f"{cause}: {right[cause]} of {n}\n")
    n_right, n_clean = sum(right.values()), args.n + args.real
    say(
        f"{n_right} of {args.n} causes named, {accused} of {n_clean} clean runs accused; "
        f"{n_drafted} of {args.real} real runs have {shapes.LEAST} drafts or more\n"
    )
    return int(n_right < 0.9 * args.n or accused > 0)


if __name__ == "__main__":
    sys.exit(main())
