"""Opening a model: its metadata is shown, then its weights are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from app.engine_thread.events import OpenedFiles, State
from app.engine_thread.requests import OpenRequest
from app.engine_thread.status import EngineStatus
from app.engine_thread.worker import EngineJob, EngineWorker
from engine.trace.store import TraceStore


class OpenModel(EngineJob):
    """Use a model, with files that draft for it; the session in use stays until it is loaded."""

    replaces = True

    def __init__(
        self,
        target: Path,
        drafts: Sequence[Path] = (),
        compute: str = "auto",
        mmap: bool | None = None,
    ) -> None:
        super().__init__()
        self._request = OpenRequest(target, tuple(drafts), compute, mmap, self.cancelled)
        self._loaded: tuple[OpenedFiles, str, TraceStore] | None = None

    def on_ask(self, status: EngineStatus) -> None:
        status.is_opening = True

    def run(self, worker: EngineWorker) -> State:
        worker.end_run()
        found = worker.engine.inspect(self._request)  # if that fails, everything is as it was
        before, worker.inspected = worker.inspected, found
        try:
            worker.post(lambda status: status.show_files(found))
            worker.post_state(State.LOADING)
            session = worker.engine.open(self._request, self.progress(worker.post))
        except BaseException:
            if worker.session is not None:
                worker.inspected, files = before, worker.files
                worker.post(lambda status: status.show_files(files))  # what is in use
            raise
        replaced = worker.use(session, found.identity, found)
        self._loaded = found, session.compute, worker.store
        if replaced is not None:
            replaced.close()
        return State.READY

    def on_finish(self, status: EngineStatus) -> None:
        if self._loaded is not None:
            status.compute_asked, status.mmap_asked = self._request.compute, self._request.mmap
            status.use_model(*self._loaded)
