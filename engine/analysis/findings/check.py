"""Application of all rules: on demand without writing, or once into the findings table."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

from engine.analysis.findings import (
    acceptance,
    audit,
    cost,
    drafting,
    logits,
    memory,
    observed,
    states,
)
from engine.analysis.findings.run_rows import (
    ACCEPTANCE,
    FOLLOWS,
    INFO,
    PARTS,
    SEVERITIES,
    ExaminedRun,
    Rule,
)
from engine.foreign import COUNT
from engine.trace.facts import Finding
from engine.trace.store import TraceStore

_TEXTS = Path(__file__).with_name("findings.toml")
CHECKS = {
    name: check
    for module in (cost, memory, states, audit, logits, drafting, acceptance, observed)
    for name, check in module.CHECKS.items()
}
RULES = {
    name: Rule(name, CHECKS[name], **texts)
    for name, texts in tomllib.loads(_TEXTS.read_text(encoding="utf-8")).items()
}


def find(trace: TraceStore, run_ids: Iterable[int] | None = None) -> list[Finding]:
    """Findings of these runs (None: all) as recorded so far: errors first, each followed by its
    consequences.

    At most one finding per rule, run and sequence: its round is the first offending one, its
    evidence counts them all. Reads whole columns and writes nothing, so any thread may call it
    while a run goes on.
    """
    found = []
    for run_id in list(trace.runs) if run_ids is None else run_ids:
        run = ExaminedRun(trace, run_id)
        for rule in RULES.values():
            found += [
                replace(
                    one,
                    suggestion=one.suggestion or rule.suggestion,
                    run_id=run_id,
                    rule=rule.id,
                    severity=rule.severity,
                )
                for one in rule.check(run)
            ]
    groups = with_consequences(sorted(found, key=_order))
    return [one for cause, following in groups for one in (cause, *following)]


def record_findings(trace: TraceStore, run_ids: Iterable[int]) -> None:
    """Append the findings of these runs to the findings table, on the engine's thread.

    Existing ones, by rule, run and sequence, are not repeated.
    """
    known = {(f.rule, f.run_id, f.seq_id) for f in recorded(trace)}
    for finding in find(trace, run_ids):
        if (finding.rule, finding.run_id, finding.seq_id) not in known:
            trace.findings.append(**asdict(finding))


def recorded(trace: TraceStore) -> list[Finding]:
    """The findings table, errors first."""
    rows = (Finding(**trace.findings.row(i)) for i in range(len(trace.findings)))
    return sorted(rows, key=_order)


def with_consequences(findings: Iterable[Finding]) -> list[tuple[Finding, list[Finding]]]:
    """Root causes in the given order, each with its consequences: findings of the same run and
    sequence, in a part that the cause's part affects, and not earlier (within a round by the order
    of PARTS and RULES). Infos are neither causes nor consequences."""
    findings = list(findings)
    near: dict[tuple[int, int | None], list[int]] = {}
    of_run: dict[int, list[int]] = {}
    for i, finding in enumerate(findings):
        if finding.severity != INFO and FOLLOWS.get(_part(finding)):  # assign consequences
            near.setdefault((finding.run_id, finding.seq_id), []).append(i)
            of_run.setdefault(finding.run_id, []).append(i)
    cause_of: dict[int, int] = {}
    for i, finding in enumerate(findings):
        run, seq = finding.run_id, finding.seq_id
        others = [*near.get((run, seq), ()), *near.get((run, None), ())]
        others = sorted(others) if seq is not None else of_run.get(run, [])
        causes = [j for j in others if _causes(findings[j], finding)]
        if causes:
            cause_of[i] = min(causes, key=lambda j: _since(findings[j]))

    def first(i: int) -> int:
        return first(cause_of[i]) if i in cause_of else i

    groups: dict[int, list[Finding]] = {i: [] for i in range(len(findings)) if i not in cause_of}
    for i in cause_of:
        groups[first(i)].append(findings[i])
    return [(findings[i], following) for i, following in groups.items()]


def _part(finding: Finding) -> str:
    return RULES[finding.rule].part if finding.rule in RULES else ""


def _causes(cause: Finding, finding: Finding) -> bool:
    """Whether one of two findings of a run that may concern the same sequence causes the other."""
    return (
        INFO not in (cause.severity, finding.severity)
        and _part(finding) in FOLLOWS.get(_part(cause), ())
        and _since(cause) < _since(finding)
    )


def _since(finding: Finding) -> tuple[int, int, int]:
    place = PARTS.index(RULES[finding.rule].part)
    number = -1 if finding.round is None else finding.round
    if PARTS[place] == ACCEPTANCE:  # None counts as the end
        number = COUNT
    return number, place, list(RULES).index(finding.rule)


def _order(finding: Finding) -> tuple[int, int, int]:
    first = -1 if finding.round is None else finding.round
    # an opened trace may hold an unknown severity
    known = finding.severity in SEVERITIES
    rank = SEVERITIES.index(finding.severity) if known else len(SEVERITIES)
    return rank, finding.run_id, first
