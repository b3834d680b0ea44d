"""The first cause of a sequence's findings, and what follows from it."""

from __future__ import annotations

from engine.analysis.findings.check import RULES, with_consequences
from engine.analysis.findings.run_rows import FOLLOWS
from engine.trace.facts import Finding


def finding(
    rule: str, round_: int | None, seq_id: int | None = 0, run_id: int = 0, severity: str = ""
) -> Finding:
    return Finding("", "", round_, seq_id, "", run_id, rule, severity or RULES[rule].severity)


def groups(*findings: Finding) -> dict[str, list[str]]:
    found = with_consequences(findings)
    return {cause.rule: [one.rule for one in following] for cause, following in found}


def test_every_part_is_known() -> None:
    assert {rule.part for rule in RULES.values() if rule.part} == FOLLOWS.keys()


def test_the_earliest_is_the_cause() -> None:
    assert groups(
        finding("position-gap", 4),
        finding("duplicate-kv-cells", 4),
        finding("wrong-snapshot-index", 3),
        finding("wrong-hidden-row", 5),
    ) == {"wrong-snapshot-index": ["position-gap", "duplicate-kv-cells", "wrong-hidden-row"]}


def test_in_one_round_the_order_of_the_rules_decides() -> None:
    assert groups(finding("plane-off-by-one", 1), finding("rollback-end", 1)) == {
        "rollback-end": ["plane-off-by-one"]
    }


def test_a_round_has_an_order() -> None:
    # the state is left wrong after a token that was chosen wrong
    assert groups(finding("state-wrong", 1), finding("wrong-token", 1)) == {
        "wrong-token": ["state-wrong"]
    }
    assert groups(finding("wrong-token", 2), finding("state-wrong", 1)) == {
        "state-wrong": ["wrong-token"]
    }


def test_what_one_part_does_not_spoil_has_a_cause_of_its_own() -> None:
    # drafts do not change states, nor states the sampler
    assert groups(finding("wrong-hidden-row", 1), finding("state-empty", 2)) == {
        "wrong-hidden-row": [],
        "state-empty": [],
    }
    assert len(groups(finding("state-empty", 1), finding("sampler-not-restored", 2))) == 2


def test_sequences_and_runs_are_apart() -> None:
    apart = [finding("rollback-end", 1), finding("position-gap", 2, seq_id=1)]
    assert len(with_consequences(apart)) == 2
    assert len(with_consequences([apart[0], finding("position-gap", 2, run_id=1)])) == 2
    # a pass of several sequences is of all of them
    assert groups(apart[0], finding("position-gap", 2, None)) == {"rollback-end": ["position-gap"]}


def test_informations_and_rules_of_others_stand_alone() -> None:
    told = finding("checkpoint-dominates", 1)
    other = Finding("", "", 3, 0, "", 0, "a-rule-to-come", "error")
    assert groups(finding("rollback-end", 1), told, other) == {
        "rollback-end": [],
        "checkpoint-dominates": [],
        "a-rule-to-come": [],
    }
