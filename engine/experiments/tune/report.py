"""The result of tuning as a report (engine.report): for a terminal, Markdown or a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.analysis.what_if.surface import ASSUMPTIONS
from engine.plain_text import size_text
from engine.report.common import (
    decimals,
    machine_section,
    model_section,
    repeat_section,
    settings_section,
    shown,
)
from engine.report.parts import CODE, Part, Plot, Remark, Report, ReportTable, Section
from engine.trace.facts import recorded_options

_HEADS = ("configuration", "tok/s", "low", "high", "speed-up", "estimate", "memory", "same text")
_MOST_TRIALS = 5


def tune_report(data: Mapping[str, Any], command: Sequence[str] = ()) -> Report:
    """data: as engine.experiments.tune.tune.tune returns it."""
    n = len(data["prompts"])
    title = f"Settings for {shown(data['model'].get('name'))}"
    return Report(
        title,
        f"{n} prompts, {data['options']['n_predict']} tokens each, {data['pairs']} pairs of runs, "
        f"compute {data['compute']}, {data['environment']['threads']} threads",
        [
            Section("Recommended", list(_recommended(data))),
            Section("Runs in alternation", list(_confirmed(data))),
            Section("Break-even", list(_costs(data))),
            Section(
                f"Acceptance of {data['verdict']['fastest']}",
                [*_positions(data), *_categories(data)],
            ),
            Section("Speed against memory", list(_pareto(data))),
            Section("Rules, simulated", list(_rules(data))),
            Section("Search by runs", list(_trials(data))),
            settings_section(recorded_options(data["options"])),
            model_section(data["model"]),
            machine_section(
                data["environment"], {"device": data["device"], "compute": data["compute"]}
            ),
            repeat_section(command),
        ],
    )


def findings(report: Report) -> Report:
    """The report without what a terminal does not need: settings, model, machine, command."""
    names = ("Settings", "Model", "Machine and versions", "Command to repeat it")
    return Report(
        report.title,
        report.summary,
        [section for section in report.sections if section.heading not in names],
    )


def _recommended(data: Mapping[str, Any]) -> Iterator[Part]:
    chosen = data["verdict"]["chosen"]
    yield Remark("plain decoding" if data["setting"] is None else chosen)
    for line in data["verdict"]["lines"]:
        yield Remark(line)
    for one in data["flags"]:
        if one["flags"]:
            yield Remark(f"{one['engine']}:")
            yield Remark(one["flags"], CODE)
        for missing in one["missing"]:
            yield Remark(f"{one['engine']}: {missing}")


def _confirmed(data: Mapping[str, Any]) -> Iterator[Part]:
    yield ReportTable(
        _HEADS,
        [
            (
                one["name"],
                decimals(one["tokens_per_second"], 1),
                decimals(one["low"], 1),
                decimals(one["high"], 1),
                decimals(one["speed_up"], 2),
                decimals(one["estimate"] or data["plain_estimate"], 1),
                size_text(one["undo_bytes"]) if one["undo_bytes"] else "0",
                "n/a" if data["synthetic"] else f"{one['same']}/{one['n_prompts']}",
            )
            for one in data["confirmed"]
        ],
    )
    if data["synthetic"]:
        yield Remark("Acceptance is synthetic: the texts are not the model's.")
    elif any(one["same"] < one["n_prompts"] for one in data["confirmed"]):
        yield Remark(
            "Some texts differ from plain decoding: `draftscope match` shows why.", "warning"
        )


def _costs(data: Mapping[str, Any]) -> Iterator[Part]:
    for one in data["confirmed"]:
        costs = one["costs"]
        if not costs or costs.get("break_even_acceptance") is None:
            continue
        needed, got = costs["break_even_acceptance"], costs["acceptance"]
        cannot = ", impossible with this draft length" if needed > 1 else ""
        yield Remark(
            f"{one['name']}: faster from an acceptance of {decimals(needed, 3)}{cannot}; it has "
            f"{decimals(got, 3)}. A round of {decimals(costs['round_ms'], 2)} ms (drafting "
            f"{decimals(costs['draft_ms'], 2)}, verifying {decimals(costs['verify_ms'], 2)}, rest "
            f"{decimals(costs['rest_ms'], 2)}) brings {decimals(costs['tokens_per_round'], 2)} "
            f"tokens; a plain step takes {decimals(costs['plain_step_ms'], 2)} ms."
        )


def _positions(data: Mapping[str, Any]) -> Iterator[Part]:
    rows = data["by_position"]
    if rows:
        names = [str(row["position"]) for row in rows]
        yield ReportTable(
            ("position", "right", "all up to it", "judged"),
            [
                (
                    str(row["position"]),
                    decimals(row["conditional"], 3),
                    decimals(row["survival"], 3),
                    str(row["n"]),
                )
                for row in rows
            ],
        )
        yield Plot(
            "columns",
            "Drafted tokens that are right",
            names,
            {
                "after right ones": [row["conditional"] for row in rows],
                "all up to it": [row["survival"] for row in rows],
            },
        )


def _categories(data: Mapping[str, Any]) -> Iterator[Part]:
    rows = data["by_category"]
    if len(rows) > 1:
        yield ReportTable(
            ("category", "prompts", "acceptance", "tokens/round", "tok/s, estimated"),
            [
                (
                    row["category"] or "none",
                    str(row["n_prompts"]),
                    decimals(row["acceptance"], 3),
                    decimals(row["tokens_per_round"], 2),
                    decimals(row["tokens_per_second"], 1),
                )
                for row in rows
            ],
        )


def _pareto(data: Mapping[str, Any]) -> Iterator[Part]:
    rows = data["pareto"]
    if rows:
        slots = list(rows[0]["bytes"])
        yield ReportTable(
            ("setting", "tok/s, estimated", *(f"{n} slot{'s' * (n != '1')}" for n in slots)),
            [
                (
                    row["setting"],
                    decimals(row["tokens_per_second"], 1),
                    *(size_text(row["bytes"][n]) for n in slots),
                )
                for row in rows
            ],
        )
        yield Remark("Memory: snapshots and checkpoints of recurrent states, for rollbacks.")


def _rules(data: Mapping[str, Any]) -> Iterator[Part]:
    yield ReportTable(
        ("drafter", "rule", "best setting", "tok/s, estimated", "acceptance", "here"),
        [
            (
                one["drafter"],
                one["rule"],
                ", ".join(f"{name} {value:g}" for name, value in one["setting"].items()),
                decimals(one["tokens_per_second"], 1),
                decimals(one["acceptance"], 3),
                "yes" if one["runs_here"] else "estimate only",
            )
            for one in data["rules"]
        ],
    )
    yield Remark(f"Assumed: {'; '.join(ASSUMPTIONS)}.")
    if data["unmeasured_widths"]:
        widths = ", ".join(map(str, data["unmeasured_widths"]))
        yield Remark(f"Passes of {widths} tokens were not measured; their time is interpolated.")


def _trials(data: Mapping[str, Any]) -> Iterator[Part]:
    rows = data.get("trials", [])
    if rows:
        names = [name for name in rows[0] if name != "tokens_per_second"]
        yield ReportTable(
            (*names, "tok/s"),
            [
                (*(str(row[name]) for name in names), decimals(row["tokens_per_second"], 1))
                for row in rows[:_MOST_TRIALS]
            ],
        )
        yield Remark("Each was run once: a small lead may be by chance.")
