"""The Tune view: the estimated speed of the run on show under other settings, and its drafter."""

from __future__ import annotations

from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QHBoxLayout, QLabel, QSizePolicy

from app.looks import Theme
from app.panels.tune.drafter_view import DrafterFacts, DrafterQuality
from app.trace_models.tune_surface import (
    BEST,
    SurfaceRequest,
    TuneSurface,
    headline,
    heat_map,
    note,
    readout,
    rows,
)
from app.widgets.build import UNLIMITED, hbox, made, turn, vbox, words
from app.widgets.fields import shown_choice
from app.widgets.fitted_labels import ElidedLabel
from app.widgets.heat_grid import HeatGrid
from app.widgets.whole_run_view import WholeRunView
from engine.analysis.what_if.rules import FIXED, RULES
from engine.trace.run_ref import RunRef

_BESIDE_FROM = 120
"""Width in characters from which the drafter's quality is next to the heat map."""
_ONE_LINE_FROM = 56
"""Width in characters from which the choices are in one line."""
_READOUT_FROM, _NOTE_FROM = 14, 16
"""Heights in lines from which there is room below the map for the readout, and for the note."""
_MAP_CHARACTERS = 110
"""Width of the map's side, unless its cells take more: the drafter next to it has the rest."""
_WRAPPED_FROM = 26
"""Height in lines from which there is room for the whole note."""
_SPACING = 3
"""Pixels between the map and the texts below it."""
_STAR = "★ frame: highest estimate · "
_HINT = "dashed: setting of this run · hover over a cell for its figures"
_CLICK = " · click: use it in Run settings"


class TuneView(WholeRunView):
    """Speeds are estimated elsewhere: `asked` requests them, `show_surface` receives them."""

    name = "Tune"
    empty_title = "No draft yet"
    about = (
        "Estimates which n_max and p_min would have been fastest. Record long drafts once, with "
        "n_max 16 and p_min 0, and press Run (F5)."
    )
    untold = "the lengths of its drafts"
    period_ms = 1500

    asked = Signal(object)  # SurfaceRequest
    setting_chosen = Signal(object, int, float)  # RunRef, n_max, p_min
    run_selected = Signal(object)  # RunRef

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._facts: DrafterFacts | None = None
        self.shown: TuneSurface | None = None
        """The surface on show."""
        self._waits: SurfaceRequest | None = None
        self._is_stale = False
        self._drafter_runs: list[RunRef] = []
        self.headline = words(bold=True, shrinks=True)
        self.rule = shown_choice("Rule that chooses the length of each draft")
        for name, spec in RULES.items():
            self.rule.addItem(name)
            tip = f"{spec.about} ({spec.source})"
            self.rule.setItemData(self.rule.count() - 1, tip, Qt.ItemDataRole.ToolTipRole)
        self.rule.activated.connect(lambda _: self._ask())
        self.drafter = shown_choice("Drafter: show its newest run of this trace")
        self.drafter.activated.connect(self._select_drafter)
        self.grid = HeatGrid(theme, "Estimated speed by n_max and p_min")
        self.grid.pointed.connect(self._tell)
        self.grid.tip = self._words_of
        self.grid.chosen.connect(self._choose)
        self.readout, self.note = ElidedLabel(), made(ElidedLabel, muted=True)
        self.quality = DrafterQuality(theme)
        self.quality.hide()  # until there is room for it, which it does not ask for
        self.quality.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
        self._lay_out()

    def _lay_out(self) -> None:
        self._named: list[QHBoxLayout] = []
        self._labels: dict[str, QLabel] = {}
        fields = self._fields = hbox(spacing=6)
        for name, field in (("rule", self.rule), ("drafter", self.drafter)):
            label = self._labels[name] = QLabel(name)
            label.setBuddy(field)
            named = hbox(label, field, 1, spacing=6)
            fields.addLayout(named)
            self._named.append(named)
        self._head = hbox((self.headline, 1), fields, spacing=6)
        left = vbox((self.grid, 1), self.readout, self.note, 0, spacing=_SPACING)
        body = hbox((left, 5), (self.quality, 4), spacing=10)
        self._column = vbox(self._head, (body, 1), of=self.page, margins=(8, 4, 8, 4), spacing=4)

    def table(self) -> tuple[list[str], list[list[object]]]:
        """Every cell of the heat map."""
        return ([], []) if self.shown is None else rows(self.shown)

    def show_surface(self, request: SurfaceRequest, found: TuneSurface | None) -> None:
        """Show the result of a request; None: the run has no draft."""
        if request is not self._waits:
            return
        self._waits = None
        if found is not None:
            self.shown = found
            self.headline.setText(headline(found))
            self.note.setText(note(found))
            self.grid.set_map(heat_map(found))
            self._fit_sides()
            self._tell(None)
        if self._is_stale:
            self._ask()

    def _begin(self, run: RunRef | None) -> None:
        self._facts = None if run is None else DrafterFacts(run)
        self.shown = self._waits = None
        self._is_stale = False
        self.grid.set_map(None)
        for label in (self.headline, self.readout, self.note):
            label.setText("")

    def _read(self) -> bool:
        return self._facts is not None and self._facts.read()

    def _show(self) -> None:
        assert self._facts is not None
        self._list_drafters()
        if self.quality.isVisibleTo(self):
            self.quality.show_facts(self._facts)
        self._ask()

    def _ask(self) -> None:
        """One request at a time: the next one is sent when it is answered."""
        self._is_stale = self._waits is not None
        if self.run is not None and not self._is_stale:
            self._waits = (self.run, self.rule.currentText())
            self.asked.emit(self._waits)

    def _list_drafters(self) -> None:
        """The drafters of the runs in this trace, each with its newest run."""
        assert self.run is not None
        newest: dict[str, RunRef] = {}
        for run_id in list(self.run.store.runs):
            run = self.run.sibling(run_id)
            if name := drafter_name(run):
                newest[name] = run
        if name := drafter_name(self.run):
            newest[name] = self.run
        names = list(newest)
        if names != [self.drafter.itemText(i) for i in range(self.drafter.count())]:
            self.drafter.clear()
            self.drafter.addItems(names)
        for part in (self._labels["drafter"], self.drafter):
            part.setVisible(bool(names))
        self._drafter_runs = list(newest.values())
        if self.run in self._drafter_runs:
            self.drafter.setCurrentIndex(self._drafter_runs.index(self.run))

    def _select_drafter(self, index: int) -> None:
        run = self._drafter_runs[index]
        if run != self.run:
            self.run_selected.emit(run)

    def _tell(self, cell: tuple[int, int] | None) -> None:
        if self.shown is None:
            return
        if cell is not None:
            self.readout.setText(readout(self.shown, cell[1], cell[0]))
        else:
            runs_here = RULES[self.shown.request[1]].runs_here
            rule = self.shown.request[1]
            more = _CLICK if rule == FIXED.name else f" · --spec-draft-adapt {rule}"
            star = _STAR if BEST in heat_map(self.shown).marks else ""
            self.readout.setText(
                star + _HINT + (more if runs_here else " · not a rule of this engine")
            )

    def _words_of(self, row: int, column: int) -> str:
        return "" if self.shown is None else readout(self.shown, column, row)

    def _choose(self, row: int, column: int) -> None:
        found = self.shown
        if found is not None and found.request[1] == FIXED.name:
            self.setting_chosen.emit(found.request[0], *found.setting(column, row))

    def minimumSizeHint(self) -> QSize:
        """With the choices stacked and no text below the map, whatever the current layout."""
        least = super().minimumSizeHint()
        for label in (self.readout, self.note):
            if not label.isHidden():
                least -= QSize(0, label.minimumSizeHint().height() + _SPACING)
        across = [part.minimumSize().width() for part in self._named]
        across.append(self.grid.minimumSizeHint().width())
        margins = self._column.contentsMargins()
        wide = max(across) + margins.left() + margins.right()
        return QSize(max(wide, self.empty.minimumSizeHint().width()), least.height())

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        characters = event.size().width() / self.fontMetrics().averageCharWidth()
        wide = characters >= _BESIDE_FROM
        turn(self._head, down=not wide)
        lines = event.size().height() / self.fontMetrics().height()
        self.readout.setVisible(lines >= _READOUT_FROM)
        self.readout.setWordWrap(not wide or lines >= _WRAPPED_FROM)
        self.note.setVisible(lines >= _NOTE_FROM)
        self.note.setWordWrap(lines >= _WRAPPED_FROM)
        turn(self._fields, down=characters < _ONE_LINE_FROM)
        if wide is self.quality.isHidden():
            self.quality.setVisible(wide)
            if wide and self._facts is not None and self.has_rounds:
                self.quality.show_facts(self._facts)
        self._fit_sides()

    def _fit_sides(self) -> None:
        """Give the drafter's quality the width that the map does not fill."""
        most = UNLIMITED
        if not self.quality.isHidden():
            least = _MAP_CHARACTERS * self.fontMetrics().averageCharWidth()
            most = max(self.grid.most_wide, least)
        for part in (self.grid, self.readout, self.note):
            part.setMaximumWidth(most)


def drafter_name(run: RunRef) -> str:
    """The drafters of a run, empty for a comparison's lane and without any."""
    options = run.facts.options
    return "" if run.facts.lane or options is None else ", ".join(options.spec.types)
