"""Choosing a scenario by what it looks like."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from PySide6.QtCore import QObject, Qt
from PySide6.QtGui import QAction
from PySide6.QtWidgets import (
    QDialog,
    QDialogButtonBox,
    QHeaderView,
    QLabel,
    QTreeWidget,
    QTreeWidgetItem,
    QWidget,
)

from app.widgets.build import made, vbox
from engine.compare.memory_script import MemoryScript
from engine.compare.scenario import Scenario

_GROUPS = "Runs and comparisons", "Operations on the memory alone"
_HEADS = "What you see", "Scenario"
_CHARACTERS, _LINES = 160, 40
_NO_MODEL = "Open a model first: a scenario is played on the model in use, when nothing runs."


def scenario_actions(
    scenarios: Sequence[Scenario | MemoryScript],
    play: Callable[[Scenario | MemoryScript], None],
    parent: QObject,
) -> list[QAction]:
    """An action for each that plays it: its title as text, what it is about as tooltip, and as data
    the sentence to choose it by with its number among the groups."""
    actions = []
    for one in scenarios:
        action = QAction(one.title.replace("&", "&&"), parent)
        action.setObjectName(f"scenario.{one.name}")
        action.setToolTip(one.about)
        symptom = re.split(r"[.:;](?: |$)", one.about, maxsplit=1)[0] + "."
        action.setData((getattr(one, "symptom", "") or symptom, isinstance(one, MemoryScript)))
        action.triggered.connect(lambda _=False, chosen=one: play(chosen))
        actions.append(action)
    return actions


class ScenarioDialog(QDialog):
    """Does not block the window. actions: see `scenario_actions`."""

    def __init__(self, actions: Sequence[QAction], parent: QWidget) -> None:
        super().__init__(parent)
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.setWindowTitle("Scenarios")
        self._actions: dict[int, QAction] = {}
        self.list = made(QTreeWidget, accessibleName="Scenarios by what is seen")
        self.list.setHeaderLabels(_HEADS)
        self.list.setRootIsDecorated(False)
        self.list.setItemsExpandable(False)
        head = self.list.header()
        head.setStretchLastSection(False)
        head.setSectionResizeMode(0, QHeaderView.ResizeMode.Stretch)
        head.setSectionResizeMode(1, QHeaderView.ResizeMode.ResizeToContents)
        for number, title in enumerate(_GROUPS):
            group = QTreeWidgetItem([title])
            group.setFlags(Qt.ItemFlag.ItemIsEnabled)
            for action in actions:
                symptom, is_script = action.data()
                if is_script is bool(number):
                    item = QTreeWidgetItem(group, [symptom, action.text().replace("&&", "&")])
                    item.setToolTip(0, action.toolTip())
                    self._actions[id(item)] = action
            if group.childCount():
                self.list.addTopLevelItem(group)
                group.setFirstColumnSpanned(True)
        self.list.expandAll()
        self.about = made(QLabel, wordWrap=True, textFormat=Qt.TextFormat.PlainText)
        buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Close)
        self.play = buttons.addButton("&Play", QDialogButtonBox.ButtonRole.AcceptRole)
        self.play.setDefault(True)
        buttons.accepted.connect(self._play)
        buttons.rejected.connect(self.reject)
        self.list.currentItemChanged.connect(lambda *_: self._tell())
        self.list.itemActivated.connect(lambda *_: self._play())
        for action in actions:
            action.enabledChanged.connect(self._tell)
        vbox((self.list, 1), self.about, buttons, of=self)
        metrics = self.fontMetrics()
        wanted = _CHARACTERS * metrics.averageCharWidth(), _LINES * metrics.height()
        self.resize(*(min(pair) for pair in zip(wanted, parent.size().toTuple(), strict=True)))
        first = self.list.topLevelItem(0)
        if first is not None:
            self.list.setCurrentItem(first.child(0))
        self.list.setFocus()

    def _chosen(self) -> QAction | None:
        return self._actions.get(id(self.list.currentItem()))

    def _tell(self) -> None:
        chosen = self._chosen()
        ready = chosen is not None and chosen.isEnabled()
        self.play.setEnabled(ready)
        about = "" if chosen is None else chosen.toolTip()
        self.about.setText(about if ready or chosen is None else f"{about}\n{_NO_MODEL}")

    def _play(self) -> None:
        chosen = self._chosen()
        if chosen is not None and chosen.isEnabled():
            self.accept()
            chosen.trigger()
