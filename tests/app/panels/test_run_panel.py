"""The Run panel gives the options that it shows, and only what makes sense is on show."""

from __future__ import annotations

from dataclasses import replace

import pytest
from PySide6.QtCore import QPoint, Qt
from PySide6.QtWidgets import QWidget
from pytestqt.qtbot import QtBot

from app.panels.run_panel import RunPanel
from engine.draft.ngram_drafter import NgramSizes
from engine.draft.suffix import SuffixOptions
from engine.options import RunOptions, SamplerOptions, SpecOptions
from resources import titled_prompts
from tests.app.panels.conftest import files


def test_first_options_are_the_engine_defaults_with_a_drafter(panel: RunPanel) -> None:
    assert panel.options() == replace(RunOptions(), spec=SpecOptions(types=("draft-mtp",)))
    assert panel.compute.currentText() == "auto"


def test_every_field_reaches_the_options(panel: RunPanel) -> None:
    panel.n_predict.setValue(77)
    panel.sampling["temp"].setValue(0.8)
    panel.sampling["top_k"].setValue(12)
    panel.sampling["top_p"].setValue(0.5)
    panel.sampling["min_p"].setValue(0.1)
    panel.sampling["seed"].setValue(9)
    panel.sampling["typical_p"].setValue(0.9)
    panel.sampling["repeat_penalty"].setValue(1.3)
    panel.sampling["repeat_last_n"].setValue(-1)
    panel.sampling["presence_penalty"].setValue(0.2)
    panel.sampling["frequency_penalty"].setValue(-0.1)
    panel.drafter.set_names(["draft-simple", "ngram-mod"])
    panel.n_max.setValue(5)
    panel.draft["n_min"].setValue(2)
    panel.draft["p_min"].setValue(0.25)
    panel.rollback.setCurrentText("checkpoint")
    panel.memory["split"].setCurrentText("seq")
    panel.ignore_eos.setChecked(True)
    panel.sampling["allow_non_finite"].setChecked(True)
    assert panel.options() == RunOptions(
        n_predict=77,
        sampler=SamplerOptions(
            temp=0.8,
            top_k=12,
            top_p=0.5,
            min_p=0.1,
            seed=9,
            typical_p=0.9,
            repeat_penalty=1.3,
            repeat_last_n=-1,
            presence_penalty=0.2,
            frequency_penalty=-0.1,
        ),
        spec=SpecOptions(types=("ngram-mod", "draft-simple"), n_max=5, n_min=2, p_min=0.25),
        rollback="checkpoint",
        split="seq",
        ignore_eos=True,
        allow_non_finite=True,
    )
    panel.rollback.setCurrentText("planes")
    panel.memory["n_rs_seq"].setValue(7)
    assert panel.options().n_rs_seq == 7
    panel.drafter.set_names([])
    assert panel.options().spec.types == ()


def test_n_min_above_n_max_is_no_way_to_an_error(panel: RunPanel) -> None:
    panel.draft["n_min"].setValue(9)
    panel.n_max.setValue(2)
    assert panel.options().spec.n_min == 2


def test_rejection_has_no_n_min(panel: RunPanel) -> None:
    """Thrown-away drafts would cost it the target's distribution; the engine refuses."""
    panel.draft["n_min"].setValue(2)
    panel.draft["p_min"].setValue(0.5)
    assert panel.draft["n_min"].isVisible()
    panel.draft["accept"].setCurrentText("rejection")
    assert not panel.draft["n_min"].isVisible()
    spec = panel.options().spec
    assert (spec.accept, spec.n_min, spec.p_min) == ("rejection", 0, 0.5)


def test_the_window_of_the_penalties_shows_with_a_penalty(panel: RunPanel) -> None:
    assert not panel.sampling["repeat_last_n"].isVisible()
    panel.sampling["presence_penalty"].setValue(0.5)
    assert panel.sampling["repeat_last_n"].isVisible()


def test_options_without_effect_are_hidden(panel: RunPanel) -> None:
    assert panel.n_max.isVisible()
    assert panel.memory["n_rs_seq"].isVisible()
    assert not panel.sampling["top_k"].isVisible()
    panel.sampling["temp"].setValue(1)
    panel.drafter.set_names(["ngram-cache"])
    assert panel.rollback.isVisible()
    assert not panel.n_max.isVisible()
    panel.drafter.set_names([])
    assert not panel.rollback.isVisible()
    assert panel.sampling["top_k"].isVisible()
    assert panel.sampling["seed"].isVisible()
    assert not panel.n_max.isVisible()
    assert not panel.memory["n_rs_seq"].isVisible()


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
    assert panel.drafter.names() == ("ngram-simple", "draft-mtp")
    panel.set_files(files(mtp=False, draft=False))
    assert panel.drafter.names() == ("ngram-simple",)
    panel.set_files(files(mtp=True, draft=False))
    assert panel.drafter.names() == ("ngram-simple", "draft-mtp")
    menu.actions()[0].trigger()
    assert panel.drafter.text() == "none"
    menu.close()


def test_example_prompts_fill_the_box(panel: RunPanel, qtbot: QtBot) -> None:
    prompts = titled_prompts()
    panel.use_first_prompt()
    assert panel.texts() == [prompts[0][1]]
    panel.prompt.setPlainText("mine")
    panel.use_first_prompt()
    assert panel.texts() == ["mine"], "what is typed is never overwritten"
    panel.prompts.examples.activated.emit(2)
    assert panel.texts() == [prompts[2][1]]
    panel.prompt.undo()
    assert panel.texts() == ["mine"], "nor by an example for good"


def test_loading_is_announced_only_when_the_user_chooses(panel: RunPanel, qtbot: QtBot) -> None:
    seen: list[tuple[str, bool | None]] = []
    panel.loading_changed.connect(
        lambda: seen.append((panel.compute.currentText(), panel.mmap_choice()))
    )
    panel.set_devices({"cuda:0": "Big", "cuda:1": "Small"})
    panel.set_loading("f32", True, "cuda:1")
    assert seen == [] and panel.device.currentText() == "cuda:1"
    panel.set_devices({"cuda:0": "Big", "cuda:1": "Small"})
    assert panel.device.count() == 4
    panel.compute.setCurrentText("auto")
    panel.mmap.setCurrentText("no")
    panel.mmap.setCurrentText("auto")
    panel.device.setCurrentText("cpu")
    assert seen == [("auto", True), ("auto", False), ("auto", None), ("auto", None)]


def test_tab_goes_through_the_fields_in_reading_order(panel: RunPanel) -> None:
    order: list[QWidget] = []
    widget: QWidget | None = panel.prompts.examples
    while widget is not None and widget not in order:
        order.append(widget)
        widget = widget.nextInFocusChain()
    fields = [
        w
        for w in order
        if w
        in (
            panel.prompts.examples,
            panel.prompt,
            panel.drafter,
            panel.n_max,
            panel.rollback,
            panel.n_predict,
            panel.compute,
            panel.sampling["temp"],
            panel.ignore_eos,
        )
    ]
    tops = [field.mapTo(panel, QPoint(0, 0)).y() for field in fields]
    assert tops == sorted(tops)
    assert len(fields) == 9


def test_every_field_has_a_name_and_says_which_option_it_is(panel: RunPanel) -> None:
    assert panel.prompt.accessibleName()
    assert panel.prompts.examples.accessibleName()
    for field in (
        panel.n_predict,
        panel.drafter,
        panel.compute,
        panel.ignore_eos,
        panel.memory["split"],
    ):
        assert field.accessibleName()
        assert field.toolTip().startswith("-")


# -- sequences and the chat template -------------------------------------------------------


def test_several_prompts_are_several_sequences(panel: RunPanel) -> None:
    panel.prompt.setPlainText("one")
    panel.prompts.add_button.click()
    panel.prompt.setPlainText("two")
    assert panel.texts() == ["one", "two"]
    assert panel.options().parallel == 2
    panel.prompts.choice.setCurrentIndex(0)
    panel.prompts.choice.activated.emit(0)
    assert panel.prompt.toPlainText() == "one"
    panel.prompts.copies.setValue(3)
    assert panel.texts() == ["one"] * 3 + ["two"] * 3
    assert panel.options().parallel == 6
    panel.limits["parallel"].setValue(2)
    assert panel.options().parallel == 2
    panel.prompts.remove_button.click()
    assert panel.texts() == ["two"] * 3
    assert not panel.prompts.remove_button.isEnabled(), "the last one stays"


def test_chat_template_variables_are_judged_in_place(panel: RunPanel) -> None:
    assert panel.chat() is None
    panel.prompts.chat_box.setChecked(True)
    assert panel.chat() == {}
    assert panel.prompts.chat_kwargs.isVisible()
    for wrong in ("{", "[1]", "true", '{"a": }', "[" * 5000):
        panel.prompts.chat_kwargs.setText(wrong)
        assert "JSON object" in panel.problem, wrong
        assert panel.message.isVisible()
    panel.prompts.chat_kwargs.setText('{"enable_thinking": false}')
    assert panel.problem == ""
    assert not panel.message.isVisible()
    assert panel.chat() == {"enable_thinking": False}


# -- options beyond the first lines --------------------------------------------------------


def test_a_removed_prompt_comes_back_where_it_was(panel: RunPanel, qtbot: QtBot) -> None:
    box = panel.prompts
    box.put_entries({"texts": ["a", "b", "c"]})
    panel.resize(300, 700)
    panel.show()
    qtbot.waitExposed(panel)
    buttons = box.add_button, box.remove_button
    places = [button.geometry() for button in buttons]
    assert not box.undo_button.isVisible()
    for index in (1, 0):
        box._go_to(index)
        box.remove_button.click()
    assert panel.texts() == ["c"]
    qtbot.waitUntil(box.undo_button.isVisible)
    assert [button.geometry() for button in buttons] == places
    box.undo_button.click()
    assert (panel.texts(), box.editor.toPlainText()) == (["a", "c"], "a")
    box.undo_button.click()
    assert (panel.texts(), box.editor.toPlainText()) == (["a", "b", "c"], "b")
    assert not box.undo_button.isVisible()


def test_limits_faults_and_bias_reach_the_options(panel: RunPanel) -> None:
    panel.limits["n_ctx"].setValue(512)
    panel.limits["n_batch"].setValue(64)
    panel.limits["n_ubatch"].setValue(16)
    panel.memory["checkpoint_device"].setCurrentText("device")
    panel.faults["faults"].set_names(["stale-plane", "stale-logits"])
    panel.sampling["logit_bias"].setText("302+1.5, 7-100")
    assert not panel.options().batch_invariant
    panel.memory["batch_invariant"].click()
    options = panel.options()
    assert options.batch_invariant
    assert (options.n_ctx, options.n_batch, options.n_ubatch) == (512, 64, 16)
    assert options.checkpoint_device == "device"
    assert options.faults == ("stale-logits", "stale-plane")
    assert options.sampler.logit_bias == ((302, 1.5), (7, -100.0))


def test_sizes_of_the_drafters_that_look_tokens_up(panel: RunPanel) -> None:
    panel.drafter.set_names(["ngram-simple", "ngram-map-k4v", "ngram-mod"])
    panel.draft["ngram_simple.size_n"].setValue(3)
    panel.draft["ngram_simple.size_m"].setValue(5)
    panel.draft["ngram_map_k4v.min_hits"].setValue(2)
    panel.draft["ngram_mod.n_match"].setValue(20)
    spec = panel.options().spec
    assert spec.ngram_simple == NgramSizes(3, 5)
    assert spec.ngram_map_k == NgramSizes(), "left alone"
    assert spec.ngram_map_k4v.min_hits == 2
    assert spec.ngram_mod.n_match == 20
    assert panel.draft["ngram_mod.n_match"].isVisible()
    assert not panel.draft["ngram_map_k.size_n"].isVisible()
    assert not panel.draft["lookup_cache_static"].isVisible()


def test_the_six_numbers_of_suffix_fit_and_arrive(panel: RunPanel) -> None:
    panel.drafter.set_names(["suffix"])
    assert panel.draft["suffix.max_tree_depth"].isVisible()
    assert panel.draft["suffix.min_token_prob"].isVisible()
    panel.draft["suffix.max_tree_depth"].setValue(16)
    panel.draft["suffix.min_token_prob"].setValue(0.25)
    assert panel.options().spec.suffix == SuffixOptions(max_tree_depth=16, min_token_prob=0.25)
    rows = {panel.draft[f"suffix.{name}"].parent() for name in ("n_max", "max_spec_factor")}
    assert len(rows) == 2
    panel.drafter.set_names(["ngram-simple"])
    assert not panel.draft["suffix.min_token_prob"].isVisible()


def test_a_grammar_is_named_by_its_file(panel: RunPanel) -> None:
    panel.sampling["json_schema"].setText(" a.json ")
    assert panel.options().sampler == SamplerOptions(json_schema="a.json")
    panel.sampling["grammar_file"].setText("b.lark")
    assert "both given" in panel.problem
    panel.sampling["json_schema"].setText("")
    assert panel.options().sampler.grammar_file == "b.lark"
    panel.sampling["ignore_eos"].setChecked(True)
    assert "--ignore-eos" in panel.problem
