"""The subject of the window, a run or a comparison: named in the panels that show it, and followed
by the messages about it."""

from __future__ import annotations

from PySide6.QtCore import QObject, SignalInstance

from app.engine_thread.bridge import Bridge
from app.engine_thread.feed import Feed
from app.trace_models.compared_lanes import lanes_of
from app.trace_models.run_facts import comparison_label
from app.trace_models.run_notes import run_name
from app.window.banner import Banner, BannerArea, BannerButton
from app.window.docks import Docks
from app.window.layouts import DOCK_OF
from engine.trace.run_ref import RunRef

_OF_RUN = ("rollback", "memory", "inspector", "runs", "acceptance", "time")
_OF_COMPARISON = ("divergence", "findings")
_OF_FILES = "results", "conform"
"""Pages that show what a file or a package holds, whatever run is on show."""


class RunBanners:
    """Messages about runs: each is in sight while its run, or a lane of the same comparison, is on
    show."""

    def __init__(self, area: BannerArea) -> None:
        self._area = area
        self._shown: RunRef | None = None
        self._runs: dict[Banner, RunRef] = {}

    def add(
        self,
        run: RunRef,
        severity: str,
        message: str,
        remedy: str = "",
        *offers: BannerButton,
        sticky: bool = False,
    ) -> Banner:
        """As BannerArea.add, of a run."""
        banner = self._area.add(severity, message, remedy, *offers, sticky=sticky)
        self._runs[banner] = run
        self.show_run(self._shown)
        return banner

    def show_run(self, run: RunRef | None) -> None:
        """Another run is on show."""
        self._shown = run
        left = self._area.banners
        self._runs = {banner: of for banner, of in self._runs.items() if banner in left}
        for banner, of in self._runs.items():
            banner.setVisible(run is not None and run in (of, *lanes_of(of)))


class SubjectNames(QObject):
    """Says in the titles of panels which run or comparison they show. renamed: runs may be called
    something else."""

    def __init__(
        self, bridge: Bridge, feed: Feed, docks: Docks, renamed: SignalInstance, parent: QObject
    ) -> None:
        super().__init__(parent)
        self._bridge, self._feed, self._docks = bridge, feed, docks
        feed.run_shown.connect(self._name)
        for changed in (bridge.listed_changed, renamed, *docks.turned()):
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
        of_files = {DOCK_OF[page] for page in _OF_FILES if page in self._docks.pages}
        for name, text in (("tuning", label), ("checks", checks)):
            self._docks.note(name, "" if name in of_files else text)
        self._docks.note("model", self._other_model(run))

    def _other_model(self, run: RunRef | None) -> str:
        """Said of the model in use where the run on show is not of it."""
        listed = self._bridge.listed
        if run is None or not any(runs.in_use for runs in listed):
            return ""
        for runs in listed:
            if runs.store is run.store and not runs.in_use:
                return f"in use; {run_name(run)} is of {runs.model}"
        return ""
