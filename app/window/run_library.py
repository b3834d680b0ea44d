"""The list of all runs: commands on them, which of them stay in memory, overlaid runs, and what is
copied of the one on show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from PySide6.QtCore import QObject, Signal
from PySide6.QtGui import QGuiApplication, QImage
from PySide6.QtWidgets import QApplication, QTableView

from app.engine_thread.events import TraceMark, mark_of
from app.engine_thread.jobs.engine import StartRun
from app.engine_thread.jobs.files import ReadRows
from app.engine_thread.jobs.judging import DiffDrafters, TriageRuns
from app.engine_thread.worker import DecodingJob
from app.saved.autosave import Autosave
from app.saved.errors import issue_text
from app.trace_models.compared_lanes import lanes_of
from app.trace_models.run_facts import comparison_label, is_ours, run_names
from app.trace_models.run_notes import (
    FACT,
    count_runs,
    describe_prompt,
    note,
    notes_of,
    number_of,
    prompt_text,
    run_name,
)
from app.trace_models.run_rows import Position, RunOverlay
from app.widgets.plain_table import table_text
from app.window.dialogs.help import environment, environment_text, report
from app.window.engine_events import EngineNews
from app.window.panels import Panels
from engine.errors import DraftscopeError
from engine.trace.records import REFERENCE
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore

if TYPE_CHECKING:
    from engine.observe.rescoring.triage import TextPair


MOST_BYTES = 512 << 20
"""Memory limit of traces, beyond which unused ones are left on disk alone, bytes."""


class RunLibrary(QObject):
    """Connects the Runs panel. `autosave`: writes traces, None if nothing is saved: then all stay
    in memory."""

    def __init__(self, panels: Panels, news: EngineNews, autosave: Autosave | None) -> None:
        super().__init__(panels.window)
        self._panels, self._news, self._autosave = panels, news, autosave
        self._bridge, self._feed = bridge, feed = panels.bridge, panels.feed
        self._used: WeakKeyDictionary[TraceStore, int] = WeakKeyDictionary()
        """A counter of when each trace was last shown."""
        self._as_read: WeakKeyDictionary[TraceStore, TraceMark] = WeakKeyDictionary()
        """The size of opened traces as read. Neither keeps closed ones alive."""
        self._deleted: list[tuple[list[RunRef], RunRef | None]] = []
        """What can be restored, latest last, each with its run that was on show."""
        self._wanted: tuple[TraceStore, Callable[[], object]] | None = None
        """A trace that is being read again, and what to do then."""
        runs = panels.runs
        runs.run_selected.connect(self.select)
        runs.overlay_asked.connect(self.overlay)
        runs.rename_asked.connect(lambda run, name: self._note([run], name=name))
        runs.star_asked.connect(lambda run, starred: self._note([run], starred=starred))
        runs.delete_asked.connect(self.delete)
        runs.undo_asked.connect(self.undo)
        runs.again_asked.connect(self.again)
        runs.can_repeat = self.can_repeat
        bridge.listed_changed.connect(self._list)
        bridge.rows_read.connect(self._go_on)
        bridge.trace_shown.connect(self._note_trace)
        bridge.run_started.connect(self._begin_run)
        bridge.run_ended.connect(self._end_run)
        bridge.loaded.connect(self.make_room)
        bridge.connected.connect(self.make_room)
        feed.run_shown.connect(self._note_use)
        feed.numbers_changed.connect(self._note_prompt)
        if autosave is not None:
            autosave.saved.connect(self.make_room)

    # -- what the user asks for ------------------------------------------------------------

    def select(self, run: RunRef) -> None:
        """Show a run in all views, once its rows are in memory."""
        self.with_rows(run.store, lambda: self._news.select_run(run))

    def overlay(self, run: RunRef | None) -> None:
        """Overlay one more run, once its rows are in memory; None removes all."""
        if run is None:
            self._feed.set_overlay(None)
        else:
            self.with_rows(run.store, lambda: self._feed.add_overlay(run))

    def can_repeat(self, run: RunRef | None) -> bool:
        """Whether a run or comparison could be repeated now."""
        return run is not None and self._bridge.can_start and self._repeat(run) is not None

    def again(self, run: RunRef) -> None:
        """Repeat a run or comparison with its prompts and options, whatever Run Settings say. One
        of another session needs its model."""
        if (job := self._repeat(run)) is not None:
            self._panels.banners.clear()
            self.with_rows(run.store, lambda: self._bridge.ask(job))

    def _repeat(self, run: RunRef) -> DecodingJob | None:
        job: DecodingJob | None = self._bridge.again(next(iter(lanes_of(run)), run))
        facts = run.facts
        is_known = facts.options is not None and is_ours(facts) and self._bridge.server is None
        if job is not None or not is_known or facts.lane or facts.turn or facts.fork:
            return job
        assert facts.options is not None
        return StartRun((), facts.options, of=run)

    def delete(self, runs: Sequence[RunRef]) -> None:
        """Remove runs from the list, lanes with their whole comparison; a running one stays."""
        live = self._bridge.live if self._bridge.has_run else None
        going = (lanes_of(live) or (live,)) if live else ()
        whole = dict.fromkeys(lane for run in runs for lane in lanes_of(run) or (run,))
        chosen = [run for run in whole if run not in going]
        if len(chosen) < len(whole) and live is not None:
            what = run_name(live)
            what = what[:1].upper() + what[1:]
            self._panels.banners.add("info", f"{what} is in progress: stop it first.")
        if not chosen:
            return
        if set(chosen).intersection(self._feed.overlaid):
            self._feed.set_overlay(None)
        shown = next((run for run in chosen if run == self._feed.run), None)
        next_to_it = None if shown is None else self._neighbour(chosen)
        self._deleted.append((chosen, shown))
        self._note(chosen, deleted=True)
        self._offer_undo()
        if next_to_it is not None:
            self.select(next_to_it)
        elif shown is not None:
            self._feed.show_run(None)

    def undo(self) -> None:
        """Restore what was deleted last, and show it if it was on show."""
        if self._deleted:
            runs, shown = self._deleted.pop()
            self._note(runs, deleted=False)
            self._offer_undo()
            if shown is not None:
                self.select(shown)

    def _neighbour(self, gone: list[RunRef]) -> RunRef | None:
        """The run to show after the one on show is deleted: the previous one in the list, else the
        next."""
        listed = [row.run for row in self._panels.runs.model.rows]
        at = min((listed.index(run) for run in gone if run in listed), default=0)
        left = [*reversed(listed[:at]), *listed[at:]]
        return next((run for run in left if run not in gone), None)

    def _offer_undo(self) -> None:
        last = tuple(self._deleted[-1][0]) if self._deleted else ()
        one = comparison_label(last) if len(last) > 1 else run_name(last[0]) if last else ""
        self._panels.runs.offer_undo(one if (n := count_runs(last)) < 2 else f"{n:,} runs")

    def _note(self, runs: Sequence[RunRef], **changes: Any) -> None:
        for run in runs:
            note(run, **changes)
            self._write(run)
        self._list()

    def _write(self, run: RunRef) -> None:
        if self._autosave is not None:
            try:
                self._autosave.note_facts(run, FACT)
            except DraftscopeError as error:
                self._panels.banners.add("error", error.message, error.remedy)

    # -- rows on disk ----------------------------------------------------------------------

    def with_rows(self, store: TraceStore, then: Callable[[], object]) -> None:
        """Do something once the rows of a trace are in memory."""
        if store.rows_in is None:
            then()
        elif self._bridge.ask(ReadRows(store, store.rows_in)):
            self._wanted = store, then
        else:
            self._panels.banners.add(
                "info", "Another trace is being read.", "Choose the run again after that."
            )

    def _go_on(self, store: TraceStore) -> None:
        if self._autosave is not None and self._bridge.opened_from(store) is None:
            self._autosave.note_reading(store)
        wanted, self._wanted = self._wanted, None
        if wanted is not None and wanted[0] is store:
            wanted[1]()
        self.make_room()

    def make_room(self, *_: object) -> None:
        """Leave the rows of the least recently shown traces on disk while all together exceed
        MOST_BYTES."""
        bridge, feed = self._bridge, self._feed
        if bridge.is_opening or bridge.reading or bridge.exporting:
            return
        held = [runs.store for runs in bridge.listed if runs.store.rows_in is None]
        n_bytes = sum(store.n_bytes() for store in held)
        in_use = {bridge.session_store, bridge.store}
        in_use |= {run.store for run in (feed.run, *feed.overlaid) if run}
        for store in sorted(held, key=lambda one: self._used.get(one, 0)):
            if n_bytes <= MOST_BYTES:
                break
            folder = self._folder_of(store)
            if store not in in_use and folder is not None:
                n_bytes -= store.n_bytes()
                bridge.let_go_of_rows(store, folder)

    def _folder_of(self, store: TraceStore) -> Path | None:
        """The folder with all of a trace, None if it is only in memory."""
        if (folder := self._bridge.opened_from(store)) is not None:
            return folder if self._as_read.get(store) == mark_of(store) else None
        saves = self._autosave
        if saves is None or saves.is_writing or not store.size() or not saves.is_saved(store):
            return None
        return saves.folder_of(store)

    # -- what happens ----------------------------------------------------------------------

    def _list(self) -> None:
        self._panels.set_recorded(self._bridge.listed)

    def _note_trace(self, folder: Path | None) -> None:
        trace = self._bridge.trace
        if folder is not None and trace is not None:
            self._as_read.setdefault(trace, mark_of(trace))

    def _note_use(self, run: RunRef | None) -> None:
        if run is not None:
            self._used[run.store] = 1 + max(self._used.values(), default=0)

    def _begin_run(self, run: RunRef) -> None:
        self._number(run)
        self._news.show_started(run)

    def _number(self, run: RunRef) -> None:
        """Number a new run after those of all sessions; lanes of a comparison share one number."""
        started = map(run.sibling, range(run.run_id, len(run.store.runs)))
        new = [one for one in started if notes_of(one.facts).number is None]
        kept = (*self._bridge.earlier, *self._bridge.recorded)
        known = (RunRef(runs.store, i) for runs in kept for i in list(runs.store.runs))
        number = max((number_of(one) for one in known if one not in new), default=-1)
        for one in new:
            if one == new[0] or one.facts.lane in (None, REFERENCE):
                number += 1
            note(one, number=number)  # saved with its rows
        if new:
            self._list()

    def _note_prompt(self, *_: object) -> None:
        """Save a running run's prompt, in case the program ends before the run."""
        live = self._bridge.live
        for run in (lanes_of(live) or (live,)) if live and self._bridge.has_run else ():
            if not notes_of(run.facts).prompt and (prompt := prompt_text(run)):
                note(run, prompt=prompt)

    def _end_run(self, run: RunRef) -> None:
        for one in lanes_of(run) or (run,):
            describe_prompt(one)
        self._number(run)  # checks of a library start one comparison after the other
        self.make_room()


class RunPairs(QObject):
    """Compares the texts of two runs once both have ended, and informs the panels."""

    changed = Signal()
    """A place to go to has appeared or disappeared."""

    def __init__(self, panels: Panels) -> None:
        super().__init__(panels.window)
        self._bridge, self._panels, self._feed = panels.bridge, panels, panels.feed
        self._overlay: RunOverlay | None = None
        self._asked = False
        self._parting: TextPair | None = None
        self._feed.overlay_changed.connect(self._begin)
        self._bridge.run_ended.connect(self._ask)

    @property
    def part(self) -> bool:
        """Whether the two differ at any token."""
        return self._parting is not None

    def go_first(self) -> None:
        """Move the cursor to the first differing token."""
        pair = self._parting
        if self._overlay is not None and pair is not None and pair.a is not None:
            run, round_ = self._overlay.over, pair.a.round
            if round_ is not None:
                self._feed.move_cursor(Position(run, pair.seq_a, round_, pair.pos))

    @property
    def have_ended(self) -> bool:
        """Whether there are two, and both have ended."""
        overlay = self._overlay
        return overlay is not None and overlay.run.ended and overlay.over.ended

    def diff_drafters(self) -> None:
        """Explain why drafts or acceptance of the two differ."""
        if self._overlay is not None:
            self._panels.banners.clear()
            self._bridge.ask(DiffDrafters(self._overlay.over, self._overlay.run), self._show_diff)

    def _show_diff(self, job: DiffDrafters) -> None:
        if job.found is None:
            return
        from engine.observe.drafter_diff.diff import lines_of

        names = "A is {}, B is {}".format(*run_names(*job.runs))
        first, *rest = lines_of(job.found)
        severity = "info" if job.found.first is None else "warning"
        whole = "\n".join((names, first, *rest))
        copy = "&Copy Report", lambda: QGuiApplication.clipboard().setText(whole)
        said = f"{first[0].upper()}{first[1:].rstrip('.')}. {names}."
        self._panels.run_banners.add(job.runs[0], severity, said, "", copy, sticky=True)

    def _begin(self, overlay: RunOverlay | None) -> None:
        self._overlay, self._asked, self._parting = overlay, False, None
        self._panels.show_triage("", "")
        self._ask()
        self.changed.emit()

    def _ask(self, *_: object) -> None:
        overlay = self._overlay
        if overlay is not None and self.have_ended and not self._asked:
            self._asked = True
            self._bridge.ask(TriageRuns(overlay.over, overlay.run), self._show)

    def _show(self, job: TriageRuns) -> None:
        overlay, found = self._overlay, job.found
        if overlay is None or (job.shown, job.overlaid) != (overlay.over, overlay.run):
            return
        if found is None:
            return
        parting = [pair for pair in found.pairs if pair.pos is not None]
        self._parting = found.worst if found.worst in parting else next(iter(parting), None)
        verdict = found.verdict if found.pairs else "other prompts"
        self._panels.show_triage(verdict, found.reason)
        self.changed.emit()


_MESSAGE_MS = 3000


class Copies:
    """The clipboard's contents. `log_lines` gives the end of the log for reports."""

    def __init__(self, panels: Panels, log_lines: Callable[[], list[str]]) -> None:
        self._bridge, self._panels, self._feed = panels.bridge, panels, panels.feed
        self._log_lines = log_lines

    def handlers(self) -> dict[str, Callable[[], object]]:
        """What each action copies, by its id."""
        panels = self._panels
        sources: dict[str, Callable[[], str | QImage | None]] = {
            "file.copy_text": self._text,
            "file.copy_step": panels.inspector.markdown,
            "file.copy_issue": self._issue,
            "plot.copy_image": lambda: panels.plots.image(),
            "help.copy_environment": environment_text,
            "help.copy_report": lambda: report(
                self._bridge.files, self._bridge.compute, self._log_lines()
            ),
        }
        return {name: partial(self._put, source) for name, source in sources.items()}

    def _text(self) -> str:
        """The focused table, else the selected or generated text."""
        at = QApplication.focusWidget()
        return table_text(at) if isinstance(at, QTableView) else self._panels.tokens.copy_text()

    def _issue(self) -> str | None:
        """Environment, model, options and the round in question, as Markdown."""
        run = self._feed.run
        return None if run is None else issue_text(run, self._feed.cursor, environment())

    def _put(self, source: Callable[[], str | QImage | None]) -> None:
        copied, clipboard = source(), QGuiApplication.clipboard()
        if copied is not None:
            clipboard.setImage(copied) if isinstance(copied, QImage) else clipboard.setText(copied)
            self._panels.status.showMessage("Copied", _MESSAGE_MS)
