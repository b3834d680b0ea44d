"""session.json of an exported trace, checked: facts have the types that views and figures expect,
with any writer. Unknown keys are kept."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.errors import TraceFileError
from engine.files import decoded, file_bytes, written_whole
from engine.foreign import Count, JsonError, OutOfRangeError, parse_json, whole
from engine.trace.csv_fields import EXCEL, PLAIN, REMEDY
from engine.trace.export import FORMAT, SESSION_FILE, write_session
from engine.trace.facts import RunFacts, problems
from engine.trace.records import READ_VERSIONS, REFERENCE
from engine.trace.typed_json import not_a, shown, strict_json, within, wrong

_MOST_BYTES = 256 << 20
_MOST_RUNS = 10_000
_MOST_LANES = 256
_LONGEST_PIECE = 1 << 16
_TABLE_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_WRITTEN_ANEW = (
    "format",
    "schema_version",
    "schema_minor",
    "csv_variant",
    "runs",
    "rows",
    "bytes",
    "columns",
    "unknown_columns",
    "pieces",
)


@dataclass(frozen=True, slots=True)
class SessionFile:
    """The contents of session.json. minor: of the schema. sizes: valid bytes of each table's file,
    where rows are appended. about: by table and column. more: unknown keys."""

    minor: int
    variant: str
    runs: dict[int, RunFacts]
    rows: dict[str, int]
    sizes: dict[str, int]
    pieces: dict[int, bytes]
    about: dict[str, dict[str, str]]
    more: dict[str, Any]


def read_session(path: Path) -> SessionFile:
    """Read and check the file. Raises TraceFileError naming the place in it."""
    session = read_json(path)
    found = session.get("schema_version")
    if not isinstance(found, int) or found not in READ_VERSIONS:
        raise TraceFileError(
            f"{path} has schema version {shown(found)}, this program reads "
            f"{' and '.join(map(str, READ_VERSIONS))}.",
            "Open it with the version of Draftscope that wrote it.",
        )
    for place, problem in _problems(session):
        raise _wrong(path, place, problem)
    runs = _runs(path, session["runs"])
    return SessionFile(
        session.get("schema_minor", 0),
        session.get("csv_variant", PLAIN),
        runs,
        session["rows"],
        session.get("bytes", {}),
        _pieces(path, session["pieces"]),
        session.get("columns", {}),
        {key: value for key, value in session.items() if key not in _WRITTEN_ANEW},
    )


def read_json(path: Path) -> dict[str, Any]:
    """The file unchecked, if it describes a trace at all. Raises TraceFileError."""
    if not path.parent.exists():
        raise TraceFileError(f"{path.parent} does not exist.", "Check the path.")
    if not path.exists():
        raise TraceFileError(
            f"{path.parent} is not an exported trace: {path.name} is missing.",
            "Choose the folder that an export wrote.",
        )
    raw = file_bytes(path, _MOST_BYTES, TraceFileError)
    try:
        session = parse_json(decoded(raw, str(path), TraceFileError))
    except JsonError as error:
        raise TraceFileError(f"{path} is not valid JSON ({error}).", REMEDY) from error
    if not isinstance(session, dict) or session.get("format") != FORMAT:
        raise TraceFileError(
            f"{path} does not describe a trace.", "Choose the folder that an export wrote."
        )
    return session


def _wrong(path: Path, place: str, problem: str) -> TraceFileError:
    place = place if len(place) <= 120 else f"{place[:120]}…"
    return TraceFileError(f"{path}: {place} {problem}.", REMEDY)


def _runs(path: Path, runs: dict[str, dict[str, Any]]) -> dict[int, RunFacts]:
    if list(runs) != [str(run_id) for run_id in range(len(runs))]:
        raise TraceFileError(f"{path}: runs are not numbered from 0.", REMEDY)
    if len(runs) > _MOST_RUNS:
        raise TraceFileError(f"{path}: there are more than {_MOST_RUNS:,} runs.", REMEDY)
    found, n_lanes = {int(run_id): RunFacts(facts) for run_id, facts in runs.items()}, 0
    for run_id, facts in found.items():
        n_lanes = n_lanes + 1 if facts.lane not in (None, REFERENCE) else 0
        if n_lanes > _MOST_LANES:
            raise TraceFileError(
                f"{path}: runs.{run_id} is one of more than {_MOST_LANES} lanes of a comparison.",
                REMEDY,
            )
    return found


def _pieces(path: Path, pieces: dict[str, str]) -> dict[int, bytes]:
    try:
        return {whole(token): bytes.fromhex(piece) for token, piece in pieces.items()}
    except OutOfRangeError as error:
        raise _wrong(path, "pieces", f"has a key that is not a token id: {error}") from error
    except ValueError as error:
        raise _wrong(path, "pieces", "are not token ids with hexadecimal bytes") from error


_FORM = {
    "schema_minor": Count,
    "csv_variant": Literal[PLAIN, EXCEL],
    "runs": dict[str, dict[str, Any]],
    "rows": dict[str, Count],
    "pieces": dict[str, Any],
    "bytes": dict[str, Count],
    "columns": dict[str, dict[str, str]],
}
"""Types of the keys. Rows and pieces have further checks, see _problems."""


def _problems(session: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The problems in the file: place and what is wrong."""
    for name in ("runs", "rows", "pieces"):
        if name not in session:
            yield name, "is missing"
    for name, hint in _FORM.items():
        if name in session:
            yield from within(name, wrong(hint, session[name]))
    for run_id, facts in session["runs"].items():
        yield from within("runs", within(run_id, problems(facts)))
    for name in session["rows"]:
        if not _TABLE_NAME.fullmatch(name):
            yield f"rows.{name}", "is not a name of a table"
    for token, piece in session["pieces"].items():
        if not isinstance(piece, str) or len(piece) > 2 * _LONGEST_PIECE:
            wanted = f"at most {_LONGEST_PIECE:,} bytes, hexadecimal"
            yield f"pieces.{token}", not_a(piece, wanted)


def change_facts(folder: Path, facts: Mapping[int, Mapping[str, Any]]) -> None:
    """Add facts to runs of an exported trace, by id, replacing existing ones.

    A crash at any moment leaves the old or the new session.json. Raises TraceFileError if it cannot
    be read or written, or lacks a run.
    """
    path = folder / SESSION_FILE
    session = read_json(path)
    runs = session.get("runs")
    for run_id, added in facts.items():
        known = runs.get(str(run_id)) if isinstance(runs, dict) else None
        if not isinstance(known, dict):
            raise TraceFileError(f"{path}: runs.{run_id} is missing.", "Export the trace again.")
        known.update(strict_json(added))
    with written_whole(path, TraceFileError) as part:
        write_session(part, session)
