"""Re-scoring: a model judges the tokens of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from app.engine_thread.events import State
from app.engine_thread.opening import LocalSession, open_engine
from app.engine_thread.status import EngineStatus
from app.engine_thread.worker import EngineJob, EngineWorker
from engine.trace.run_ref import RunRef
from engine.trace.writer import TraceWriter

if TYPE_CHECKING:
    from engine.observe.rescoring.rescore import Rescored
    from engine.session import Session


class Rescore(EngineJob):
    """Re-score a run with a model; one that is not in use is loaded for it, and let go of after.

    assume_same: the user has said that it is the model that the run was made with.
    """

    found: Rescored | None = None
    unsure = ""
    """Why it is not known whether the model is the run's own: the user has to say."""

    def __init__(self, run: RunRef, target: Path, *, assume_same: bool = False) -> None:
        super().__init__()
        self.ref, self.target, self._assume_same = run, target, assume_same
        self._compute = "auto"

    def may_start(self, status: EngineStatus) -> bool:
        return status.state is not State.LOADING and not status.has_run

    def on_ask(self, status: EngineStatus) -> None:
        self._compute = status.compute_asked
        status.set_state(State.LOADING)

    def run(self, worker: EngineWorker) -> State:
        from engine.observe.rescoring.rescore import SameModelUnknownError, rescore

        worker.end_run()
        worker.post_state(State.LOADING)
        progress, cancelled = self.progress(worker.post), self.cancelled.is_set
        local = worker.session
        if isinstance(local, LocalSession) and local.has(self.target):
            session = local.engine_session
        else:
            session = open_engine(
                self.target, compute=self._compute, progress=progress, cancelled=cancelled
            )
        store, run_id = self.ref.store, self.ref.run_id
        try:
            found = rescore(
                session, store, run_id, progress, cancelled, assume_same=self._assume_same
            )
            _learn_texts(session, self.ref)
            self.found = found
        except SameModelUnknownError as error:
            self.unsure = error.message
        return worker.rest()


def _learn_texts(session: Session, run: RunRef) -> None:
    """Keep the texts of tokens of which another engine gave the ids alone."""
    tokens, n = run.store.tokens, len(run.store.tokens)
    mine = tokens.column("run_id", 0, n) == run.run_id
    ids = set(tokens.column("token_id", 0, n)[mine].tolist())
    known = (one for one in ids if 0 <= one < session.info.n_vocab)
    TraceWriter(run.store, run.run_id).learn(known, session.tokenizer.piece)


def rescored_sentence(found: Rescored) -> str:
    """A sentence on the result of re-scoring a run."""
    judged = f"{found.n_tokens:,} tokens re-scored in {found.compute}"
    share = f"{found.n_first:,} of rank 1"
    if not found.n_changed:
        return f"{judged}: {share}, none that the model cannot have chosen."
    first = next(one.changed for one in found.sequences if one.changed is not None)
    return (
        f"{judged}: {share}; speculation changed the text, first in round {first.round} at "
        f"position {first.pos}."
    )
