"""The status of the run on show: its progress, how it ended, its speed-up over plain decoding."""

from __future__ import annotations

import math

import numpy as np
from PySide6.QtCore import QObject

from app.engine_thread.events import State
from app.engine_thread.feed import timer
from app.engine_thread.jobs.judging import MeasurePlain
from app.panels.tokens.end_card import COMPARE, FINDING, NextStep, run_end
from app.trace_models.run_facts import LiveNumbers, has_no_client
from app.trace_models.run_notes import run_name
from app.trace_models.run_rows import Position, RunRows
from app.window.panels import Panels
from engine.analysis.findings.audit import audit_goes_on
from engine.analysis.run_cost import PlainRatio
from engine.plain_text import duration_text
from engine.trace.run_ref import RunColumns, RunRef


class RunEnds(QObject):
    """Fills the end card below the text, and the status line."""

    def __init__(self, panels: Panels) -> None:
        super().__init__(panels.window)
        self._panels, self._docks, self._actions = panels, panels.docks, panels.actions
        self._bridge, self._feed = bridge, feed = panels.bridge, panels.feed
        card = panels.tokens.end_card
        card.plain_asked.connect(self.measure_plain)
        card.step_asked.connect(self._take)
        feed.run_shown.connect(self._show)
        feed.numbers_changed.connect(self._show_numbers)
        bridge.run_ended.connect(self._look_again)
        bridge.listed_changed.connect(self._look_again)
        bridge.server_seen.connect(lambda _: self._show_card())
        bridge.state_changed.connect(self._take_state)
        bridge.pause_asked.connect(feed.tell_numbers)
        self._compiling = timer(self, self._look_at_compiler, _LOOK_MS)
        self._is_compiling = False

    @property
    def can_measure(self) -> bool:
        """Whether the run on show could be measured against plain decoding now."""
        run, bridge = self._feed.run, self._bridge
        if run is None or bridge.server_status.gone:
            return False
        return bridge.can_start and bridge.request_of(run) is not None

    def measure_plain(self) -> None:
        """Repeat the run on show with its drafters and without, in alternation."""
        run = self._feed.run
        request = None if run is None else self._bridge.request_of(run)
        if run is None or request is None:
            return
        self._panels.banners.clear()
        self._bridge.ask(MeasurePlain(run, request), self._show_pairs)

    def _show_pairs(self, job: MeasurePlain) -> None:
        """Show the result, unless there is another card by now."""
        if job.error:
            words = "Plain decoding was not measured."
            self._panels.run_banners.add(job.ref, "warning", words, job.error)
        self._panels.plain_measured()
        self._look_again()

    def _show(self, run: RunRef | None) -> None:
        if run is None:
            self._compiling.stop()  # the window may close
        self._show_card()

    def _look_again(self, *_: object) -> None:
        self._show_card()
        self._feed.tell_numbers()

    def _take_state(self, state: State) -> None:
        if state is State.RUNNING:  # the card offers no measurement meanwhile
            self._compiling.start()
            self._show_card()
        else:
            self._compiling.stop()
            self._is_compiling = False
            self._look_again()

    def _show_card(self) -> None:
        run = self._feed.run
        bridge, card = self._bridge, self._panels.tokens.end_card
        end = None if run is None else run_end(run)
        card.show_end(
            end,
            can_measure=self.can_measure,
            can_compare=bridge.can_start and bridge.server is None,
        )

    def _show_numbers(self, numbers: LiveNumbers) -> None:
        run, status = self._feed.run, self._panels.status
        status.set_vs_plain(None if run is None else PlainRatio.of(run.facts))
        goes_on = run is not None and run == self._bridge.live and self._bridge.has_run
        words = "" if run is None else progress_text(run, numbers) if goes_on else _rebuilt(run)
        if goes_on and self._bridge.pausing:
            words = " · ".join(filter(None, ("pausing after this round", words)))
        if goes_on and self._is_compiling:
            words = " · ".join(filter(None, ("compiling kernels", words)))
        status.say(going=words)

    def _look_at_compiler(self) -> None:
        """Show compilation of a kernel: it happens within a round, which writes no rows
        meanwhile."""
        from engine.machine.clock import is_compiling  # it is imported if anything runs

        if is_compiling() != self._is_compiling:
            self._is_compiling = not self._is_compiling
            self._feed.tell_numbers()

    def _take(self, step: NextStep) -> None:
        run = self._feed.run
        if step.kind == COMPARE:
            self._actions["run.compare"].trigger()
        elif step.kind == FINDING:
            self._docks.reveal("findings")
            if run is not None and step.round is not None:
                self._feed.move_cursor(Position(run, step.seq_id or 0, step.round, None))
        else:
            self._docks.reveal("tune")


def _rebuilt(run: RunRef) -> str:
    """How the state of a fork was rebuilt; empty for other runs."""
    fork = run.facts.fork
    return f"{_fork(run)}, {fork.rebuilt}" if fork is not None else ""


def _fork(run: RunRef) -> str:
    fork = run.facts.fork
    assert fork is not None
    return f"fork of {run_name(run.sibling(fork.parent))} at round {fork.round}"


_LEAST_S, _LEAST_TOKENS = 2.0, 16
"""Seconds of generation and tokens before which the remaining time is not estimated."""
_LOOK_MS = 200


def progress_text(run: RunRef, numbers: LiveNumbers) -> str:
    """ "1,238 / 2,000 tokens · round 339 · 44 s · about 27 s left"; unknown parts are left out.
    Before the first token: "prompt: 512 tokens processed".

    numbers: figures of the run. The time is that of its rounds, without pauses; the remaining time
    is that of the remaining tokens at the speed so far. A text may end before its limit.
    """
    if numbers.tokens is None:
        return ""
    if not numbers.tokens:
        if run.facts.listens_at:
            waits = has_no_client(run.facts)
            return "waiting for a client" if waits else "nothing is streamed yet"
        rows = RunRows(run, "rounds")
        n_read = int(np.maximum(rows.column("verify_width", *rows.read()), 0).sum())
        return f"prompt: {n_read:,} tokens processed" if n_read else "processing the prompt"
    wanted = tokens_asked(run)
    of = f" / {wanted:,}" if wanted else ""
    parts = [f"{numbers.tokens:,}{of} token{'s' * ((wanted or numbers.tokens) != 1)}"]
    fork = run.facts.fork
    if fork is not None and numbers.rounds is not None and numbers.rounds < fork.round:
        parts.insert(0, _rebuilt(run))
    if numbers.rounds:
        parts.append(f"round {numbers.rounds - 1:,}")
    seconds, speed = _seconds(run), numbers.tokens_per_second
    if seconds is not None:
        parts.append(duration_text(seconds))
        speed = speed or (numbers.tokens / seconds if seconds else None)
    if speed:
        goes_on = not run.ended and not audit_goes_on(run.facts)
        enough = numbers.tokens >= _LEAST_TOKENS and numbers.tokens >= _LEAST_S * speed
        if wanted and enough and goes_on:
            left = max(wanted - numbers.tokens, 0) / speed
            parts.append(f"about {duration_text(left)} left")
    if audit_goes_on(run.facts):
        parts.append("comparing with plain decoding (Stop or a new run ends it)")
    return " · ".join(parts)


def tokens_asked(run: RunRef) -> int | None:
    """Most tokens of all sequences of a run, None without a limit or if unknown."""
    limit = run.facts.options.n_predict if run.facts.options else 0
    if limit <= 0:
        return None
    seqs = set(RunColumns(run.store, "tokens", run.run_id)["seq_id"].tolist())
    return limit * len(seqs) if seqs else None


def _seconds(run: RunRef) -> float | None:
    rows = RunRows(run, "rounds")
    start, stop = rows.read()
    if start == stop:
        return None
    ms = rows.column("t_ms", stop - 1, stop)[0]
    return None if math.isnan(ms) else float(ms) / 1e3
