"""Bugs put into the code that rolls back: a rule names each, and none speaks without them."""

from __future__ import annotations

import pytest

from engine.analysis.findings.check import RULES
from engine.analysis.findings.run_rows import INFO
from tests.support.host_chosen import host_chosen  # noqa: F401
from tests.support.mutations import LANE, MUTATIONS, Mutation, mutate, outcome

pytestmark = pytest.mark.usefixtures("host_chosen")

SETTINGS = {
    (m.where, m.setting, m.n_seqs, *sorted(m.options)): m for m in reversed(MUTATIONS)
}.values()


def test_there_are_enough_of_them() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 22
    assert {mutation.finds for mutation in MUTATIONS} <= set(RULES)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_a_bug_is_named(monkeypatch: pytest.MonkeyPatch, mutation: Mutation) -> None:
    mutate(monkeypatch, mutation)
    findings, _ = outcome(mutation)
    assert mutation.finds in {finding.rule for finding in findings if finding.severity != INFO}


@pytest.mark.parametrize("mutation", SETTINGS, ids=lambda m: f"{m.where}-{m.setting}-{m.n_seqs}")
@pytest.mark.thinned(8)
def test_its_setting_is_clean_without_it(mutation: Mutation) -> None:
    findings, verdict = outcome(mutation)
    noticed = [f for f in findings if f.severity != INFO and f.rule != "checkpoint-dominates"]
    assert noticed == []
    assert verdict in (("exact", "within") if mutation.where == LANE else ("same text",))
