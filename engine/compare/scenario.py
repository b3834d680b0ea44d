"""Scenarios: settings that provoke a known failure, as TOML files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from engine.analysis.findings.check import RULES
from engine.compare.lane_spec import NOISE_LANE, LaneSpec
from engine.errors import OptionError
from engine.files import user_text
from engine.foreign import parse_toml
from engine.options import RunOptions

_T = TypeVar("_T")
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Scenario:
    """Settings, and what they show.

    name: of its file. about: what to look at. symptom: one sentence on how it appears to a user who
    does not know the cause. prompts: texts. lanes: the noise lane comes first; none = a plain run
    of all prompts together. draft_accept: right tokens in the first, second, … draft, repeated;
    empty = the drafters of the options. expects: rules that fire.
    """

    title: str
    about: str
    prompts: tuple[str, ...]
    options: RunOptions = RunOptions()  # noqa: RUF009 - frozen
    lanes: tuple[LaneSpec, ...] = ()
    draft_accept: tuple[int, ...] = ()
    expects: tuple[str, ...] = ()
    symptom: str = ""
    name: str = ""


def scenarios(folder: Path) -> tuple[Scenario, ...]:
    """All scenarios of a folder by name. Raises OptionError for a file that is wrong."""
    return tuple(read_scenario(path) for path in sorted(folder.glob("*.toml")))


def find_scenario(folder: Path, name: str) -> Scenario:
    """The scenario of this name. Raises OptionError."""
    names = sorted(path.stem for path in folder.glob("*.toml"))
    if name not in names:
        raise OptionError(f"There is no scenario {name!r}.", f"Choose from {', '.join(names)}.")
    return read_scenario(folder / f"{name}.toml")


def read_scenario(path: Path) -> Scenario:
    """One scenario. Raises OptionError, naming file and key."""
    found = filled(Scenario, user_text(path, _MOST_BYTES), path)
    if not found.prompts or not all(found.prompts):
        raise wrong(path, "prompts", "is empty")
    if found.draft_accept and not found.lanes:
        raise wrong(path, "draft_accept", "needs lanes")
    for rule in found.expects:
        if rule not in RULES:
            raise wrong(path, "expects", f"names {rule!r}, which is not a rule")
    lanes = (NOISE_LANE, *found.lanes) if found.lanes else ()
    return replace(found, name=path.stem, lanes=lanes)


def filled(cls: type[_T], text: str, path: Path) -> _T:
    """Read a dataclass from a TOML text whose keys are its fields, except `name`. Raises
    OptionError, naming file and key, or the line of a syntax error."""
    try:
        table = parse_toml(text)
    except (ValueError, RecursionError) as error:
        raise wrong(path, "", f"is not valid TOML ({error})") from error
    return _filled(cls, table, path, "")


def _filled(cls: type[_T], table: dict[str, Any], path: Path, prefix: str) -> _T:
    hints, names = get_type_hints(cls), [f.name for f in fields(cls) if f.name != "name"]  # type: ignore[arg-type]
    values = {}
    for key, value in table.items():
        if key not in names:
            raise wrong(path, prefix + key, f"is unknown; known are {', '.join(names)}")
        values[key] = _value(hints[key], value, path, prefix + key)
    has_none = [f.name for f in fields(cls) if f.default is f.default_factory is MISSING]  # type: ignore[arg-type]
    if lacking := [name for name in has_none if name not in values]:
        raise wrong(path, prefix.rstrip("."), f"has no {' and no '.join(lacking)}")
    try:
        return cls(**values)
    except OptionError as error:
        raise wrong(path, prefix.rstrip("."), f"is wrong: {error.message}") from error


def _value(hint: Any, value: Any, path: Path, key: str) -> Any:
    if hint is LaneSpec:
        text = _value(str, value, path, key)
        try:
            return LaneSpec.parse(text)
        except OptionError as error:
            raise wrong(path, key, f"is wrong: {error.message}") from error
    if is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, dict):
            raise wrong(path, key, "is not a table")
        return _filled(hint, value, path, f"{key}.")
    if get_origin(hint) is tuple:
        kind = get_args(hint)[0]
        if not isinstance(value, list):
            raise wrong(path, key, "is not a list")
        return tuple(_value(kind, item, path, key) for item in value)
    kinds: Sequence[type] = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if float in kinds and type(value) is int:
        try:
            return float(value)
        except OverflowError as error:
            raise wrong(path, key, "is far too large") from error
    if type(value) not in kinds:
        wanted = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
        raise wrong(path, key, f"is {value!r}, not {wanted}")
    return value


def wrong(path: Path, key: str, what: str) -> OptionError:
    """The error for a key of a file, or for the file."""
    place = f"{path.name}: {key}" if key else path.name
    return OptionError(f"{place} {what}.", "Correct the file.")
