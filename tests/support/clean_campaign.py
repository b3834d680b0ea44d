"""Random comparisons whose lanes are all clean, and how many of them are called suspect.

The suite plays a few; `python -m tests.support.clean_campaign N [--seed S] [--rows FILE]` plays N
and prints every lane that was accused. rows: raw errors for a look at their distribution.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count

import numpy as np

from engine.analysis.findings.check import recorded
from engine.analysis.verdict import LaneVerdict
from engine.compare.comparison import Comparison
from engine.compare.lane_spec import NOISE_LANE, LaneSpec
from engine.options import ROLLBACK_POLICIES, Prompt, RunOptions, SamplerOptions, SpecOptions
from engine.session import Session
from resources import DEMO_TARGET
from tests.support.golden_runs import DATA, MODELS, MTP_MODELS

TRUE = ("concurrency-lost",)
"""Findings above info that are true of settings that are played."""
MODES = ("f32", "bf16", "int8", "q8", "blocks")
TEXTS = (
    "import os",
    "class Stack:",
    "def main():\n    ",
    "def read_file(path):",
    "for i in range(10):\n    print(",
    "class Node:\n    def __init__(self",
    "def quicksort(arr):",
    "try:\n    value = int(text)\nexcept",
)


@dataclass(frozen=True, slots=True)
class Played:
    """One comparison. what: its settings in a line."""

    what: str
    comparison: Comparison
    verdicts: list[LaneVerdict]

    @property
    def accused(self) -> list[str]:
        """Lanes beyond their bound, and findings above info."""
        lanes = [
            f"{v.lane}: {v.verdict} {v.worst_nmse:.2e} > {v.bound:.2e} {v.error}{v.fork or ''}"
            for v in self.verdicts
            if v.is_beyond
        ]
        rules = [
            f"{f.rule} ({self.comparison.trace.runs[f.run_id]['lane']}): {f.evidence}"
            for f in recorded(self.comparison.trace)
            if f.severity != "info" and f.rule not in TRUE
        ]
        return [*lanes, *rules]


@cache
def opened(name: str, compute: str) -> Session:
    path = DEMO_TARGET if name == "demo" else DATA / f"{name}.gguf"
    return Session.open(path, compute=compute)


def play(random: np.random.Generator, modes: Sequence[str] = MODES) -> Played:
    """A comparison of random lanes over random prompts on a random model in a random mode."""
    name, compute = str(random.choice((*MODELS, "demo"))), str(random.choice(modes))
    session = opened(name, compute)
    n_prompts = int(random.choice([1, 1, 2, 3]))
    prompts = [_prompt(session, name, random) for _ in range(n_prompts)]
    has_head = name in MTP_MODELS or name == "demo"
    scripted = not has_head or random.random() < 0.3
    spec = SpecOptions(
        types=() if scripted else ("draft-mtp",),
        n_max=int(random.integers(1, 9)),
        p_min=float(random.choice([0.0, 0.3])),
    )
    sampler = SamplerOptions()
    if random.random() < 0.4:
        sampler = SamplerOptions(temp=1.0, seed=int(random.integers(1000)))
    options = RunOptions(
        n_predict=int(random.integers(16, 49)),
        parallel=n_prompts,
        n_ctx=192,
        sampler=sampler,
        spec=spec,
        ignore_eos=True,
    )
    texts = {_lane(random) for _ in range(3)}
    if not scripted:
        texts |= {f"{text},free" for text in [t for t in texts if "forks" not in t][:1]}
    lanes = [NOISE_LANE, *map(LaneSpec.parse, sorted(texts))]
    accept = tuple(random.integers(0, spec.n_max + 1, 4).tolist()) if scripted else None
    comparison = Comparison(session, prompts, options, lanes, draft_accept=accept)
    while comparison.step():
        pass
    what = f"{name} {compute} {n_prompts} prompts n_max {spec.n_max} temp {sampler.temp}"
    return Played(f"{what} accept {accept}", comparison, comparison.results())


def played(n: int, seed: int, modes: Sequence[str] = MODES) -> Iterator[Played]:
    """n comparisons, the same ones for the same seed."""
    for number in range(n):
        yield play(np.random.default_rng((seed, number)), modes)


def _prompt(session: Session, name: str, random: np.random.Generator) -> Prompt:
    if name == "demo":
        return session.prompt(str(random.choice(TEXTS)))
    n = int(random.integers(3, 25))
    return Prompt(tuple(random.integers(0, session.config.n_vocab, n).tolist()))


def _lane(random: np.random.Generator) -> str:
    parts = [str(random.choice(list(ROLLBACK_POLICIES)))]
    for key, values in (
        ("n_rs_seq", (None, None, 1, 2)),
        ("split", (None, None, "seq")),
        ("kv", (None, None, "unified")),
        ("ubatch", (None, None, 3, 7)),
    ):
        value = values[int(random.integers(len(values)))]
        if value is not None:
            parts.append(f"{key}={value}")
    if random.random() < 0.25:
        parts.append("forks")
    return ",".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("n", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows")
    parser.add_argument("--modes", nargs="+", default=MODES)
    args = parser.parse_args()
    numbers, n_lanes, kept = count(1), 0, []
    for game in played(args.n, args.seed, args.modes):
        n_lanes += len(game.verdicts)
        rows = game.comparison.trace.divergence
        for v in game.verdicts:
            mine = rows.column("run_id") == v.run_id
            columns = ("nmse", "max_abs", "state_error", "top2_gap", "top1_equal", "kl", "round")
            kept.append((game.what, v.lane, *(rows.column(c)[mine].copy() for c in columns)))
        number = next(numbers)
        for line in game.accused:
            sys.stdout.write(f"{number}: {game.what}: {line}\n")
        if number % 10 == 0:
            sys.stdout.write(f"{number} comparisons, {n_lanes} lanes\n")
            sys.stdout.flush()
    if args.rows:
        np.save(args.rows, np.array(kept, object), allow_pickle=True)


if __name__ == "__main__":
    main()
