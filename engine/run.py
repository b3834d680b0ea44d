"""A run of a session: stepped by its owner, readable at any time."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from engine.analysis.findings.check import record_findings
from engine.decode.held_sequences import CachedRun, PromptCache
from engine.decode.round import RoundObserver
from engine.decode.scheduler import Scheduler
from engine.errors import DeviceLostError, NonFiniteError, OptionError
from engine.gguf.part_file import ModelFiles
from engine.gguf.tokenizer import Tokenizer
from engine.machine.device import run_on
from engine.memory.hybrid import LentMemories
from engine.trace.store import LOOK_S, TraceStore
from engine.trace.timings import acceptance, summary, timings
from engine.trace.writer import TraceWriter


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """The result of one sequence. stop: end, limit, context, grammar (which could not continue),
    stopped, error, or "" while it runs. timings, acceptance: its figures by
    engine.trace.timings."""

    seq_id: int
    prompt_tokens: list[int]
    tokens: list[int]
    text: str
    stop: str
    timings: dict[str, Any]
    acceptance: dict[str, Any]


_ENDED = object()
LOOK_BYTES = 16 << 20
"""Bytes of logits kept between two looks, about."""


class Run:
    """A run: `step` or `advance` until it returns False; the record is `trace`.

    files: of the models. cache: receives `cached` at the end, unless the run fails. memories: get
    back what the run borrowed then, too.
    """

    def __init__(
        self,
        run_id: int,
        trace: TraceStore,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        files: ModelFiles,
        cache: PromptCache | None = None,
        cached: CachedRun | None = None,
        memories: LentMemories | None = None,
        audit: RoundObserver | None = None,
    ) -> None:
        self.run_id, self.trace = run_id, trace
        self.done = False
        self._audit = audit
        self._auditing: Generator[None] | None = None
        self._scheduler, self._tokenizer, self.files = scheduler, tokenizer, files
        self._cache, self._cached, self._memories = cache, cached, memories

    def step(self) -> bool:
        """One scheduler round; after the last one, a part of the audit. True while work remains;
        DraftscopeError ends the run."""
        if self.done:
            return False
        if self._auditing is not None:
            self.done = next(self._auditing, _ENDED) is _ENDED
        else:
            try:
                more = run_on(self._scheduler.device, self._scheduler.step)
            except BaseException as error:
                self._cached = self._memories = None  # how far the round came is unknown
                self._scheduler.note_failure(error)
                if is_lost := isinstance(error, DeviceLostError):  # its memory cannot be cleared
                    with suppress(RuntimeError):  # nor can rows that wait for it be written
                        self._scheduler.close()
                with suppress(RuntimeError) if is_lost else nullcontext():
                    self.stop()
                if isinstance(error, NonFiniteError):
                    self.files.check()  # overwritten weights explain it
                raise
            if not more and self._audit is not None:
                self._scheduler.close()
                self._auditing = self._audit.steps(self.trace, self.run_id)
            self.done = not more and self._auditing is None
        if self.done:
            self._close()
        return not self.done

    def advance(self, seconds: float = LOOK_S) -> bool:
        """Step for `seconds` or until LOOK_BYTES are pending, at least once. The trace gets the
        rows at the end, all at once, which is cheaper than row by row."""
        until, decodes = perf_counter() + seconds, self._auditing is None
        self._scheduler.settle(may_wait=not self.done)
        # entered once for all steps; the audit makes memories that outlast it
        with torch.inference_mode(decodes):
            try:
                while self.step():
                    is_due = perf_counter() >= until or decodes is not (self._auditing is None)
                    is_due |= self._scheduler.bytes_waiting >= LOOK_BYTES
                    if is_due and not self._scheduler.is_ahead:
                        break
            finally:
                self._scheduler.settle()
        return not self.done

    def cancel(self, seq_id: int) -> None:
        """End one sequence between two steps; its recorded rows stay.

        Its result says "stopped", unless it had ended before. Its slot goes to a waiting sequence
        in the next step. Raises OptionError for a sequence that the run does not have.
        """
        n = len(self._scheduler.sequences)
        if not 0 <= seq_id < n:
            raise OptionError(f"The run has no sequence {seq_id}.", f"Name one from 0 to {n - 1}.")
        self._scheduler.cancel(seq_id)

    def stop(self) -> None:
        """End the run now; recorded rows stay."""
        if not self.done:
            self.done = True
            try:
                self._scheduler.stop()
            finally:
                if self._auditing is not None:
                    self._auditing.close()
                self._close()

    @property
    def emitted(self) -> list[list[int]]:
        """Emitted tokens of each prompt, so far."""
        return [list(slot.emitted) for slot in self._scheduler.sequences]

    def results(self) -> list[SequenceResult]:
        """Results of each prompt, so far."""
        return [
            SequenceResult(
                slot.seq_id,
                list(slot.prompt.tokens),
                list(slot.emitted),
                self._tokenizer.decode(slot.emitted),
                slot.stop,
                timings(self.trace, self.run_id, slot.seq_id),
                acceptance(self.trace, self.run_id, slot.seq_id),
            )
            for slot in self._scheduler.sequences
        ]

    def summary(self) -> dict[str, Any]:
        """Figures over all sequences (engine.trace.timings)."""
        return summary(self.trace, self.run_id)

    def _close(self) -> None:
        self._scheduler.close()
        if self._cache and self._cached:
            self._cache.put(self._cached)
        if self._memories:
            self._memories.give_back()
        record_findings(self.trace, [self.run_id])
        TraceWriter(self.trace, self.run_id).end([s.stop for s in self._scheduler.sequences])
