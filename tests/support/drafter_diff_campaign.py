"""Pairs of runs with one planted mistake in one of them, and pairs without, drawn by seed.

The suite plays some; `python -m tests.support.drafter_diff_campaign N [--clean M] [--seed S]` plays
N planted ones and M clean ones, and prints how many causes are named first and rightly, by cause,
and every clean pair that is accused. --blind: without the model and drafter.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch

from engine.draft.ngram_drafter import NgramSizes
from engine.draft.ngram_mod import NgramModOptions
from engine.draft.registry import DRAFTERS
from engine.observe.drafter_diff.diff import DrafterDiff, drafter_diff
from engine.observe.drafter_diff.records import n_equal, same_contexts
from engine.observe.drafter_diff.sides import sides_of
from engine.options import Prompt, RunOptions, SamplerOptions, SpecOptions
from engine.session import Session
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from resources import DEMO_DRAFT, DEMO_EAGLE3, DEMO_TARGET
from tests.support.clean_settings import TEXTS
from tests.support.drafter_bugs import BUGS as FIRST_BUGS
from tests.support.drafter_bugs import Bug, without_rejected, without_tops
from tests.support.golden_drafters import TARGETS, drafter_file, there
from tests.support.golden_files import golden_file
from tests.support.more_drafter_bugs import MORE_BUGS
from tests.support.placed_drafter_bugs import PLACED_BUGS

_GOLDEN = {
    "dflash": ("dflash-a-mrope", "draft-dflash"),
    "dflash2": ("dflash2-a", "draft-dflash"),
    "dspark": ("dspark-a-anchor", "draft-dspark"),
    "eagle3-d2t": ("eagle3-b-d2t-norms", "draft-eagle3"),
    "dflash-d2t": ("dflash-b-swa-d2t", "draft-dflash"),
}
_TRIES, _LEAST_APART = 6, 5
"""Prompts tried until a bug shows in this many rounds: on easy text it may change nothing."""
_TYPES = {"mtp": "draft-mtp", "simple": "draft-simple", "eagle3": "draft-eagle3"} | {
    name: name for name in ("ngram-simple", "ngram-map-k", "ngram-mod", "ngram-cache", "suffix")
}
BUGS = FIRST_BUGS | MORE_BUGS | PLACED_BUGS


@dataclass(frozen=True)
class Played:
    """What a pair came to. right: the planted stage was named first, by the planted side where the
    cause is of one. words: the sentence says which mistake."""

    name: str
    kind: str
    side: str
    found: DrafterDiff

    @property
    def right(self) -> bool:
        first = self.found.first
        bug = BUGS.get(self.name)
        if first is None or bug is None:
            return first is None and bug is None
        return first.stage == bug.stage and first.side in ("", self.side)

    @property
    def says_which(self) -> bool:
        first = self.found.first
        return first is not None and BUGS[self.name].words in first.about

    def __str__(self) -> str:
        first = self.found.first
        said = "no cause" if first is None else f"{first.stage} of {first.side}: {first.about}"
        return f"{self.name}, {self.kind}, in {self.side}: {said}"


@cache
def opened(kind: str, compute: str = "f32") -> Session:
    if kind in _GOLDEN:
        name, _ = _GOLDEN[kind]
        return Session.open(
            golden_file(f"{TARGETS[name]}.gguf"), drafter_file(f"{name}.gguf"), compute=compute
        )
    file = {"simple": DEMO_DRAFT, "eagle3": DEMO_EAGLE3}.get(kind)
    return Session.open(DEMO_TARGET, file, compute=compute)


def kinds() -> list[str]:
    """Drafters whose files can be found."""
    return [*_TYPES, *(kind for kind, (name, _) in _GOLDEN.items() if there(name))]


def _prompt(kind: str, random: np.random.Generator) -> Prompt:
    session = opened(kind)
    if kind in _GOLDEN:
        n = int(random.integers(6, 20))
        return Prompt(tuple(random.integers(3, 376, n).tolist()))
    text = TEXTS[int(random.integers(len(TEXTS)))]
    return session.prompt(3 * f"{text} x\n" if kind in DRAFTERS else text)


def _run(
    session: Session, prompt: Prompt, options: RunOptions, bug: Bug | None = None, *more: Prompt
) -> RunRef:
    """more: prompts of other sequences."""
    store = TraceStore()
    with pytest.MonkeyPatch.context() as patch:
        if bug and bug.prompt:
            prompt = bug.prompt(session, prompt)
        if bug and bug.options:
            options = bug.options(options)
        if bug and bug.patch:
            bug.patch(patch, session)
        options = replace(options, parallel=1 + len(more))
        run = session.start([prompt, *more], options, store)
        while run.step():
            pass
    ref = RunRef(store, run.run_id)
    if bug and bug.edit:
        bug.edit(ref)
    return ref


def _n_apart(a: RunRef, b: RunRef) -> int:
    """Rounds of the same text that have other drafts or another outcome: what a bug did."""
    sides = sides_of("A", a)[0], sides_of("B", b)[0]
    pairs = same_contexts(*sides)
    found = sum(n_equal(*p) is not None or p[0].n_accepted != p[1].n_accepted for p in pairs)
    return found + max(0, len(sides[1].drafts) - len(pairs)) // 4


def _options(kind: str, random: np.random.Generator) -> RunOptions:
    drafter = _TYPES.get(kind) or _GOLDEN[kind][1]
    n = 40 if kind in _GOLDEN else 96
    n_max = int(random.integers(3, 5))
    sizes = NgramSizes(size_n=3, size_m=2 * n_max - 1)
    spec = SpecOptions(
        types=(drafter,),
        n_max=n_max,
        ngram_simple=sizes,
        ngram_map_k=sizes,
        ngram_mod=NgramModOptions(n_match=4, n_min=0, n_max=6),
    )
    return RunOptions(n_predict=n, n_ctx=640, spec=spec, ignore_eos=True)


def play_planted(name: str, seed: int, *, blind: bool = False) -> Played:
    """One pair with a bug in A or B; the buggy one may lack candidates, as another engine's."""
    random = np.random.default_rng(seed)
    bug = BUGS[name]
    able = [kind for kind in bug.kinds if kind in kinds()]
    for _ in range(_TRIES):
        kind = able[int(random.integers(len(able)))]
        session = opened(kind)
        prompt, options = _prompt(kind, random), _options(kind, random)
        right = bug.good_prompt(session, prompt) if bug.good_prompt else prompt
        good, bad = _run(session, right, options), _run(session, prompt, options, bug)
        if bug.patch is None or _n_apart(good, bad) >= _LEAST_APART:
            break
    if random.random() < 0.7:
        without_tops(bad)
    is_a = random.random() < 0.4
    a, b = (bad, good) if is_a else (good, bad)
    return Played(name, kind, "AB"[not is_a], drafter_diff(a, b, None if blind else session))


def play_clean(seed: int, *, blind: bool = False) -> Played:
    """Two runs of one drafter that differ in nothing that matters: rollback, compute mode, length,
    what is recorded; of one sequence or two, at temperature 0 or above."""
    random = np.random.default_rng(seed)
    able = kinds()
    kind = able[int(random.integers(len(able)))]
    prompt, options = _prompt(kind, random), _options(kind, random)
    compute = str(random.choice(["f32", "f32", "bf16", "q8"]))
    policy = str(random.choice(["planes", "ring", "checkpoint"]))
    other = replace(options, rollback=policy, n_predict=int(random.integers(32, 97)))
    more = [_prompt(kind, random)] if random.random() < 0.3 else []
    sampler = SamplerOptions(temp=float(random.choice([0.0, 0.0, 0.7])), seed=seed % 97)
    a, b = (
        _run(opened(kind, mode), prompt, replace(own, sampler=sampler), None, *more)
        for mode, own in (("f32", options), (compute, other))
    )
    if any((run.store.rounds.column("num_draft_tokens") <= 0).all() for run in (a, b)):
        return play_clean(seed + 7919, blind=blind)  # look-ups may find nothing
    what = f"{compute}, {policy}, {1 + len(more)} sequences, temperature {sampler.temp:g}"
    if random.random() < 0.6:
        (without_rejected if random.random() < 0.5 else without_tops)(b)
    return Played("", kind, what, drafter_diff(a, b, None if blind else opened(kind)))


def main() -> None:
    """Play and print. One thread: on a busy machine two of them mostly wait for each other."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("n", type=int, nargs="?", default=len(BUGS))
    parser.add_argument("--clean", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("--blind", action="store_true")
    args = parser.parse_args()
    names = [name for name in BUGS if args.only in name]
    right, which, played = Counter[str](), 0, 0

    def say(line: str) -> None:
        sys.stdout.write(line)
        sys.stdout.flush()

    for i in range(args.n):
        one = play_planted(names[i % len(names)], args.seed * 1000 + i, blind=args.blind)
        played += 1
        right[one.name] += one.right
        which += one.right and one.says_which
        if not (one.right and one.says_which):
            say(f"{'right, other words' if one.right else 'WRONG'}: {one}\n")
    accused = 0
    for i in range(args.clean):
        one = play_clean(args.seed * 1000 + i, blind=args.blind)
        if not one.right:
            accused += 1
            say(f"accused: {one} {one.found.pairs}\n")
    say(f"{sum(right.values())} of {played} named first and rightly, {which} by their mistake\n")
    say(f"{accused} of {args.clean} clean pairs accused\n")


if __name__ == "__main__":
    main()
