"""Reports of a conformance run: lines for a terminal, Markdown, JUnit."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from xml.etree import ElementTree

from engine.conform.causes import CAUSES
from engine.conform.checks import CHECKS, Fault
from engine.conform.runner import Outcome

_WORDS = {None: "-", True: "ok", False: "FAIL"}


def lines(outcomes: Sequence[Outcome], target: str) -> Iterator[str]:
    """A table of kernels by checks, then a paragraph for each fault."""
    width = max((len(_label(o)) for o in outcomes), default=0) + 2
    yield " " * width + "".join(f"{name:>11}" for name in CHECKS)
    for label, row in _table(outcomes):
        yield f"{label:<{width}}" + "".join(f"{_WORDS[cell]:>11}" for cell in row)
    for fault in _faults(outcomes):
        yield ""
        yield from _paragraph(fault, target)


def markdown(outcomes: Sequence[Outcome], title: str, target: str) -> str:
    """The same as Markdown, for an issue or a summary of CI."""
    text = [
        f"### {title}",
        "",
        f"| kernel | {' | '.join(CHECKS)} |",
        "|---" * (len(CHECKS) + 1) + "|",
    ]
    for label, row in _table(outcomes):
        text.append(f"| {label} | {' | '.join(_WORDS[cell] for cell in row)} |")
    for fault in _faults(outcomes):
        first, *rest = _paragraph(fault, target)
        text += ["", f"**{first}**", "", *(f"- {line.strip()}" for line in rest)]
    return "\n".join(text) + "\n"


def junit(outcomes: Sequence[Outcome], title: str, target: str) -> str:
    """The same as a JUnit file: a case for each check of a kernel."""
    suite = ElementTree.Element(
        "testsuite",
        name=title,
        tests=str(len(outcomes)),
        failures=str(sum(not o.passed for o in outcomes)),
    )
    for outcome in outcomes:
        case = ElementTree.SubElement(
            suite,
            "testcase",
            classname=_label(outcome),
            name=outcome.check,
            time=f"{outcome.seconds:.3f}",
        )
        for fault in outcome.faults:
            if not fault.note:
                failure = ElementTree.SubElement(case, "failure", message=fault.cause)
                failure.text = "\n".join(_paragraph(fault, target))
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _label(outcome: Outcome) -> str:
    return f"{outcome.kernel} {outcome.recurrence}"


def _table(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, list[bool | None]]]:
    labels = dict.fromkeys(_label(outcome) for outcome in outcomes)
    passed = {(_label(o), o.check): o.passed for o in outcomes}
    for label in labels:
        yield label, [passed.get((label, name)) for name in CHECKS]


def _faults(outcomes: Sequence[Outcome]) -> Iterator[Fault]:
    for outcome in outcomes:
        yield from outcome.faults


def _paragraph(fault: Fault, target: str) -> Iterator[str]:
    kind = "note" if fault.note else "error"
    yield f"{kind}: {fault.kernel}, {fault.check}: {fault.cause} ({CAUSES[fault.cause]})"
    if fault.detail:
        yield f"  {fault.detail}"
    if fault.cause not in ("crash", "hang"):
        place = f"  round {fault.round}, sequence {fault.sequence}"
        place += f", row {fault.row}" if fault.row >= 0 else ""
        yield f"{place}: relative error {fault.error:.2g}"
        yield f"  smallest shape that shows it: {fault.shape.recurrence} {fault.shape}"
    where = shlex.quote(target)
    yield (
        f"  again: draftscope conform {where} --only {fault.kernel} --checks {fault.check} "
        f"--seed {fault.seed}"
    )
