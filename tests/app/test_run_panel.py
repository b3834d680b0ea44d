"""The Run panel gives the options that it shows, and only what makes sense is on show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PySide6.QtCore import QPoint, QPointF, Qt
from PySide6.QtGui import QWheelEvent
from PySide6.QtWidgets import QApplication, QWidget
from pytestqt.qtbot import QtBot

from app.events import ModelFiles
from app.views.run_panel import RunPanel
from engine.options import RunOptions, SamplerOptions, SpecOptions
from resources import demo_prompts
from tests.support.fake_session import FakeInfo, FakeLayer


def files(*, mtp: bool, draft: bool) -> ModelFiles:
    layers = (FakeLayer(0, "recurrent"), FakeLayer(1, "mtp" if mtp else "attention"))
    info: Any = FakeInfo(layers=layers)
    path = Path("draft.gguf") if draft else None
    return ModelFiles(Path("a.gguf"), path, info, info if draft else None, {})


@pytest.fixture
def panel(qtbot: QtBot) -> RunPanel:
    panel = RunPanel()
    qtbot.addWidget(panel)
    panel.resize(320, 700)
    panel.show()
    panel.set_files(files(mtp=True, draft=True))
    return panel


def test_first_options_are_the_engine_defaults_with_a_drafter(panel: RunPanel) -> None:
    assert panel.options() == replace(RunOptions(), spec=SpecOptions(types=("draft-mtp",)))
    assert panel.compute.currentText() == "auto"


def test_every_field_reaches_the_options(panel: RunPanel) -> None:
    panel.n_predict.setValue(77)
    panel.temp.setValue(0.8)
    panel.top_k.setValue(12)
    panel.top_p.setValue(0.5)
    panel.min_p.setValue(0.1)
    panel.seed.setValue(9)
    panel.drafter.set_types(["draft-simple", "ngram-mod"])
    panel.n_max.setValue(5)
    panel.n_min.setValue(2)
    panel.p_min.setValue(0.25)
    panel.rollback.setCurrentText("checkpoint")
    panel.split.setCurrentText("seq")
    panel.ignore_eos.setChecked(True)
    assert panel.options() == RunOptions(
        n_predict=77,
        sampler=SamplerOptions(temp=0.8, top_k=12, top_p=0.5, min_p=0.1, seed=9),
        spec=SpecOptions(types=("ngram-mod", "draft-simple"), n_max=5, n_min=2, p_min=0.25),
        rollback="checkpoint",
        split="seq",
        ignore_eos=True,
    )
    panel.rollback.setCurrentText("planes")
    panel.n_rs_seq.setValue(7)
    assert panel.options().n_rs_seq == 7
    panel.drafter.set_types([])
    assert panel.options().spec.types == ()


def test_n_min_above_n_max_is_no_way_to_an_error(panel: RunPanel) -> None:
    panel.n_min.setValue(9)
    panel.n_max.setValue(2)
    assert panel.options().spec.n_min == 2


def test_options_without_effect_are_hidden(panel: RunPanel) -> None:
    assert panel.n_max.isVisible()
    assert panel.n_rs_seq.isVisible()
    assert not panel.top_k.isVisible()
    panel.temp.setValue(1)
    panel.drafter.set_types(["ngram-cache"])
    assert panel.rollback.isVisible()
    assert not panel.n_max.isVisible()
    panel.drafter.set_types([])
    assert not panel.rollback.isVisible()
    assert panel.top_k.isVisible()
    assert panel.seed.isVisible()
    assert not panel.n_max.isVisible()
    assert not panel.n_rs_seq.isVisible()


@pytest.mark.parametrize(
    ("mtp", "draft", "chosen"),
    [
        (True, False, "draft-mtp"),
        (False, True, "draft-simple"),
        (False, False, "none"),
        (True, True, "draft-mtp"),
    ],
)
def test_drafters_follow_the_files(panel: RunPanel, mtp: bool, draft: bool, chosen: str) -> None:
    panel.set_files(files(mtp=mtp, draft=draft))
    assert panel.drafter.text() == chosen
    action = panel.drafter.actions_by_name["draft-simple"]
    assert action.isEnabled() is draft
    if not draft:
        assert "draft model" in action.toolTip()
    assert panel.drafter.actions_by_name["ngram-mod"].isEnabled()


def test_a_chosen_drafter_comes_back_with_a_model_that_has_it(panel: RunPanel) -> None:
    panel.set_files(files(mtp=False, draft=False))
    panel.set_files(files(mtp=True, draft=False))
    assert panel.drafter.text() == "draft-mtp"


def test_drafters_are_ticked_in_a_menu_that_stays_open(panel: RunPanel, qtbot: QtBot) -> None:
    menu = panel.drafter.menu()
    menu.popup(panel.mapToGlobal(QPoint(0, 0)))
    for name in ("ngram-mod", "ngram-simple"):
        where = menu.actionGeometry(panel.drafter.actions_by_name[name]).center()
        qtbot.mouseMove(menu, where)
        qtbot.mouseClick(menu, Qt.MouseButton.LeftButton, pos=where)
        assert menu.isVisible()
    assert panel.drafter.text() == "ngram-simple, ngram-mod, draft-mtp"
    assert panel.options().spec.types == ("ngram-simple", "ngram-mod", "draft-mtp")
    menu.setActiveAction(panel.drafter.actions_by_name["ngram-mod"])
    qtbot.keyClick(menu, Qt.Key.Key_Space)
    assert menu.isVisible()
    assert panel.drafter.types() == ("ngram-simple", "draft-mtp")
    panel.set_files(files(mtp=False, draft=False))
    assert panel.drafter.types() == ("ngram-simple",)
    panel.set_files(files(mtp=True, draft=False))
    assert panel.drafter.types() == ("ngram-simple", "draft-mtp")
    menu.actions()[0].trigger()
    assert panel.drafter.text() == "none"
    menu.close()


def test_example_prompts_fill_the_box(panel: RunPanel, qtbot: QtBot) -> None:
    prompts = demo_prompts()
    panel.use_first_prompt()
    assert panel.texts() == [prompts[0].text]
    panel.prompt.setPlainText("mine")
    panel.use_first_prompt()
    assert panel.texts() == ["mine"], "what is typed is never overwritten"
    panel.examples.activated.emit(2)
    assert panel.texts() == [prompts[2].text]


def test_compute_is_announced_only_when_the_user_chooses(panel: RunPanel, qtbot: QtBot) -> None:
    seen: list[str] = []
    panel.compute_changed.connect(seen.append)
    panel.set_compute("f32")
    assert seen == []
    panel.compute.setCurrentText("auto")
    assert seen == ["auto"]


def test_the_wheel_does_not_change_a_field_without_focus(panel: RunPanel) -> None:
    field = panel.n_predict
    panel.prompt.setFocus()
    value = field.value()
    centre = QPointF(field.rect().center())
    wheel = QWheelEvent(
        centre, QPointF(field.mapToGlobal(QPoint(5, 5))), QPoint(0, 120), QPoint(0, 120),
        Qt.MouseButton.NoButton, Qt.KeyboardModifier.NoModifier, Qt.ScrollPhase.NoScrollPhase,
        False,
    )  # fmt: skip
    QApplication.sendEvent(field, wheel)
    assert field.value() == value


def test_tab_goes_through_the_fields_in_reading_order(panel: RunPanel) -> None:
    order: list[QWidget] = []
    widget: QWidget | None = panel.examples
    while widget is not None and widget not in order:
        order.append(widget)
        widget = widget.nextInFocusChain()
    fields = [w for w in order if w in (
        panel.examples, panel.prompt, panel.n_predict, panel.drafter, panel.n_max, panel.rollback,
        panel.compute, panel.temp, panel.ignore_eos,
    )]  # fmt: skip
    tops = [field.mapTo(panel, QPoint(0, 0)).y() for field in fields]
    assert tops == sorted(tops)
    assert len(fields) == 9


def test_every_field_has_a_name_and_says_which_option_it_is(panel: RunPanel) -> None:
    assert panel.prompt.accessibleName()
    assert panel.examples.accessibleName()
    for field in (panel.n_predict, panel.drafter, panel.compute, panel.ignore_eos, panel.split):
        assert field.accessibleName()
        assert field.toolTip().startswith("-")
