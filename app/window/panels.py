"""All that the window shows of the trace, the model and the options, made and put in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from PySide6.QtWidgets import QStackedWidget, QVBoxLayout, QWidget

from app.actions.actions import Actions
from app.looks.theme import Theme
from app.panels.breaks.breaks_view import BreaksView
from app.panels.conversation.conversation_view import ConversationView
from app.panels.findings.findings_view import FindingsView
from app.panels.inspector.inspector_view import InspectorView
from app.panels.model.model_map import ModelMapView
from app.panels.run_settings.run_panel import RunPanel
from app.panels.runs.runs_view import RunsView
from app.panels.tokens.tokens_view import TokensView
from app.saved.settings import Settings
from app.trace_models.run_facts import ModelRuns
from app.widgets.buttons import TitleButton
from app.widgets.empty_state import EmptyState
from app.window.banner import BannerArea
from app.window.docks import Docks
from app.window.menus import PlotsMenu
from app.window.status_line import StatusLine
from app.window.why_not_strip import WhyNotStrip
from engine.trace.run_ref import RunRef

if TYPE_CHECKING:
    from app.panels.plots.round_view import RoundView

_FIRST, _TOKENS = range(2)


class Panels:
    """The views by name. `text_views`: those of the trace that are made at once, `drawn_views`:
    those that `complete` makes."""

    def __init__(self, theme: Theme, actions: Actions) -> None:
        self._actions = actions
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
        self.banners = BannerArea(theme)
        self.status = StatusLine()
        self.text_views = (self.tokens, self.findings, self.inspector, self.why_not, self.runs)
        self._waiting: list[EmptyState] = []
        """The content of panels until there is a run."""
        self._offer_run(self.text_views)
        self._centre = QStackedWidget()
        self._centre.addWidget(
            EmptyState(
                "Watch a model speculate",
                "Open a hybrid GGUF model or a trace, or drop one here; connect to a server that "
                "runs one; the bundled demo needs no download.",
                [*opening, actions["file.connect"], actions["file.open_trace"]],
            )
        )
        self._centre.addWidget(self.tokens)

    def complete(
        self,
        theme: Theme,
        settings: Settings,
        menu: PlotsMenu,
        report: Callable[[str, str, str], None],
        docks: Docks,
    ) -> None:
        """Make what draws with pyqtgraph and put it into its docks. To import it and to build the
        plots takes half as long as everything else, so it may come after the first painting.

        report: takes severity, message and remedy of what a user should know.
        """
        from app.panels.divergence.divergence_view import DivergenceView
        from app.panels.results.results_view import ResultsView
        from app.window.plot_group import PlotGroup
        from app.window.plot_stack import PlotStack

        self.plots = PlotGroup(theme, self._actions, settings, menu, report)
        self.divergence = DivergenceView(theme, self._actions)
        self.results = ResultsView(theme, self._actions)
        self.drawn_views: tuple[RoundView | DivergenceView, ...] = (
            *self.plots.views.values(),
            self.divergence,
        )
        self._offer_run((*self.drawn_views, *self.plots.whole.values()))
        others = {"divergence": self.divergence, "results": self.results}
        for name, view in {**self.plots.widgets, **others}.items():
            docks.fill(name, view)
        stacked = {docks[name]: view for name, view in self.plots.views.items()}
        PlotStack(stacked, self._centre)
        for name, plot in self.plots.targets.items():
            TitleButton(docks[name], "Plot", menu, plot)
        self._is_complete = True

    @property
    def has_divergences(self) -> bool:
        """Whether the comparison on show has a position beyond the bound."""
        return self._is_complete and self.divergence.has_divergences

    def show_triage(self, verdict: str, reason: str) -> None:
        """What came of comparing the texts of two runs; empty: nothing yet."""
        self.runs.pair.say(f"Verdict: {verdict}. {reason}" if verdict else "")
        if self._is_complete:
            self.divergence.show_triage(verdict, reason)

    def set_plain(self, plain: RunRef | None) -> None:
        """The run that the one on show is measured by."""
        if self._is_complete:
            self.plots.timing.set_plain(plain)

    def fill(self, docks: Docks) -> None:
        """Put the views made so far into their docks."""
        for name, view in (
            ("model", self.model_map),
            ("run", self.run_panel),
            ("findings", self.findings),
            ("inspector", self.inspector),
            ("runs", self.runs),
            ("breaks", self.breaks),
            ("conversation", self.conversation),
        ):
            docks.fill(name, view)

    def centre(self) -> QWidget:
        """The widget between the docks: the text, and why it is not as asked."""
        column = QVBoxLayout(middle := QWidget())
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addWidget(self._centre, 1)
        column.addWidget(self.why_not)
        return middle

    def show_tokens(self, shown: bool) -> None:
        """The text in the centre, or what there is to open. Panels without a run do not say what
        to do where the centre says it."""
        self._is_open = shown
        self._centre.setCurrentIndex(_TOKENS if shown else _FIRST)
        for empty in self._waiting:
            empty.set_brief(shown)

    def retheme(self, theme: Theme) -> None:
        """Take the colours of a theme."""
        for view in (
            self.tokens,
            self.findings,
            self.inspector,
            self.why_not,
            self.runs,
            self.model_map,
            self.banners,
            self.breaks,
            self.conversation,
        ):
            view.retheme(theme)
        if self._is_complete:
            self.plots.retheme(theme)
            self.divergence.retheme(theme)
            self.results.retheme(theme)

    def set_recorded(self, recorded: Sequence[ModelRuns]) -> None:
        """List the runs of these models."""
        self.runs.set_recorded(recorded)
        self.tokens.tell_kept(sum(len(runs.store.runs) for runs in recorded))

    def _offer_run(self, views: Iterable[QWidget]) -> None:
        run, demo = self._actions["run.start"], self._actions["file.open_demo"]
        for view in views:
            for empty in view.findChildren(EmptyState):
                if empty.waits_for_run and view is self.tokens:
                    empty.offer([run])  # something is open, else the text were not in sight
                elif empty.waits_for_run:
                    empty.offer([run, demo])
                    empty.set_brief(self._is_open)
                    self._waiting.append(empty)
