"""Starting a turn of a conversation, which is a run of its own."""

from __future__ import annotations

from app.engine_thread.requests import Decoding, EngineSession, TurnRequest
from app.engine_thread.worker import DecodingJob, EngineWorker


class StartTurn(DecodingJob):
    """A turn with the model in use."""

    def __init__(self, turn: TurnRequest) -> None:
        super().__init__()
        self._turn = turn

    def begin(self, worker: EngineWorker, session: EngineSession) -> Decoding:
        run = session.say(self._turn, worker.store)
        worker.store.runs[run.run_id].update(worker.more_facts)
        return run
