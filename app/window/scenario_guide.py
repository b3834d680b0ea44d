"""What a scenario shows when it has come to its end: the lane that is wrong, the first position at
which it is, what was found, and the story of it.
"""

from __future__ import annotations

from PySide6.QtCore import QObject, QTimer

from app.engine_thread.bridge import Bridge
from app.engine_thread.events import State
from app.trace_models.compared_lanes import lanes_of
from app.window.banner import Banner
from app.window.docks import Docks
from app.window.panels import Panels
from engine.compare.memory_script import MemoryScript
from engine.compare.scenario import Scenario
from engine.trace.run_ref import RunRef


class ScenarioGuide(QObject):
    """Belongs to one window. Another run, of whatever kind, ends what it has to tell."""

    def __init__(self, bridge: Bridge, panels: Panels, docks: Docks, parent: QObject) -> None:
        super().__init__(parent)
        self._bridge, self._panels, self._docks = bridge, panels, docks
        self._scenario: Scenario | MemoryScript | None = None
        self._has_begun = self._is_told = False
        self._banner: Banner | None = None
        bridge.run_started.connect(self._begin_run)
        bridge.state_changed.connect(self._end_run)

    def begin(self, scenario: Scenario | MemoryScript) -> None:
        """The next run is that of this scenario."""
        self._take_down()
        self._scenario = scenario
        self._has_begun = self._is_told = False

    def _begin_run(self, _run: RunRef) -> None:
        if self._is_told:
            self._scenario = None
            self._take_down()
        self._has_begun = True

    def _end_run(self, state: State) -> None:
        over = state is State.READY and self._bridge.live is not None and self._bridge.live.ended
        if self._scenario is not None and self._has_begun and not self._is_told and over:
            self._is_told = True
            QTimer.singleShot(0, self, self._tell)  # behind the views' own last rows

    def _tell(self) -> None:
        scenario, panels, run = self._scenario, self._panels, self._bridge.live
        if scenario is None or run is None or self._bridge.trace is not None:
            return
        self._docks.reveal("findings")
        if lanes_of(run):
            self._docks.reveal("divergence")
        panels.divergence.refresh()
        diverges = panels.divergence.has_divergences
        if diverges:
            panels.divergence.go_first()
        found = panels.findings.open_first(getattr(scenario, "expects", ()), keep_place=diverges)
        outcome = panels.divergence.outcome if lanes_of(run) else ""
        told = " ".join(filter(None, (scenario.about, outcome, found)))
        self._banner = panels.banners.add("info", f"{scenario.title}. {told}", sticky=True)

    def _take_down(self) -> None:
        if self._banner is not None:
            self._panels.banners.take_down(self._banner)
            self._banner = None
