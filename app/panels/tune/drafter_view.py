"""The Drafter panel: how good the drafters of the run on show are."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QComboBox, QWidget

from app.looks.theme import Theme
from app.widgets.build import hbox, made, vbox
from app.widgets.drafter_quality import DrafterFacts, DrafterQuality
from app.widgets.fitted_labels import ElidedLabel
from app.widgets.whole_run_view import WholeRunView
from engine.trace.run_ref import RunRef

_ALL = "all drafters"


class DrafterView(WholeRunView):
    """One drafter, or with a chain of them the chosen one or all together."""

    untold = "the tokens of its drafts"

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(
            "Drafter",
            "No draft yet",
            "Shows whether a drafter's confidence can be trusted, how far its drafts come and what "
            "it ranked next when it was wrong. Press Run (F5) with a drafter chosen.",
            parent,
        )
        self._facts: DrafterFacts | None = None
        self.choice = made(
            QComboBox,
            accessibleName="Drafter on show",
            toolTip="Drafter whose drafts are counted",
            focusPolicy=Qt.FocusPolicy.StrongFocus,
            activated=lambda _: self._show(),
        )
        self.headline, self.quality = ElidedLabel(), DrafterQuality(theme)
        head = hbox((self.headline, 1), self.choice, margins=(8, 4, 8, 0))
        vbox(head, (self.quality, 1), of=self.page, margins=(0, 0, 0, 0), spacing=2)

    def table(self) -> tuple[list[str], list[list[object]]]:
        """The bins of confidence."""
        names = ["confidence_from", "confidence_to", "judged", "accepted", "mean_confidence"]
        if self._facts is None:
            return names, []
        found = self._facts.quality(self._chosen).calibration
        n = len(found.n)
        return names, [
            [
                at / n,
                (at + 1) / n,
                int(found.n[at]),
                int(found.accepted[at]),
                mean if found.n[at] else None,
            ]
            for at, mean in enumerate(found.mean_confidence.tolist())
        ]

    @property
    def _chosen(self) -> str:
        """Name of the drafter on show, empty for all of them."""
        return self.choice.currentText() if self.choice.currentIndex() > 0 else ""

    def _begin(self, run: RunRef | None) -> None:
        self._facts = None if run is None else DrafterFacts(run)
        self.choice.clear()
        self.choice.addItem(_ALL)
        self.choice.hide()

    def _read(self) -> bool:
        assert self._facts is not None
        self._facts.read()
        return bool(self._facts.by_name)

    def _show(self) -> None:
        facts = self._facts
        if facts is None:
            return
        for name in list(facts.by_name)[self.choice.count() - 1 :]:
            self.choice.addItem(name)
        self.choice.setVisible(len(facts.by_name) > 1)
        name = self._chosen
        self.quality.show_facts(facts, name)
        quality = facts.quality(name)
        words = name or ", ".join(facts.by_name)
        if quality.n_untold:
            words += f" · tokens of {quality.n_untold:,} drafts are not known and left out"
        self.headline.setText(words)
