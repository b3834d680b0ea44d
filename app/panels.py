"""All that the window shows of the trace, the model and the options, made and put in its place."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtWidgets import QStackedWidget, QVBoxLayout, QWidget

from app.actions import Actions
from app.docks import Docks
from app.plot_group import PlotGroup
from app.settings import Settings
from app.theme import Theme
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
from app.widgets.title_button import TitleButton
from app.widgets.why_not_strip import WhyNotStrip

TraceView = (
    TokensView | RoundView | DivergenceView | FindingsView | InspectorView | WhyNotStrip | RunsView
)
_FIRST, _TOKENS = range(2)


class Panels:
    """The views by name. `trace_views`: those that tell of a position.

    report: takes severity, message and remedy of what a user should know.
    """

    def __init__(
        self,
        theme: Theme,
        actions: Actions,
        settings: Settings,
        report: Callable[[str, str, str], None],
    ) -> None:
        opening = [actions["file.open"], actions["file.open_demo"]]
        self.tokens = TokensView(theme)
        self.plots = PlotGroup(theme, actions, settings, report)
        self.divergence = DivergenceView(theme, actions)
        self.findings = FindingsView(theme)
        self.inspector = InspectorView(theme, actions)
        self.why_not = WhyNotStrip(theme)
        self.runs = RunsView(theme, actions)
        self.breaks = BreaksView(theme)
        self.model_map = ModelMapView(theme, opening)
        self.run_panel = RunPanel()
        self.banners = BannerArea(theme)
        self.status = StatusLine()
        self.trace_views: tuple[TraceView, ...] = (
            self.tokens, *self.plots.views.values(), self.divergence, self.findings,
            self.inspector, self.why_not, self.runs,
        )  # fmt: skip
        for view in (*self.trace_views, self.plots.what_if):
            for empty in view.findChildren(EmptyState):
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

    def fill(self, docks: Docks) -> None:
        """Put every view into its dock, and the menu of the plots into their titles."""
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
            docks.fill(name, view)
        for name, plot in self.plots.targets.items():
            TitleButton(docks[name], "Plot", self.plots.menu, plot)

    def centre(self) -> QWidget:
        """What stands between the docks: messages, the text, and why it is not as asked."""
        column = QVBoxLayout(middle := QWidget())
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addWidget(self.banners)
        column.addWidget(self._centre, 1)
        column.addWidget(self.why_not)
        return middle

    def show_tokens(self, shown: bool) -> None:
        """The text in the centre, or what there is to open."""
        self._centre.setCurrentIndex(_TOKENS if shown else _FIRST)

    def retheme(self, theme: Theme) -> None:
        """Take the colours of a theme."""
        for view in (
            self.tokens, self.plots, self.divergence, self.findings, self.inspector, self.why_not,
            self.runs, self.model_map, self.banners, self.breaks,
        ):  # fmt: skip
            view.retheme(theme)
