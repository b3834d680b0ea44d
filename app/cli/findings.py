"""The findings recorded in a trace, as lines for a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from engine.analysis.findings.check import Finding, recorded, with_consequences
from engine.trace.store import TraceStore


def finding_lines(trace: TraceStore) -> Iterator[str]:
    """A line per finding: severity, rule, where, message; suggestion, for a first cause. What
    follows from it is indented below."""
    for cause, following in with_consequences(recorded(trace)):
        yield f"{_line(trace, cause)} {cause.suggestion}"
        for finding in following:
            yield f"  follows: {_line(trace, finding)}"


def findings_json(trace: TraceStore) -> list[dict[str, Any]]:
    """The findings as JSON objects, each with the name of its lane, null outside comparisons, and
    the rule of the first cause that it follows from, null for such a cause."""
    found = recorded(trace)
    cause_of = {
        id(one): cause.rule for cause, following in with_consequences(found) for one in following
    }
    return [
        {
            "lane": trace.runs[finding.run_id].lane,
            **asdict(finding),
            "cause": cause_of.get(id(finding)),
        }
        for finding in found
    ]


def _line(trace: TraceStore, finding: Finding) -> str:
    where = f" ({place})" if (place := ", ".join(_place(trace, finding))) else ""
    return f"{finding.severity}: {finding.rule}{where}: {finding.message}"


def _place(trace: TraceStore, finding: Finding) -> Iterator[str]:
    if lane := trace.runs[finding.run_id].lane:
        yield lane
    if finding.round is not None:
        yield f"round {finding.round}"
    if finding.seq_id:
        yield f"sequence {finding.seq_id}"
