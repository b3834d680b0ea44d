"""Work in rounds whose trace is exported at its end, however it ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from app.cli.interruption import Interrupted, on_signal
from app.cli.output import tell
from engine.errors import OptionError
from engine.gguf.content import ContentHash
from engine.trace.export import check_export, export_csv
from engine.trace.store import TraceStore

if TYPE_CHECKING:
    from engine.observe.rounds.observed_run import ObservedRun

_CONTENT_S = 1.0
"""How long an export waits for the hash of the tensors, seconds."""
_LATE = ", without the hash of the tensors, which takes longer"


def check_trace_folder(folder: Path | None) -> None:
    """Refuse a --trace folder that cannot be written, before anything is computed for it.

    Raises TraceFileError for one that holds something else, OptionError for one that cannot be.
    """
    if folder is None:
        return
    try:
        check_export(folder)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise OptionError(
            f"--trace {str(folder)[:80]} cannot be written: {reason}.", "Name another folder."
        ) from error


class Recorded(Protocol):
    """Work that writes a trace."""

    trace: TraceStore

    def stop(self) -> None: ...


class Decoding(Recorded, Protocol):
    """A run or a comparison."""

    @property
    def done(self) -> bool: ...

    @property
    def emitted(self) -> list[list[int]]: ...


def decode(
    job: Decoding,
    advance: Callable[[], bool],
    folder: Path | None,
    content: ContentHash | None = None,
    show: Callable[[], None] = lambda: None,
) -> None:
    """As `record`, and the hash of the model's content starts once tokens come."""
    if folder is not None and content is not None:
        content.start(lambda: job.done or any(job.emitted))
    record(job, advance, folder, content, show)


def record(
    job: Recorded,
    advance: Callable[[], bool],
    folder: Path | None,
    content: ContentHash | None = None,
    show: Callable[[], None] = lambda: None,
) -> None:
    """Call `advance` until it returns False and `show` after each time; then stop and export.

    After an error the trace is exported too. A signal ends the work between two rounds, then
    the trace is exported and Interrupted raised. content: of the model, for the export.
    """
    came: list[int] = []
    with on_signal(came.append):
        try:
            more = True
            while more and not came:
                more = advance()
                show()
        finally:
            job.stop()
            if folder is not None:
                export(job.trace, folder, content)
    if came:
        raise Interrupted(came[0])


def keep_capture(run: ObservedRun, path: Path) -> None:
    """Write what was sent to a server and what came back, and tell where. Raises TraceFileError."""
    from engine.observe.files.capture import capture_of, write_capture

    write_capture(path, capture_of(run, path.name.split(".")[0]))
    whole = "" if run.raw is None or run.raw.is_whole else ", without what found no room"
    tell(f"capture written to {path}{whole}")


def export(trace: TraceStore, folder: Path, content: ContentHash | None = None) -> None:
    """Write a trace, and tell where."""
    is_known = content is None or content.wait(_CONTENT_S)
    export_csv(trace, folder)
    tell(f"trace written to {folder}{'' if is_known else _LATE}")
