"""Starting a comparison: lanes side by side, or the contexts of a script of memory operations."""

from __future__ import annotations

from app.engine_thread.requests import CompareRequest, Decoding, EngineSession, ScriptRequest
from app.engine_thread.worker import DecodingJob, EngineWorker


class StartComparison(DecodingJob):
    """A comparison on the model in use. rounds: pause after as many."""

    def __init__(self, lanes: CompareRequest | ScriptRequest, rounds: int | None = None) -> None:
        super().__init__(rounds)
        self._lanes = lanes

    def begin(self, worker: EngineWorker, session: EngineSession) -> Decoding:
        return session.compare(self._lanes, worker.store)
