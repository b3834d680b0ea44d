"""Reports of a conformance run: terminal, HTML, Markdown, JUnit; and a script that repeats a fault
without this program."""

from __future__ import annotations

import math
import shlex
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import engine
from engine.conform.checks import CHECKS, VAGUE, Fault
from engine.conform.runner import COST, Outcome
from engine.errors import TraceFileError
from engine.files import user_text, written_whole
from engine.foreign import JsonError, parse_json
from engine.report.parts import CODE, Part, Plot, Remark, Report, ReportTable, Section
from engine.trace.typed_json import strictly

JSON_KIND, JSON_VERSION = "draftscope conform", 1
_MOST_BYTES = 64 << 20

MEANINGS = tomllib.loads(Path(__file__).with_name("causes.toml").read_text("utf-8"))
"""The meaning of each cause."""
_WORDS = {None: "-", True: "ok", False: "FAIL"}


def lines(outcomes: Sequence[Outcome], target: str) -> Iterator[str]:
    """A table of kernels by checks, then a paragraph for each fault."""
    width = max((len(_label(o)) for o in outcomes), default=0) + 2
    yield " " * width + "".join(f"{name:>11}" for name in CHECKS)
    for label, row in _table(outcomes):
        yield f"{label:<{width}}" + "".join(f"{_WORDS[cell]:>11}" for cell in row)
    yield from _remarks(outcomes)
    for fault in chain.from_iterable(outcome.faults for outcome in outcomes):
        yield ""
        yield from paragraph(fault)
        yield f"  repeat: {again(fault, target)}"
    if costs := _costs(outcomes):
        yield ""
        yield costs.title
        for label, *figures in costs.rows:
            yield f"{label:<{width}}" + "".join(f"{figure:>11}" for figure in figures)


def report(outcomes: Sequence[Outcome], title: str, target: str, device: str) -> Report:
    """The same for HTML and Markdown, with each fault's error by row or depth as a plot."""
    n_failed = sum(not outcome.passed for outcome in outcomes)
    where = "on CUDA" if device == "cuda" else "in Triton's interpreter or on the CPU"
    rows = [[label, *(_WORDS[cell] for cell in row)] for label, row in _table(outcomes)]
    parts: list[Part] = [ReportTable(["kernel", *CHECKS], rows)] if rows else []
    parts += [Remark(line) for line in _remarks(outcomes)]
    sections = [Section("Checks", parts)]
    for fault in chain.from_iterable(outcome.faults for outcome in outcomes):
        first, *rest = paragraph(fault)
        kind, _, words = first.partition(": ")
        parts = [Remark(words, kind if kind == "error" else "")]
        parts += [Remark(line.strip()) for line in rest]
        parts += error_plots(fault)
        parts.append(Remark(again(fault, target), CODE))
        sections.append(Section(f"{fault.kernel}: {fault.cause}", parts))
    if costs := _costs(outcomes):
        sections.append(Section("Cost", [costs]))
    n_checks = len(judged(outcomes))
    return Report(title, f"{n_checks} checks {where}, {n_failed} failed.", sections)


def error_plots(fault: Fault) -> list[Plot]:
    """Relative error by row of the pass, or of the state by the depth compared."""
    made = []
    for title, errors in (
        ("Error of the output of each row", fault.row_errors),
        ("Difference of the state from that after each number of rows", fault.depth_errors),
    ):
        if errors:
            names = [str(i) for i in range(len(errors))]
            made.append(Plot("columns", title, names, {"relative error": list(errors)}))
    return made


def judged(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The checks, without measurements and unfinished ones."""
    return [outcome for outcome in outcomes if outcome.check in CHECKS and not outcome.needs]


def _remarks(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Kernels that were not played, and those whose checks name different causes."""
    named: dict[str, dict[str, list[str]]] = {}
    for outcome in outcomes:
        if outcome.needs:
            yield f"not checked: {f'{_label(outcome)} {outcome.check}'.strip()}: {outcome.needs}"
        for fault in outcome.faults:
            if not fault.note and fault.cause not in (*VAGUE, "crash", "hang"):
                causes = named.setdefault(_label(outcome), {})
                causes.setdefault(fault.cause, []).append(outcome.check)
    for label, causes in named.items():
        if len(causes) > 1:
            each = "; ".join(f"{cause} ({', '.join(seen)})" for cause, seen in causes.items())
            yield f"not certain: {label}: its checks name different causes, one or all true: {each}"


def _costs(outcomes: Sequence[Outcome]) -> ReportTable | None:
    """Bytes of a verify pass, and its time if measured."""
    title = "A verify pass of 64 sequences of 4 tokens, 32 heads of 128 (windows: 8,192 channels)"
    heads = ["kernel", "least MiB", "ms", "of a copy"]
    rows = []
    for outcome in outcomes:
        if outcome.figures:
            ms, share = (outcome.figures.get(name) for name in ("ms", "copy_share"))
            least = f"{outcome.figures['bytes'] / 2**20:.1f}"
            measured = "n/a" if ms is None else f"{ms:.3f}", f"{share:.0%}" if share else "n/a"
            rows.append([_label(outcome), least, *measured])
    return ReportTable(heads, rows, title) if rows else None


def junit(outcomes: Sequence[Outcome], title: str, target: str) -> str:
    """The same as a JUnit file: one case per check of a kernel."""
    suite = ElementTree.Element(
        "testsuite",
        name=title,
        tests=str(sum(outcome.check != COST for outcome in outcomes)),
        failures=str(sum(not o.passed for o in outcomes)),
        skipped=str(sum(bool(o.needs) for o in outcomes)),
    )
    for outcome in outcomes:
        if outcome.check == COST:
            continue
        case = ElementTree.SubElement(
            suite,
            "testcase",
            classname=_label(outcome),
            name=outcome.check or "not checked",
            time=f"{outcome.seconds:.3f}",
        )
        if outcome.needs:
            ElementTree.SubElement(case, "skipped", message=outcome.needs)
        for fault in outcome.faults:
            if not fault.note:
                failure = ElementTree.SubElement(case, "failure", message=fault.cause)
                failure.text = "\n".join([*paragraph(fault), again(fault, target)])
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def facts(outcomes: Sequence[Outcome], title: str, target: str, device: str) -> dict[str, Any]:
    """The same as JSON. title: the target with its version."""
    return {
        "kind": JSON_KIND,
        "version": JSON_VERSION,
        "target": title,
        "argument": target,
        "device": device,
        "failed": sum(not outcome.passed for outcome in outcomes),
        "checks": [asdict(outcome) | {"passed": outcome.passed} for outcome in outcomes],
    }


def read_json(path: Path) -> tuple[str, list[Outcome]]:
    """The target as named, and the outcomes, from a file written by `facts`. Raises TraceFileError
    if it cannot be read or lacks something."""

    def wrong(place: str, what: str) -> TraceFileError:
        where = f"{path}: {place}" if place else f"{path}"
        return TraceFileError(
            f"{where} {what}.", "Write it again with `draftscope conform --json`."
        )

    try:
        data = parse_json(user_text(path, _MOST_BYTES, TraceFileError))
    except JsonError as error:
        raise wrong("", f"is not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("kind") != JSON_KIND:
        raise wrong("", "is not a result of `draftscope conform`")
    if data.get("version") != JSON_VERSION:
        raise wrong("version", f"is not {JSON_VERSION}, which this program reads")
    target = strictly(str, data.get("argument"), wrong)
    return target, strictly(list[Outcome], _with_infinities(data.get("checks")), wrong)


def _with_infinities(value: Any) -> Any:
    """JSON has no infinity: null errors stand for it."""
    if isinstance(value, list):
        return [math.inf if item is None else _with_infinities(item) for item in value]
    if isinstance(value, dict):
        filled = {name: _with_infinities(item) for name, item in value.items()}
        return filled | ({"error": math.inf} if filled.get("error", 0.0) is None else {})
    return value


def _label(outcome: Outcome) -> str:
    return f"{outcome.kernel} {outcome.recurrence}"


def _table(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, list[bool | None]]]:
    labels = dict.fromkeys(_label(outcome) for outcome in outcomes)
    passed = {(_label(o), o.check): o.passed for o in judged(outcomes)}
    for label in labels:
        yield label, [passed.get((label, name)) for name in CHECKS]


def paragraph(fault: Fault) -> Iterator[str]:
    """A fault, its place, and the smallest shape that shows it."""
    kind, meaning = "note" if fault.note else "error", MEANINGS.get(fault.cause, "unknown")
    yield f"{kind}: {fault.kernel}, {fault.check}: {fault.cause} ({meaning})"
    if fault.detail:
        yield f"  {fault.detail}"
    if fault.cause not in ("crash", "hang"):
        place = f"  round {fault.round}, sequence {fault.sequence}"
        place += f", row {fault.row}" if fault.row >= 0 else ""
        yield f"{place}: relative error {fault.error:.2g}"
        yield f"  smallest shape that shows it: {fault.shape.recurrence} {fault.shape}"


def again(fault: Fault, target: str) -> str:
    """The command that repeats the check."""
    return (
        f"draftscope conform {shlex.quote(target)} --only {fault.kernel} --checks {fault.check} "
        f"--seed {fault.seed}"
    )


# -- a script that repeats a fault ----------------------------------------------------------------

_FILES = ("__init__.py", "errors.py", "plain_text.py")
_LEFT_OUT = ("own", "report")
_MAIN = '''"""Plays one check of a kernel again and prints what differs: {kernel}, {check}: {cause}.

python3 {file} [TARGET]

TARGET is the package, its wheel or folder, or the adapter (FILE.py:FUNCTION); without it that of
the first time: {target!r}. Needs torch and triton.
"""

import os
import sys

if len(sys.argv) > 1 and sys.argv[1] in ("-h", "--help"):
    sys.exit(__doc__)
if {device!r} == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from engine.conform.runner import play_again

lines = list(play_again(sys.argv[1] if len(sys.argv) > 1 else {target!r}, {fault!r}, {device!r}))
print("\\n".join(lines))
sys.exit(not lines[0].startswith("0 "))
'''


def write_script(path: Path, fault: Fault, target: str, device: str) -> None:
    """Write a Python archive that repeats `fault` of `target` on `device` (cpu or cuda), for the
    kernel's author: it needs only torch and triton.

    Raises OptionError if the file cannot be written.
    """
    folder = Path(engine.__file__).parent
    # infinity has no literal in Python
    fields = asdict(replace(fault, error=0.0, row_errors=(), depth_errors=()))
    if Path(target.rpartition(":")[0]).is_file() or Path(target).exists():
        target = str(Path(target).absolute())
    main = _MAIN.format(
        kernel=fault.kernel, check=fault.check, cause=fault.cause, file=path.name, target=target,
        device=device, fault=fields,
    )  # fmt: skip
    with written_whole(path) as part, part.open("wb") as file:
        file.write(b"#!/usr/bin/env python3\n")
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("__main__.py", main)
            checks = [f for f in (folder / "conform").rglob("*.py") if f.stem not in _LEFT_OUT]
            for source in (*(folder / name for name in _FILES), *sorted(checks)):
                archive.write(source, f"engine/{source.relative_to(folder)}")
