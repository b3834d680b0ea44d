"""Reports on a comparison: of lanes, from its trace alone, and of two runs that were laid over one
another, of whatever models and traces."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from engine.analysis.findings.check import recorded
from engine.analysis.run_cost import COST_HEADS, COST_NOTE, RunCost, cost_cells, cost_notes
from engine.analysis.verdict import IDLE_FAULT, LaneVerdict, judge_lanes
from engine.report.common import (
    GeneratedText,
    changed,
    findings_section,
    machine_section,
    model_section,
    name_of,
    repeat_section,
    run_command,
    run_texts,
    settings_section,
    shown,
    shown_texts,
)
from engine.report.parts import CodeSample, Facts, Part, Plot, Remark, Report, ReportTable, Section
from engine.report.run import model_facts, run_machine
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore

LANE_HEADS = (
    "lane",
    "verdict",
    "band",
    "max NMSE",
    "max |Δ|",
    "max KL",
    "seq",
    "pos",
    "round",
    "after",
    "forks",
    "dupl.",
)
LANE_NOTE = "seq, pos, round: first divergence; after: the round whose rollback came before it"


def compare_report(
    lanes: Sequence[RunRef],
    environment: Mapping[str, Any],
    command: Sequence[str] = (),
    verdicts: Sequence[LaneVerdict] | None = None,
) -> Report:
    """lanes: runs of one comparison, the reference first. verdicts: where they are known already.

    environment, command: as for `engine.report.run`.
    """
    store, facts = lanes[0].store, lanes[0].facts
    if verdicts is None:
        verdicts = judge_lanes(store, [lane.run_id for lane in lanes])
    beyond = [verdict.lane for verdict in verdicts if verdict.is_beyond]
    ids = {lane.run_id for lane in lanes}
    mine = [one for one in recorded(store) if one.run_id in ids]
    n_tokens = (facts.summary or {}).get("predicted_n")
    about = f"{len(verdicts)} lanes over {shown(n_tokens)} tokens against plain decoding; "
    return Report(
        f"Rollback compared: {name_of(facts)}",
        about + (f"beyond their bounds: {', '.join(beyond)}" if beyond else "all within bounds"),
        [
            Section("Lanes", list(_lanes(store, verdicts))),
            Section("Cost", list(_costs([RunCost.of(lane) for lane in lanes]))),
            findings_section(mine, {v.run_id: v.lane for v in verdicts}),
            settings_section(facts.options),
            model_section(facts.model, {"architecture": facts.architecture}),
            machine_section(
                facts.environment or environment, {"device": facts.device, "compute": facts.compute}
            ),
            repeat_section(command),
        ],
    )


def lane_cells(verdict: LaneVerdict) -> tuple[str, ...]:
    """A row of the table under LANE_HEADS."""
    v = verdict
    if not v.n_positions:
        return (v.lane, v.verdict, *["-"] * (len(LANE_HEADS) - 2))
    measured = (f"{v.worst_nmse:.1e}", f"{v.max_abs:.1e}", f"{v.max_kl:.1e}")
    numbers = (v.first_seq, v.first_pos, v.first_round, v.after_round, v.n_forks, v.duplicates)
    return (v.lane, v.verdict, v.band, *measured, *("-" if n is None else str(n) for n in numbers))


def lane_notes(verdicts: Sequence[LaneVerdict], common_bound: float | None) -> Iterator[str]:
    """A sentence for every lane that needs one: another bound than the common one, a fork, a
    fault without effect, an error."""
    for v in verdicts:
        if math.isfinite(v.bound) and v.bound != common_bound:
            yield f"{v.lane}: bound {v.bound:.1e}"
        if f := v.fork:
            before = (
                "" if f.after_round is None else f", after the rollback of round {f.after_round}"
            )
            yield (
                f"{v.lane} forked: sequence {f.seq_id}, position {f.pos}, round {f.round}{before}; "
                f"token {f.token_id} for {f.reference_id}, top-2 gap {f.top2_gap:.1e}"
            )
        if v.idle_faults:
            yield f"{v.lane}: {IDLE_FAULT}"
        if v.error:
            yield f"{v.lane} stopped: {v.error}"


def noise_notes(trace: TraceStore, verdicts: Sequence[LaneVerdict]) -> Iterator[str]:
    """A sentence for every noise lane with a ceiling: what its texts, decoded afresh, came to."""
    for verdict in verdicts:
        check = trace.runs[verdict.run_id].noise_check
        if check is None:
            continue
        worst: dict[str, float] = {}
        for one in check.batches:
            found = math.inf if one.worst is None else one.worst
            worst[one.batches] = max(worst.get(one.batches, 0.0), found)
        figures = ", ".join(f"{nmse:.1e} in {name}" for name, nmse in worst.items())
        yield (
            f"{verdict.lane}: texts decoded afresh differ by NMSE {figures}; "
            if figures
            else f"{verdict.lane}: no text was decoded afresh; "
        ) + f"rounding reaches {check.ceiling:.0e}"


def _lanes(trace: TraceStore, verdicts: Sequence[LaneVerdict]) -> Iterator[Part]:
    yield ReportTable(LANE_HEADS, [lane_cells(verdict) for verdict in verdicts])
    yield Remark(LANE_NOTE)
    bounds = {v.bound for v in verdicts if math.isfinite(v.bound)}
    common = max(bounds, default=None)
    if common is not None:
        yield Facts({"bound on the NMSE of the logits": f"{common:.1e}"})
    notes = (*lane_notes(verdicts, common), *noise_notes(trace, verdicts))
    yield from (Remark(text) for text in notes)
    measured = [v for v in verdicts if v.n_positions]
    yield Plot(
        "bars",
        "Worst NMSE of the logits",
        [v.lane for v in measured],
        {"measured": [v.worst_nmse for v in measured], "bound": [v.bound for v in measured]},
        "logarithmic; n/a: exact, or no bound",
        log=True,
    )


def _costs(costs: Sequence[RunCost]) -> Iterator[Part]:
    yield ReportTable(COST_HEADS, [cost_cells(cost) for cost in costs])
    yield from (Remark(text) for text in (COST_NOTE, *cost_notes(costs)))


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
    changes = [changed(one) for one in options]
    rest = [_DEFAULT if one else _UNTOLD for one in options]
    rows = [
        (name, *(mine.get(name, other) for mine, other in zip(changes, rest, strict=True)))
        for name in {**changes[0], **changes[1]}
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
