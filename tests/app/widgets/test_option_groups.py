"""Forms over options: a field for every kind, its tip, and what it is set to."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from PySide6.QtCore import Qt, QTimer
from PySide6.QtWidgets import QWidget
from pytestqt.qtbot import QtBot

from app.widgets.option_groups import ABOVE, OptionGroup
from engine.errors import OptionError
from engine.option_fields import FormRow, build, option, options_in
from engine.options import RunOptions


def _pair(text: str) -> tuple[str, int]:
    name, _, count = text.partition("=")
    if not count.isdigit():
        raise OptionError(f"{text!r} is not a pair.", "Write a=1.")
    return name, int(count)


@dataclass(frozen=True)
class Toy:
    n: int = option(3, "--n  how many", FormRow("n", 0, 9))
    most: int | None = option(None, "--most  at most", FormRow("most", -1, 9, special="all"))
    share: float = option(0.5, "--share  of it", FormRow("share", 0.0, 1.0))
    way: str = option("a", "--way  {either}", FormRow("way"), choices={"a": "the first", "b": ""})
    names: tuple[str, ...] = option(
        (), "--name  any of {choices}", FormRow("names"), choices={"x": "an x", "y": "a y"}
    )
    loud: bool = option(False, "--loud  more noise", FormRow("loud"))
    file: str | None = option(None, "--file  to read", FormRow("file", text="a.bin"))
    pairs: tuple[tuple[str, int], ...] = option(
        (), "--pair  counts", FormRow("pairs"), parse=_pair, repeats=True
    )


@pytest.fixture
def group(qtbot: QtBot) -> OptionGroup:
    group = OptionGroup("Toys", options_in(Toy))
    qtbot.addWidget(group)
    return group


def test_a_form_begins_with_the_defaults(group: OptionGroup) -> None:
    assert build(Toy, group.values()) == Toy()
    assert group["most"].text() == "all"
    assert group["way"].itemData(0, Qt.ItemDataRole.ToolTipRole) == "the first"
    assert group["names"].actions_by_name["y"].toolTip() == "a y"
    assert group["names"].sizeHint().height() == group["way"].sizeHint().height()
    assert group["way"].toolTip() == "--way: a or b"
    assert group["loud"].accessibleName() == "loud"
    assert group.summary == ""


def test_every_kind_of_field_is_read_and_heard(group: OptionGroup) -> None:
    heard: list[None] = []
    group.changed.connect(lambda: heard.append(None))
    group["n"].setValue(4)
    group["most"].setValue(0)
    group["share"].setValue(0.25)
    group["way"].setCurrentText("b")
    group["names"].set_names(["y", "x"])
    group["loud"].click()
    group["file"].setText(" here ")
    group["pairs"].setText("a=1, b=22")
    assert len(heard) == 8
    expected = Toy(4, 0, 0.25, "b", ("x", "y"), True, "here", (("a", 1), ("b", 22)))
    assert build(Toy, group.values()) == expected
    assert group.summary.startswith("n 4, most 0, share 0.25, way b, names x, y, loud, file here")
    group["pairs"].setText("a")
    with pytest.raises(OptionError, match="'a' is not a pair"):
        group.values()


def test_every_option_of_a_run_is_shown_somewhere(qtbot: QtBot) -> None:
    """What has a row has a field, in exactly one place of the Run panel or of Lab."""
    from app.panels.run_panel import RunPanel

    panel = RunPanel()
    qtbot.addWidget(panel)
    groups = (panel.draft, panel.sampling, panel.memory, panel.limits, *panel.provoking)
    shown = [path for group in groups for path in group.paths()] + list(ABOVE)
    assert len(set(shown)) == len(shown)
    assert set(shown) == {one.path for one in options_in(RunOptions) if one.option.row}
    assert all(isinstance(group[path[-1]], QWidget) for group in groups for path in group.paths())


def test_the_arrow_of_names_opens_them(group: OptionGroup, qtbot: QtBot) -> None:
    """Instead of going on to the next field, as a button of Qt does."""
    group.show()
    field = group["names"]
    opened: list[bool] = []
    field.menu().aboutToShow.connect(lambda: opened.append(True))
    QTimer.singleShot(100, field.menu().close)
    qtbot.keyClick(field, Qt.Key.Key_Down)
    assert opened
