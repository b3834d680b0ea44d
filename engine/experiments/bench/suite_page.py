"""The report on the prompt suite, from the object that `bench` writes as its result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.report.common import (
    decimals,
    machine_section,
    model_section,
    repeat_section,
    settings_section,
    shown,
)
from engine.report.parts import Part, Plot, Remark, Report, ReportTable, Section
from engine.trace.facts import options_of

OVERVIEW_HEADS = ("configuration", "tok/s", "speed-up", "rate", "tokens/round", "wall s", "same")
_SAME = {True: "yes", False: "NO", None: "n/a"}


def suite_page(result: Mapping[str, Any], command: Sequence[str] = ()) -> Report:
    """result: of one suite, as engine.experiments.bench.suite_report and the command line put it
    together."""
    configurations = result["configurations"]
    model, last = result["model"], configurations[-1]
    return Report(
        f"Speculative decoding measured: {shown(model.get('name'))}",
        f"{len(last['rows'])} prompts ({result['prompts']}), {len(configurations)} configurations, "
        f"compute {result['compute']}"
        + ("" if result["complete"] else "; not complete: the suite was stopped"),
        [
            Section("Configurations", list(_overview(configurations))),
            Section("Prompts", list(_prompts(configurations))),
            settings_section(
                options_of(last["options"]), {"runs of each request": result["repeat"]}
            ),
            model_section(model),
            machine_section(
                result["environment"], {"device": result["device"], "compute": result["compute"]}
            ),
            repeat_section(command),
        ],
    )


def overview_cells(one: Mapping[str, Any]) -> tuple[str, ...]:
    """The row of a configuration under OVERVIEW_HEADS."""
    split, total = one["split"] or {}, one["aggregate"]
    return (
        one["name"],
        decimals(one["tokens_per_second"], 1),
        decimals(one["speed_up"], 2),
        decimals(total["aggregate_accept_rate"], 3),
        decimals(split.get("tokens_per_round"), 2),
        decimals(total["wall_s_total"], 2),
        f"{one['num_same']}/{len(one['rows'])}",
    )


def _overview(configurations: Sequence[Mapping[str, Any]]) -> Iterator[Part]:
    yield ReportTable(OVERVIEW_HEADS, [overview_cells(one) for one in configurations])
    yield Remark("same: prompts whose text is that of plain decoding; rate: of drafted tokens.")
    yield Plot(
        "bars",
        "Speed",
        [one["name"] for one in configurations],
        {"tokens/s": [one["tokens_per_second"] for one in configurations]},
        "tokens/s",
    )
    costs = {one["name"]: one["split"] for one in configurations if one["split"]}
    yield Plot(
        "bars",
        "A round",
        list(costs),
        {
            "drafting": [split["draft_ms"] for split in costs.values()],
            "verifying": [split["verify_ms"] for split in costs.values()],
            "rest": [split["rest_ms"] for split in costs.values()],
        },
        "ms",
    )


def _prompts(configurations: Sequence[Mapping[str, Any]]) -> Iterator[Part]:
    heads = ("prompt", "tokens", "drafted", "accepted", "rate", "tok/s", "speed-up", "same")
    for one in configurations:
        rows = [
            (
                row["name"],
                shown(row["predicted_n"]),
                shown(row["draft_n"]),
                shown(row["draft_n_accepted"]),
                decimals(row["accept_rate"], 3),
                decimals(row["predicted_per_second"], 1),
                decimals(row["speed_up"], 2),
                _SAME.get(row["same"], "n/a"),
            )
            for row in one["rows"]
        ]
        yield ReportTable(heads, rows, title=one["name"])
