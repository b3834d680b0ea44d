"""Reports of a conformance run: lines for a terminal, one for HTML and Markdown, JUnit."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from xml.etree import ElementTree

from engine.conform.causes import CAUSES
from engine.conform.checks import CHECKS, Fault
from engine.conform.runner import Outcome
from engine.report.parts import CodeSample, Part, Plot, Remark, Report, ReportTable, Section

_WORDS = {None: "-", True: "ok", False: "FAIL"}


def lines(outcomes: Sequence[Outcome], target: str) -> Iterator[str]:
    """A table of kernels by checks, then a paragraph for each fault."""
    width = max((len(_label(o)) for o in outcomes), default=0) + 2
    yield " " * width + "".join(f"{name:>11}" for name in CHECKS)
    for label, row in _table(outcomes):
        yield f"{label:<{width}}" + "".join(f"{_WORDS[cell]:>11}" for cell in row)
    for fault in _faults(outcomes):
        yield ""
        yield from paragraph(fault)
        yield f"  again: {again(fault, target)}"


def report(outcomes: Sequence[Outcome], title: str, target: str, device: str) -> Report:
    """The same for HTML and Markdown, with the error by row or depth of each fault as a plot."""
    n_failed = sum(not outcome.passed for outcome in outcomes)
    where = "on CUDA" if device == "cuda" else "in Triton's interpreter or on the CPU"
    rows = [[label, *(_WORDS[cell] for cell in row)] for label, row in _table(outcomes)]
    sections = [Section("Checks", [ReportTable(["kernel", *CHECKS], rows)] if rows else [])]
    for fault in _faults(outcomes):
        first, *rest = paragraph(fault)
        kind, _, words = first.partition(": ")
        parts: list[Part] = [Remark(words, kind if kind == "error" else "")]
        parts += [Remark(line.strip()) for line in rest]
        parts += error_plots(fault)
        parts.append(CodeSample(again(fault, target)))
        sections.append(Section(f"{fault.kernel}: {fault.cause}", parts))
    return Report(title, f"{len(outcomes)} checks {where}, {n_failed} failed.", sections)


def error_plots(fault: Fault) -> list[Plot]:
    """Relative error by row of the pass, or of the state by the depth that it is compared with."""
    made = []
    for title, first, errors in (
        ("Error of the output of each row", 0, fault.row_errors),
        ("Distance of the state from that after each number of rows", 0, fault.depth_errors),
    ):
        if errors:
            names = [str(first + i) for i in range(len(errors))]
            made.append(Plot("columns", title, names, {"relative error": list(errors)}))
    return made


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
                failure.text = "\n".join([*paragraph(fault), again(fault, target)])
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


def paragraph(fault: Fault) -> Iterator[str]:
    """What a fault is, where, and the smallest shape that shows it."""
    kind = "note" if fault.note else "error"
    yield f"{kind}: {fault.kernel}, {fault.check}: {fault.cause} ({CAUSES[fault.cause]})"
    if fault.detail:
        yield f"  {fault.detail}"
    if fault.cause not in ("crash", "hang"):
        place = f"  round {fault.round}, sequence {fault.sequence}"
        place += f", row {fault.row}" if fault.row >= 0 else ""
        yield f"{place}: relative error {fault.error:.2g}"
        yield f"  smallest shape that shows it: {fault.shape.recurrence} {fault.shape}"


def again(fault: Fault, target: str) -> str:
    """The command that plays the check again."""
    return (
        f"draftscope conform {shlex.quote(target)} --only {fault.kernel} --checks {fault.check} "
        f"--seed {fault.seed}"
    )
