"""Bugs put into the engine, one at a time: each is seen, and named by the rule that is listed.

All of them: python -m tests.torture --only mutants --minutes 12. With fewer minutes as many as
there is time for, 16 at least, from a place in the list that the seed chooses. Every play that a
bug is listed with is played without any bug as well: nothing may be accused then.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from engine.analysis.findings.check import with_consequences
from engine.decode.acceptance import RULES
from engine.machine.graphs import VARIABLE
from tests.support.golden_runs import session
from tests.support.mutations import MODEL, MUTATIONS, mutate, outcome
from tests.torture.campaign import Campaign, Case, Figures
from tests.torture.mutant import Mutant
from tests.torture.mutant_plays import TRUE, play
from tests.torture.mutants_list import MUTANTS
from tests.torture.reworded import reworded

_CLEAN = "clean: "
_NAMES = [*(m.name for m in MUTATIONS), *(m.name for m in MUTANTS)]
_PLAYS = sorted({mutant.play for mutant in MUTANTS})
_CASES = [*_NAMES, *(f"{_CLEAN}{line}" for line in _PLAYS)]
_HOW = ("compare", "run", "memory", "text", "error")


def _draw(random: np.random.Generator, number: int) -> Case:
    # an odd stride, so that a part of them is of all kinds
    return {"name": _CASES[number * 101 % len(_CASES)]}


def _play(case: Case, _: Path) -> Figures:
    os.environ[VARIABLE] = "off"
    name = case["name"]
    figures = dict.fromkeys(("mutants", "unseen", "caught", "named", "clean"), 0.0)
    figures |= dict.fromkeys((f"by_{how}" for how in _HOW), 0.0)
    if name.startswith(_CLEAN):
        seen = play(name.removeprefix(_CLEAN))
        assert not seen.by, f"without a bug {name} is accused by {seen.by}: {seen.rules}"
        return figures | {"clean": 1}
    mutant = next((m for m in MUTANTS if m.name == name), None)
    how, causes = _by_function(name) if mutant is None else saw(mutant)
    listed = next(m.finds for m in MUTATIONS if m.name == name) if mutant is None else mutant.named
    if mutant is not None:
        assert how == mutant.seen, f"{name} is seen by {how or 'nothing'}, listed is {mutant.seen}"
    assert not listed or listed in causes, f"{name} is named {causes}, listed is {listed}"
    figures |= {"mutants": 1, "unseen": not how, "caught": bool(how), "named": bool(listed)}
    return figures | ({f"by_{how}": 1} if how else {})


def _by_function(name: str) -> tuple[str, set[str]]:
    """What a bug of tests.support.mutations shows: how, and the first causes found."""
    mutation = next(m for m in MUTATIONS if m.name == name)
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch, mutation)
        findings, verdict = outcome(mutation)
    found = [one for one in findings if one.severity != "info" and one.rule not in TRUE]
    how = "compare" if mutation.where == "lane" else "run"
    seen = bool(found) or verdict not in ("exact", "within", "same text")
    return how if seen else "", {cause.rule for cause, _ in with_consequences(found)}


def saw(mutant: Mutant) -> tuple[str, set[str]]:
    """The same for a bug of the list, in its play."""
    expected = play(mutant.play).text if mutant.seen in ("text", "") else []
    with pytest.MonkeyPatch.context() as patch:
        switch_on(patch, mutant)
        seen = play(mutant.play)
    by_text = mutant.seen in ("text", "") and seen.text != expected
    return seen.by or ("text" if by_text else ""), seen.causes


def switch_on(patch: pytest.MonkeyPatch, mutant: Mutant) -> None:
    """Put a bug into its function, wherever a module of the engine has it by name."""
    owner, name, changed = reworded(mutant.place, mutant.old, mutant.new)
    original = getattr(owner, name)
    patch.setattr(owner, name, changed)
    for module in [m for n, m in sys.modules.items() if n.startswith("engine.")]:
        if module.__dict__.get(name) is original:
            patch.setattr(module, name, changed)
    for key in [key for key, rule in RULES.items() if rule is original]:
        patch.setitem(RULES, key, changed)


def _prepare() -> None:
    session(MODEL)


CAMPAIGN = Campaign(
    "mutants",
    "Every bug is seen and named as it is listed, or cannot be seen; without one nothing is.",
    _draw,
    _play,
    _prepare,
    seconds=90.0,
    n_bytes=2**29,
    batch=8,
    share=1.5,
    n_least=16,
    n_all=len(_CASES),
)
