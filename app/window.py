"""The main window: panels around the token stream, and what the actions do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from PySide6.QtCore import QMimeData, Qt
from PySide6.QtGui import QCloseEvent, QDragEnterEvent, QDragLeaveEvent, QDropEvent, QGuiApplication
from PySide6.QtWidgets import (
    QApplication,
    QMainWindow,
    QStackedWidget,
    QVBoxLayout,
    QWidget,
)

from app import worker
from app.actions import Actions
from app.bridge import Bridge
from app.dialogs.about import AboutDialog, report
from app.dialogs.export import ask_export_folder
from app.dialogs.open_model import ask_model
from app.dialogs.shortcuts import ShortcutsDialog
from app.docks import TITLES, Docks
from app.errors import log
from app.feed import Feed
from app.menus import RecentMenu, Scenario, ScenarioMenu, make_menus, make_toolbar
from app.models.compared_lanes import run_to_show
from app.plot_group import PlotGroup
from app.settings import THEME_CHOICES, Settings
from app.theme import Theme, apply_theme, load_theme
from app.views.divergence import DivergenceView
from app.views.findings import FindingsView
from app.views.model_map import ModelMapView
from app.views.run_panel import RunPanel
from app.views.tokens import TokensView
from app.widgets.banner import BannerArea
from app.widgets.empty_state import EmptyState
from app.widgets.round_view import RoundView
from app.widgets.status_line import StatusLine
from app.worker import CompareRequest, State
from engine.trace.store import TraceStore
from resources import DEMO_DRAFT, DEMO_TARGET


class MainWindow(QMainWindow):
    """Everything on screen. The bridge is given, so that a test can put a fake engine behind it.

    `log_lines` gives the end of the log for reports. `scenarios` fill the menu of that name.
    """

    def __init__(
        self,
        bridge: Bridge,
        settings: Settings,
        log_lines: Callable[[], list[str]] = list,
        scenarios: Sequence[Scenario] = (),
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
        self.recent_menu = RecentMenu(settings, self.actions_by_id, self.open_model)
        self.scenario_menu = ScenarioMenu(scenarios, self.open_scenario)
        self.menus = make_menus(
            self, self.actions_by_id, self.recent_menu, self.scenario_menu, self.plots.menu
        )
        make_toolbar(self, self.actions_by_id)
        self._connect_actions()
        self._connect_bridge()
        self.setAcceptDrops(True)
        self.set_theme(settings.theme)
        self.docks.restore(settings.geometry, settings.layout)
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
        """Compare what a scenario asks for, on the model in use."""
        self.compare(
            CompareRequest(tuple(scenario.prompts), scenario.options, tuple(scenario.lanes))
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
            self.tokens, self.plots, self.divergence, self.findings, self.model_map, self.banners,
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
        self._trace_views: tuple[TokensView | RoundView | DivergenceView | FindingsView, ...] = (
            self.tokens, *self.plots.views.values(), self.divergence, self.findings,
        )  # fmt: skip
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
        ):
            self.docks.fill(name, view)
        self._centre = QStackedWidget()
        self._centre.addWidget(
            EmptyState(
                "Watch a model speculate",
                "Open a hybrid GGUF model or drop one here; the bundled demo needs no download.",
                opening,
            )
        )
        self._centre.addWidget(self.tokens)
        column = QVBoxLayout(middle := QWidget())
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addWidget(self.banners)
        column.addWidget(self._centre, 1)
        self.setCentralWidget(middle)

    def _connect_actions(self) -> None:
        handlers: dict[str, Callable[[], object]] = {
            "file.open": self._ask_target,
            "file.open_draft": self._ask_draft,
            "file.open_demo": self.open_demo,
            "file.clear_recent": self.settings.clear_recent_models,
            "file.export": lambda: self._export(self.bridge.store),
            "file.copy_text": self._copy_text,
            "file.quit": self.close,
            "run.start": lambda: self._run(None),
            "run.pause": self.bridge.pause,
            "run.step": lambda: self._run(1),
            "run.stop": self.bridge.stop,
            "run.compare": self._compare,
            "go.first_divergence": self.divergence.go_first,
            "go.next_divergence": self.divergence.go_next,
            "go.previous_divergence": self.divergence.go_previous,
            "view.reset_layout": self.docks.reset,
            "help.shortcuts": lambda: ShortcutsDialog(self.actions_by_id, self).show(),
            "help.copy_report": self._copy_report,
            "help.about": lambda: AboutDialog(self).show(),
        }
        for action_id, handler in handlers.items():
            self.actions_by_id[action_id].triggered.connect(lambda _=False, run=handler: run())
        for name in THEME_CHOICES:
            self.actions_by_id[f"view.theme_{name}"].triggered.connect(
                lambda _=False, choice=name: self.set_theme(choice)
            )
        ghosts, follow = self.actions_by_id["view.ghosts"], self.actions_by_id["view.follow"]
        ghosts.toggled.connect(self._show_ghosts)
        follow.toggled.connect(self.tokens.set_follow)
        self.tokens.follow_changed.connect(follow.setChecked)
        ghosts.setChecked(self.settings.ghosts)
        self.tokens.toggle_ghosts(ghosts.isChecked())
        follow.setChecked(True)
        QGuiApplication.styleHints().colorSchemeChanged.connect(self._follow_desktop)

    def _connect_bridge(self) -> None:
        bridge = self.bridge
        bridge.state_changed.connect(self._show_state)
        bridge.inspected.connect(self._show_files)
        bridge.loaded.connect(self._show_loaded)
        bridge.progress.connect(self.status.show_progress)
        bridge.failed.connect(self._show_failure)
        bridge.run_started.connect(self._show_run)
        bridge.exported.connect(self._show_exported)
        bridge.export_ended.connect(self._show_export_ended)
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
        if self.bridge.state is State.PAUSED:
            self.bridge.resume(rounds)
            return
        self.banners.clear()
        self.bridge.start(self.run_panel.texts(), self.run_panel.options(), rounds)

    def _compare(self) -> None:
        lanes = self.divergence.chosen_lanes()
        if lanes is None:
            self.docks.reveal("divergence", "findings")
            return
        panel = self.run_panel
        self.compare(CompareRequest(tuple(panel.texts()), panel.options(), lanes))

    def _export(self, store: TraceStore) -> None:
        folder = ask_export_folder(self, self.settings)
        if folder is not None:
            self.bridge.export(store, folder)
            self._enable_actions()

    def _copy_text(self) -> None:
        QGuiApplication.clipboard().setText(self.tokens.copy_text())

    def _copy_report(self) -> None:
        text = report(self.bridge.files, self.bridge.compute, self._log_lines())
        QGuiApplication.clipboard().setText(text)

    def _show_ghosts(self, shown: bool) -> None:
        self.settings.ghosts = shown
        self.tokens.toggle_ghosts(shown)

    # -- what the engine reports -----------------------------------------------------------

    def _show_state(self, state: State) -> None:
        if state is State.RUNNING:
            self.feed.start()
        else:
            self.feed.stop()
        if state is not State.LOADING and not self.bridge.exporting:
            self.status.hide_progress()
        if state is State.READY:
            self.run_panel.set_compute(self.bridge.compute_asked)
        self.model_map.set_loadable(state is State.INSPECTED)
        self.run_panel.set_compute_enabled(
            state not in (State.LOADING, State.RUNNING, State.PAUSED)
        )
        self._enable_actions()
        self._show_model_text()

    def _enable_actions(self) -> None:
        state, bridge, actions = self.bridge.state, self.bridge, self.actions_by_id
        going = bridge.can_start or state is State.PAUSED
        for action_id, enabled in (
            ("run.start", going),
            ("run.step", going),
            ("run.pause", state is State.RUNNING),
            ("run.stop", state in (State.RUNNING, State.PAUSED)),
            ("run.compare", bridge.can_start),
            ("go.first_divergence", self.divergence.has_divergences),
            ("go.next_divergence", self.divergence.has_divergences),
            ("go.previous_divergence", self.divergence.has_divergences),
            ("file.open_draft", bridge.files is not None),
            ("file.export", bool(bridge.store.runs) and not bridge.exporting),
            ("file.copy_text", bridge.run_id is not None),
        ):
            actions[action_id].setEnabled(enabled)
        self.scenario_menu.setEnabled(bridge.can_start)
        actions["run.start"].setText("&Resume" if state is State.PAUSED else "&Run")

    def _show_files(self, files: worker.ModelFiles | None) -> None:
        self.model_map.set_files(files)
        self.run_panel.set_files(files)
        self._show_options()
        self._centre.setCurrentIndex(1 if files is not None or self.bridge.store.runs else 0)
        self.setWindowTitle("Draftscope" if files is None else f"{files.target.stem} — Draftscope")
        self._enable_actions()
        self._show_model_text()

    def _show_loaded(self, event: worker.Loaded) -> None:
        if event.files.target != DEMO_TARGET:
            self.settings.add_recent_model(event.files.target)
        if event.replaced is not None:
            old = event.replaced
            self.banners.add(
                "info",
                "The runs of the model before are no longer shown.",
                "They are kept until this message is dismissed.",
                ("Export them…", lambda: self._export(old)),
            )
        self._show_lanes_or_run(event.store, self.bridge.run_id)
        self._show_files(event.files)

    def _show_options(self) -> None:
        self.model_map.set_options(self.run_panel.options())

    def _show_run(self, run_id: int) -> None:
        self._show_lanes_or_run(self.bridge.store, run_id)
        self._enable_actions()

    def _show_lanes_or_run(self, store: TraceStore, run_id: int | None) -> None:
        self.feed.show_run(store, None if run_id is None else run_to_show(store, run_id))

    def _show_failure(self, failed: worker.Failed) -> None:
        log.warning("%s %s", failed.message, failed.remedy)
        self.banners.add("error", failed.message, failed.remedy)

    def _show_exported(self, folder: Path) -> None:
        self.show_message("info", f"Trace exported to {folder}.")

    def _show_export_ended(self) -> None:
        self.status.hide_progress()
        self._enable_actions()

    def _show_model_text(self) -> None:
        files, state = self.bridge.files, self.bridge.state
        parts = [state.value]
        if files is not None:
            quant = next(iter(files.info.quant_mix), "")
            parts = [files.target.stem, quant, self.bridge.compute, state.value]
        self.status.set_model(" · ".join(part for part in parts if part))

    # -- Qt --------------------------------------------------------------------------------

    def dragEnterEvent(self, event: QDragEnterEvent) -> None:
        paths = _gguf_paths(event.mimeData())
        if paths:
            event.acceptProposedAction()
            self.status.showMessage(f"Drop to open {' and '.join(p.name for p in paths)}")

    def dragLeaveEvent(self, event: QDragLeaveEvent) -> None:
        self.status.clearMessage()

    def dropEvent(self, event: QDropEvent) -> None:
        paths = _gguf_paths(event.mimeData())
        self.status.clearMessage()
        if paths:
            event.acceptProposedAction()
            self.open_model(*paths)

    def closeEvent(self, event: QCloseEvent) -> None:
        self.feed.clear()
        self.settings.save_layout(*self.docks.save())
        self.settings.sync()
        if not self.bridge.close():
            log.warning("the engine did not stop in time")
        event.accept()


def _gguf_paths(data: QMimeData) -> Sequence[Path]:
    """Up to two dropped models, the larger (the target) first."""
    paths = [Path(url.toLocalFile()) for url in data.urls() if url.isLocalFile()]
    models = [path for path in paths if path.suffix.lower() == ".gguf" and path.is_file()]
    return sorted(models, key=lambda path: path.stat().st_size, reverse=True)[:2]


def _theme_name(choice: str) -> str:
    if choice != "system":
        return choice
    dark = QGuiApplication.styleHints().colorScheme() is Qt.ColorScheme.Dark
    return "dark" if dark else "light"
