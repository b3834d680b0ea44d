"""The report on a comparison of lanes, from its trace alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.analysis.findings.check import recorded
from engine.analysis.verdict import LaneVerdict, judge_lanes
from engine.report.common import (
    findings_section,
    machine_section,
    model_section,
    name_of,
    repeat_section,
    settings_section,
    shown,
)
from engine.report.parts import Facts, Part, Plot, Remark, Report, ReportTable, Section
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
    """A sentence for every lane that needs one: another bound than the common one, a fork, an
    error."""
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
