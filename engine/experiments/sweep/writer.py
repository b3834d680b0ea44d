"""Writing the results of a sweep: each finished job is one row, committed before the next."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from engine.errors import OptionError
from engine.experiments.sweep import schema
from engine.experiments.sweep.plan import SweepJob, SweepPlan
from engine.experiments.sweep.reader import check_tables, find_results
from engine.experiments.sweep.schema import DONE, FAILED, FIGURES, RESULTS_FILE
from engine.trace.typed_json import strict_json

_LOCK_FILE = "sweep.lock"


@dataclass(frozen=True, slots=True)
class JobResult:
    """What came of a job. error: empty unless it failed. figures: by name of schema.FIGURES.
    machine, model: JSON-able descriptions. output: a hash of the generated tokens. trace: files of
    an exported trace by name, where they are not in their place already. has_trace: whether there
    is a trace at all. unwritable: why a trace could not be written; then the job has to be run
    again."""

    error: str = ""
    figures: Mapping[str, float | None] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    output: str = ""
    has_trace: bool = False
    trace: Mapping[str, bytes] = field(default_factory=dict)
    unwritable: str = ""


class ResultsWriter:
    """The results file of one sweep, opened to go on with it; a context manager.

    There is one writer at a time; readers may read meanwhile.
    """

    def __init__(self, folder: Path, plan: SweepPlan) -> None:
        """Make the folder or open it. Raises OptionError for one that cannot be written or that
        another sweep is writing, TraceFileError for one that holds something else."""
        self.path = folder / RESULTS_FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            is_new = not self.path.exists() or self.path.stat().st_size == 0
            if not is_new and find_results(self.path) is None:
                raise schema.not_ours(self.path)
            # held until this process ends, however it ends
            self._lock = sqlite3.connect(folder / _LOCK_FILE, isolation_level=None, timeout=0)
            self._open(plan)
        except OSError as error:
            raise _unwritable(self.path, error.strerror or str(error)) from error
        except sqlite3.DatabaseError as error:
            raise _unwritable(self.path, str(error)) from error

    def _open(self, plan: SweepPlan) -> None:
        try:
            self._lock.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as error:
            self._lock.close()
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                raise
            raise OptionError(
                f"Another sweep is writing to {self.path.parent}.", "Wait for it, or name another."
            ) from error
        self._file = sqlite3.connect(self.path, timeout=60)
        try:
            with self._file:
                self._file.execute("BEGIN IMMEDIATE")
                if not self._file.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                    self._file.execute(f"PRAGMA application_id = {schema.APPLICATION_ID}")
                    self._file.execute(f"PRAGMA user_version = {schema.VERSION}")
                    for statement in schema.TABLES.values():
                        self._file.execute(statement)
                check_tables(self.path, self._file)
                facts = {"title": plan.title, "plan": plan.text, "planned": str(len(plan.jobs))}
                self._file.executemany("REPLACE INTO facts VALUES (?, ?)", facts.items())
        except BaseException:
            self.close()
            raise

    def finished(self) -> dict[str, str]:
        """The status of every job that has a row, by key."""
        return dict(self._file.execute("SELECT key, status FROM results"))

    def models(self) -> dict[str, list[dict[str, Any]]]:
        """Identities of the models that rows are of, by the name that the plan has for each."""
        found: dict[str, list[dict[str, Any]]] = {}
        rows = self._file.execute(
            "SELECT DISTINCT json_extract(settings, '$.model'), text FROM results "
            "JOIN descriptions ON model = id"
        )
        for name, text in rows:
            found.setdefault(name, []).append(json.loads(text))
        return found

    def add(self, job: SweepJob, result: JobResult) -> None:
        """Write the row of a job, in place of an earlier one. Raises OptionError where the disk
        does not take it."""
        try:
            with self._file:
                columns = {
                    "key": job.key,
                    "number": job.number,
                    "status": FAILED if result.error else DONE,
                    "error": result.error,
                    "finished": datetime.now(UTC).isoformat(timespec="seconds"),
                    "settings": json.dumps(dict(job.settings)),
                    "output": result.output,
                    "has_trace": int(result.has_trace),
                    "machine": self._describe(result.machine),
                    "model": self._describe(result.model),
                    **{name: result.figures.get(name) for name in FIGURES},
                }
                marks = ", ".join("?" * len(columns))
                self._file.execute(
                    f"REPLACE INTO results ({', '.join(columns)}) VALUES ({marks})",
                    tuple(columns.values()),
                )
        except sqlite3.Error as error:
            raise _unwritable(self.path, str(error)) from error

    def _describe(self, description: Mapping[str, Any]) -> int | None:
        if not description:
            return None
        text = json.dumps(strict_json(dict(description)), sort_keys=True)
        self._file.execute("INSERT OR IGNORE INTO descriptions (text) VALUES (?)", (text,))
        found = self._file.execute("SELECT id FROM descriptions WHERE text = ?", (text,))
        return int(found.fetchone()[0])

    def close(self) -> None:
        """Give the file back."""
        for opened in (self._file, self._lock):
            opened.close()

    def __enter__(self) -> ResultsWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _unwritable(path: Path, reason: str) -> OptionError:
    return OptionError(
        f"{path} cannot be written: {reason}.",
        "Name another folder with --out, or free some space.",
    )
