"""Events of the engine, passed to the panels: states, files, runs, messages, progress; and the
names of what is shown, in the panels' titles."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import QObject, Signal

from app.engine_thread import events
from app.engine_thread.events import State
from app.engine_thread.jobs.files import is_pasted
from app.saved.errors import log
from app.trace_models.compared_lanes import lanes_of, run_to_show
from app.trace_models.run_facts import comparison_label
from app.trace_models.run_notes import run_name
from app.trace_models.run_rows import Position
from app.trace_models.server_facts import known_facts, server_name
from app.trace_models.shown_text import in_window
from app.window.banner import Banner
from app.window.dock_area import DOCK_OF
from app.window.panels import NOT_READY, Panels
from engine.analysis.breaks import BreakHit
from engine.errors import DraftscopeError
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from resources import DEMO_TARGET


class EngineNews(QObject):
    """Handles the bridge's signals."""

    changed = Signal()
    """The available actions may have changed."""
    named = Signal(str)
    """The name of what is shown, for the window's title; empty for nothing."""

    def __init__(self, panels: Panels) -> None:
        super().__init__(panels.window)
        self._panels, self._settings = panels, panels.settings
        self._bridge, self._feed = bridge, feed = panels.bridge, panels.feed
        self._loaded: events.OpenedFiles | None = None
        """Files of the loaded model."""
        self._behind: Banner | None = None
        self._watching: Banner | None = None
        self._gone: Banner | None = None
        bridge.state_changed.connect(self.show_state)
        bridge.inspected.connect(self._show_files)
        bridge.loaded.connect(self._show_loaded)
        bridge.progress.connect(panels.status.show_progress)
        bridge.failed.connect(self._show_failure)
        bridge.run_ended.connect(self._end_run)
        bridge.broke.connect(self._show_break)
        bridge.finished.connect(self._end_progress)
        bridge.trace_shown.connect(self._show_trace)
        bridge.trace_read.connect(self._offer_trace)
        bridge.connected.connect(self._show_server)
        bridge.server_seen.connect(self._show_server_status)
        bridge.server_waited_for.connect(lambda words: panels.status.say(waiting=words))
        bridge.disconnected.connect(self._show_no_server)
        panels.status.cancel_asked.connect(bridge.cancel)
        panels.run_panel.options_changed.connect(self._show_options)
        feed.numbers_changed.connect(lambda _: panels.runs.refresh_numbers())
        feed.run_shown.connect(self._show_model_text)
        feed.run_shown.connect(self._tell_of_run_behind)

    def show_state(self, state: State) -> None:
        panels = self._panels
        if state is State.RUNNING:
            self._feed.start()
            panels.breaks.show_hit(None)
        elif state is not State.AUDITING:
            self._feed.stop()
            panels.model_map.server.refresh()  # its counters may have come before the last rounds
        self._end_progress()
        panels.run_panel.set_devices(self._bridge.devices)
        panels.model_map.set_memory(self._bridge.memory)
        panels.model_map.set_loadable(state is State.INSPECTED)
        panels.run_panel.set_loading_enabled(
            state is not State.LOADING and not self._bridge.has_run and self._bridge.server is None
        )
        panels.conversation.set_ready(self._why_no_turn(state))
        panels.tell_kept()
        self._show_model_text()
        self._tell_of_run_behind()

    def _why_no_turn(self, state: State) -> str:
        if self._bridge.server is not None:
            return "A server's memory cannot be inspected: open the model's file."
        if state in (State.RUNNING, State.PAUSED):
            return "A run is in progress; Stop (Shift+F5) ends it."
        return NOT_READY.get(state, "")

    # -- servers ---------------------------------------------------------------------------

    def _show_server(self, server: events.ServerConnected) -> None:
        from engine.observe.server.request_options import why_not_sent

        panels = self._panels
        self._settings.add_recent_server(server.facts.address)
        panels.set_recorded(self._bridge.listed)
        self._show_lanes_or_run(self._bridge.live)
        panels.model_map.set_server(server)
        panels.run_panel.set_server(why_not_sent)
        panels.run_panel.use_first_prompt()
        if server.key_kept == "session":
            panels.banners.add(
                "info", "This system has no keyring: the API key is kept only for this session."
            )
        self._show_names()

    def _show_server_status(self, status: events.ServerSeen) -> None:
        panels = self._panels
        is_another = status.gone.endswith(events.ANOTHER)
        is_news = bool(status.gone) and (is_another or panels.status.gone.isHidden())
        is_news &= not self._bridge.has_run  # whose own end is shown
        panels.model_map.server.set_status(status)
        panels.status.set_server_gone(status.gone)
        if is_news or not status.gone:
            panels.banners.take_down(self._gone)
        if is_news:
            again = "Connect to it again (Ctrl+Shift+K)."
            remedy = again if is_another else "Start the server again, or check address and port."
            self._gone = panels.banners.add("error", status.gone, remedy)
        self._show_model_text()

    def _show_no_server(self) -> None:
        panels = self._panels
        panels.model_map.set_server(None)
        panels.run_panel.set_server(None)
        panels.status.set_server_gone("")
        self._show_names()

    # -- files and traces ------------------------------------------------------------------

    def _show_files(self, files: events.OpenedFiles | None) -> None:
        self._panels.model_map.set_files(files)
        if files is not None and files is self._loaded:  # again, as another could not be loaded
            self._panels.model_map.set_compute(self._bridge.compute)
        self._panels.run_panel.set_files(files)
        self._show_options()
        self._show_names()

    def _show_trace(self, folder: Path | None) -> None:
        """A trace was opened, or closed."""
        if folder is not None:  # its lanes are the trace's
            self._panels.divergence.header.set_editing(False)
        self._panels.set_recorded(self._bridge.listed)
        self._show_lanes_or_run(self._bridge.run)
        self._show_names()
        self._tell_of_run_behind()

    def _offer_trace(self, folder: Path, store: TraceStore) -> None:
        """Offer a trace after something else was shown since it was requested."""
        self._panels.banners.add(
            "info",
            f"The trace {folder.name} has been read.",
            "",
            ("&Show it", lambda: self._bridge.show_trace(folder, store)),
        )

    def _tell_of_run_behind(self, *_: object) -> None:
        """Say that a run continues while another one is shown, with a button to it."""
        bridge, banners = self._bridge, self._panels.banners
        banners.take_down(self._behind)
        live, shown = bridge.live, self._feed.run
        if live is None or not bridge.has_run:
            return
        if bridge.trace is not None or (shown is not None and shown not in (live, *lanes_of(live))):
            word = "is paused" if bridge.state is State.PAUSED else "continues"
            name = run_name(live)
            self._behind = banners.add(
                "info",
                f"{name[:1].upper()}{name[1:]} {word} in the background.",
                "",
                ("&Show the run", self._show_live),
                sticky=True,
            )

    def _show_live(self) -> None:
        self._bridge.hide_trace()
        self._show_lanes_or_run(self._bridge.live)

    def _show_names(self) -> None:
        files, folder = self._bridge.files, self._bridge.trace_folder
        server = self._bridge.server
        in_use = files.target.stem if files else server_name(server.facts) if server else ""
        name = folder.name if folder else in_use
        self._panels.show_tokens(bool(name or self._feed.run))
        self.named.emit(name)
        self.changed.emit()
        self._show_model_text()

    def _show_loaded(self, files: events.OpenedFiles) -> None:
        if files.target != DEMO_TARGET:
            self._settings.add_recent_model(files.target)
        self._panels.set_recorded(self._bridge.listed)
        self._show_lanes_or_run(self._bridge.live)
        self._loaded = files
        self._show_files(files)

    def _show_options(self) -> None:
        panel = self._panels.run_panel
        if not panel.problem:
            options = panel.options()
            self._panels.model_map.set_options(options, len(panel.texts()))
            self._panels.divergence.header.editor.set_options(options)

    # -- runs ------------------------------------------------------------------------------

    def show_started(self, run: RunRef) -> None:
        """Show a starting run, once it has its number."""
        self._show_lanes_or_run(run)
        if listens_at := run.facts.listens_at:
            self._watching = self._panels.banners.add(
                "info",
                f"Requests to {listens_at} are forwarded to the server and recorded here.",
                "Stop (Shift+F5) ends the recording.",
                sticky=True,
            )

    def _end_run(self, *_: object) -> None:
        self._panels.banners.take_down(self._watching)
        self._panels.runs.refresh_numbers()

    def _show_lanes_or_run(self, run: RunRef | None) -> None:
        self._feed.show_run(None if run is None else run_to_show(run))

    def select_run(self, run: RunRef) -> None:
        """Show a run in all views; within a comparison the cursor stays."""
        shown = self._feed.run
        if shown is not None and run in lanes_of(shown):
            self._feed.select_run(run)
        elif run != shown:
            self._bring_its_trace(run)
            self._feed.show_run(run)
            self._show_names()

    def _bring_its_trace(self, run: RunRef) -> None:
        """Show the trace that holds a run, an opened one or the session's."""
        bridge, folder = self._bridge, self._bridge.opened_from(run.store)
        if folder is None:
            bridge.hide_trace()
        elif run.store is not bridge.trace:
            bridge.show_trace(folder, run.store)

    def _show_break(self, hit: BreakHit) -> None:
        self._panels.breaks.show_hit(hit)
        self._feed.refresh()
        words = f"A break rule matched: {hit}."
        if self._bridge.trace is not None:  # a trace on show stays
            offer = "&Show it", lambda: self._go_to(hit)
            self._panels.banners.add("info", words, "", offer)
        else:
            self._go_to(hit)
            self._panels.run_banners.add(hit.run, "info", words)

    def _go_to(self, hit: BreakHit) -> None:
        self._bridge.hide_trace()
        if hit.round is not None:
            self._feed.move_cursor(Position(hit.run, hit.seq_id or 0, hit.round, None))

    def _show_failure(self, failed: DraftscopeError) -> None:
        log.warning("%s %s", failed.message, failed.remedy)
        message, remedy = failed.message, failed.remedy
        if self._bridge.server is None:  # a server has its own flags
            message, remedy = in_window(message), in_window(remedy)
        self._panels.banners.add("error", message, remedy)

    # -- the status line -------------------------------------------------------------------

    def _end_progress(self, *_: object) -> None:
        bridge = self._bridge
        if bridge.state is not State.LOADING and not bridge.exporting and not bridge.reading:
            self._panels.status.hide_progress()
        if bridge.state is State.READY and (how := bridge.loaded_as) is not None:
            self._panels.run_panel.set_loading(how.compute, how.mmap, how.device)
        self.changed.emit()

    def _show_model_text(self, *_: object) -> None:
        bridge = self._bridge
        files, folder = bridge.files, bridge.trace_folder
        parts = [bridge.state.value]
        if folder is not None:
            parts = (
                ["pasted text"] if is_pasted(folder) else [f"trace {folder}", "opened from disk"]
            )
            parts[1:1] = self._on_show()
            if bridge.has_run:
                parts.append(f"{bridge.live} {bridge.state.value}")
            elif bridge.state is State.EMPTY:
                parts.append("to run or compare, open its model (Ctrl+O)")
        elif bridge.connecting:
            parts = [f"connecting to {bridge.connecting}"]
        elif bridge.server is not None:
            known = known_facts(bridge.server.facts)
            state = "not responding" if bridge.server_status.gone else bridge.state.value
            parts = [server_name(bridge.server.facts), known["model"], known["build"], state]
            parts += self._on_show()
        elif files is not None:
            quant = next(iter(files.info.quant_mix), "")
            device = bridge.memory.name.split()[0] if bridge.memory else ""
            parts = [files.target.stem, quant, bridge.compute, device, bridge.state.value]
            parts += self._on_show()
        self._panels.status.say(model=" · ".join(part for part in parts if part))

    def _on_show(self) -> list[str]:
        """The run on show, with its model if that is not the loaded one."""
        shown = self._feed.run
        if shown is None:
            return []
        others = [r.model for r in self._bridge.listed if r.store is shown.store and not r.in_use]
        return [" of ".join((f"shown: {run_name(shown)}", *others[:1]))]


_OF_RUN = ("rollback", "memory", "inspector", "runs", "speed")
_OF_COMPARISON = ("divergence", "findings")
_OF_NO_RUN = "results", "conform", "faults", "breaks"
"""Pages about a file, a package or future runs, whatever run is shown."""


class SubjectNames(QObject):
    """Shows in panels' titles which run or comparison they are about."""

    def __init__(self, panels: Panels) -> None:
        super().__init__(panels.window)
        self._bridge, self._feed, self._docks = panels.bridge, panels.feed, panels.docks
        renamed, turned = panels.runs.rename_asked, panels.docks.turned()
        for changed in (self._feed.run_shown, self._bridge.listed_changed, renamed, *turned):
            changed.connect(self._name)

    def _name(self, *_: object) -> None:
        run = self._feed.run
        lanes = () if run is None else lanes_of(run)
        label = "" if run is None else run_name(run)
        for name in _OF_RUN:
            self._docks.note(name, label)
        for name in _OF_COMPARISON:
            self._docks.note(name, comparison_label(lanes) if lanes else label)
        is_turn = run is not None and run.facts.turn is not None
        self._docks.note("conversation", label if is_turn else f"not of {label}" if label else "")
        runs = () if run is None else list(run.store.runs.values())
        is_checked = any(one.gate or one.gate_scripts for one in runs)
        checks = label if is_checked else f"not of {label}" if label else ""
        of_no_run = {DOCK_OF[page] for page in _OF_NO_RUN if page in self._docks.pages}
        for name, text in (("tuning", label), ("lab", checks)):
            self._docks.note(name, "" if name in of_no_run else text)
        self._docks.note("model", self._other_model(run))

    def _other_model(self, run: RunRef | None) -> str:
        """A note on the loaded model if the run on show is of another one."""
        listed = self._bridge.listed
        if run is None or not any(runs.in_use for runs in listed):
            return ""
        for runs in listed:
            if runs.store is run.store and not runs.in_use:
                return f"in use; {run_name(run)} is of {runs.model}"
        return ""
