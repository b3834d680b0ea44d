"""Judging jobs: rescoring, triage, fidelity, speed against plain decoding and under other settings,
conform."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import to_builtins

from app.engine_thread.events import OpenRequest, RunRequest, State
from app.engine_thread.opening import LocalSession, open_engine
from app.engine_thread.status import EngineStatus
from app.engine_thread.worker import EngineJob, EngineWorker, Post, SideJob
from app.trace_models.tune_surface import SurfaceRequest, TuneSurface, estimate
from engine.analysis.run_cost import LEAST_PAIRS, MOST_PAIRS
from engine.long_work import ReportProgress
from engine.plain_text import duration_text
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from engine.trace.timings import summary
from engine.trace.writer import TraceWriter

if TYPE_CHECKING:
    from app.engine_thread.worker import EngineSession
    from engine.conform.runner import Outcome
    from engine.experiments.sweep.plan import SweepPlan
    from engine.observe.drafter_diff.diff import DrafterDiff
    from engine.observe.rescoring.rescore import Rescored
    from engine.observe.rescoring.triage import Triage
    from engine.session import Session
    from engine.trace.facts import FidelityFacts


_LONG_PAIR_S = 20.0
"""If the two first runs take longer, seconds, fewer pairs are measured."""


class JudgingJob(EngineJob):
    """A job on runs that have ended, for which the engine is busy."""

    def may_start(self, status: EngineStatus) -> bool:
        if self.needs_rest:
            return status.can_start
        return status.state is not State.LOADING and not status.has_run

    def on_ask(self, status: EngineStatus) -> None:
        status.set_state(State.LOADING)


class Rescore(JudgingJob):
    """Rescore a run with a model, which is loaded temporarily if it is not in use.

    assume_same: the user has confirmed that it is the run's model.
    """

    found: Rescored | None = None
    unsure = ""
    """Why it is uncertain whether the model is the run's own; the user must decide."""

    def __init__(self, run: RunRef, target: Path, *, assume_same: bool = False) -> None:
        super().__init__()
        self.ref, self.target, self._assume_same = run, target, assume_same
        self._compute, self._device = "auto", "auto"

    def on_ask(self, status: EngineStatus) -> None:
        if status.loaded_as is not None:
            self._compute, self._device = status.loaded_as.compute, status.loaded_as.device
        super().on_ask(status)

    def run(self, worker: EngineWorker) -> State:
        from engine.observe.rescoring.rescore import SameModelUnknownError, rescore

        worker.end_run()
        worker.post_state(State.LOADING)
        progress, cancelled = self.progress(worker.post), self.cancelled.is_set
        local = worker.session
        if isinstance(local, LocalSession) and local.has(self.target):
            session = local.engine_session
        else:
            compute, device = self._compute, self._device
            request = OpenRequest(self.target, (), compute, device=device, cancelled=self.cancelled)
            session = open_engine(request, progress)
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
    """Add texts of tokens whose ids alone were recorded."""
    tokens, n = run.store.tokens, len(run.store.tokens)
    mine = tokens.column("run_id", 0, n) == run.run_id
    ids = set(tokens.column("token_id", 0, n)[mine].tolist())
    known = (one for one in ids if 0 <= one < session.info.n_vocab)
    TraceWriter(run.store, run.run_id).learn(known, session.tokenizer.piece)


def rescored_sentence(found: Rescored) -> str:
    judged = f"{found.n_tokens:,} tokens re-scored in {found.compute}"
    share = f"{found.n_first:,} of rank 1"
    if not found.n_changed:
        return f"{judged}: {share}, all of them possible choices of the model."
    first = next(one.changed for one in found.sequences if one.changed is not None)
    return (
        f"{judged}: {share}; speculation changed the text, first in round {first.round} at "
        f"position {first.pos}."
    )


class TriageRuns(SideJob):
    """Compare two finished runs: the one on show and the overlay."""

    found: Triage | None = None

    def __init__(self, shown: RunRef, overlaid: RunRef) -> None:
        super().__init__()
        self.shown, self.overlaid = shown, overlaid

    def run(self, progress: ReportProgress) -> None:
        from engine.observe.rescoring.triage import triage

        self.found = triage(self.shown, self.overlaid)


class DiffDrafters(JudgingJob):
    """Find why the drafts, or their acceptance, of the run on show and of the one laid over it
    differ. The model in use makes drafts again if both are known to be its runs; without one it
    goes by what is recorded."""

    found: DrafterDiff | None = None

    def __init__(self, shown: RunRef, overlaid: RunRef) -> None:
        super().__init__()
        self.runs = shown, overlaid

    def run(self, worker: EngineWorker) -> State:
        from engine.observe.drafter_diff.diff import drafter_diff
        from engine.observe.rescoring.identity import LIKELY, SAME, identify

        worker.end_run()
        self.progress(worker.post)(0, 1, "comparing drafts")
        local, session = worker.session, None
        if isinstance(local, LocalSession):
            known = [identify(local.engine_session, run.facts) for run in self.runs]
            if all(one.verdict in (SAME, LIKELY) or one.is_requantised for one in known):
                session = local.engine_session
        self.found = drafter_diff(*self.runs, session, self.cancelled.is_set)
        return worker.rest()


class MeasureFidelity(JudgingJob):
    """Measure the compute mode's fidelity on the model's own continuation of a text; modes other
    than f32 load the file again in f32. Runs in the mode keep the result as a fact."""

    needs_rest = True
    found: FidelityFacts | None = None

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def run(self, worker: EngineWorker) -> State:
        worker.end_run()
        if isinstance(worker.session, LocalSession):
            self.found = self._measure(worker.session, worker)
            fact = {"fidelity": to_builtins(self.found)}
            worker.more_facts.update(fact)
            for facts in list(worker.store.runs.values()):
                if facts.compute == worker.session.compute:
                    facts.update(fact)
        return worker.rest()

    def _measure(self, local: LocalSession, worker: EngineWorker) -> FidelityFacts:
        from engine.compare.divergence import N_TOKENS, greedy_text, measure_fidelity

        progress, cancelled = self.progress(worker.post), self.cancelled.is_set
        session = reference = local.engine_session
        session.check_unchanged()
        progress(0, 1, "generating a text for the measurement")
        tokens = greedy_text(session, self._text, N_TOKENS, cancelled)
        if session.compute != "f32":
            device = str(session.device)
            request = OpenRequest(local.target, (), "f32", device=device, cancelled=self.cancelled)
            reference = open_engine(request, progress)
        progress(0, 1, "comparing logits with f32")
        return measure_fidelity(session, reference, tokens)


class MeasurePlain(JudgingJob):
    """Run a request with and without drafters in alternation, and note the speeds of each pair as a
    fact of the run made from it. The other runs are not kept. When cancelled, the pairs so far
    count if there are enough."""

    needs_rest = True
    error = ""
    """Why nothing was measured."""

    def __init__(self, run: RunRef, request: RunRequest) -> None:
        super().__init__()
        self.ref, self._request = run, request

    def run(self, worker: EngineWorker) -> State:
        worker.end_run()
        session = worker.session
        if session is not None:
            pairs = self._pairs(session, self.progress(worker.post))
            if len(pairs) >= LEAST_PAIRS:
                self.ref.facts.plain_pairs = pairs
            elif not self.cancelled.is_set():
                self.error = "The runs have no times."
        return worker.rest()

    def _pairs(self, session: EngineSession, progress: ReportProgress) -> list[tuple[float, float]]:
        """Tokens per second with drafts and without."""
        options = self._request.options
        plain = replace(options, spec=replace(options.spec, types=()))
        ways = (self._request, replace(self._request, options=plain))
        progress(0, 1, "warm-up runs, which are not counted")
        began = time.monotonic()
        if any(self._speed(session, way) is None for way in ways):
            return []
        n_pairs = MOST_PAIRS if time.monotonic() - began < _LONG_PAIR_S else LEAST_PAIRS
        pairs: list[tuple[float, float]] = []
        for number in range(n_pairs):
            progress(number, n_pairs, f"with drafts and without, pair {number + 1} of {n_pairs}")
            order = (0, 1) if number % 2 else (1, 0)
            speeds = {at: self._speed(session, ways[at]) for at in order}
            a, b = speeds[0], speeds[1]
            if a is None or b is None:
                break
            pairs.append((a, b))
        return pairs

    def _speed(self, session: EngineSession, request: RunRequest) -> float | None:
        """Tokens per second of one run; None if cancelled or untimed."""
        if self.cancelled.is_set():
            return None
        store = TraceStore()
        run = session.start(request, store)
        while run.advance():
            if self.cancelled.is_set():
                run.stop()
                return None
        return summary(store, run.run_id)["predicted_per_second"] or None


class RunSweep(JudgingJob):
    """Run the jobs of a plan into its folder, in a process of their own, with nothing else running
    here. When cancelled, the rows so far stay."""

    needs_rest = True
    n_done = 0

    def __init__(self, plan: SweepPlan, *, traces: bool) -> None:
        super().__init__()
        self.plan, self._traces = plan, traces

    def run(self, worker: EngineWorker) -> State:
        from engine.experiments.sweep.sweep import Sweep, one_by_one

        worker.end_run()
        progress, total = self.progress(worker.post), len(self.plan.jobs)
        execute = partial(one_by_one, cancelled=self.cancelled.is_set)
        with Sweep(self.plan, self.plan.path.parent, traces=self._traces) as sweep:
            progress(0, total, f"sweep: job 1 of {total}")
            for *_, left_s in sweep.run(execute):
                self.n_done = sweep.n_done
                if left_s is not None:
                    left = f"about {duration_text(left_s)} left"
                    progress(self.n_done, total, f"sweep: job {self.n_done + 1} of {total}, {left}")
        return worker.rest()


class EstimateSpeeds(SideJob):
    """Estimate speeds of a request under other settings. found: None also if the run has no
    draft."""

    found: TuneSurface | None = None

    def __init__(self, request: SurfaceRequest) -> None:
        super().__init__()
        self.request = request

    def run(self, progress: ReportProgress) -> None:
        self.found = estimate(self.request)


class CheckKernels(SideJob):
    """Check the kernels of a package or adapter; `seen` is called with each outcome."""

    has_progress = True

    def __init__(self, target: str, seen: Callable[[Outcome], object]) -> None:
        super().__init__()
        self.target, self._seen = target, seen

    def progress(self, post: Post) -> ReportProgress:
        self._post = post
        return super().progress(post)

    def run(self, progress: ReportProgress) -> None:
        import torch

        from engine.conform import runner
        from engine.conform.checks import CHECKS

        name, place, _ = runner.open_target(self.target)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        total = len(CHECKS) * sum(len(k.recurrences) for k in runner.kernels(name, place))
        progress(0, total, "checking kernels")
        outcomes = runner.run(name, place, seed=1, device=device, cancelled=self.cancelled.is_set)
        for done, outcome in enumerate(outcomes, start=1):
            progress(min(done, total), total, f"checking {outcome.kernel}")
            self._post(partial(self._show, outcome))

    def _show(self, outcome: Outcome, _: EngineStatus) -> None:
        self._seen(outcome)
