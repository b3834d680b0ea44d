"""Watching clients: other programs talk to the server in use through a port of the window."""

from __future__ import annotations

from app.engine_thread.requests import Decoding, EngineSession
from app.engine_thread.status import EngineStatus
from app.engine_thread.worker import DecodingJob, EngineWorker


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
