"""The main window: its parts, and each action connected to the part that handles it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import QMimeData, Qt, QTimer
from PySide6.QtGui import QAction, QCloseEvent, QGuiApplication, QKeyEvent, QKeySequence
from PySide6.QtWidgets import QDockWidget, QMainWindow, QMenu, QMenuBar

from app.actions import PANELS, SPECS, Actions, submenu_of
from app.engine_thread.bridge import Bridge
from app.engine_thread.events import State
from app.engine_thread.jobs.engine import DisconnectServer
from app.engine_thread.jobs.judging import CheckKernels, EstimateSpeeds
from app.saved.errors import log
from app.saved.settings import Settings
from app.trace_models.compared_lanes import lanes_of
from app.trace_models.run_rows import RunRange
from app.window.appearance import Appearance, GlyphWatch, first_theme
from app.window.dialogs.help import AboutDialog, ShortcutsDialog, open_help
from app.window.dialogs.palette import Command, CommandPalette
from app.window.dialogs.runs import ScenarioDialog, scenario_actions
from app.window.dock_area import PAGES, TITLES, known_layout, move_keys
from app.window.docks import Docks
from app.window.engine_events import EngineNews, SubjectNames
from app.window.menus import PlotsMenu, RecentMenu, make_head, make_menus, make_toolbar
from app.window.panels import Panels
from app.window.run_control import RunControl
from app.window.run_library import Copies, RunLibrary, RunPairs
from app.window.run_status import RunEnds
from app.window.sessions import DropTarget, OpenedResults, Sessions, what_is
from engine.compare.memory_script import MemoryScript
from engine.compare.scenario import Scenario
from engine.report.text import visible
from engine.trace.run_ref import RunRef

if TYPE_CHECKING:
    from app.panels.lab.conform_view import ConformView
    from app.window.panels import LateView
_COMMANDS = {"gate": "check-rollback", "conform": "conform", "tune": "tune"}
"""Commands that do what a page does."""


class MainWindow(QMainWindow):
    """Everything on screen. The bridge is passed in, so that a test can use a fake engine.

    `log_lines` gives the end of the log for reports. `scenarios` are listed under that name, and
    are read when the window is complete. `data`: folder of autosaved traces; without it nothing is
    saved by itself. `whole`: with all views; otherwise call `complete` before anything is opened.
    """

    def __init__(
        self,
        bridge: Bridge,
        settings: Settings,
        log_lines: Callable[[], list[str]] = list,
        scenarios: Iterable[Scenario | MemoryScript] = (),
        data: Path | None = None,
        *,
        whole: bool = True,
    ) -> None:
        super().__init__()
        self.setObjectName("main")
        self.setWindowTitle("Draftscope")
        self.bridge, self.settings = bridge, settings
        bridge.setParent(self)
        self.docks = Docks(self)
        self.actions_by_id = Actions(self)
        for name in TITLES:
            self.docks.connect_action(name, self.actions_by_id[f"view.panel_{name}"])
        self._make_panels()
        self.sessions = Sessions(self.panels, data)
        self.sessions.message.connect(self.status.showMessage)
        self.control = RunControl(self.panels)
        self.copies = Copies(self.panels, log_lines)
        self._unread, self.scenarios = scenarios, list[QAction]()
        self._make_menus()
        self.palette_box = CommandPalette(self._commands, self)
        self.appearance = Appearance(self.panels)
        self.news = EngineNews(self.panels)
        self.opened_results = OpenedResults(self.panels, self.sessions)
        self.library = RunLibrary(self.panels, self.news, self.sessions.autosave)
        self.run_ends = RunEnds(self.panels)
        self.run_pairs = RunPairs(self.panels)
        SubjectNames(self.panels)
        self.feed.run_shown.connect(self.panels.run_banners.show_run)
        GlyphWatch(self.panels)
        self._connect_actions()
        self._connect_panels()
        if whole:
            self.complete()
        floating = self.findChildren(QDockWidget)  # each may be a window of its own
        for place in (self, *floating):
            drops = DropTarget(place)
            drops.hovers.connect(self.status.showMessage)
            drops.dropped.connect(self._open_data)
        self.appearance.set_theme(settings.theme)
        name = known_layout(settings.layout_name)
        self.docks.restore(settings.geometry, name, settings.layout(name))
        self.actions_by_id[f"view.layout_{name}"].setChecked(True)
        if settings.note:
            self.banners.add("warning", settings.note)
        self.news.show_state(bridge.state)
        self.setFocus()  # Tab leads from here to the first panel, and the keys of actions are free

    # -- for the start of the program and tests --------------------------------------------

    def complete(self) -> None:
        """Make what the first painting does not need: everything with a plot."""
        panels = self.panels
        panels.complete(self.plots_menu, self.banners.add, self._connect_drawn)
        self.plots, self.divergence = panels.plots, panels.divergence
        self.feed.overlay_changed.connect(self.plots.set_overlay)
        self.feed.range_changed.connect(self.plots.set_range)
        self.inspector.range.zoom_asked.connect(lambda _: self.plots.rollback.plot.zoom_to_range())
        self.actions_by_id.on(
            {
                "go.first_divergence": lambda: (
                    self.divergence if self.panels.has_divergences else self.run_pairs
                ).go_first(),
                "go.next_divergence": self.divergence.go_next,
                "go.previous_divergence": self.divergence.go_previous,
            }
        )
        self.scenarios = scenario_actions(self._unread, self.control.open_scenario, self)
        self._enable_actions()

    def open_model(self, target: Path, *drafts: Path, traces: Sequence[Path] = ()) -> None:
        """Inspect and load a model; the current session stays until the new one is complete. Then
        show traces, even if it cannot be loaded."""
        self.control.open_model(target, *drafts, then=lambda _: self.sessions.read(traces))

    def open_demo(self, traces: Sequence[Path] = ()) -> None:
        self.control.open_demo(lambda _: self.sessions.read(traces))

    def show_unexpected(self, summary: str) -> None:
        self.banners.add(
            "error",
            f"Unexpected error: {summary}.",
            "The log has the details.",
            ("Copy report", self.actions_by_id["help.copy_report"].trigger),
        )

    def show_crash(self, trace: str) -> None:
        self.banners.add(
            "warning",
            "Draftscope crashed the last time.",
            "",
            ("Copy the crash report", lambda: QGuiApplication.clipboard().setText(trace)),
        )

    # -- building --------------------------------------------------------------------------

    def _make_panels(self) -> None:
        theme, settings = first_theme(self.settings), self.settings
        panels = Panels(theme, self, self.bridge, settings, self.docks, self.actions_by_id)
        self.panels, self.feed = panels, panels.feed
        self.tokens, self.runs, self.breaks = panels.tokens, panels.runs, panels.breaks
        self.findings, self.inspector = panels.findings, panels.inspector
        self.model_map, self.run_panel = panels.model_map, panels.run_panel
        self.banners, self.status, self.why_not = panels.banners, panels.status, panels.why_not
        panels.run_panel.put_entries(self.settings.run_form)
        panels.fill()
        self.setCentralWidget(panels.centre())
        self.setStatusBar(self.status)
        self.feed.add((*panels.text_views, panels.conversation))

    def _make_menus(self) -> None:
        actions = self.actions_by_id
        self.recent_menu = RecentMenu(self.settings, actions, self.open_model, self.sessions.open)
        self.pages = [self._page_action(page) for pages in PAGES.values() for page in pages]
        self.plots_menu = PlotsMenu(actions)
        bar = QMenuBar()
        self.menus = make_menus(self, bar, actions, self.recent_menu, self.plots_menu)
        self.setMenuWidget(make_head(bar, make_toolbar(actions), self.banners))

    def _connect_actions(self) -> None:
        control, bridge = self.control, self.bridge
        handlers: dict[str, Callable[[], object]] = {
            "file.open": control.ask_target,
            "file.open_draft": control.ask_draft,
            "file.open_demo": self.open_demo,
            "file.open_trace": self.sessions.ask,
            "file.open_results": self.opened_results.ask,
            "file.paste": self._paste,
            "file.connect": control.ask_server,
            "file.disconnect": lambda: bridge.ask(DisconnectServer()),
            "file.close_trace": bridge.close_trace,
            "file.reopen_trace": bridge.reopen_trace,
            "file.clear_recent": self.settings.clear_recent,
            "file.export": self._shown(lambda run: self.sessions.export(run.store)),
            "file.export_run": self._shown(self._export_run),
            "file.perfetto": self._shown(self.sessions.perfetto),
            "file.report": self._shown(self.sessions.report),
            "file.share": self._shown(self.sessions.share),
            "file.quit": self.close,
            "go.previous_round": lambda: self.inspector.step_round(-1),
            "go.next_round": lambda: self.inspector.step_round(+1),
            "go.previous_rejection": lambda: self.tokens.step_rejection(-1),
            "go.next_rejection": lambda: self.tokens.step_rejection(+1),
            "go.inspect": lambda: self.docks.reveal("inspector"),
            "go.find": self.tokens.open_find,
            "go.find_next": lambda: self.tokens.step_hit(+1),
            "go.find_previous": lambda: self.tokens.step_hit(-1),
            "run.scenarios": lambda: ScenarioDialog(self.scenarios, self).show(),
            "view.palette": self.palette_box.open,
            "view.reset_layout": self.docks.reset,
            "view.full_screen": lambda: self.setWindowState(
                self.windowState() ^ Qt.WindowState.WindowFullScreen
            ),
            "help.pages": lambda: open_help(self),
            "help.shortcuts": lambda: ShortcutsDialog(self.actions_by_id, self).show(),
            "help.about": lambda: AboutDialog(self).show(),
        }
        handlers["run.again"] = self._shown(self.library.again)
        handlers["run.check_rollback"] = self._check_rollback
        handlers["run.drafter_diff"] = self.run_pairs.diff_drafters
        handlers["run.sweep"] = self.opened_results.ask_sweep
        handlers["run.measure_plain"] = self.run_ends.measure_plain
        self.actions_by_id.on(handlers | control.handlers() | self.copies.handlers())

    def _connect_panels(self) -> None:
        feed, control = self.feed, self.control
        self.news.changed.connect(self._enable_actions)
        self.news.named.connect(
            lambda name: self.setWindowTitle(f"{visible(name)} — Draftscope".removeprefix(" — "))
        )
        self.model_map.load_asked.connect(control.reload)
        self.run_panel.loading_changed.connect(control.reload)
        self.bridge.state_changed.connect(control.begin_watching)
        self.bridge.state_changed.connect(control.begin_waiting)
        self.run_pairs.changed.connect(self._enable_actions)
        feed.numbers_changed.connect(self.status.set_numbers)
        for show in (self.runs.show_run, self._enable_actions):
            feed.run_shown.connect(show)
        self.bridge.pause_asked.connect(self._enable_actions)
        for view in self.panels.text_views:
            view.position_selected.connect(feed.move_cursor)
        self.tokens.range_selected.connect(feed.set_range)
        for shown in (self.tokens, self.inspector):
            feed.range_changed.connect(shown.set_range)
        self.inspector.range.closed.connect(lambda: feed.set_range(None))
        self.findings.run_selected.connect(feed.select_run)
        for shows in (self.runs, self.status):
            feed.overlay_changed.connect(shows.set_overlay)
        self.findings.count_changed.connect(lambda n: self.docks.count("findings", n))
        self.tokens.inspect_asked.connect(self.actions_by_id["go.inspect"].trigger)
        self.tokens.cancel_asked.connect(control.cancel_sequence)
        in_menu = "file.copy_text", "file.copy_step", "go.inspect", "run.fork"
        self.tokens.menu_actions = [self.actions_by_id[i] for i in in_menu]
        panels = self.panels
        panels.conversation.say_asked.connect(control.say)
        self.runs.export_asked.connect(self._export_run)
        self.sessions.runs_asked.connect(lambda: self.docks.reveal("runs"))
        panels.conversation.run_selected.connect(self.library.select)
        self.bridge.inspected.connect(panels.conversation.set_files)
        self.breaks.rules_changed.connect(control.use_break_rules)
        self.breaks.set_entries(self.settings.break_rules)

    def _connect_drawn(self, view: LateView) -> None:
        from app.panels.divergence.divergence_view import DivergenceView
        from app.panels.lab.conform_view import ConformView
        from app.panels.lab.gate_view import GateView
        from app.panels.plots.round_view import RoundView
        from app.panels.tune.results_view import ResultsView
        from app.panels.tune.tune_view import TuneView

        feed, bridge = self.feed, self.bridge
        if isinstance(view, ResultsView):
            self.opened_results.connect(view)
            return
        if isinstance(view, ConformView):
            view.asked.connect(lambda target: self._check_kernels(view, target))
            return
        if isinstance(view, RoundView | DivergenceView):
            view.position_selected.connect(feed.move_cursor)
            view.range_selected.connect(self._choose_range)
        if isinstance(view, DivergenceView):
            feed.range_changed.connect(view.set_range)
            view.lane_selected.connect(feed.select_run)
            view.divergences_changed.connect(self._enable_actions)
        if isinstance(view, TuneView):
            view.asked.connect(
                lambda request: bridge.ask(
                    EstimateSpeeds(request), lambda job: view.show_surface(job.request, job.found)
                )
            )
            view.run_selected.connect(feed.select_run)
            view.setting_chosen.connect(self.control.use_setting)
        if isinstance(view, GateView):
            names = ("run.check_rollback", "file.open_demo", "file.open_trace")
            view.empty.offer([self.actions_by_id[name] for name in names])
            view.run_selected.connect(self.control.show_lane)
            view.form.asked.connect(self.control.check_rollback)
            view.form.follow(self.actions_by_id["run.check_rollback"])
        feed.add([view])

    def _choose_range(self, chosen: RunRange | None) -> None:
        """A range was chosen in a plot: show its figures."""
        self.feed.set_range(chosen)
        if chosen is not None:
            self.docks.reveal("inspector")

    def _check_rollback(self) -> None:
        from app.panels.lab.gate_view import GateView

        self.docks.reveal("gate")
        view = self.plots["gate"]
        assert isinstance(view, GateView)
        view.form.ask()

    def _check_kernels(self, view: ConformView, target: str) -> None:
        self.panels.banners.clear()
        job = CheckKernels(target, view.add)
        view.begin(target)
        view.stop_asked.connect(job.cancelled.set)
        self.bridge.ask(
            job,
            lambda ended: view.end(
                ended.failed.message if ended.failed else "", stopped=ended.cancelled.is_set()
            ),
        )

    def _commands(self) -> list[Command]:
        """The palette's commands: every action but the palette itself, scenarios, and views that
        share a panel."""
        actions = self.actions_by_id
        registered = [
            Command(
                actions[spec.id], spec.tip, spec.needs, actions.reason(spec), submenu_of(spec.id)
            )
            for spec in SPECS
            if spec.id != "view.palette"
        ]
        scenarios = [
            Command(action, action.toolTip(), _A_MODEL, group="Scenarios")
            for action in self.scenarios
        ]
        return (
            registered + scenarios + [Command(a, a.toolTip(), group="Panels") for a in self.pages]
        )

    def _enable_actions(self) -> None:
        """Enable the actions that the bridge and the run on show allow."""
        actions, bridge, shown = self.actions_by_id, self.bridge, self.feed.run
        diverges, served = self.panels.has_divergences, bridge.server is not None
        actions.explain(at_server=served)
        single = bridge.has_run and bridge.live is not None and not lanes_of(bridge.live)
        self.tokens.cancellable = bridge.live if single else None
        allowed = dict.fromkeys(_NEED_RUN, shown is not None) | self.control.allowed(shown)
        allowed |= {
            "go.first_divergence": diverges or self.run_pairs.part,
            "go.next_divergence": diverges,
            "go.previous_divergence": diverges,
            "file.open_draft": bridge.files is not None,
            "file.export": shown is not None and not bridge.exporting,
            "file.export_run": shown is not None and not bridge.exporting,
            "run.again": self.library.can_repeat(shown),
            "run.measure_plain": self.run_ends.can_measure,
            "run.drafter_diff": allowed["run.rescore"] and self.run_pairs.have_ended,
            "file.open_trace": not bridge.reading,
            "file.close_trace": bridge.trace_folder is not None,
            "file.reopen_trace": bridge.closed is not None,
            "file.disconnect": served,
        }
        for action_id, enabled in allowed.items():
            actions[action_id].setEnabled(enabled)
        for scenario in self.scenarios:
            scenario.setEnabled(bridge.can_start and not served)
        actions["run.start"].setText("&Resume" if bridge.state is State.PAUSED else "&Run")

    def _page_action(self, page: str) -> QAction:
        """An action that shows a page of a shared dock, with the focus."""
        dock = next(name for name, pages in PAGES.items() if page in pages)
        action = QAction(PAGES[dock][page], self)
        command = f"; draftscope {_COMMANDS[page]} does the same" if page in _COMMANDS else ""
        action.setToolTip(f"Show this page of the panel {TITLES[dock]}{command}")
        action.triggered.connect(lambda: self.docks.enter(page))
        return action

    def _export_run(self, run: RunRef) -> None:
        self.library.with_rows(
            run.store, lambda: self.sessions.export(run.store, *(lanes_of(run) or (run,)))
        )

    def _shown(self, act: Callable[[RunRef], object]) -> Callable[[], object]:
        """A handler that acts on the run on show, if there is one."""
        return lambda: None if self.feed.run is None else act(self.feed.run)

    def _open_data(self, data: QMimeData) -> None:
        """Open what was dropped or copied."""
        found = what_is(data)
        if found is None:
            self.banners.add("warning", "The clipboard has nothing that can be opened.", _TO_PASTE)
            return
        if isinstance(found, str):
            self.sessions.open_text(found)
            return
        models, results, traces, folders = found
        if models:
            self.open_model(*models, traces=traces)
        elif traces:
            self.sessions.open(*traces)
        elif folders:  # later: the drag's source waits for the end of the drop
            QTimer.singleShot(0, self, lambda: self.control.ask_target(folders[0]))
        for path in results:
            self.opened_results.open(path)

    def _paste(self) -> None:
        self._open_data(QGuiApplication.clipboard().mimeData() or QMimeData())  # empty: None

    # -- Qt --------------------------------------------------------------------------------

    def focusNextPrevChild(self, forward: bool) -> bool:
        return move_keys(self, 1 if forward else -1)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        """A disabled action's key says what the action needs."""
        keys = QKeySequence(event.keyCombination())
        for action in self.actions_by_id:
            if action.shortcut() == keys and not action.isEnabled():
                _, found, needs = action.toolTip().rpartition(": needs ")
                key = keys.toString(QKeySequence.SequenceFormat.NativeText)
                said = f"{key} needs {needs}" if found else needs  # the rest may have no room
                self.status.showMessage(said, _READING_MS)
        super().keyPressEvent(event)

    def createPopupMenu(self) -> QMenu:
        """The context menu of titles and separators; Qt's would also offer to hide the toolbar."""
        menu = QMenu(self)
        menu.addActions([self.actions_by_id[spec.id] for spec in PANELS])
        return menu

    def closeEvent(self, event: QCloseEvent) -> None:
        if not self.sessions.may_end():
            event.ignore()
            return
        self.feed.clear()
        self.docks.stop()
        self.status.clearMessage()  # and with it, its timer
        self.settings.run_form = self.run_panel.entries()
        self.appearance.keep()
        self.appearance.rest()
        self.sessions.close()
        if not self.bridge.close():
            log.warning("the engine did not stop in time")
        event.accept()


_NEED_RUN = tuple(spec.id for spec in SPECS if spec.needs == "a shown run")
_A_MODEL = "a model that is loaded and idle"
_READING_MS = 6_000
"""How long a sentence stays in the status bar."""
_TO_PASTE = "Copy a file, or the text of a log, a reply or a record of another engine."
