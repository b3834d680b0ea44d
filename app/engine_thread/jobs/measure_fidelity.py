"""Measuring fidelity: how far the compute mode in use is from f32."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from app.engine_thread.events import State
from app.engine_thread.opening import LocalSession, open_engine
from app.engine_thread.status import EngineStatus
from app.engine_thread.worker import EngineJob, EngineWorker

if TYPE_CHECKING:
    from engine.compare.fidelity import Fidelity


class MeasureFidelity(EngineJob):
    """Measure it on the model's own continuation of a text, for which the file is loaded a second
    time. Its runs keep the result as a fact."""

    needs_rest = True
    found: Fidelity | None = None

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def may_start(self, status: EngineStatus) -> bool:
        return status.can_start and status.server is None

    def on_ask(self, status: EngineStatus) -> None:
        status.set_state(State.LOADING)

    def run(self, worker: EngineWorker) -> State:
        worker.end_run()
        if isinstance(worker.session, LocalSession):
            self.found = self._measure(worker.session, worker)
            fact = {"fidelity": asdict(self.found)}
            worker.more_facts.update(fact)
            for facts in worker.store.runs.values():
                if facts.compute == worker.session.compute:
                    facts.update(fact)
        return worker.rest()

    def _measure(self, local: LocalSession, worker: EngineWorker) -> Fidelity:
        from engine.compare.fidelity import N_TOKENS, greedy_text, measure_fidelity

        progress, cancelled = self.progress(worker.post), self.cancelled.is_set
        session = reference = local.engine_session
        session.check_unchanged()
        progress(0, 1, "writing a text to measure on")
        tokens = greedy_text(session, self._text, N_TOKENS, cancelled)
        if session.compute != "f32":
            reference = open_engine(
                local.target, compute="f32", progress=progress, cancelled=cancelled
            )
        progress(0, 1, "comparing logits with f32")
        return measure_fidelity(session, reference, tokens)
