"""The report on two runs that were laid over one another, of whatever models and traces."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from engine.analysis.findings.check import recorded
from engine.report.common import changed, findings_section, model_section, run_command
from engine.report.generated import GeneratedText, run_texts, shown_texts
from engine.report.parts import CodeSample, Part, Remark, Report, ReportTable, Section
from engine.report.run import model_facts, run_machine
from engine.trace.run_ref import RunRef

_DEFAULT = "default"
_UNTOLD = "n/a"


def pair_report(
    runs: tuple[RunRef, RunRef],
    names: tuple[str, str],
    figures: Sequence[tuple[str, str, str, str]],
    difference: str,
    environment: Mapping[str, Any],
) -> Report:
    """names: of the runs, as the reader knows them. figures: name, both values and the first as a
    multiple of the second. difference: where the texts part, a sentence.

    environment: of this machine; what a run's facts tell of theirs goes before it.
    """
    texts = [run_texts(run) for run in runs]

    def both(make: Any) -> list[Section]:
        """A section for each run, under its name; one for both where they are the same."""
        one, two = (make(run, text) for run, text in zip(runs, texts, strict=True))
        return [one] if one == two else [_named(one, names[0]), _named(two, names[1])]

    return Report(
        f"Two runs compared: {names[0]} and {names[1]}",
        difference,
        [
            Section("Figures", [ReportTable(("figure", *names, "ratio"), figures)]),
            _settings(runs, names),
            *both(lambda run, _: _findings(run)),
            *both(lambda _, text: Section("Text", shown_texts(text))),
            *both(lambda run, _: model_section(run.facts.model, model_facts(run.facts))),
            *both(lambda run, _: run_machine(run.facts, environment)),
            Section("How to repeat them", list(_commands(runs, texts))),
        ],
    )


def _named(section: Section, name: str) -> Section:
    return replace(section, heading=f"{section.heading} of {name}")


def _findings(run: RunRef) -> Section:
    return findings_section([one for one in recorded(run.store) if one.run_id == run.run_id])


def _settings(runs: tuple[RunRef, RunRef], names: tuple[str, str]) -> Section:
    """Every option that one of both has not at its default; what an engine does not report is not
    called a default."""
    options = [run.facts.options for run in runs]
    told = [changed(one) for one in options]
    rest = [_DEFAULT if one else _UNTOLD for one in options]
    rows = [
        (name, *(mine.get(name, other) for mine, other in zip(told, rest, strict=True)))
        for name in {**told[0], **told[1]}
    ]
    parts: list[Part] = [ReportTable(("option", *names), rows)] if rows else []
    return Section("Settings", [*parts, Remark("All other options have their defaults.")])


def _commands(
    runs: tuple[RunRef, RunRef], texts: Sequence[Sequence[GeneratedText]]
) -> Iterator[Part]:
    for run, generated in zip(runs, texts, strict=True):
        if options := run.facts.options:
            prompts = [prompt for prompt, _ in generated]
            yield CodeSample(shlex.join(run_command(run.facts.model, options, prompts)))
