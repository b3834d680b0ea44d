"""Engine jobs: opening a model or server, and everything that decodes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.engine_thread.events import (
    Decoding,
    OpenedFiles,
    OpenRequest,
    RunRequest,
    ServerConnected,
    ServerSeen,
    State,
    TurnRequest,
)
from app.engine_thread.opening import devices
from app.engine_thread.status import EngineStatus
from app.engine_thread.worker import DecodingJob, EngineJob, EngineWorker
from engine.fork import Fork
from engine.options import RunOptions
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore

if TYPE_CHECKING:
    from app.engine_thread.worker import EngineSession
    from engine.observe.rounds.observed_run import ServerFacts


class OpenModel(EngineJob):
    """Open a model with its drafter files; the current session stays until it is loaded."""

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
        found = worker.engine.inspect(self._request)  # if that fails, nothing has been replaced
        before, worker.inspected = worker.inspected, found
        try:
            worker.post(lambda status: status.show_files(found))
            worker.post_state(State.LOADING)
            session = worker.engine.open(self._request, self.progress(worker.post))
        except BaseException:
            if worker.session is not None:
                worker.inspected, files = before, worker.files
                worker.post(lambda status: status.show_files(files))  # those in use
            raise
        finally:
            self._devices = devices()
        worker.use(session, found.identity, found)
        self._loaded = found, session.compute, worker.store
        return State.READY

    def on_finish(self, status: EngineStatus) -> None:
        status.devices = self._devices or status.devices
        if self._loaded is not None:
            status.loaded_as = self._request
            status.use_model(*self._loaded)


class ConnectServer(EngineJob):
    """Connect to a server; the current session stays until it answers. For the arguments see
    `app.engine_thread.serving.ServerEngine.connect`."""

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
        self._address = address
        self._how: dict[str, Any] = {"key": key, "log": log, "timeout": timeout, "model": model}
        self._connected: ServerConnected | None = None

    def on_ask(self, status: EngineStatus) -> None:
        status.connecting, status.is_opening = self._address, True

    def run(self, worker: EngineWorker) -> State:
        def see(seen: ServerSeen) -> None:
            worker.post(lambda status: status.see_server(seen))

        def wait(sentence: str) -> None:
            worker.post(lambda status: status.server_waited_for.emit(sentence))

        worker.end_run()
        worker.post_state(State.LOADING)
        progress = self.progress(worker.post)
        session = worker.servers.connect(
            self._address, progress, see, wait, self.cancelled, **self._how
        )
        worker.use(session, identity_of(session.facts), None)
        worker.server = session
        self._connected = ServerConnected(session.facts, session.key_kept, worker.store)
        return State.READY

    def on_finish(self, status: EngineStatus) -> None:
        if self._connected is not None:
            status.show_files(None)
            status.use_server(self._connected)


class DisconnectServer(EngineJob):
    """Disconnect from the server; its runs stay."""

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
    """The identity of a server with its model; sessions of the same identity share a trace."""
    listed = facts.models.get("data")
    first = listed[0] if isinstance(listed, list) and listed else None
    meta = first.get("meta") if isinstance(first, dict) else None
    return {"name": facts.address, "sha256": facts.props.get("model_path"), "size": meta}


class StartRun(DecodingJob):
    """A run of the current session. rounds: pause after this many. of, fork: see RunRequest."""

    def __init__(
        self,
        texts: Sequence[str],
        options: RunOptions,
        rounds: int | None = None,
        chat: dict[str, Any] | None = None,
        of: RunRef | None = None,
        fork: Fork | None = None,
    ) -> None:
        super().__init__(rounds)
        self._asked = RunRequest(tuple(texts), options, chat, fork, of)
        self.request = None if fork else self._asked

    def again(self) -> StartRun:
        asked = self._asked
        return StartRun(asked.texts, asked.options, chat=asked.chat, of=asked.of, fork=asked.fork)

    def begin(self, worker: EngineWorker, session: EngineSession) -> Decoding:
        run = session.start(self._asked, worker.store)
        facts = worker.store.runs[run.run_id]
        facts.update(worker.more_facts)
        if self._asked.chat is not None:
            facts.chat = json.dumps(self._asked.chat)
        return run


class StartTurn(DecodingJob):
    """A turn with the current model."""

    def __init__(self, turn: TurnRequest) -> None:
        super().__init__()
        self._turn = turn

    def begin(self, worker: EngineWorker, session: EngineSession) -> Decoding:
        run = session.say(self._turn, worker.store)
        worker.store.runs[run.run_id].update(worker.more_facts)
        return run


class LanesJob(DecodingJob):
    """A job whose runs are lanes. asked: arguments of the session's method."""

    def __init__(self, *asked: Any) -> None:
        super().__init__()
        self._asked = asked

    def again(self) -> DecodingJob:
        return type(self)(*self._asked)


class StartComparison(LanesJob):
    """A comparison on the current model, of a RunRequest."""

    def begin(self, worker: EngineWorker, session: EngineSession) -> Decoding:
        return session.compare(self._asked[0], worker.store)


class PlayScript(LanesJob):
    """A MemoryScript under a rollback policy; its contexts are the lanes."""

    def begin(self, worker: EngineWorker, session: EngineSession) -> Decoding:
        script, policy = self._asked
        return session.play(script, policy, worker.store)


class CheckRollback(LanesJob):
    """All rollback checks of a llama.cpp build, None = an installed package, for several
    GateOptions in turn."""

    def begin(self, worker: EngineWorker, session: EngineSession) -> Decoding:
        library, gates = self._asked
        return session.check_rollback(library, gates, worker.store)


class WatchClients(DecodingJob):
    """A run that records the server's clients until it is stopped. listen: host:port."""

    def __init__(self, listen: str) -> None:
        super().__init__()
        self._listen = listen

    def may_start(self, status: EngineStatus) -> bool:
        return status.can_start and status.server is not None

    def begin(self, worker: EngineWorker, session: EngineSession) -> Decoding:
        assert worker.server is session
        return worker.server.watch(self._listen, worker.store)
