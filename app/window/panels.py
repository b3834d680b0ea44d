"""The panels: every view of the trace, the model and the options, made and placed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeVar

from PySide6.QtWidgets import QStackedWidget, QWidget

from app.actions import Actions
from app.engine_thread.bridge import Bridge
from app.engine_thread.events import State
from app.engine_thread.feed import Feed
from app.looks import Theme
from app.panels.conversation.conversation_view import ConversationView
from app.panels.findings_view import FindingsView
from app.panels.inspector.inspector_view import InspectorView
from app.panels.lab.breaks_view import BreaksView, FaultsView
from app.panels.model.model_map import ModelMapView
from app.panels.run_panel import RunPanel
from app.panels.runs.runs_view import RunsView
from app.panels.tokens.tokens_view import TokensView
from app.saved.settings import Settings
from app.trace_models.run_facts import ModelRuns
from app.widgets.build import vbox
from app.widgets.empty_state import EmptyState
from app.window.banner import BannerArea, RunBanners
from app.window.docks import Docks
from app.window.menus import PlotsMenu, TitleButton
from app.window.status_line import StatusLine
from app.window.why_not_strip import WhyNotStrip

if TYPE_CHECKING:
    from app.panels.divergence.divergence_view import DivergenceView
    from app.panels.lab.conform_view import ConformView
    from app.panels.tune.results_view import ResultsView
    from app.window.plot_group import PlotView

    LateView = PlotView | DivergenceView | ResultsView | ConformView

_View = TypeVar("_View", "DivergenceView", "ResultsView", "ConformView")
_FIRST, _TOKENS = range(2)


NOT_READY = {
    State.EMPTY: "Open a model first.",
    State.INSPECTED: "The model is not loaded: press Load weights in the Model panel (Ctrl+1).",
    State.LOADING: "The engine is busy, as the status line says.",
}
"""Why no run can start."""


class Panels:
    """The views by name, their data sources and their docks. `text_views`: views of the trace that
    are made at once. `complete` adds those with drawings, some of them only when they are first
    shown."""

    def __init__(
        self,
        theme: Theme,
        window: QWidget,
        bridge: Bridge,
        settings: Settings,
        docks: Docks,
        actions: Actions,
    ) -> None:
        self.window, self.bridge, self.settings = window, bridge, settings
        self.docks, self.actions, self.theme = docks, actions, theme
        self.feed = Feed(window)
        self._is_complete = self._is_open = False
        opening = [actions["file.open"], actions["file.open_demo"]]
        self.tokens = TokensView(theme)
        self.findings = FindingsView(theme)
        self.inspector = InspectorView(theme, actions)
        self.why_not = WhyNotStrip(theme)
        self.runs = RunsView(theme, actions)
        self.breaks = BreaksView(theme)
        self.conversation = ConversationView(theme)
        self.model_map = ModelMapView(theme, opening)
        self.run_panel = RunPanel()
        self.lab = FaultsView(actions["run.scenarios"], self.run_panel.provoking)
        self.banners = BannerArea(theme)
        self.run_banners = RunBanners(self.banners)
        self.status = StatusLine()
        self.text_views = (self.tokens, self.findings, self.inspector, self.why_not)
        self._waiting: list[EmptyState] = []
        """Placeholders of panels until there is a run."""
        self._offer_run((*self.text_views, self.runs))
        self._centre = QStackedWidget()
        self._centre.addWidget(
            EmptyState(
                "Watch a model speculate",
                "Open a hybrid GGUF model or a trace, or drop one here, or connect to a server. "
                "The bundled demo needs no download.",
                [*opening, actions["file.connect"], actions["file.open_trace"]],
            )
        )
        self._centre.addWidget(self.tokens)

    def complete(
        self,
        menu: PlotsMenu,
        report: Callable[[str, str, str], object],
        made: Callable[[LateView], None],
    ) -> None:
        """Make the views that draw with pyqtgraph and put them into their docks. Importing it and
        building the plots takes half as long as everything else, so it may happen after the first
        painting, and most plots are made once their docks are visible.

        report: takes severity, message and remedy for the user. made: takes each view once it is in
        its dock, to connect it.
        """
        from app.panels.divergence.divergence_view import DivergenceView
        from app.panels.plots.round_view import RoundView
        from app.window.plot_group import PLOTS, PlotGroup, PlotStack

        docks = self.docks
        stack = PlotStack(self._centre, docks.is_making)

        def target(name: str) -> QWidget | None:
            return PlotGroup.target(docks.front(name))

        def put(name: str, view: PlotView) -> None:
            self._offer_run([view])
            docks.fill(name, view)
            if isinstance(view, RoundView):
                stack.add(docks[name], view)
            if not docks[name].findChildren(TitleButton):
                TitleButton(docks[name], "Plot", menu, partial(target, name))
            made(view)

        self._made = made
        self.divergence = DivergenceView(self.theme, self.actions)
        self._offer_run([self.divergence])
        self._fill("divergence", self.divergence)
        plots = self.plots = PlotGroup(self.theme, self.actions, self.settings, menu, report, put)
        for name in PLOTS:
            docks.fill_when_seen(name, partial(plots.__getitem__, name))
        docks.fill_when_seen("results", lambda: self.results)
        docks.fill_when_seen("conform", lambda: self.conform)
        self._is_complete = True

    @cached_property
    def results(self) -> ResultsView:
        """The view of result files, made on first use."""
        from app.panels.tune.results_view import ResultsView

        return self._fill("results", ResultsView(self.theme, self.actions))

    @cached_property
    def conform(self) -> ConformView:
        """The view of kernel checks, made on first use."""
        from app.panels.lab.conform_view import ConformView

        return self._fill("conform", ConformView(self.theme))

    def _fill(self, name: str, view: _View) -> _View:
        self.docks.fill(name, view)
        self._made(view)
        return view

    @property
    def has_divergences(self) -> bool:
        """Whether the comparison on show has a position beyond the bound."""
        return self._is_complete and self.divergence.has_divergences

    def show_triage(self, verdict: str, reason: str) -> None:
        """Show the comparison of two runs' texts; empty: none yet."""
        self.runs.pair.say(f"Verdict: {verdict}. {reason}" if verdict else "")
        if self._is_complete:
            self.divergence.show_triage(verdict, reason)

    def plain_measured(self) -> None:
        if self._is_complete:
            self.plots.plain_measured()

    def fill(self) -> None:
        for name, view in (
            ("model", self.model_map),
            ("run", self.run_panel),
            ("findings", self.findings),
            ("inspector", self.inspector),
            ("runs", self.runs),
            ("faults", self.lab),
            ("breaks", self.breaks),
            ("conversation", self.conversation),
        ):
            self.docks.fill(name, view)

    def centre(self) -> QWidget:
        """The widget between the docks: the text, and why it is not as requested."""
        middle = QWidget()
        vbox((self._centre, 1), self.why_not, of=middle, margins=(0, 0, 0, 0), spacing=0)
        return middle

    def show_tokens(self, shown: bool) -> None:
        """Show the text in the centre, or what can be opened. While the centre explains that,
        panels without a run do not."""
        self._is_open = shown
        self._centre.setCurrentIndex(_TOKENS if shown else _FIRST)
        for empty in self._waiting:
            empty.set_brief(shown)

    def set_recorded(self, recorded: Sequence[ModelRuns]) -> None:
        self.runs.set_recorded(recorded)
        self.tell_kept()

    def tell_kept(self) -> None:
        """Show in the empty centre what can be run or chosen."""
        why_not = NOT_READY.get(self.bridge.state, "")
        self.tokens.tell_kept(self.runs.model.n_known, why_not)

    def _offer_run(self, views: Iterable[QWidget]) -> None:
        run, demo = self.actions["run.start"], self.actions["file.open_demo"]
        for view in views:
            for empty in view.findChildren(EmptyState):
                if empty.waits_for_run and view is self.tokens:
                    empty.offer([run])  # something is open, otherwise the text would be hidden
                elif empty.waits_for_run:
                    empty.offer([run, demo])
                    empty.set_brief(self._is_open)
                    self._waiting.append(empty)
