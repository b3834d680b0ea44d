"""The main window: panels around the token stream, and what the actions do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import Qt
from PySide6.QtGui import QCloseEvent, QDragEnterEvent, QDragLeaveEvent, QDropEvent, QGuiApplication
from PySide6.QtWidgets import (
    QApplication,
    QMainWindow,
    QStackedWidget,
    QVBoxLayout,
    QWidget,
)

from app import events
from app.actions import SPECS, Actions
from app.bridge import Bridge
from app.dialogs.about import AboutDialog, environment, environment_text, report
from app.dialogs.open_files import ask_model
from app.dialogs.palette import Command, CommandPalette
from app.dialogs.shortcuts import ShortcutsDialog
from app.docks import LAYOUTS, TITLES, Docks
from app.dropping import what_is
from app.errors import log
from app.events import State
from app.feed import Feed
from app.issue_text import issue_text
from app.jobs import CompareRequest
from app.menus import RecentMenu, Scenario, ScenarioMenu, make_menus, make_toolbar
from app.models.compared_lanes import lanes_of, run_to_show
from app.models.position import Position
from app.models.run_facts import fidelity_text
from app.plot_group import PlotGroup
from app.sessions import Sessions
from app.settings import THEME_CHOICES, Settings
from app.theme import Theme, apply_theme, load_theme
from app.views.breaks import BreaksView
from app.views.divergence import DivergenceView
from app.views.findings import FindingsView
from app.views.inspector import InspectorView
from app.views.model_map import ModelMapView
from app.views.run_panel import RunPanel
from app.views.runs import RunsView
from app.views.tokens import TokensView
from app.widgets.banner import BannerArea
from app.widgets.empty_state import EmptyState
from app.widgets.round_view import RoundView
from app.widgets.status_line import StatusLine
from app.widgets.why_not_strip import WhyNotStrip
from engine.trace.breaks import BreakHit
from engine.trace.store import TraceStore
from resources import DEMO_DRAFT, DEMO_TARGET, demo_prompts

if TYPE_CHECKING:
    from engine.compare.fidelity import Fidelity

_MESSAGE_MS = 3000
_NEED_RUN = (
    "file.copy_step", "go.previous_round", "go.next_round", "go.inspect",
    "go.find", "go.find_next", "go.find_previous",
)  # fmt: skip


class MainWindow(QMainWindow):
    """Everything on screen. The bridge is given, so that a test can put a fake engine behind it.

    `log_lines` gives the end of the log for reports. `scenarios` fill the menu of that name.
    `data`: folder for autosaved traces; without one nothing is saved by itself.
    """

    def __init__(
        self,
        bridge: Bridge,
        settings: Settings,
        log_lines: Callable[[], list[str]] = list,
        scenarios: Sequence[Scenario] = (),
        data: Path | None = None,
    ) -> None:
        super().__init__()
        self.setObjectName("main")
        self.setWindowTitle("Draftscope")
        self.bridge, self.settings, self._log_lines = bridge, settings, log_lines
        bridge.setParent(self)
        self.theme = load_theme(_theme_name(settings.theme))
        self.docks = Docks(self)
        self.actions_by_id = Actions(
            self, {f"view.panel_{name}": self.docks[name].toggleViewAction() for name in TITLES}
        )
        self._make_views()
        self.sessions = Sessions(bridge, settings, self.banners, data, self)
        self.recent_menu = RecentMenu(
            settings, self.actions_by_id, self.open_model, self.sessions.open
        )
        self.scenario_menu = ScenarioMenu(scenarios, self.open_scenario)
        self.menus = make_menus(
            self, self.actions_by_id, self.recent_menu, self.scenario_menu, self.plots.menu
        )
        make_toolbar(self, self.actions_by_id)
        self.palette_box = CommandPalette(self._commands, self)
        self._connect_actions()
        self._connect_bridge()
        self.setAcceptDrops(True)
        self.set_theme(settings.theme)
        name = settings.layout_name
        self.docks.restore(settings.geometry, name, settings.layout(name))
        self.actions_by_id[f"view.layout_{name}"].setChecked(True)
        if settings.note:
            self.banners.add("warning", settings.note)
        self._show_state(bridge.state)

    # -- opening ---------------------------------------------------------------------------

    def open_model(self, target: Path, draft: Path | None = None) -> None:
        """Inspect and load a model; the session in use stays until the new one is complete."""
        self.banners.clear()
        self.bridge.open(target, draft, self.run_panel.compute.currentText())

    def open_demo(self) -> None:
        """The bundled models, with a prompt ready."""
        self.run_panel.use_first_prompt()
        self.open_model(DEMO_TARGET, DEMO_DRAFT)

    def compare(self, request: CompareRequest) -> None:
        """Run lanes side by side, and bring them into sight."""
        self.docks.reveal("divergence", "findings")
        self.banners.clear()
        self.bridge.compare(request)

    def open_scenario(self, scenario: Scenario) -> None:
        """Compare what a scenario asks for on the model in use, or just run it without lanes."""
        if not scenario.lanes:
            self.docks.reveal("findings")
            self.banners.clear()
            self.bridge.start(list(scenario.prompts), scenario.options)
            return
        self.compare(
            CompareRequest(
                scenario.prompts, scenario.options, scenario.lanes, scenario.draft_accept
            )
        )

    def show_message(self, severity: str, message: str, remedy: str = "") -> None:
        """A banner above the text."""
        self.banners.add(severity, message, remedy)

    def show_unexpected(self, summary: str) -> None:
        """A banner for an error that nobody foresaw."""
        self.banners.add(
            "error",
            f"Something unexpected happened: {summary}.",
            "The log has the details.",
            ("Copy report", self._copy_report),
        )

    def show_crash(self, trace: str) -> None:
        """A banner for the stack that an earlier run left behind when it died."""
        self.banners.add(
            "warning",
            "Draftscope ended abnormally the last time.",
            "",
            ("Copy what it left", lambda: QGuiApplication.clipboard().setText(trace)),
        )

    # -- appearance ------------------------------------------------------------------------

    def set_layout(self, name: str) -> None:
        """Take a named layout as it was left; the one in use is kept for the next time."""
        if name != self.docks.layout_name:
            self.settings.set_layout(self.docks.layout_name, self.docks.save())
            self.docks.apply(name, self.settings.layout(name))
        self.actions_by_id[f"view.layout_{name}"].setChecked(True)

    def set_theme(self, choice: str) -> None:
        """system, light or dark."""
        self.settings.theme = choice
        self.actions_by_id[f"view.theme_{choice}"].setChecked(True)
        self._retheme(load_theme(_theme_name(choice)))

    def _retheme(self, theme: Theme) -> None:
        self.theme = theme
        app = QApplication.instance()
        assert isinstance(app, QApplication)
        apply_theme(app, theme)
        self.actions_by_id.retheme(theme)
        for view in (
            self.tokens, self.plots, self.divergence, self.findings, self.inspector, self.why_not,
            self.runs, self.model_map, self.banners, self.breaks,
        ):  # fmt: skip
            view.retheme(theme)

    def _follow_desktop(self) -> None:
        if self.settings.theme == "system":
            self._retheme(load_theme(_theme_name("system")))

    # -- building --------------------------------------------------------------------------

    def _make_views(self) -> None:
        theme, actions = self.theme, self.actions_by_id
        opening = [actions["file.open"], actions["file.open_demo"]]
        self.tokens = TokensView(theme)
        self.plots = PlotGroup(theme, actions, self.settings, self.show_message)
        self.rollback, self.ring = self.plots.rollback, self.plots.ring
        self.divergence = DivergenceView(theme, actions)
        self.findings = FindingsView(theme)
        self.inspector = InspectorView(theme, actions)
        self.why_not = WhyNotStrip(theme)
        self.runs = RunsView(theme)
        self._trace_views: tuple[
            TokensView | RoundView | DivergenceView | FindingsView | InspectorView | WhyNotStrip
            | RunsView, ...
        ] = (
            self.tokens, *self.plots.views.values(), self.divergence, self.findings,
            self.inspector, self.why_not, self.runs,
        )  # fmt: skip
        self.breaks = BreaksView(theme)
        self.model_map = ModelMapView(theme, opening)
        self.run_panel = RunPanel()
        self.banners = BannerArea(theme)
        self.status = StatusLine()
        self.setStatusBar(self.status)
        self.feed = Feed((*self._trace_views, self.plots.what_if), self)
        for name, view in (
            ("model", self.model_map),
            ("run", self.run_panel),
            *self.plots.widgets.items(),
            ("divergence", self.divergence),
            ("findings", self.findings),
            ("inspector", self.inspector),
            ("runs", self.runs),
            ("breaks", self.breaks),
        ):
            self.docks.fill(name, view)
        for trace_view in (*self._trace_views, self.plots.what_if):
            for empty in trace_view.findChildren(EmptyState):
                if empty.waits_for_run:
                    empty.offer([actions["run.start"], actions["file.open_demo"]])
        self._centre = QStackedWidget()
        self._centre.addWidget(
            EmptyState(
                "Watch a model speculate",
                "Open a hybrid GGUF model or an exported trace, or drop one here; the bundled "
                "demo needs no download.",
                [*opening, actions["file.open_trace"]],
            )
        )
        self._centre.addWidget(self.tokens)
        column = QVBoxLayout(middle := QWidget())
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addWidget(self.banners)
        column.addWidget(self._centre, 1)
        column.addWidget(self.why_not)
        self.setCentralWidget(middle)

    def _connect_actions(self) -> None:
        handlers: dict[str, Callable[[], object]] = {
            "file.open": self._ask_target,
            "file.open_draft": self._ask_draft,
            "file.open_demo": self.open_demo,
            "file.open_trace": self.sessions.ask,
            "file.close_trace": self.bridge.close_trace,
            "file.clear_recent": self.settings.clear_recent,
            "file.export": lambda: self.sessions.export(self.bridge.store),
            "file.copy_text": self._copy_text,
            "file.copy_step": self._copy_step,
            "file.copy_issue": self._copy_issue,
            "file.quit": self.close,
            "run.start": lambda: self._run(None),
            "run.pause": self.bridge.pause,
            "run.step": lambda: self._run(1),
            "run.stop": self.bridge.stop,
            "run.compare": self._compare,
            "run.add_break": self._write_break,
            "run.measure_fidelity": lambda: self.bridge.measure(demo_prompts()[0].text),
            "go.first_divergence": self.divergence.go_first,
            "go.next_divergence": self.divergence.go_next,
            "go.previous_divergence": self.divergence.go_previous,
            "go.previous_round": lambda: self.inspector.step_round(-1),
            "go.next_round": lambda: self.inspector.step_round(+1),
            "go.inspect": lambda: self.docks.reveal("inspector"),
            "go.find": self.tokens.open_find,
            "go.find_next": lambda: self.tokens.step_hit(+1),
            "go.find_previous": lambda: self.tokens.step_hit(-1),
            "view.palette": self.palette_box.open,
            "view.reset_layout": self.docks.reset,
            "help.shortcuts": lambda: ShortcutsDialog(self.actions_by_id, self).show(),
            "help.copy_environment": lambda: self._copy(environment_text()),
            "help.copy_report": self._copy_report,
            "help.about": lambda: AboutDialog(self).show(),
        }
        for action_id, handler in handlers.items():
            self.actions_by_id[action_id].triggered.connect(lambda _=False, run=handler: run())
        for name in THEME_CHOICES:
            self.actions_by_id[f"view.theme_{name}"].triggered.connect(
                lambda _=False, choice=name: self.set_theme(choice)
            )
        for name in LAYOUTS:
            self.actions_by_id[f"view.layout_{name}"].triggered.connect(
                lambda _=False, choice=name: self.set_layout(choice)
            )
        ghosts, follow = self.actions_by_id["view.ghosts"], self.actions_by_id["view.follow"]
        ghosts.toggled.connect(self._show_ghosts)
        follow.toggled.connect(self.tokens.set_follow)
        self.tokens.follow_changed.connect(follow.setChecked)
        ghosts.setChecked(self.settings.ghosts)
        self.tokens.toggle_ghosts(ghosts.isChecked())
        follow.setChecked(True)
        tabs = self.actions_by_id["view.tabs"]
        tabs.toggled.connect(self._show_tabs)
        tabs.setChecked(self.settings.tabs)
        self.tokens.inspect_asked.connect(self.actions_by_id["go.inspect"].trigger)
        QGuiApplication.styleHints().colorSchemeChanged.connect(self._follow_desktop)

    def _connect_bridge(self) -> None:
        bridge = self.bridge
        bridge.state_changed.connect(self._show_state)
        bridge.inspected.connect(self._show_files)
        bridge.loaded.connect(self._show_loaded)
        bridge.progress.connect(self.status.show_progress)
        bridge.failed.connect(self._show_failure)
        bridge.run_started.connect(self._show_run)
        bridge.run_ended.connect(self._refresh_runs)
        bridge.measured.connect(self._show_fidelity)
        bridge.broke.connect(self._show_break)
        bridge.exported.connect(self._show_exported)
        bridge.export_ended.connect(self._end_progress)
        bridge.trace_shown.connect(self._show_trace)
        bridge.reading_ended.connect(self._end_progress)
        self.status.cancel_asked.connect(bridge.cancel)
        self.model_map.load_asked.connect(self._reload)
        self.run_panel.compute_changed.connect(self._reload)
        self.run_panel.options_changed.connect(self._show_options)
        self.feed.numbers_changed.connect(self.status.set_numbers)
        for view in self._trace_views:
            view.position_selected.connect(self.feed.move_cursor)
        self.divergence.lane_selected.connect(self.feed.select_run)
        self.divergence.divergences_changed.connect(self._enable_actions)
        self.findings.run_selected.connect(self.feed.select_run)
        self.tokens.cancel_asked.connect(self._cancel_sequence)
        self.runs.run_selected.connect(self._select_run)
        self.feed.numbers_changed.connect(self._refresh_runs)
        self.breaks.rules_changed.connect(self._use_break_rules)
        self.breaks.set_entries(self.settings.break_rules)
        self.findings.count_changed.connect(lambda n: self.docks.count("findings", n))

    # -- what the actions do ---------------------------------------------------------------

    def _ask_target(self) -> None:
        path = ask_model(self, self.settings, "Open model")
        if path is not None:
            self.open_model(path)

    def _ask_draft(self) -> None:
        path = ask_model(self, self.settings, "Open draft model")
        if path is not None and self.bridge.files is not None:
            self.open_model(self.bridge.files.target, path)

    def _reload(self) -> None:
        files = self.bridge.files
        if files is not None:
            self.open_model(files.target, files.draft)

    def _run(self, rounds: int | None) -> None:
        self.banners.clear()
        if self.bridge.state is State.PAUSED:
            self.bridge.resume(rounds)
            return
        panel = self.run_panel
        if panel.problem:
            self._show_problem()
        else:
            self.bridge.start(panel.texts(), panel.options(), rounds, panel.chat())

    def _compare(self) -> None:
        lanes = self.divergence.chosen_lanes()
        if lanes is None:
            self.docks.reveal("divergence", "findings")
            return
        panel = self.run_panel
        if panel.problem:
            self._show_problem()
            return
        texts = tuple(panel.texts())
        self.compare(CompareRequest(texts, panel.options(), lanes, chat=panel.chat()))

    def _show_problem(self) -> None:
        """What is wrong stands in the Run panel: bring it into sight."""
        self.docks["run"].show()
        self.docks["run"].raise_()
        self.show_message("warning", self.run_panel.problem)

    def _cancel_sequence(self, seq_id: int) -> None:
        self.bridge.cancel_sequence(seq_id)
        self.show_message("info", f"Sequence {seq_id} ends before the next round.")

    def _write_break(self) -> None:
        self.docks.reveal("breaks")
        self.breaks.begin_typing()

    def _use_break_rules(self) -> None:
        self.settings.break_rules = self.breaks.entries()
        self.bridge.set_break_rules(self.breaks.rules())

    def _copy(self, text: str) -> None:
        QGuiApplication.clipboard().setText(text)
        self.status.showMessage("Copied", _MESSAGE_MS)

    def _copy_text(self) -> None:
        QGuiApplication.clipboard().setText(self.tokens.copy_text())

    def _copy_step(self) -> None:
        self._copy(self.inspector.markdown())

    def _copy_issue(self) -> None:
        run_id = self.feed.run_id
        if run_id is not None:
            self._copy(issue_text(self.bridge.store, run_id, self.feed.cursor, environment()))

    def _copy_report(self) -> None:
        self._copy(report(self.bridge.files, self.bridge.compute, self._log_lines()))

    def _commands(self) -> list[Command]:
        """What the palette offers: every action but the palette itself, and the scenarios."""
        actions = self.actions_by_id
        registered = [
            Command(actions[spec.id], spec.tip, spec.needs)
            for spec in SPECS
            if spec.id != "view.palette"
        ]
        if not self.scenario_menu.isEnabled():
            return registered
        scenarios = self.scenario_menu.actions()
        return registered + [Command(action, action.toolTip()) for action in scenarios]

    def _show_ghosts(self, shown: bool) -> None:
        self.settings.ghosts = shown
        self.tokens.toggle_ghosts(shown)

    def _show_tabs(self, as_tabs: bool) -> None:
        self.settings.tabs = as_tabs
        self.tokens.set_tabs(as_tabs)

    # -- what the engine reports -----------------------------------------------------------

    def _show_state(self, state: State) -> None:
        if state is State.RUNNING:
            self.feed.start()
            self.breaks.show_hit(None)
        else:
            self.feed.stop()
        self._end_progress()
        if state is State.READY:
            self.run_panel.set_compute(self.bridge.compute_asked)
        self.model_map.set_loadable(state is State.INSPECTED)
        self.run_panel.set_compute_enabled(
            state not in (State.LOADING, State.RUNNING, State.PAUSED)
        )
        self._show_model_text()

    def _enable_actions(self) -> None:
        state, bridge, actions = self.bridge.state, self.bridge, self.actions_by_id
        going = bridge.can_start or state is State.PAUSED
        runs = state in (State.RUNNING, State.PAUSED)
        compared = bridge.run_id is not None and bool(lanes_of(bridge.store, bridge.run_id))
        self.tokens.set_cancellable(bridge.run_id if runs and not compared else None)
        for action_id, enabled in (
            ("run.start", going),
            ("run.step", going),
            ("run.pause", state is State.RUNNING),
            ("run.stop", state in (State.RUNNING, State.PAUSED)),
            ("run.compare", bridge.can_start),
            ("run.measure_fidelity", bridge.can_start),
            ("go.first_divergence", self.divergence.has_divergences),
            ("go.next_divergence", self.divergence.has_divergences),
            ("go.previous_divergence", self.divergence.has_divergences),
            ("file.open_draft", bridge.files is not None),
            ("file.export", bool(bridge.store.runs) and not bridge.exporting),
            ("file.copy_text", bridge.run_id is not None),
            *((name, bool(bridge.store.runs)) for name in _NEED_RUN),
            ("file.copy_issue", bridge.run_id is not None),
            ("file.open_trace", not bridge.reading),
            ("file.close_trace", bridge.trace_folder is not None),
        ):
            actions[action_id].setEnabled(enabled)
        self.scenario_menu.setEnabled(bridge.can_start)
        actions["run.start"].setText("&Resume" if state is State.PAUSED else "&Run")

    def _show_files(self, files: events.ModelFiles | None) -> None:
        self.model_map.set_files(files)
        self.run_panel.set_files(files)
        self._show_options()
        self._show_names()

    def _show_trace(self, folder: Path | None) -> None:
        """A trace was opened, or closed."""
        if folder is not None:
            self.divergence.edit_button.setChecked(False)  # its lanes are those of the trace
        self._show_lanes_or_run(self.bridge.store, self.bridge.run_id)
        self._show_names()

    def _show_names(self) -> None:
        files, folder = self.bridge.files, self.bridge.trace_folder
        names = [folder.name if folder else "", files.target.stem if files and not folder else ""]
        shown = [name for name in names if name]
        self._centre.setCurrentIndex(1 if shown or self.bridge.store.runs else 0)
        self.setWindowTitle(" — ".join([*shown, "Draftscope"]))
        self._enable_actions()
        self._show_model_text()

    def _show_loaded(self, event: events.Loaded) -> None:
        if event.files.target != DEMO_TARGET:
            self.settings.add_recent_model(event.files.target)
        if event.replaced is not None:
            old = event.replaced
            self.banners.add(
                "info",
                "The runs of the model before are no longer shown.",
                "They are kept until this message is dismissed.",
                ("Export them…", lambda: self.sessions.export(old)),
            )
        self._show_lanes_or_run(event.store, self.bridge.run_id)
        self._show_files(event.files)
        self.model_map.set_compute(event.compute)

    def _show_options(self) -> None:
        panel = self.run_panel
        if not panel.problem:
            self.model_map.set_options(panel.options(), len(panel.texts()))

    def _show_run(self, run_id: int) -> None:
        self._show_lanes_or_run(self.bridge.store, run_id)
        self._enable_actions()

    def _show_lanes_or_run(self, store: TraceStore, run_id: int | None) -> None:
        self.feed.show_run(store, None if run_id is None else run_to_show(store, run_id))

    def _show_fidelity(self, found: Fidelity) -> None:
        self.show_message("info", f"Fidelity: {fidelity_text(asdict(found))}.")

    def _show_break(self, hit: BreakHit) -> None:
        self.breaks.show_hit(hit)
        self.banners.add("info", f"A break rule held, {hit}.")
        self.feed.refresh()
        if hit.round is not None:
            self.feed.move_cursor(Position(hit.run_id, hit.seq_id or 0, hit.round, None))

    def _select_run(self, run_id: int) -> None:
        """Show a run in all views; lanes of one comparison keep the cursor."""
        if run_id in lanes_of(self.bridge.store, self.runs.model.shown or 0):
            self.feed.select_run(run_id)
        elif run_id != self.runs.model.shown:
            self.feed.show_run(self.bridge.store, run_id)

    def _refresh_runs(self, *_: object) -> None:
        self.runs.refresh_numbers()

    def _show_failure(self, failed: events.Failed) -> None:
        log.warning("%s %s", failed.message, failed.remedy)
        self.banners.add("error", failed.message, failed.remedy)

    def _show_exported(self, folder: Path) -> None:
        self.show_message("info", f"Trace exported to {folder}.")

    def _end_progress(self) -> None:
        bridge = self.bridge
        if bridge.state is not State.LOADING and not bridge.exporting and not bridge.reading:
            self.status.hide_progress()
        self._enable_actions()

    def _show_model_text(self) -> None:
        files, state = self.bridge.files, self.bridge.state
        parts = [state.value]
        if self.bridge.trace_folder is not None:
            parts = [f"trace {self.bridge.trace_folder}", "opened from disk"]
        elif files is not None:
            quant = next(iter(files.info.quant_mix), "")
            parts = [files.target.stem, quant, self.bridge.compute, state.value]
        self.status.set_model(" · ".join(part for part in parts if part))

    # -- Qt --------------------------------------------------------------------------------

    def dragEnterEvent(self, event: QDragEnterEvent) -> None:
        found = what_is(event.mimeData())
        if found is not None:
            event.acceptProposedAction()
            self.status.showMessage(f"Drop to open {found.names}")

    def dragLeaveEvent(self, event: QDragLeaveEvent) -> None:
        self.status.clearMessage()

    def dropEvent(self, event: QDropEvent) -> None:
        found = what_is(event.mimeData())
        self.status.clearMessage()
        if found is None:
            return
        event.acceptProposedAction()
        if found.trace is not None:
            self.sessions.open(found.trace)
        else:
            self.open_model(*found.models)

    def closeEvent(self, event: QCloseEvent) -> None:
        self.feed.clear()
        self.status.clearMessage()  # and with it, its timer
        self.settings.set_geometry(self.saveGeometry())
        self.settings.set_layout(self.docks.layout_name, self.docks.save())
        self.settings.sync()
        self.sessions.close()
        if not self.bridge.close():
            log.warning("the engine did not stop in time")
        event.accept()


def _theme_name(choice: str) -> str:
    if choice != "system":
        return choice
    dark = QGuiApplication.styleHints().colorScheme() is Qt.ColorScheme.Dark
    return "dark" if dark else "light"
