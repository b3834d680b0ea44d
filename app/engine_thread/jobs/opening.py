"""Jobs that put a model or a server to use, and let go of the server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.engine_thread.events import OpenedFiles, ServerConnected, ServerSeen, State
from app.engine_thread.opening import devices
from app.engine_thread.requests import OpenRequest, ServerRunRequest
from app.engine_thread.status import EngineStatus
from app.engine_thread.worker import EngineJob, EngineWorker
from engine.options import RunOptions
from engine.trace.store import TraceStore

if TYPE_CHECKING:
    from engine.observe.rounds.observed_run import ServerFacts


class OpenModel(EngineJob):
    """Use a model, with files that draft for it; the session in use stays until it is loaded."""

    replaces = True

    def __init__(
        self,
        target: Path,
        drafts: Sequence[Path] = (),
        compute: str = "auto",
        mmap: bool | None = None,
        device: str = "auto",
        options: RunOptions | None = None,
    ) -> None:
        super().__init__()
        more = mmap, device, options, self.cancelled
        self._request = OpenRequest(target, tuple(drafts), compute, *more)
        self._loaded: tuple[OpenedFiles, str, TraceStore] | None = None
        self._devices: dict[str, str] = {}

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
        finally:
            self._devices = devices()
        replaced = worker.use(session, found.identity, found)
        self._loaded = found, session.compute, worker.store
        if replaced is not None:
            replaced.close()
        return State.READY

    def on_finish(self, status: EngineStatus) -> None:
        status.devices = self._devices or status.devices
        if self._loaded is not None:
            status.loaded_as = self._request
            status.use_model(*self._loaded)


class ConnectServer(EngineJob):
    """Use a server; the session in use stays until it answers. timeout: of its replies, seconds.
    model: which of its models, empty where it need not be said."""

    replaces = True

    def __init__(
        self,
        address: str,
        key: str = "",
        log: Path | None = None,
        timeout: float | None = None,
        model: str = "",
    ) -> None:
        super().__init__()
        self._request = ServerRunRequest(address, key, log, timeout, self.cancelled, model)
        self._connected: ServerConnected | None = None

    def on_ask(self, status: EngineStatus) -> None:
        status.connecting, status.is_opening = self._request.address, True

    def run(self, worker: EngineWorker) -> State:
        def see(seen: ServerSeen) -> None:
            worker.post(lambda status: status.see_server(seen))

        def wait(sentence: str) -> None:
            worker.post(lambda status: status.server_waited_for.emit(sentence))

        worker.end_run()
        worker.post_state(State.LOADING)
        session = worker.servers.connect(self._request, self.progress(worker.post), see, wait)
        replaced = worker.use(session, identity_of(session.facts), None)
        worker.server = session
        self._connected = ServerConnected(session.facts, session.key_kept, worker.store)
        if replaced is not None:
            replaced.close()
        return State.READY

    def on_finish(self, status: EngineStatus) -> None:
        if self._connected is not None:
            status.show_files(None)
            status.use_server(self._connected)


class DisconnectServer(EngineJob):
    """Let go of the server in use; its runs stay."""

    replaces = True

    def may_start(self, status: EngineStatus) -> bool:
        return status.server is not None

    def run(self, worker: EngineWorker) -> State:
        worker.end_run()
        server = worker.server
        if server is not None:
            worker.session = worker.server = None
            worker.store = TraceStore()
            worker.post(EngineStatus.let_go_of_server)
            server.close()
        return worker.rest()


def identity_of(facts: ServerFacts) -> dict[str, Any]:
    """The identity of a server with its model, whose runs share a trace."""
    listed = facts.models.get("data")
    first = listed[0] if isinstance(listed, list) and listed else None
    meta = first.get("meta") if isinstance(first, dict) else None
    return {"name": facts.address, "sha256": facts.props.get("model_path"), "size": meta}
