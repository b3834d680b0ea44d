"""The gate's form: every option of the command line, its values, and settings that are kept."""

from __future__ import annotations

from argparse import ArgumentParser

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QAction
from PySide6.QtWidgets import QPushButton
from pytestqt.qtbot import QtBot

from app.cli.check_rollback import add_arguments
from app.panels.lab.gate_view import GateForm
from engine.option_fields import options_in
from engine.options.llama_cpp import DEFAULT_GATE, GateOptions, LlamaSettings


@pytest.fixture
def form(qtbot: QtBot) -> GateForm:
    made = GateForm()
    qtbot.addWidget(made)
    made.show()
    return made


def test_it_has_every_option_of_the_command_and_its_default(form: GateForm) -> None:
    assert form.options() == DEFAULT_GATE
    assert form.words.text() == "defaults"
    assert set(form.fields) == {one.field for one in options_in(GateOptions)}
    add_arguments(parser := ArgumentParser())
    usage = parser.format_help()
    for one, field in form.fields.values():
        assert one.option.name in field.toolTip() and field.accessibleName()
        assert all(flag in usage for flag in one.option.flags)


def test_fields_become_options(form: GateForm, qtbot: QtBot) -> None:
    field = {name: field for name, (_, field) in form.fields.items()}
    field["n_gpu_layers"].setValue(-1)
    field["flash_attn"].setCurrentText("on")
    field["type_k"].setCurrentText("q8_0")
    field["devices"].setText(" CUDA0 ")
    field["kv_unified"].setChecked(True)
    field["n_batch"].setValue(64)
    field["n_slots"].setValue(3)
    field["n_rs_seq"].setValue(5)
    field["depths"].setText("2,4")
    field["mtp"].setChecked(True)
    field["baseline"].setText("before.json")
    expected = GateOptions(
        LlamaSettings(-1, "CUDA0", "on", "q8_0", kv_unified=True),
        n_batch=64,
        n_slots=3,
        n_rs_seq=5,
        depths=(2, 4),
        mtp=True,
        baseline="before.json",
    )
    assert form.options() == expected
    assert expected.settings == LlamaSettings(-1, "CUDA0", "on", "q8_0", "f32", True, 64, True)
    assert form.words.text() == (
        "-ngl -1 --llama-device CUDA0 -fa on -ctk q8_0 -kvu -b 64 -np 3 --n-rs-seq 5 "
        "--depths 2,4 --mtp --baseline before.json"
    )
    with qtbot.waitSignal(form.asked) as asked:
        qtbot.mouseClick(form.check, Qt.MouseButton.LeftButton)
    assert asked.args == [(expected,)]
    assert not form.body.isVisible()


def test_kept_settings_are_asked_for_once_each(form: GateForm, qtbot: QtBot) -> None:
    form.keep.click()
    form.keep.click()
    form.fields["flash_attn"][1].setCurrentText("on")
    with qtbot.waitSignal(form.asked) as asked:
        form.ask()
    assert [one.llama.flash_attn for one in asked.args[0]] == ["off", "on"]
    (chip,) = [one for one in form.findChildren(QPushButton) if "✕" in one.text()]
    chip.click()
    with qtbot.waitSignal(form.asked) as asked:
        form.ask()
    assert [one.llama.flash_attn for one in asked.args[0]] == ["on"]


def test_what_cannot_be_read_is_said_and_not_asked(form: GateForm, qtbot: QtBot) -> None:
    form.fields["depths"][1].setText("1,99")
    assert "not a list of whole numbers from 1 to 64" in form.words.text()
    assert not form.keep.isEnabled()
    with qtbot.assertNotEmitted(form.asked):
        form.ask()


def test_it_follows_its_action(form: GateForm, qtbot: QtBot) -> None:
    action = QAction()
    action.setEnabled(False)
    form.follow(action)
    assert not form.check.isEnabled()
    action.setEnabled(True)
    assert form.check.isEnabled()
