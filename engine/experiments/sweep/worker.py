"""Sweep worker: runs jobs in its own process, keeping loaded models for the next job."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.analysis.findings.check import recorded
from engine.draft.registry import DRAFTERS
from engine.environment import machine
from engine.errors import DraftscopeError, TraceFileError
from engine.experiments.bench.request import measured, run_to_end, shorter
from engine.experiments.results.table import FIGURES
from engine.experiments.results.writer import JobResult
from engine.experiments.sweep.plan import CHAT, COMPUTE, DEVICE, REPEAT, THREADS, SweepJob
from engine.gguf.file import GgufFile
from engine.machine.device import device_name, resolve_device
from engine.machine.host_memory import wait_for_huge_pages
from engine.model.drafters.config import drafter_of
from engine.model.tensors import DRAFT_MTP
from engine.options import Prompt, RunOptions
from engine.run import Run
from engine.session import Session
from engine.threads import choose_threads
from engine.trace.export import export_csv

_WARM_UP_TOKENS = 8
_CONTENT_S = 1.0


class SweepWorker:
    """Runs jobs one after another; errors become results."""

    def __init__(self) -> None:
        self._session: Session | None = None
        self._loaded: tuple[Any, ...] = ()

    def run(self, job: SweepJob, trace: Path | None, files: Sequence[Path] = ()) -> JobResult:
        """Measure a job. trace: a folder for its trace. files: local paths of the model files,
        replacing job.files."""
        target, *drafts = files or job.files
        try:
            return self._measure(job, trace, target, drafts[0] if drafts else None)
        except DraftscopeError as error:
            return JobResult(str(error), machine=machine())
        except (Exception, MemoryError) as error:
            first_line = (str(error).splitlines() or [""])[0]
            return JobResult(f"{type(error).__name__}: {first_line}", machine=machine())

    def _measure(
        self, job: SweepJob, trace: Path | None, target: Path, draft: Path | None
    ) -> JobResult:
        session = self._open(job, target, draft)
        choose_threads(job.setting(THREADS), session.info, session.model)
        chat: dict[str, Any] | None = {} if job.setting(CHAT) else None
        remedy = "Leave chat out of the plan."
        prompts = [session.message_prompt(text, chat, remedy) for text in job.prompts]
        run_to_end(session.start(prompts[:1], shorter(job.options, _WARM_UP_TOKENS)))
        runs = [_timed(session, prompts, job.options) for _ in range(job.setting(REPEAT))]
        runs.sort(key=lambda timed: timed[1]["predicted_ms"] or 0.0)
        run, figures = runs[(len(runs) - 1) // 2]
        speeds = [figures["predicted_per_second"] or 0.0 for _, figures in runs]
        if trace is not None:
            if session.content:
                session.content.find(_CONTENT_S)
            try:
                export_csv(run.trace, trace)
            except TraceFileError as error:
                return JobResult(unwritable=error.message)
        return JobResult(
            figures={
                **figures,
                "predicted_per_second_low": min(speeds),
                "predicted_per_second_high": max(speeds),
                "wall_s": statistics.median(figures["wall_s"] for _, figures in runs),
            },
            machine={**machine(), "device": device_name(session.device)},
            model=dict(session.identity),
            output=hashlib.sha256(repr(run.emitted).encode()).hexdigest()[:16],
            has_trace=trace is not None,
        )

    def _open(self, job: SweepJob, target: Path, draft: Path | None) -> Session:
        """The models of a job, reusing the previous ones if possible."""
        device = resolve_device(job.setting(DEVICE))
        wanted = (target, job.setting(COMPUTE), device)
        if draft is not None and not _is_used(draft, job.options.spec.types):
            draft = None
        serves = self._loaded[:3] == wanted and draft in (None, self._loaded[3])
        if draft is None and self._session and DRAFT_MTP in self._session.drafts:
            serves = False  # the model's own MTP block is requested
        if self._session and serves and not self._session.files.changed:
            return self._session
        self._session, self._loaded = None, ()  # free memory for the next one
        self._session = Session.open(
            target, draft, compute=job.setting(COMPUTE), device=str(device)
        )
        wait_for_huge_pages()
        self._loaded = (*wanted, draft)
        return self._session


def _is_used(draft: Path, types: Sequence[str]) -> bool:
    """Whether any of these drafters uses a file; draft-mtp can use one with an MTP block."""
    if any(DRAFTERS[name].has_file for name in types):
        return True
    with GgufFile.open(draft) as file:
        return drafter_of(file) == DRAFT_MTP


def _timed(
    session: Session, prompts: Sequence[Prompt], options: RunOptions
) -> tuple[Run, dict[str, Any]]:
    """A finished run and its figures; None = unknown."""
    run, found = measured(session, prompts, options)
    known = {
        **found,
        **run.trace.runs[run.run_id],
        "draft_ms": found["phase_ms"]["draft"],
        "verify_ms": found["phase_ms"]["verify"],
        "num_findings": sum(finding.severity != "info" for finding in recorded(run.trace)),
    }
    if not found["draft_n"]:
        known |= {"draft_n": None, "draft_n_accepted": None}
    return run, {name: known.get(name) for name in FIGURES}
