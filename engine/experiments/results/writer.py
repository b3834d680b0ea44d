"""Writer of a results file: each finished job is one row, committed before the next."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.errors import OptionError
from engine.experiments.results.reader import check_tables, is_database, read_results
from engine.experiments.results.table import (
    APPLICATION_ID,
    DONE,
    FAILED,
    FIGURES,
    RESULTS_FILE,
    TABLES,
    VERSION,
    not_ours,
)
from engine.files import unwritable
from engine.trace.typed_json import strict_json

_LOCK_FILE = "sweep.lock"
_ELSEWHERE = "Name another folder with --out, or free some space."


@dataclass(frozen=True, slots=True)
class JobResult:
    """Result of a job. error: empty unless it failed. figures: by name of FIGURES. machine, model:
    JSON-able descriptions. output: a hash of the generated tokens. trace: files of an exported
    trace by name, if they are not in place already. has_trace: whether there is a trace.
    unwritable: why a trace could not be written; then the job must be repeated."""

    error: str = ""
    figures: Mapping[str, float | None] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    output: str = ""
    has_trace: bool = False
    trace: Mapping[str, bytes] = field(default_factory=dict)
    unwritable: str = ""


def known_jobs(folder: Path, kind: str) -> dict[str, str]:
    """The status of every job that has a row, by key, without opening the folder for writing.

    Raises TraceFileError for a damaged file or something else, OptionError for another kind.
    """
    path = folder / RESULTS_FILE
    if not path.exists() or path.stat().st_size == 0:
        return {}
    results = read_results(path)
    _check_kind(path, results.facts.get("kind", ""), kind)
    return dict(zip(results.columns["key"], results.columns["status"], strict=True))


def _check_kind(path: Path, known: str, kind: str) -> None:
    if known not in ("", kind):
        raise OptionError(
            f"{path} has results of `{known}`, not of `{kind}`.", "Name another folder with --out."
        )


class ResultsWriter:
    """A results file, opened for appending; a context manager.

    One writer at a time; readers may read meanwhile.
    """

    def __init__(self, folder: Path, kind: str, title: str, planned: int, plan: str = "") -> None:
        """Create or open the folder. kind: SUITE, SWEEP or TUNE. planned: number of jobs. plan:
        their description.

        Raises OptionError for a folder that cannot be written, that another process is writing or
        that has results of another kind, TraceFileError for one with other contents.
        """
        self.path = folder / RESULTS_FILE
        try:
            # also follows a link to a folder that does not exist yet
            Path(os.path.realpath(folder)).mkdir(parents=True, exist_ok=True)
            is_new = not self.path.exists() or self.path.stat().st_size == 0
            if not is_new and not is_database(self.path):
                raise not_ours(self.path)
            # held until this process ends, in any way
            self._lock = sqlite3.connect(folder / _LOCK_FILE, isolation_level=None, timeout=0)
            self._open({"title": title, "plan": plan, "planned": str(planned), "kind": kind})
        except (OSError, sqlite3.DatabaseError) as error:
            raise unwritable(self.path, error, _ELSEWHERE) from error

    def _open(self, facts: Mapping[str, str]) -> None:
        try:
            self._lock.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as error:
            self._lock.close()
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                raise
            raise OptionError(
                f"Another command is writing to {self.path.parent}.",
                "Wait for it, or name another folder with --out.",
            ) from error
        self._file = sqlite3.connect(self.path, timeout=60)
        try:
            with self._file:
                self._file.execute("BEGIN IMMEDIATE")
                if not self._file.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                    self._file.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                    self._file.execute(f"PRAGMA user_version = {VERSION}")
                    for statement in TABLES.values():
                        self._file.execute(statement)
                check_tables(self.path, self._file)
                _check_kind(self.path, self.fact("kind"), facts["kind"])
                self._file.executemany("REPLACE INTO facts VALUES (?, ?)", facts.items())
        except BaseException:
            self.close()
            raise

    def fact(self, name: str) -> str:
        """A fact of the file, empty if missing."""
        found = self._file.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return str(found[0]) if found else ""

    def finished(self) -> dict[str, str]:
        """The status of every job that has a row, by key."""
        return dict(self._file.execute("SELECT key, status FROM results"))

    def models(self) -> dict[str, list[dict[str, Any]]]:
        """Model identities of the rows, by their names in the plan."""
        found: dict[str, list[dict[str, Any]]] = {}
        rows = self._file.execute(
            "SELECT DISTINCT json_extract(settings, '$.model'), text FROM results "
            "JOIN descriptions ON model = id"
        )
        for name, text in rows:
            found.setdefault(name, []).append(json.loads(text))
        return found

    def add(
        self,
        key: str,
        number: int,
        settings: Mapping[str, Any],
        result: JobResult,
        detail: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the row of a job, replacing an earlier one. key: 16 hexadecimal digits. number: its
        place in the plan. detail: data in addition to its figures.

        Raises OptionError if that fails.
        """
        try:
            with self._file:
                columns = {
                    "key": key,
                    "number": number,
                    "status": FAILED if result.error else DONE,
                    "error": result.error,
                    "finished": datetime.now(UTC).isoformat(timespec="seconds"),
                    "settings": json.dumps(dict(settings)),
                    "output": result.output,
                    "has_trace": int(result.has_trace),
                    "machine": self._describe(result.machine),
                    "model": self._describe(result.model),
                    **{name: result.figures.get(name) for name in FIGURES},
                }
                if detail is not None:
                    text = json.dumps(strict_json(dict(detail)))
                    self._file.execute("REPLACE INTO facts VALUES (?, ?)", (f"detail {key}", text))
                marks = ", ".join("?" * len(columns))
                self._file.execute(
                    f"REPLACE INTO results ({', '.join(columns)}) VALUES ({marks})",
                    tuple(columns.values()),
                )
        except sqlite3.Error as error:
            raise unwritable(self.path, error, _ELSEWHERE) from error

    def _describe(self, description: Mapping[str, Any]) -> int | None:
        if not description:
            return None
        text = json.dumps(strict_json(dict(description)), sort_keys=True)
        self._file.execute("INSERT OR IGNORE INTO descriptions (text) VALUES (?)", (text,))
        found = self._file.execute("SELECT id FROM descriptions WHERE text = ?", (text,))
        return int(found.fetchone()[0])

    def close(self) -> None:
        """Close the file."""
        for opened in (self._file, self._lock):
            opened.close()

    def __enter__(self) -> ResultsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
