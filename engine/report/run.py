"""Report on one run, on lanes or on two runs, from the trace alone, so that opened traces have one
too; and a run's figures in one line, or in three."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from engine.analysis.findings.audit import audit_text
from engine.analysis.findings.check import recorded
from engine.analysis.run_cost import COST_HEADS, COST_NOTE, RunCost, cost_cells, cost_notes
from engine.analysis.verdict import IDLE_FAULT, LaneVerdict, judge_lanes
from engine.plain_text import size_text
from engine.report.common import (
    GeneratedText,
    changed,
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
from engine.report.parts import CODE, Part, Plot, Remark, Report, ReportTable, Section
from engine.trace.facts import RunFacts
from engine.trace.records import EMITTED_KINDS, PHASES
from engine.trace.run_ref import RunColumns, RunRef
from engine.trace.store import TraceStore
from engine.trace.timings import acceptance, summary, timings

_POSITIONS = 8
"""Draft positions shown in a line."""
_ENDS = {
    "end": "ended with an end token",
    "stop": "ended with an end token or a stop text",
    "limit": "reached the token limit",
    "grammar": "could not continue within the grammar",
    "failed": "failed",
    "stopped": "was stopped",
    "interrupted": "was interrupted when its window ended",
}


def headline(totals: Mapping[str, Any], *, has_speed: bool = True) -> str:
    """Figures of a run in one line, as far as known. has_speed: lanes share their drafts and have
    no speed of their own."""
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
    """The headline; prompt and times of the phases; acceptance by position (if the previous token
    was accepted) and rounds by rollback depth. Unknown figures are omitted."""
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
    if None in (totals.get(name, 0) for name in ("predicted_n", "draft_n", "num_draft_tokens")):
        return  # whether it drafted is not known
    if not totals.get("draft_n"):
        yield "drafts: none, plain decoding"
        return
    parts = []
    if rates := (totals.get("acceptance_per_position") or {}).get("conditional"):
        shown = ["-" if rate is None else f"{rate:.2f}" for rate in rates[:_POSITIONS]]
        more = " …" if len(rates) > _POSITIONS else ""
        parts.append(f"acceptance by position, if reached: {' '.join(shown)}{more}")
    depths = enumerate(totals.get("rollback_depth_histogram") or ())
    if found := [f"{depth} ({n})" for depth, n in depths if n]:
        more = " …" if len(found) > _POSITIONS else ""
        parts.append(f"rollback depth (rounds): {' '.join(found[:_POSITIONS])}{more}")
    if parts:
        yield "; ".join(parts)


def why_it_ended(run: RunRef) -> str:
    """Why a run ended, in one sentence."""
    facts = run.facts
    if error := facts.error:
        return f"The run failed: {error.rstrip('.')}."
    stops = facts.stops or []
    kinds = Counter(stops)
    if not kinds:
        return "No client sent a request." if facts.listens_at else "The run has ended."
    if len(stops) == 1:
        return f"The run {_end(run, stops[0], 0)}."
    if len(kinds) == 1 and stops[0] != "context":
        return f"Each of the {len(stops)} sequences {_end(run, stops[0], 0)}."
    parts = [
        f"{n} {_end(run, stop, stops.index(stop)) if n == 1 else _ENDS.get(stop, stop)}"
        for stop, n in kinds.items()
        if stop != "context"
    ]
    if n := kinds["context"]:
        parts.append(f"{n} filled the context")
    return f"Of {len(stops)} sequences {', '.join(parts)}."


def _end(run: RunRef, stop: str, seq_id: int) -> str:
    asked = run.facts.options.n_predict if run.facts.options else 0
    if stop == "limit" and asked > 0:
        return f"reached its limit of {asked:,} tokens"
    if stop != "context":
        return _ENDS.get(stop, f"ended: {stop}")
    n_ctx = run.facts.n_ctx
    delivered = f"{_n_emitted(run, seq_id):,}"
    of = f" of {asked:,} requested tokens" if asked > 0 else " tokens"
    room = f" of {n_ctx:,} tokens" if n_ctx else ""
    return f"filled the context{room} after {delivered}{of}; raise -c for more"


def _n_emitted(run: RunRef, seq_id: int) -> int:
    tokens = RunColumns(run.store, "tokens", run.run_id)
    return int((tokens.is_text("kind", *EMITTED_KINDS) & (tokens["seq_id"] == seq_id)).sum())


def run_report(run: RunRef, environment: Mapping[str, Any], command: Sequence[str] = ()) -> Report:
    """environment: of this machine; a run's own takes precedence. command: the words it was started
    with; without them a command is made from its options."""
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
            Section("Figures", [_figures(figures) | known]),
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
    names = {"unconditional": "of all steps", "conditional": "of those with all before accepted"}
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
    """The machine of a run; `environment` if its facts have none."""
    known = facts.pick("device", "compute", "threads", "threads_chosen")
    return machine_section(
        facts.environment or environment,
        {name: value for name, value in known.items() if value is not None},
    )


def model_facts(facts: RunFacts) -> dict[str, Any]:
    """Facts of a run's model in addition to its files: architecture and sizes in memory."""
    sizes = {
        "weight": facts.weight_bytes,
        "memory": facts.memory_bytes,
        "snapshot": facts.snapshot_bytes,
    }
    known = {} if facts.architecture is None else {"architecture": facts.architecture}
    return known | {name: size_text(size) for name, size in sizes.items() if size is not None}


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
    """lanes: runs of one comparison, the reference first. verdicts: if already known. environment,
    command: as for `run_report`."""
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
    """A sentence for each of these facts of a lane: another bound than the common one, a fork, a
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
    """A sentence for every noise lane with a ceiling: the NMSE of its texts when decoded afresh."""
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
            f"{verdict.lane}: texts decoded from an empty memory differ by NMSE {figures}; "
            if figures
            else f"{verdict.lane}: no text was decoded from an empty memory; "
        ) + f"rounding reaches {check.ceiling:.0e}"


def _lanes(trace: TraceStore, verdicts: Sequence[LaneVerdict]) -> Iterator[Part]:
    yield ReportTable(LANE_HEADS, [lane_cells(verdict) for verdict in verdicts])
    yield Remark(LANE_NOTE)
    bounds = {v.bound for v in verdicts if math.isfinite(v.bound)}
    common = max(bounds, default=None)
    if common is not None:
        yield {"bound on the NMSE of the logits": f"{common:.1e}"}
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
    """names: of the runs, for display. figures: name, both values and the first as a multiple of
    the second. difference: where the texts diverge, a sentence. environment: of this machine; a
    run's own takes precedence."""
    texts = [run_texts(run) for run in runs]

    def both(make: Any) -> list[Section]:
        """A section for each run, under its name; one for both if they are equal."""
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
    """Options that differ from their default in either run; for an unreported option no default is
    claimed."""
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
            yield Remark(shlex.join(run_command(run.facts.model, options, prompts)), CODE)
