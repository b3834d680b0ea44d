"""What `draftscope tune --json` wrote, read as the results of a sweep are.

The file may come from anyone: what is taken from it is checked, in words that name its place.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from engine.errors import TraceFileError
from engine.experiments.sweep.results import SweepResults, results_of
from engine.experiments.sweep.row_check import MOST_ROWS, is_figure
from engine.experiments.sweep.schema import DONE, FIGURES
from engine.experiments.tune.result_rows import KIND, VERSION, result_rows
from engine.files import file_head, user_text
from engine.foreign_json import JsonError, parse_json

_MOST_BYTES = 64 << 20
_BEGIN = re.compile(rb'\s*\{\s*"kind"\s*:\s*"' + KIND.encode() + b'"')
_AGAIN = "Write it again with `draftscope tune --json`."
_LONGEST = 200
"""Characters of a name."""


def is_tune_json(path: Path) -> bool:
    """Whether a path is such a file. Looks at the first bytes only."""
    return _BEGIN.match(file_head(path, 256)) is not None


def read_tune_json(path: Path) -> SweepResults:
    """Read a file. Raises TraceFileError, in one sentence, for one that cannot be read, is
    something else or has not what is needed."""
    data = _loaded(path)
    place = _Place(path)
    for at, one in place.objects(data, "confirmed"):
        place.numbers(at, one, ("tokens_per_second", "low", "high", "undo_bytes"))
        place.setting(at, one, may_lack=True)
        costs = one.get("costs")
        if costs is not None:
            place.numbers(f"{at}.costs", place.object(f"{at}.costs", costs), (), ("acceptance",))
    for at, one in place.objects(data, "estimates"):
        place.numbers(at, one, ("tokens_per_second",), ("acceptance",))
        place.setting(at, one)
    model = place.object("model", data.get("model"))
    environment = place.object("environment", data.get("environment"))
    name = model.get("name")
    # settings named twice would be one row of a sweep, and are one here
    rows = {row.key: row for row in result_rows(data)}
    cells = [
        [
            key,
            DONE,
            "",
            "",
            "",
            i,
            json.dumps(row.settings),
            0,
            0,
            1,
            *map(row.figures.get, FIGURES),
        ]
        for i, (key, row) in enumerate(rows.items(), 1)
    ]
    title = f"tune: {name[:_LONGEST]}" if isinstance(name, str) else "tune"
    described = {0: json.dumps(environment), 1: json.dumps(model)}
    return results_of(path, title, len(cells), cells, described)


def _loaded(path: Path) -> dict[str, Any]:
    try:
        data = parse_json(user_text(path, _MOST_BYTES, TraceFileError))
    except JsonError as error:
        raise TraceFileError(f"{path}, {error}.", _AGAIN) from error
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise TraceFileError(
            f"{path} is no result of `draftscope tune` or `draftscope sweep`.",
            "Name the file of `tune --json`, or the results.sqlite in the folder of --out.",
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

    def objects(self, data: dict[str, Any], name: str) -> list[tuple[str, dict[str, Any]]]:
        """The objects of a list, each with its place."""
        found = data.get(name)
        if not isinstance(found, list) or len(found) > MOST_ROWS:
            raise self._wrong(name, f"is no list of up to {MOST_ROWS:,} entries")
        return [
            (at, self.object(at, one)) for i, one in enumerate(found) for at in [f"{name}[{i}]"]
        ]

    def object(self, at: str, value: Any) -> dict[str, Any]:
        """A value that has to be an object."""
        if not isinstance(value, dict):
            raise self._wrong(at, "is no object")
        return value

    def numbers(
        self, at: str, one: dict[str, Any], names: tuple[str, ...], or_none: tuple[str, ...] = ()
    ) -> None:
        """Check numbers of an object. or_none: those that may be null."""
        for name in (*names, *or_none):
            value = one.get(name)
            if not (is_figure(value) or (value is None and name in or_none)):
                raise self._wrong(f"{at}.{name}", "is no number from 0 to 2^53")

    def setting(self, at: str, one: dict[str, Any], *, may_lack: bool = False) -> None:
        """Check the setting of an object. may_lack: whether null is one."""
        value, at = one.get("setting"), f"{at}.setting"
        if value is None and may_lack:
            return
        found = self.object(at, value)
        if not isinstance(found.get("drafter"), str) or len(found["drafter"]) > _LONGEST:
            raise self._wrong(f"{at}.drafter", "is no name")
        self.numbers(at, found, ("n_max", "p_min"))

    def _wrong(self, at: str, what: str) -> TraceFileError:
        return TraceFileError(f"{self._path}: {at} {what}.", _AGAIN)
