"""What the engine reports, brought to the panels: states, files, runs, messages, progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, Signal

from app.engine_thread import events
from app.engine_thread.bridge import Bridge
from app.engine_thread.events import State
from app.engine_thread.feed import Feed
from app.models.compared_lanes import lanes_of, run_to_show
from app.models.position import Position
from app.models.run_facts import fidelity_text
from app.saved.errors import log
from app.saved.settings import Settings
from app.shell.panels import Panels
from engine.trace.breaks import BreakHit
from engine.trace.store import TraceStore
from resources import DEMO_TARGET

if TYPE_CHECKING:
    from engine.compare.fidelity import Fidelity


class EngineNews(QObject):
    """Listens to the bridge. export: writes a trace that is no longer shown, if asked to."""

    changed = Signal()
    """What can be done now may be something else."""
    named = Signal(str)
    """What is on show, for the window's title; empty for nothing."""

    def __init__(
        self,
        bridge: Bridge,
        panels: Panels,
        feed: Feed,
        settings: Settings,
        export: Callable[[TraceStore], None],
        parent: QObject,
    ) -> None:
        super().__init__(parent)
        self._bridge, self._panels, self._feed = bridge, panels, feed
        self._settings, self._export = settings, export
        bridge.state_changed.connect(self.show_state)
        bridge.inspected.connect(self._show_files)
        bridge.loaded.connect(self._show_loaded)
        bridge.progress.connect(panels.status.show_progress)
        bridge.failed.connect(self._show_failure)
        bridge.run_started.connect(self._show_run)
        bridge.run_ended.connect(self._refresh_runs)
        bridge.measured.connect(self._show_fidelity)
        bridge.broke.connect(self._show_break)
        bridge.exported.connect(self._show_exported)
        bridge.export_ended.connect(self._end_progress)
        bridge.trace_shown.connect(self._show_trace)
        bridge.reading_ended.connect(self._end_progress)
        panels.status.cancel_asked.connect(bridge.cancel)
        panels.run_panel.options_changed.connect(self._show_options)
        panels.runs.run_selected.connect(self._select_run)
        feed.numbers_changed.connect(self._refresh_runs)

    def show_state(self, state: State) -> None:
        """Loading, ready, running, …"""
        panels = self._panels
        if state is State.RUNNING:
            self._feed.start()
            panels.breaks.show_hit(None)
        else:
            self._feed.stop()
        self._end_progress()
        if state is State.READY:
            panels.run_panel.set_compute(self._bridge.compute_asked)
        panels.model_map.set_loadable(state is State.INSPECTED)
        panels.run_panel.set_compute_enabled(
            state not in (State.LOADING, State.RUNNING, State.PAUSED)
        )
        self._show_model_text()

    # -- files and traces ------------------------------------------------------------------

    def _show_files(self, files: events.ModelFiles | None) -> None:
        self._panels.model_map.set_files(files)
        self._panels.run_panel.set_files(files)
        self._show_options()
        self._show_names()

    def _show_trace(self, folder: Path | None) -> None:
        """A trace was opened, or closed."""
        if folder is not None:  # its lanes are those of the trace
            self._panels.divergence.header.set_editing(False)
        self._show_lanes_or_run(self._bridge.store, self._bridge.run_id)
        self._show_names()

    def _show_names(self) -> None:
        files, folder = self._bridge.files, self._bridge.trace_folder
        names = [folder.name if folder else "", files.target.stem if files and not folder else ""]
        name = "".join(names)
        self._panels.show_tokens(bool(name or self._bridge.store.runs))
        self.named.emit(name)
        self.changed.emit()
        self._show_model_text()

    def _show_loaded(self, event: events.Loaded) -> None:
        if event.files.target != DEMO_TARGET:
            self._settings.add_recent_model(event.files.target)
        if event.replaced is not None:
            old = event.replaced
            self._panels.banners.add(
                "info",
                "The runs of the model before are no longer shown.",
                "They are kept until this message is dismissed.",
                ("Export them…", lambda: self._export(old)),
            )
        self._show_lanes_or_run(event.store, self._bridge.run_id)
        self._show_files(event.files)
        self._panels.model_map.set_compute(event.compute)

    def _show_options(self) -> None:
        panel = self._panels.run_panel
        if not panel.problem:
            options = panel.options()
            self._panels.model_map.set_options(options, len(panel.texts()))
            self._panels.divergence.header.editor.set_options(options)

    def _show_exported(self, folder: Path) -> None:
        self._panels.banners.add("info", f"Trace exported to {folder}.")

    # -- runs ------------------------------------------------------------------------------

    def _show_run(self, run_id: int) -> None:
        self._show_lanes_or_run(self._bridge.store, run_id)
        self.changed.emit()

    def _show_lanes_or_run(self, store: TraceStore, run_id: int | None) -> None:
        self._feed.show_run(store, None if run_id is None else run_to_show(store, run_id))

    def _select_run(self, run_id: int) -> None:
        """Show a run in all views; lanes of one comparison keep the cursor."""
        shown = self._panels.runs.model.shown
        if run_id in lanes_of(self._bridge.store, shown or 0):
            self._feed.select_run(run_id)
        elif run_id != shown:
            self._feed.show_run(self._bridge.store, run_id)

    def _refresh_runs(self, *_: object) -> None:
        self._panels.runs.refresh_numbers()

    def _show_fidelity(self, found: Fidelity) -> None:
        self._panels.banners.add("info", f"Fidelity: {fidelity_text(asdict(found))}.")

    def _show_break(self, hit: BreakHit) -> None:
        self._panels.breaks.show_hit(hit)
        self._panels.banners.add("info", f"A break rule held, {hit}.")
        self._feed.refresh()
        if hit.round is not None:
            self._feed.move_cursor(Position(hit.run_id, hit.seq_id or 0, hit.round, None))

    def _show_failure(self, failed: events.Failed) -> None:
        log.warning("%s %s", failed.message, failed.remedy)
        self._panels.banners.add("error", failed.message, failed.remedy)

    # -- the status line -------------------------------------------------------------------

    def _end_progress(self) -> None:
        bridge = self._bridge
        if bridge.state is not State.LOADING and not bridge.exporting and not bridge.reading:
            self._panels.status.hide_progress()
        self.changed.emit()

    def _show_model_text(self) -> None:
        bridge = self._bridge
        files, folder = bridge.files, bridge.trace_folder
        parts = [bridge.state.value]
        if folder is not None:
            parts = [f"trace {folder}", "opened from disk"]
        elif files is not None:
            quant = next(iter(files.info.quant_mix), "")
            parts = [files.target.stem, quant, bridge.compute, bridge.state.value]
        self._panels.status.set_model(" · ".join(part for part in parts if part))
