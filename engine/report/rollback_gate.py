"""A gate over check-rollback: failures that are new since a baseline, as JUnit XML and Markdown.

A baseline is the output of `draftscope check-rollback --json` for an earlier build. A check that
failed there too, with any outcome, is not new.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from engine.compare.rollback_check import CheckedLane
from engine.compare.rollback_outcomes import BAD, is_new
from engine.plain_text import terminal_text

_MOST_NAMED = 3
_LONGEST = 300


@dataclass(frozen=True, slots=True)
class Gate:
    """Checks compared with a baseline (None: there is none). library: the build's version;
    settings: in words."""

    lanes: Sequence[CheckedLane]
    baseline: Mapping[str, str] | None
    library: str
    model: str
    settings: str
    strict: bool = False

    @property
    def failures(self) -> list[CheckedLane]:
        """Checks that fail the gate: without a baseline every outcome that a build must not have
        (strict: known defects too), with one those that are bad now and were not in it."""
        return [lane for lane in self.lanes if self._fails(lane)]

    @property
    def fixed(self) -> list[str]:
        """Names of checks that were bad in the baseline and no longer are."""
        return [
            lane.name
            for lane in self.lanes
            if lane.outcome not in BAD and (self.baseline or {}).get(lane.name) in BAD
        ]

    def _fails(self, lane: CheckedLane) -> bool:
        known = (self.baseline or {}).get(lane.name, "")
        return is_new(lane.outcome, known, strict=self.strict)


def junit(gate: Gate) -> str:
    """The checks as JUnit XML: failures are those of the gate; checks that fail as before or were
    not judged are skipped."""
    failing = {lane.name for lane in gate.failures}
    suite = ElementTree.Element("testsuite", name="draftscope check-rollback")
    skipped = 0
    for lane in gate.lanes:
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"rollback.{lane.scenario}", name=lane.name
        )
        message = _clean(f"{lane.outcome}: {lane.about}" if lane.about else lane.outcome)
        if lane.name in failing:
            ElementTree.SubElement(
                case, "failure", message=message, type=lane.outcome
            ).text = _measured(lane)
        elif lane.outcome != "right":
            skipped += 1
            ElementTree.SubElement(case, "skipped", message=message)
    suite.set("tests", str(len(gate.lanes)))
    suite.set("failures", str(len(failing)))
    suite.set("skipped", str(skipped))
    properties = ElementTree.Element("properties")
    suite.insert(0, properties)
    for name in ("library", "model", "settings"):
        ElementTree.SubElement(properties, "property", name=name, value=_clean(getattr(gate, name)))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, "unicode", xml_declaration=True) + "\n"


def markdown(gate: Gate) -> str:
    """Five lines for a reviewer."""
    failures, outcomes = gate.failures, Counter(lane.outcome for lane in gate.lanes)
    n = len(failures) or "no"
    verdict = f"{n} new failure{'s' if n != 1 else ''}"
    counts = ", ".join(f"{n} {outcome}" for outcome, n in outcomes.most_common())
    others = sum(lane.outcome in BAD for lane in gate.lanes) - len(failures)
    known = "also bad in the baseline" if gate.baseline is not None else "known defects"
    return (
        f"**Rollback of {_code(gate.library)} on {_code(gate.model)}: {verdict}**\n\n"
        f"- {len(gate.lanes)} checks: {counts}\n"
        f"- New: {_named(f'{lane.name} ({lane.outcome}; {lane.about})' for lane in failures)}\n"
        f"- Not counted: {others} {known}; fixed: {_named(gate.fixed)}\n"
        f"- Settings: {_code(gate.settings)}\n"
    )


def _named(names: Iterable[str]) -> str:
    every = [_code(name) for name in names]
    if not every:
        return "none"
    more = len(every) - _MOST_NAMED
    return "; ".join(every[:_MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")


def _code(text: str) -> str:
    return f"`{_clean(text).replace('`', chr(39))}`"


def _clean(text: str) -> str:
    """Text without control characters, which a library's messages may contain, and shortened."""
    return terminal_text(" ".join(text.split()))[:_LONGEST]


def _measured(lane: CheckedLane) -> str:
    verdict: Any = lane.verdict
    if verdict is None or not verdict.n_positions or not math.isfinite(verdict.worst_nmse):
        return ""
    return f"max NMSE {verdict.worst_nmse:.1e}, bound {verdict.bound:.1e}, round {lane.round}"
