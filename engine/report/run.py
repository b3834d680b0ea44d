"""The report on one run, from its trace alone, so that an opened trace has one too; and its figures
in one line, or in three."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from engine.analysis.findings.audit import audit_text
from engine.analysis.findings.check import recorded
from engine.report.common import (
    decimals,
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
from engine.report.parts import Facts, Part, Plot, Report, ReportTable, Section
from engine.size_text import size_text
from engine.trace.facts import RunFacts
from engine.trace.records import PHASES
from engine.trace.run_columns import RunColumns
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from engine.trace.timings import acceptance, summary, timings

_POSITIONS = 8
"""Of a draft, shown in a line."""


def headline(totals: Mapping[str, Any], *, has_speed: bool = True) -> str:
    """Figures of a run in one line, as far as they are known. has_speed: lanes share their drafts
    and have none of their own."""
    n = totals["predicted_n"]
    line = "tokens not known" if n is None else f"{n} tokens"
    if totals["predicted_per_second"] and has_speed:
        line += f", {totals['predicted_per_second']:.1f} tokens/s"
    if totals.get("draft_n"):
        line += f"; {totals['draft_n_accepted']} of {totals['draft_n']} drafted tokens accepted"
        if totals["draft_acceptance_rate"] is not None:
            line += f" ({totals['draft_acceptance_rate']:.3f})"
        if totals["mean_acceptance_length"] is not None:
            line += f", mean length {totals['mean_acceptance_length']:.2f}"
    return line


def figure_lines(totals: Mapping[str, Any]) -> Iterator[str]:
    """The headline; prompt and times of the phases; acceptance by position (given that the token
    before was accepted) and rounds by rollback depth. What is not known is left out."""
    yield headline(totals)
    parts = []
    if totals.get("prompt_n") is not None:
        took = f" in {totals['prompt_ms']:.0f} ms" if totals.get("prompt_ms") else ""
        cached = f", {totals['cache_n']} from the cache" if totals.get("cache_n") else ""
        parts.append(f"prompt: {totals['prompt_n']} tokens{took}{cached}")
    phases = (totals.get("phase_ms") or {}).items()
    if times := [f"{name} {ms:.0f} ms" for name, ms in phases if ms and ms >= 0.5]:
        parts.append(f"rounds: {', '.join(times)}")
    if parts:
        yield "; ".join(parts)
    if totals["predicted_n"] is None:
        return  # nor whether it drafted
    if not totals.get("draft_n"):
        yield "drafts: none, plain decoding"
        return
    parts = []
    if rates := (totals.get("acceptance_per_position") or {}).get("conditional"):
        shown = ["-" if rate is None else f"{rate:.2f}" for rate in rates[:_POSITIONS]]
        more = " …" if len(rates) > _POSITIONS else ""
        parts.append(f"acceptance by position: {' '.join(shown)}{more}")
    depths = enumerate(totals.get("rollback_depth_histogram") or ())
    if found := [f"{depth} ({n})" for depth, n in depths if n]:
        more = " …" if len(found) > _POSITIONS else ""
        parts.append(f"rollback depth (rounds): {' '.join(found[:_POSITIONS])}{more}")
    if parts:
        yield "; ".join(parts)


def run_report(run: RunRef, environment: Mapping[str, Any], command: Sequence[str] = ()) -> Report:
    """environment: of this machine; what the run's facts tell of theirs goes before it.

    command: the words it was started with; without them a command is made of its options.
    """
    store, facts = run.store, run.facts
    figures = summary(store, run.run_id)
    texts = run_texts(run)
    options = facts.options
    if not command and options:
        command = run_command(facts.model, options, [text for text, _ in texts])
    facts_shown = facts.pick("error", "chat", "stops")
    known = {key: shown(value) for key, value in facts_shown.items() if value}
    if audited := "; ".join(audit_text(facts)):
        known["audit"] = audited.removeprefix("audit: ")
    mine = [one for one in recorded(store) if one.run_id == run.run_id]
    return Report(
        f"Speculative decoding of {name_of(facts)}",
        headline(figures),
        [
            Section("Figures", [Facts(_figures(figures) | known)]),
            Section("Drafts", list(_drafts(figures))),
            Section("Time", list(_time(figures))),
            Section("Sequences", [_sequences(store, run.run_id)] if len(texts) > 1 else []),
            findings_section(mine),
            Section("Text", shown_texts(texts)),
            settings_section(options),
            model_section(facts.model, model_facts(facts)),
            run_machine(facts, environment),
            repeat_section(command),
        ],
    )


def _figures(figures: Mapping[str, Any]) -> dict[str, str]:
    return {
        "generated tokens": shown(figures["predicted_n"]),
        "tokens per second": decimals(figures["predicted_per_second"], 1),
        "prompt tokens": shown(figures["prompt_n"]),
        "prompt tokens per second": decimals(figures["prompt_per_second"], 1),
        "steps with a draft": shown(figures["num_spec_steps"]),
        "drafted": shown(figures.get("draft_n", 0)),
        "accepted": shown(figures.get("draft_n_accepted", 0)),
        "acceptance": decimals(figures["draft_acceptance_rate"], 3),
        "mean length of a step": decimals(figures["mean_acceptance_length"], 2),
    }


def _drafts(figures: Mapping[str, Any]) -> list[Part]:
    rates = figures.get("acceptance_per_position") or {}
    positions = max((len(values or ()) for values in rates.values()), default=0)
    parts: list[Part] = []
    names = {"unconditional": "of all steps", "conditional": "of those accepted so far"}
    if positions:
        parts.append(
            Plot(
                "columns",
                "Acceptance by position in the draft",
                [str(i + 1) for i in range(positions)],
                {title: rates.get(key) or [] for key, title in names.items()},
                "rate",
            )
        )
    histogram = figures.get("acceptance_histogram") or []
    if sum(histogram):
        parts.append(_counts("Steps by accepted tokens", histogram))
    depths = figures.get("rollback_depth_histogram") or []
    if sum(depths):
        parts.append(_counts("Rounds by tokens rolled back", depths))
    return parts


def _counts(title: str, counts: Sequence[int]) -> Plot:
    return Plot("columns", title, [str(i) for i in range(len(counts))], {"n": list(counts)})


def _time(figures: Mapping[str, Any]) -> list[Part]:
    spent = {phase: figures["phase_ms"].get(phase) for phase in PHASES}
    known = {phase: ms for phase, ms in spent.items() if ms}
    if not known:
        return []
    return [
        Plot(
            "bars",
            "Time after the prompts by phase",
            list(known),
            {"time": list(known.values())},
            "ms",
        )
    ]


def _sequences(store: TraceStore, run_id: int) -> ReportTable:
    ids = np.unique(RunColumns(store, "rounds", run_id)["seq_id"]).tolist()
    rows = []
    for seq_id in ids[:200]:
        timed, fared = timings(store, run_id, seq_id), acceptance(store, run_id, seq_id)
        rows.append(
            [
                str(seq_id),
                shown(timed["prompt_n"]),
                shown(timed["predicted_n"]),
                decimals(timed["predicted_per_second"], 1),
                decimals(fared["draft_acceptance_rate"], 3),
                decimals(fared["mean_acceptance_length"], 2),
            ]
        )
    heads = ["sequence", "prompt", "generated", "tokens/s", "acceptance", "mean length"]
    return ReportTable(heads, rows)


def run_machine(facts: RunFacts, environment: Mapping[str, Any]) -> Section:
    """Where a run ran; `environment` where it does not report."""
    known = facts.pick("device", "compute", "threads", "threads_chosen")
    return machine_section(
        facts.environment or environment,
        {name: value for name, value in known.items() if value is not None},
    )


def model_facts(facts: RunFacts) -> dict[str, Any]:
    """What a run tells of its model next to the files: architecture and sizes in memory."""
    sizes = {
        "weight": facts.weight_bytes,
        "memory": facts.memory_bytes,
        "snapshot": facts.snapshot_bytes,
    }
    known = {} if facts.architecture is None else {"architecture": facts.architecture}
    return known | {name: size_text(size) for name, size in sizes.items() if size is not None}
