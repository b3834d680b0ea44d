"""JSON that `tune --json` and `bench suite --json` print, read as the results file is.

The file may come from anyone: what is taken from it is checked, in words that name its place.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from msgspec import Meta

from engine.errors import TraceFileError
from engine.experiments.results.table import (
    DONE,
    FIGURES,
    MOST_ROWS,
    SUITE,
    TUNE,
    ExperimentResults,
    is_figure,
    results_of,
)
from engine.files import file_head, user_text
from engine.foreign_json import JsonError, parse_json
from engine.foreign_numbers import LARGEST
from engine.trace.typed_json import strictly

KINDS = {"draftscope tune": TUNE, "draftscope bench suite": SUITE}
VERSION = 1
MEASURED, ESTIMATED = "measured", "estimated"
_MOST_BYTES = 64 << 20
_BEGIN = re.compile(rb'\s*\{\s*"kind"\s*:\s*"(%s)"' % "|".join(KINDS).encode())
_AGAIN = "Write it again with --json."
_LONGEST = 200
"""Characters of a name."""

_Figure = Annotated[float, Meta(ge=0, le=LARGEST)]
_Name = Annotated[str, Meta(max_length=_LONGEST)]
_Rows = Meta(max_length=MOST_ROWS)


class _Setting(TypedDict):
    drafter: _Name
    n_max: _Figure
    p_min: _Figure


class _Costs(TypedDict):
    acceptance: NotRequired[_Figure | None]


class _Confirmed(TypedDict):
    tokens_per_second: _Figure
    low: _Figure
    high: _Figure
    undo_bytes: _Figure
    setting: _Setting | None
    costs: _Costs | None


class _Estimated(TypedDict):
    tokens_per_second: _Figure
    acceptance: _Figure | None
    setting: _Setting


class _TuneFile(TypedDict):
    model: dict[str, Any]
    environment: dict[str, Any]
    confirmed: Annotated[list[_Confirmed], _Rows]
    estimates: Annotated[list[_Estimated], _Rows]


class _Request(TypedDict):
    name: _Name
    predicted_per_second: _Figure
    draft_n: _Figure
    draft_n_accepted: _Figure


class _Configuration(TypedDict):
    name: _Name
    rows: Annotated[list[_Request], _Rows]


class _SuiteFile(TypedDict):
    model: dict[str, Any]
    environment: dict[str, Any]
    configurations: Annotated[list[_Configuration], _Rows]


Row = tuple[dict[str, Any], dict[str, float | None]]
"""Settings, by their keys in the plan of a sweep, and figures by name of schema.FIGURES."""


def is_results_json(path: Path) -> bool:
    """Whether a path is such a file. Looks at the first bytes only."""
    return _BEGIN.match(file_head(path, 256)) is not None


def read_results_json(path: Path) -> ExperimentResults:
    """Read a file. Raises TraceFileError, in one sentence, for one that cannot be read, is
    something else or has not what is needed."""
    data = _loaded(path)
    kind = KINDS[data["kind"]]

    def wrong(place: str, what: str) -> TraceFileError:
        return TraceFileError(f"{path}: {place} {what}.", _AGAIN)

    strictly(_TuneFile if kind == TUNE else _SuiteFile, data, wrong)
    model, environment = data["model"], data["environment"]
    found = tune_rows(data) if kind == TUNE else list(_suite_rows(data, wrong))
    # settings named twice would be one row of a results file, and are one here
    rows = {key_of(settings): (settings, figures) for settings, figures in found}
    name = model.get("name")
    return results_of(
        path,
        {"title": title(kind, name if isinstance(name, str) else ""), "kind": kind},
        len(rows),
        [
            [key, DONE, "", "", "", i, json.dumps(settings), 0, 0, 1, *map(figures.get, FIGURES)]
            for i, (key, (settings, figures)) in enumerate(rows.items(), 1)
        ],
        {0: json.dumps(environment), 1: json.dumps(model)},
    )


def title(kind: str, model: str) -> str:
    """What results are called: their kind, and the model's name."""
    return f"{kind}: {model[:_LONGEST]}" if model else kind


def key_of(settings: Mapping[str, Any]) -> str:
    """The key of a row, from its settings."""
    text = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def tune_rows(data: Mapping[str, Any]) -> list[Row]:
    """The rows of what `tune` returns: real runs, and the simulated settings,
    distinguished by the setting `figures`."""
    measured = [
        (
            _tune_settings(one["setting"], MEASURED),
            {
                "predicted_per_second": one["tokens_per_second"],
                "predicted_per_second_low": one["low"],
                "predicted_per_second_high": one["high"],
                "draft_acceptance_rate": (one["costs"] or {}).get("acceptance"),
                "memory_bytes": one["undo_bytes"],
            },
        )
        for one in data["confirmed"]
    ]
    estimated = [
        (
            _tune_settings(one["setting"], ESTIMATED),
            {
                "predicted_per_second": one["tokens_per_second"],
                "draft_acceptance_rate": one["acceptance"],
            },
        )
        for one in data["estimates"]
    ]
    return [*measured, *estimated]


def _tune_settings(setting: Mapping[str, Any] | None, figures: str) -> dict[str, Any]:
    if setting is None:
        return {"figures": figures, "spec-type": "none"}
    return {
        "figures": figures,
        "spec-type": setting["drafter"],
        "spec-draft-n-max": setting["n_max"],
        "spec-draft-p-min": setting["p_min"],
    }


def suite_row(configuration: str, request: Mapping[str, Any]) -> Row:
    """The row of a request. request: fields of engine.experiments.bench.request.RequestResult,
    with the prompt's name under `prompt`."""
    figures = {name: request[name] for name in FIGURES if name in request}
    drafted = request.get("draft_n")
    if drafted:
        figures["draft_acceptance_rate"] = request["draft_n_accepted"] / drafted
    return {"configuration": configuration, "prompt": request["prompt"]}, figures


def _suite_rows(data: dict[str, Any], wrong: Callable[[str, str], TraceFileError]) -> Iterator[Row]:
    for i, one in enumerate(data["configurations"]):
        for j, row in enumerate(one["rows"]):
            for name in FIGURES:
                if row.get(name) is not None and not is_figure(row[name]):
                    place = f"configurations[{i}].rows[{j}].{name}"
                    raise wrong(place, "is not a number from 0 to 2^53")
            yield suite_row(one["name"], {**row, "prompt": row["name"]})


def _loaded(path: Path) -> dict[str, Any]:
    try:
        data = parse_json(user_text(path, _MOST_BYTES, TraceFileError))
    except JsonError as error:
        raise TraceFileError(f"{path}, {error}.", _AGAIN) from error
    if not isinstance(data, dict) or data.get("kind") not in tuple(KINDS):
        raise TraceFileError(
            f"{path} is not a result of `draftscope bench suite`, `sweep` or `tune`.",
            "Name the JSON of --json, or the results.sqlite in the folder of --out.",
        )
    if data.get("version") != VERSION:
        raise TraceFileError(
            f"{path} has a version that this program does not read, which is not {VERSION}.",
            "Open it with the version of Draftscope that wrote it.",
        )
    return data
