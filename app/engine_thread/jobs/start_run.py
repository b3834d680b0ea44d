"""Starting a run: one sequence for each text."""

from __future__ import annotations

import json
from collections.abc import Sequence

from app.engine_thread.requests import ChatWrap, Decoding, EngineSession, RunRequest
from app.engine_thread.worker import DecodingJob, EngineWorker
from engine.options import RunOptions


class StartRun(DecodingJob):
    """A run of the session in use. rounds: pause after as many."""

    request: RunRequest

    def __init__(
        self,
        texts: Sequence[str],
        options: RunOptions,
        rounds: int | None = None,
        chat: ChatWrap | None = None,
    ) -> None:
        super().__init__(rounds)
        self.request = RunRequest(tuple(texts), options, chat)

    def begin(self, worker: EngineWorker, session: EngineSession) -> Decoding:
        run = session.start(self.request, worker.store)
        facts = worker.store.runs[run.run_id]
        facts.update(worker.more_facts)
        if self.request.chat is not None:
            facts.chat = json.dumps(self.request.chat.kwargs)
        return run
