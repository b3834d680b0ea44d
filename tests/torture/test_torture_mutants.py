"""The list of mutants: every bug can be switched on, and the page of help has its figures."""

from __future__ import annotations

import pytest

from engine.analysis.findings.check import RULES
from engine.machine.graphs import VARIABLE
from tests.support.mutations import MUTATIONS
from tests.torture.campaigns.mutants import saw, switch_on
from tests.torture.mutant import WEAK
from tests.torture.mutants_list import MUTANTS
from tests.torture.mutants_table import PAGE, with_table


def test_there_are_enough_of_them() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names)
    assert len([mutant for mutant in MUTANTS if mutant.seen]) + len(MUTATIONS) >= 120
    for mutant in MUTANTS:
        assert not (mutant.named and mutant.unseen), mutant.name
        assert not mutant.named or mutant.named in RULES, mutant.name
        assert bool(mutant.weak) == (mutant.named in WEAK), mutant.name


def test_every_bug_is_still_in_the_code() -> None:
    for mutant in MUTANTS:
        with pytest.MonkeyPatch.context() as patch:
            switch_on(patch, mutant)


NAMED_AFTER_ALL = (
    "a bonus after a replay counts as drafted",
    "the position stays one back after a whole draft",
    "a branch lacks the cells of its stem",
    "context checkpoints are those of slot 0",
    "older rings start from the one just written",
    "older windows take the newest rows",
)
"""Bugs that had another name once, or none."""


@pytest.mark.parametrize("name", NAMED_AFTER_ALL)
def test_a_bug_has_its_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "off")  # as the campaign plays them
    (mutant,) = (one for one in MUTANTS if one.name == name)
    how, causes = saw(mutant)
    assert how == mutant.seen
    assert mutant.named in causes


def test_the_page_of_help_has_their_figures() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page) == page  # python -m tests.torture.mutants_table writes it
