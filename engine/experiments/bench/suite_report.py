"""The report on a suite: rows, aggregates, speed-ups, and where the time went.

Everything here is plain data, as `bench suite --json` prints it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from engine.experiments.bench.request import (
    PLAIN,
    Configuration,
    RequestResult,
    ms_per_token,
    round_costs,
)
from engine.report.common import (
    decimals,
    machine_section,
    model_section,
    repeat_section,
    settings_section,
    shown,
)
from engine.report.parts import Part, Plot, Remark, Report, ReportTable, Section
from engine.trace.facts import recorded_options


def options_of(configurations: Sequence[Configuration]) -> dict[str, dict[str, Any]]:
    """The options of configurations, by name."""
    return {one.name: asdict(one.options) for one in configurations}


def suite_report(
    options: Mapping[str, Mapping[str, Any]], done: Mapping[str, Sequence[RequestResult]]
) -> list[dict[str, Any]]:
    """One object per configuration. options: of each by its name, the plain one among them. Keys:
    name, options, aggregate, tokens_per_second, speed_up, split,
    num_same (requests whose tokens are those of plain decoding) and rows."""
    return [_configuration(name, of, done[name], done[PLAIN]) for name, of in options.items()]


def aggregate_requests(requests: Sequence[RequestResult]) -> dict[str, Any]:
    """The totals that llama.cpp #22400's script prints: the rate to four decimals, None without a
    draft; the sum of the requests' wall times in seconds, to two."""
    drafted = sum(request.draft_n for request in requests)
    accepted = sum(request.draft_n_accepted for request in requests)
    return {
        "n_requests": len(requests),
        "total_predicted": sum(request.predicted_n for request in requests),
        "total_draft": drafted,
        "total_draft_accepted": accepted,
        "aggregate_accept_rate": round(accepted / drafted, 4) if drafted else None,
        "wall_s_total": round(sum(request.wall_s for request in requests), 2),
    }


def _configuration(
    name: str,
    options: Mapping[str, Any],
    requests: Sequence[RequestResult],
    plain: Sequence[RequestResult],
) -> dict[str, Any]:
    plain_of = {request.prompt: request for request in plain}
    compared = [request for request in requests if request.prompt in plain_of]
    beside = [plain_of[request.prompt] for request in compared]
    per_token, plain_per_token = ms_per_token(compared), ms_per_token(beside)
    own = ms_per_token(requests)
    rows = [_row(request, plain_of.get(request.prompt)) for request in requests]
    return {
        "name": name,
        "options": options,
        "aggregate": aggregate_requests(requests),
        "tokens_per_second": 1000 / own if own else None,
        "speed_up": plain_per_token / per_token if per_token and plain_per_token else None,
        "num_same": sum(row["same"] is True for row in rows),
        "split": round_costs(compared, beside),
        "rows": rows,
    }


def _row(request: RequestResult, plain: RequestResult | None) -> dict[str, Any]:
    known = asdict(request)
    del known["configuration"]
    timed = plain is not None and plain.predicted_per_second > 0
    return {
        "name": known.pop("prompt"),
        **known,
        "accept_rate": request.draft_n_accepted / request.draft_n if request.draft_n else None,
        "speed_up": request.predicted_per_second / plain.predicted_per_second
        if plain is not None and timed
        else None,
        "same": None if plain is None else request.tokens == plain.tokens,
    }


OVERVIEW_HEADS = ("configuration", "tok/s", "speed-up", "rate", "tokens/round", "wall s", "same")
_SAME = {True: "yes", False: "NO", None: "n/a"}


def suite_page(result: Mapping[str, Any], command: Sequence[str] = ()) -> Report:
    """The page for one suite. result: as suite_result and `bench suite --json` have it."""
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
                recorded_options(last["options"]), {"runs of each request": result["repeat"]}
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
    yield Remark("same: prompts with the same text as plain decoding; rate: of drafted tokens.")
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
