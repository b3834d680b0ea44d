"""Groups of the Run panel: what they hold, say, and bring back."""

from __future__ import annotations

import json

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QPalette
from PySide6.QtWidgets import QApplication, QFileDialog
from pytestqt.qtbot import QtBot

from app.looks import Theme, apply_theme
from app.panels.run_panel import RunPanel
from engine.errors import OptionError


def test_what_contradicts_itself_is_said_in_place(panel: RunPanel) -> None:
    heard: list[str] = []
    panel.options_changed.connect(lambda: heard.append(panel.problem))
    panel.synthetic["synth_rates"].setText("0.5, 0.9, 0.1")
    assert "rises" in panel.problem
    assert panel.message.text() == panel.problem == heard[-1]
    with pytest.raises(OptionError):
        panel.options()
    panel.synthetic["synth_rates"].setText("0.9, x")
    assert "is not a number" in panel.problem
    panel.synthetic["synth_rates"].setText("0.9 0.5 0.1")
    assert panel.problem == ""
    assert "invalid" in panel.message.text()
    assert "invalid" in panel.synthetic.summary
    assert panel.options().spec.synthetic == (0.9, 0.5, 0.1)
    panel.n_max.setValue(2)
    assert "3 values" in panel.problem
    panel.synthetic["synth_rates"].clear()
    panel.synthetic["synth_len"].setValue(2.5)
    assert panel.options().spec.synth_len == 2.5
    panel.drafter.set_names([])
    assert panel.problem == "", "nothing is drafted, so nothing is accepted"


def test_faults_are_red_and_named(panel: RunPanel) -> None:
    fault = panel.faults["faults"]
    plain = fault.palette().color(QPalette.ColorRole.ButtonText)
    fault.set_names(["stale-plane"])
    red = fault.palette().color(QPalette.ColorRole.ButtonText)
    assert red == QApplication.palette().color(QPalette.ColorRole.BrightText) != plain
    assert "stale-plane" in panel.message.text()
    assert "Fault stale-plane cannot act" in panel.message.text()
    panel.limits["n_ubatch"].setValue(2)
    assert "cannot act" not in panel.message.text()
    assert panel.faults.summary == "fault stale-plane, output may be wrong"
    panel.drafter.set_names([])
    assert panel.options().faults == (), "without a draft none does anything"
    panel.drafter.set_names(["draft-mtp"])
    app = QApplication.instance()
    assert isinstance(app, QApplication)
    before = app.palette()
    try:
        for name in ("dark", "light"):
            apply_theme(app, theme := Theme(name))
            QApplication.processEvents()
            palette = fault.palette()
            assert palette.color(QPalette.ColorRole.ButtonText) == theme.color("status.error")
            assert palette.color(QPalette.ColorRole.Button) == theme.color("ui.raised")
    finally:
        app.setPalette(before)
    fault.set_names([])
    assert fault.palette().color(QPalette.ColorRole.ButtonText) == plain


def test_a_folded_group_says_what_it_holds(panel: RunPanel, qtbot: QtBot) -> None:
    group = panel.sampling
    assert group.summary == "greedy"
    qtbot.keyClick(group.header, Qt.Key.Key_Space)
    assert not group["temp"].isVisible()
    group["temp"].setValue(0.5)
    assert group.summary == "temperature 0.5"
    qtbot.keyClick(group.header, Qt.Key.Key_Space)
    assert group["temp"].isVisible()


def test_a_group_without_a_relevant_row_is_gone(panel: RunPanel) -> None:
    panel.drafter.set_names([])
    assert not panel.draft.isVisible()
    panel.drafter.set_names(["ngram-mod"])
    assert panel.draft.isVisible()


def test_a_header_says_what_differs_from_the_defaults(panel: RunPanel) -> None:
    groups = (panel.draft, panel.sampling, panel.memory, panel.limits, panel.faults)
    assert [group.summary for group in groups] == ["", "greedy", "", "", "none"]
    panel.sampling["temp"].setValue(0.8)
    panel.sampling["top_k"].setValue(20)
    panel.ignore_eos.setChecked(True)
    assert panel.sampling.summary == "temperature 0.8, top_k 20, ignore end of text"
    panel.memory["kv"].setCurrentText("unified")
    panel.limits["n_ctx"].setValue(512)
    panel.draft["p_min"].setValue(0.5)
    panel.drafter.set_names(["draft-mtp", "ngram-simple"])
    panel.draft["ngram_simple.size_n"].setValue(3)
    assert panel.memory.summary == "KV unified"
    assert panel.limits.summary == "context 512"
    assert panel.draft.summary.startswith("p_min 0.5, simple n 3 m ")
    assert panel.limits.header.accessibleDescription() == "context 512"
    panel.sampling["temp"].setValue(0)
    assert panel.sampling.summary == "ignore end of text", "top_k has no effect"
    panel.drafter.set_names(["draft-mtp"])
    assert panel.draft.summary == "p_min 0.5"


def test_a_header_says_whether_its_rows_are_unfolded(panel: RunPanel) -> None:
    assert panel.limits.header.accessibleName() == "Limits, unfolded"
    panel.limits.header.click()
    assert panel.limits.header.accessibleName() == "Limits, folded"


def test_what_stood_in_the_form_comes_back_but_no_fault(panel: RunPanel, qtbot: QtBot) -> None:
    panel.prompts.editor.setPlainText("first")
    panel.prompts.add()
    panel.prompts.editor.setPlainText("sécond\n")
    panel.prompts.chat_box.setChecked(True)
    panel.drafter.set_names(["ngram-simple"])
    panel.n_max.setValue(7)
    panel.rollback.setCurrentText("ring")
    panel.sampling["temp"].setValue(0.5)
    panel.faults["faults"].set_names(["stale-plane"])
    kept = json.loads(json.dumps(panel.entries()))
    other = RunPanel()
    qtbot.addWidget(other)
    before = other.entries()
    other.put_entries(
        {"prompts": {"texts": [3], "copies": "x"}, "options": {"rollback": "no such"}}
    )
    other.put_entries({"prompts": [], "options": 3})
    assert other.entries() == before, "what the form cannot hold is left out"
    other.put_entries(kept)
    assert other.texts() == ["first", "sécond\n"]
    assert other.entries() == panel.entries()
    options = other.options()
    assert (options.rollback, options.sampler.temp, options.faults) == ("ring", 0.5, ())
    assert options.spec.types == ("ngram-simple",)
    assert other.chat() == {}


def test_a_grammar_is_chosen_in_a_dialog_and_labels_say_what_fields_do(
    qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    panel = RunPanel()
    qtbot.addWidget(panel)
    field = panel.sampling["grammar_file"]
    monkeypatch.setattr(QFileDialog, "getOpenFileName", lambda *_a, **_k: ("/x/a.lark", ""))
    (browse,) = [action for action in field.actions() if action.toolTip() == "Browse… (Alt+Down)"]
    browse.trigger()
    assert panel.options().sampler.grammar_file == "/x/a.lark"
    label = panel.sampling._form.labelForField(field)
    assert label.toolTip() == field.toolTip() != ""
