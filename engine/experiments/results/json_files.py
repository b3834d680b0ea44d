"""JSON that `tune --json` and `bench suite --json` print, read as the results file is.

The file may come from anyone: what is taken from it is checked, in words that name its place.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

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

KINDS = {"draftscope tune": TUNE, "draftscope bench suite": SUITE}
VERSION = 1
MEASURED, ESTIMATED = "measured", "estimated"
_MOST_BYTES = 64 << 20
_BEGIN = re.compile(rb'\s*\{\s*"kind"\s*:\s*"(%s)"' % "|".join(KINDS).encode())
_AGAIN = "Write it again with --json."
_LONGEST = 200
"""Characters of a name."""

Row = tuple[dict[str, Any], dict[str, float | None]]
"""Settings, by their keys in the plan of a sweep, and figures by name of schema.FIGURES."""


def is_results_json(path: Path) -> bool:
    """Whether a path is such a file. Looks at the first bytes only."""
    return _BEGIN.match(file_head(path, 256)) is not None


def read_results_json(path: Path) -> ExperimentResults:
    """Read a file. Raises TraceFileError, in one sentence, for one that cannot be read, is
    something else or has not what is needed."""
    data = _loaded(path)
    place = _Place(path)
    kind = KINDS[data["kind"]]
    model = place.object("model", data.get("model"))
    environment = place.object("environment", data.get("environment"))
    if kind == TUNE:
        _check_tune(place, data)
        found = tune_rows(data)
    else:
        found = list(_suite_rows(place, data))
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


def _suite_rows(place: _Place, data: dict[str, Any]) -> Iterator[Row]:
    for at, one in place.objects(data, "configurations"):
        name = place.name(f"{at}.name", one.get("name"))
        for where, row in place.objects(one, "rows", at):
            prompt = place.name(f"{where}.name", row.get("name"))
            known = [name for name in FIGURES if row.get(name) is not None]
            place.numbers(where, row, ("predicted_per_second", "draft_n", "draft_n_accepted"))
            place.numbers(where, row, tuple(known))
            yield suite_row(name, {**row, "prompt": prompt})


def _check_tune(place: _Place, data: dict[str, Any]) -> None:
    for at, one in place.objects(data, "confirmed"):
        place.numbers(at, one, ("tokens_per_second", "low", "high", "undo_bytes"))
        place.setting(at, one, may_lack=True)
        costs = one.get("costs")
        if costs is not None:
            place.numbers(f"{at}.costs", place.object(f"{at}.costs", costs), (), ("acceptance",))
    for at, one in place.objects(data, "estimates"):
        place.numbers(at, one, ("tokens_per_second",), ("acceptance",))
        place.setting(at, one)


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


class _Place:
    """Looks at values of a file and says where one is wrong."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def objects(
        self, data: dict[str, Any], name: str, within: str = ""
    ) -> list[tuple[str, dict[str, Any]]]:
        """The objects of a list, each with its place. within: the place of the list's owner."""
        found, at = data.get(name), f"{within}.{name}" if within else name
        if not isinstance(found, list) or len(found) > MOST_ROWS:
            raise self._wrong(at, f"is not a list of up to {MOST_ROWS:,} entries")
        return [(f"{at}[{i}]", self.object(f"{at}[{i}]", one)) for i, one in enumerate(found)]

    def object(self, at: str, value: Any) -> dict[str, Any]:
        """A value that has to be an object."""
        if not isinstance(value, dict):
            raise self._wrong(at, "is not an object")
        return value

    def name(self, at: str, value: Any) -> str:
        """A value that has to be a name."""
        if not isinstance(value, str) or len(value) > _LONGEST:
            raise self._wrong(at, "is not a name")
        return value

    def numbers(
        self, at: str, one: dict[str, Any], names: tuple[str, ...], or_none: tuple[str, ...] = ()
    ) -> None:
        """Check numbers of an object. or_none: those that may be null."""
        for name in (*names, *or_none):
            value = one.get(name)
            if not (is_figure(value) or (value is None and name in or_none)):
                raise self._wrong(f"{at}.{name}", "is not a number from 0 to 2^53")

    def setting(self, at: str, one: dict[str, Any], *, may_lack: bool = False) -> None:
        """Check the setting of an object. may_lack: whether null is one."""
        value, at = one.get("setting"), f"{at}.setting"
        if value is None and may_lack:
            return
        found = self.object(at, value)
        self.name(f"{at}.drafter", found.get("drafter"))
        self.numbers(at, found, ("n_max", "p_min"))

    def _wrong(self, at: str, what: str) -> TraceFileError:
        return TraceFileError(f"{self._path}: {at} {what}.", _AGAIN)
