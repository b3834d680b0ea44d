"""The lane list: what it gives, and what it says about mistakes."""

from __future__ import annotations

import pytest
from PySide6.QtWidgets import QLabel
from pytestqt.qtbot import QtBot

from app.looks import Theme
from app.panels.divergence.comparison_header import LaneEditor, parse_lanes
from engine.compare.lane_spec import DEFAULT_LANES, LaneSpec
from engine.errors import OptionError
from engine.options import RunOptions, SpecOptions


@pytest.fixture
def editor(qtbot: QtBot) -> LaneEditor:
    editor = LaneEditor(Theme("dark"))
    qtbot.addWidget(editor)
    return editor


def test_the_default_lanes_are_those_of_the_engine(editor: LaneEditor) -> None:
    assert editor.lanes() == DEFAULT_LANES
    assert editor.error == ""


def test_a_line_is_a_lane(editor: LaneEditor) -> None:
    editor.text.setPlainText("\n ring,n_rs_seq=2 \n\nplanes,split=seq,fault=stale-plane\n")
    lanes = editor.lanes()
    assert lanes is not None
    assert [lane.name for lane in lanes] == [
        "noise",
        "ring,n_rs_seq=2",
        "planes,split=seq,fault=stale-plane",
    ]
    assert lanes[1] == LaneSpec.parse("ring,n_rs_seq=2")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("planes\nplans", ("Line 2", "'plans'")),
        ("planes,fault=odd", ("Line 1", "odd")),
        ("planes,n_rs_seq=many", ("Line 1", "many")),
        ("ring\n\nring", ("Line 3", "twice")),
        ("noise", ("Line 1", "always included")),
        (" \n", ("No lane",)),
    ],
)
def test_mistakes_are_named(editor: LaneEditor, text: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(OptionError):
        parse_lanes(text)
    editor.text.setPlainText(text)
    assert editor.lanes() is None
    shown = " ".join(label.text() for label in editor.findChildren(QLabel))
    assert all(part in editor.error and part in shown for part in parts)
    editor.set_defaults()
    assert editor.error == "" and editor.lanes() is not None


def test_lanes_are_added_from_the_menu(editor: LaneEditor) -> None:
    menu = editor.add_button.menu()
    offered = [action.text() for action in menu.actions() if action.text()]
    for name in offered:
        LaneSpec.parse(name)
    editor.text.setPlainText("planes\n")
    next(a for a in menu.actions() if a.text() == "ring,fault=no-conv-rollback").trigger()
    assert editor.text.toPlainText() == "planes\nring,fault=no-conv-rollback"
    assert editor.error == ""


def test_a_fault_that_cannot_act_is_noted(editor: LaneEditor) -> None:
    editor.text.setPlainText("planes\nring,fault=plane-off-by-one")
    assert editor.error == "" and editor.lanes() is not None
    assert editor.note.startswith("ring,fault=plane-off-by-one: Fault plane-off-by-one cannot act")
    assert any(editor.note == label.text() for label in editor.findChildren(QLabel))
    editor.text.setPlainText("planes,fault=stale-plane")
    assert "-ub" in editor.note
    spec = SpecOptions(types=("draft-mtp",), n_max=4)
    editor.set_options(RunOptions(spec=spec, n_ubatch=4))
    assert editor.note == ""


def test_the_faults_on_offer_can_act(editor: LaneEditor) -> None:
    editor.set_options(RunOptions(spec=SpecOptions(types=("draft-mtp",))))
    for action in (each for each in editor.add_button.menu().actions() if each.isEnabled()):
        editor.text.setPlainText(action.text() or "planes")
        assert (editor.error, editor.note) == ("", "")


@pytest.mark.parametrize("why", ["", "llama.cpp lanes need a build of llama.cpp."])
def test_lanes_of_llama_cpp_are_offered_or_say_what_they_need(
    qtbot: QtBot, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setattr("app.panels.divergence.comparison_header.missing", lambda: why)
    editor = LaneEditor(Theme("dark"))
    qtbot.addWidget(editor)
    offered = {a.text(): a for a in editor.add_button.menu().actions()}
    action = offered["llama.cpp,rollback=planes"]
    assert action.isEnabled() == (not why) and (not why or action.toolTip() == why)
    editor.text.setPlainText("llama.cpp,rollback=checkpoint,device")
    assert editor.lanes() is not None
    assert editor.note == why


def test_what_a_button_replaced_comes_back_by_undo(editor: LaneEditor) -> None:
    first = editor.text.toPlainText()
    editor.text.undo()
    assert editor.text.toPlainText() == first, "nothing was typed yet"
    editor.text.setFocus()
    editor.text.selectAll()
    editor.text.insertPlainText("ring")
    editor.set_defaults()
    assert editor.text.toPlainText() == first
    editor.text.undo()
    assert editor.text.toPlainText() == "ring"
    (add, *_) = editor.add_button.menu().actions()
    add.trigger()
    assert editor.text.toPlainText() != "ring"
    editor.text.undo()
    assert editor.text.toPlainText() == "ring"
