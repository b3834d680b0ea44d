"""Jobs that start decoding: a run, a turn of a conversation, a comparison, watched clients."""

from __future__ import annotations

import json
from collections.abc import Sequence

from app.engine_thread.requests import (
    ChatWrap,
    Decoding,
    EngineSession,
    LanesRequest,
    RunRequest,
    TurnRequest,
)
from app.engine_thread.status import EngineStatus
from app.engine_thread.worker import DecodingJob, EngineWorker
from engine.fork import Fork
from engine.options import RunOptions
from engine.trace.run_ref import RunRef


class StartRun(DecodingJob):
    """A run of the session in use. rounds: pause after as many. of: see RunRequest."""

    request: RunRequest

    def __init__(
        self,
        texts: Sequence[str],
        options: RunOptions,
        rounds: int | None = None,
        chat: ChatWrap | None = None,
        of: RunRef | None = None,
    ) -> None:
        super().__init__(rounds)
        self.request = RunRequest(tuple(texts), options, chat, of=of)

    def again(self) -> StartRun:
        asked = self.request
        return StartRun(asked.texts, asked.options, chat=asked.chat, of=asked.of)

    def begin(self, worker: EngineWorker, session: EngineSession) -> Decoding:
        run = session.start(self.request, worker.store)
        facts = worker.store.runs[run.run_id]
        facts.update(worker.more_facts)
        if self.request.chat is not None:
            facts.chat = json.dumps(self.request.chat.kwargs)
        return run


class StartFork(DecodingJob):
    """A run that goes on from another one of the session in use."""

    def __init__(self, fork: Fork, options: RunOptions) -> None:
        super().__init__()
        self._fork, self._options = fork, options

    def again(self) -> StartFork:
        return StartFork(self._fork, self._options)

    def begin(self, worker: EngineWorker, session: EngineSession) -> Decoding:
        asked = RunRequest((), self._options, fork=self._fork)
        run = session.start(asked, worker.store)
        worker.store.runs[run.run_id].update(worker.more_facts)
        return run


class StartTurn(DecodingJob):
    """A turn with the model in use."""

    def __init__(self, turn: TurnRequest) -> None:
        super().__init__()
        self._turn = turn

    def begin(self, worker: EngineWorker, session: EngineSession) -> Decoding:
        run = session.say(self._turn, worker.store)
        worker.store.runs[run.run_id].update(worker.more_facts)
        return run


class StartComparison(DecodingJob):
    """A comparison on the model in use. rounds: pause after as many."""

    def __init__(self, lanes: LanesRequest, rounds: int | None = None) -> None:
        super().__init__(rounds)
        self._lanes = lanes

    def again(self) -> StartComparison:
        return StartComparison(self._lanes)

    def begin(self, worker: EngineWorker, session: EngineSession) -> Decoding:
        return session.compare(self._lanes, worker.store)


class WatchClients(DecodingJob):
    """A run made of what they ask of the server, until it is stopped. listen: host:port."""

    def __init__(self, listen: str) -> None:
        super().__init__()
        self._listen = listen

    def may_start(self, status: EngineStatus) -> bool:
        return status.can_start and status.server is not None

    def begin(self, worker: EngineWorker, session: EngineSession) -> Decoding:
        assert worker.server is session
        return worker.server.watch(self._listen, worker.store)
