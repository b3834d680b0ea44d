"""Two result files of the suite, configuration by configuration and prompt by prompt."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import OptionError
from engine.files import user_text
from engine.foreign_json import JsonError, parse_json

SUITE_KIND = "draftscope bench suite"
SUITE_VERSION = 1
_MOST_BYTES = 64 << 20
AGGREGATE_FIELDS = (
    "n_requests",
    "total_predicted",
    "total_draft",
    "total_draft_accepted",
    "aggregate_accept_rate",
    "wall_s_total",
)


@dataclass(frozen=True, slots=True)
class PromptDiff:
    """One prompt in both files: tokens per second, their ratio b / a, acceptance rates."""

    name: str
    a_tok_s: float
    b_tok_s: float
    ratio: float | None
    a_rate: float | None
    b_rate: float | None


@dataclass(frozen=True, slots=True)
class ConfigurationDiff:
    """Two configurations compared. aggregate: (a, b) by field; prompts: those in both files."""

    a_name: str
    b_name: str
    aggregate: dict[str, tuple[float | None, float | None]]
    prompts: list[PromptDiff]


@dataclass(frozen=True, slots=True)
class SuiteDiff:
    """Pairs of configurations, and those that one file alone has."""

    pairs: list[ConfigurationDiff]
    only_a: list[str]
    only_b: list[str]


def read_result(path: Path) -> dict[str, Any]:
    """A result file that `draftscope bench --out` wrote.

    Raises OptionError for a file that cannot be read or holds anything else.
    """
    try:
        result = parse_json(user_text(path, _MOST_BYTES))
    except JsonError as error:
        raise _unusable(path) from error
    try:
        if (result["kind"], result["version"]) != (SUITE_KIND, SUITE_VERSION):
            raise _unusable(path)
        for one in result["configurations"]:
            _check_configuration(one)
    except (KeyError, TypeError, AttributeError) as error:
        raise _unusable(path) from error
    return dict(result)


def compare_results(a: dict[str, Any], b: dict[str, Any]) -> SuiteDiff:
    """Pair configurations of the same name; where each file has one left over, these as well."""
    of_a = {one["name"]: one for one in a["configurations"]}
    of_b = {one["name"]: one for one in b["configurations"]}
    pairs = [(name, name) for name in of_a if name in of_b]
    only_a = [name for name in of_a if name not in of_b]
    only_b = [name for name in of_b if name not in of_a]
    if len(only_a) == len(only_b) == 1:
        pairs.append((only_a.pop(), only_b.pop()))
    return SuiteDiff([_pair(of_a[name], of_b[other]) for name, other in pairs], only_a, only_b)


def _pair(a: dict[str, Any], b: dict[str, Any]) -> ConfigurationDiff:
    of_b = {row["name"]: row for row in b["rows"]}
    prompts = []
    for row in a["rows"]:
        if (other := of_b.get(row["name"])) is None:
            continue
        speed, other_speed = row["predicted_per_second"], other["predicted_per_second"]
        prompts.append(
            PromptDiff(
                row["name"],
                speed,
                other_speed,
                other_speed / speed if speed else None,
                row["accept_rate"],
                other["accept_rate"],
            )
        )
    fields = {name: (a["aggregate"][name], b["aggregate"][name]) for name in AGGREGATE_FIELDS}
    return ConfigurationDiff(a["name"], b["name"], fields, prompts)


def _check_configuration(one: dict[str, Any]) -> None:
    """Raises KeyError or TypeError where something that a comparison needs is not there."""
    _require(one["name"], str)
    for name in AGGREGATE_FIELDS:
        _require(one["aggregate"][name], int, float, none=name == "aggregate_accept_rate")
    for row in one["rows"]:
        _require(row["name"], str)
        _require(row["predicted_per_second"], int, float)
        _require(row["accept_rate"], int, float, none=True)


def _require(value: object, *kinds: type, none: bool = False) -> None:
    if isinstance(value, bool) or not (isinstance(value, kinds) or (none and value is None)):
        raise TypeError


def _unusable(path: Path) -> OptionError:
    return OptionError(
        f"{path} is no result file of `draftscope bench`.", "Write one with --out FILE."
    )
