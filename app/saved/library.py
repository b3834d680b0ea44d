"""The runs of earlier sessions: traces that windows left in the data folder, whatever their end.

Each is an exported trace in a folder of its own, next to those that windows write now. What a list
says of its runs is in session.json; the rows are read when one of them is to be shown.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from app.engine_thread.events import CommandFailed, failure
from app.engine_thread.job import SideJob
from app.saved.autosave import PREFIX, discard, in_use
from app.trace_models.run_facts import ModelRuns
from app.trace_models.run_notes import SOURCE, notes_of
from engine.progress import ReportProgress
from engine.trace.export import SESSION_FILE, recover_export
from engine.trace.replacing import target_of
from engine.trace.run_ref import RunRef
from engine.trace.session_file import read_session
from engine.trace.store import TraceStore

INTERRUPTED = "interrupted"
"""Why a run ended whose window ended before it."""


@dataclass(frozen=True)
class SavedTrace:
    """A trace of an earlier session, without its rows. interrupted: runs of it that went on when
    their window ended; what is in the folder does not say so yet."""

    runs: ModelRuns
    interrupted: tuple[RunRef, ...]


@dataclass(frozen=True)
class DamagedTrace:
    """A folder of the library that does not open, and why."""

    folder: Path
    failed: CommandFailed


class ReadLibrary(SideJob):
    """Read what earlier sessions left, the oldest first; posts each of them."""

    def __init__(self, folder: Path, post: Callable[[SavedTrace | DamagedTrace], None]) -> None:
        super().__init__()
        self._folder, self._post = folder, post

    def run(self, progress: ReportProgress) -> None:
        for path in saved_folders(self._folder):
            if self.cancelled.is_set():
                break
            try:
                found = read_saved(path)
            except BaseException as error:  # one that is damaged does not hide the others
                self._post(DamagedTrace(path, failure(error)))
                continue
            if found is None:
                discard(path)
            else:
                self._post(found)


def saved_folders(folder: Path) -> list[Path]:
    """Traces that no living window writes, the oldest first.

    One that was being replaced when its process was killed is brought back first; what is left of
    half-written ones is deleted.
    """
    try:
        for target in {found for path in folder.iterdir() if (found := target_of(path))}:
            if not in_use(target):
                with suppress(OSError):
                    recover_export(target)
        left = [path for path in folder.iterdir() if path.is_dir() and not in_use(path)]
    except OSError:  # there is no such folder, or it is not ours to read
        return []
    traces = []
    for path in sorted(left, key=lambda one: one.name):
        if not path.name.startswith(PREFIX):
            continue
        if any(path.iterdir()):
            traces.append(path)
        else:
            discard(path)
    return traces


def read_saved(folder: Path) -> SavedTrace | None:
    """What is known of a saved trace without its rows; None where the user deleted all its runs.

    Raises TraceFileError.
    """
    session = read_session(folder / SESSION_FILE)
    store = TraceStore()
    store.runs.update(session.runs)
    store.more_facts = session.more
    if store.runs and all(notes_of(facts).deleted for facts in store.runs.values()):
        return None
    cut = tuple(RunRef(store, i) for i, facts in store.runs.items() if facts.stops is None)
    for run in cut:
        run.facts.stops = [INTERRUPTED]
    return SavedTrace(ModelRuns(source_of(store), store, on_disk=folder, is_earlier=True), cut)


def source_of(store: TraceStore) -> str:
    """The name that the runs of a saved trace are listed under: of old ones, that of the model."""
    more = store.more_facts
    if isinstance(name := more.get(SOURCE), str) and name:
        return name
    model = store.runs[0].model if store.runs else None
    name = (model or {}).get("name")
    return str(name or "earlier session").removesuffix(".gguf")
