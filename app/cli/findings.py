"""The findings recorded in a trace, as lines for a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from engine.findings.check import Finding, recorded
from engine.trace.store import TraceStore


def finding_lines(trace: TraceStore) -> Iterator[str]:
    """A line per finding: severity, rule, where, message, suggestion."""
    for finding in recorded(trace):
        where = f" ({place})" if (place := ", ".join(_place(trace, finding))) else ""
        yield f"{finding.severity}: {finding.rule}{where}: {finding.message} {finding.suggestion}"


def findings_json(trace: TraceStore) -> list[dict[str, Any]]:
    """The findings as JSON objects, each with the name of its lane, null outside comparisons."""
    return [
        {"lane": trace.runs[finding.run_id].get("lane"), **asdict(finding)}
        for finding in recorded(trace)
    ]


def _place(trace: TraceStore, finding: Finding) -> Iterator[str]:
    if lane := trace.runs[finding.run_id].get("lane"):
        yield str(lane)
    if finding.round is not None:
        yield f"round {finding.round}"
    if finding.seq_id:
        yield f"sequence {finding.seq_id}"
