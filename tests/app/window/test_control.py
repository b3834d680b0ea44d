"""Run control in the real window: break rules, the list of runs, ending one sequence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from PySide6.QtCore import QPoint, Qt
from PySide6.QtWidgets import QApplication, QMenu, QToolButton
from pytestqt.qtbot import QtBot

from app.engine_thread.bridge import Bridge
from app.engine_thread.events import State
from app.looks import Theme
from app.panels.lab.breaks_view import BreaksView
from app.saved.settings import Settings
from app.trace_models.run_facts import effective, run_marks, run_title
from app.window.window import MainWindow
from engine.analysis.breaks import EXAMPLES, BreakRule
from engine.trace.facts import RunFacts
from resources import DEMO_DRAFT
from tests.support.fake_session import FakeEngine
from tests.support.window_acts import settle, wait


@pytest.fixture
def loaded(loaded: MainWindow) -> MainWindow:
    """With a prompt."""
    loaded.run_panel.prompt.setPlainText("start")
    return loaded


@pytest.fixture
def view(qtbot: QtBot) -> BreaksView:
    view = BreaksView(Theme("dark"))
    qtbot.addWidget(view)
    view.show()
    return view


# -- the list of rules ---------------------------------------------------------------------


def test_rules_are_typed_ticked_edited_and_removed_by_keys(view: BreaksView, qtbot: QtBot) -> None:
    heard: list[tuple[BreakRule, ...]] = []
    view.rules_changed.connect(lambda: heard.append(view.rules()))
    qtbot.keyClicks(view.line, "depth>=3")
    qtbot.keyClick(view.line, Qt.Key.Key_Return)
    assert view.entries() == [("depth >= 3", True)]
    assert view.line.text() == ""
    assert heard == [(BreakRule("depth", 3),)]
    view.list.setFocus()
    qtbot.keyClick(view.list, Qt.Key.Key_Space)
    assert view.entries() == [("depth >= 3", False)]
    assert view.rules() == ()
    view.list.item(0).setText("depth >= 7")
    assert view.entries() == [("depth >= 7", False)]
    qtbot.keyClick(view.list, Qt.Key.Key_Delete)
    assert view.entries() == []


def test_a_wrong_rule_is_said_while_it_is_typed(view: BreaksView, qtbot: QtBot) -> None:
    view.line.setText("depth > 3")
    assert "depth >= 4" in view.message
    assert not view.add_button.isEnabled()
    qtbot.keyClick(view.line, Qt.Key.Key_Return)
    assert view.entries() == []
    view.add(BreakRule.parse("path = restore"))
    view.list.item(0).setText("path = nowhere")
    assert view.entries() == [("path = restore", True)], "it goes back to what it was"
    assert "rollback path" in view.message


def test_the_same_rule_twice_is_one(view: BreaksView) -> None:
    for _ in range(2):
        view.add(BreakRule.parse("finding"))
    assert view.entries() == [("finding", True)]


def test_examples_are_written_into_the_line(view: BreaksView) -> None:
    for action, example in zip(view.examples_button.menu().actions(), EXAMPLES, strict=True):
        action.trigger()
        assert view.line.text() == example
        assert view.add_button.isEnabled()


# -- breaking ------------------------------------------------------------------------------


def test_a_rule_pauses_the_run_and_says_where(loaded: MainWindow, qtbot: QtBot) -> None:
    loaded.actions_by_id["run.add_break"].trigger()
    qtbot.waitUntil(loaded.breaks.isVisible)
    qtbot.keyClicks(loaded.breaks.line, "depth >= 2")
    qtbot.keyClick(loaded.breaks.line, Qt.Key.Key_Return)
    loaded.actions_by_id["run.start"].trigger()
    wait(qtbot, loaded, State.PAUSED)
    # the fake accepts 1, 2, 3, 0 of three tokens in turn, from round 1 on
    said = "A break rule matched: depth >= 2: round 1, sequence 0, depth 2 ≤ n_rs_seq 3."
    assert [b.message for b in loaded.banners.banners] == [said]
    assert loaded.feed.cursor is not None and loaded.feed.cursor.round == 1
    assert "round 1" in loaded.breaks.message
    assert len(loaded.bridge.store.rounds) == 2, "not a round more"
    loaded.actions_by_id["run.start"].trigger()
    qtbot.waitUntil(lambda: "round 4" in loaded.breaks.message)
    wait(qtbot, loaded, State.PAUSED)
    loaded.breaks.list.item(0).setCheckState(Qt.CheckState.Unchecked)
    loaded.actions_by_id["run.start"].trigger()
    wait(qtbot, loaded, State.READY)
    assert loaded.banners.banners == []


def test_a_rule_does_not_hold_for_an_earlier_run(loaded: MainWindow, qtbot: QtBot) -> None:
    loaded.actions_by_id["run.start"].trigger()
    wait(qtbot, loaded, State.READY)
    loaded.breaks.add(BreakRule.parse("path = restore"))
    loaded.actions_by_id["run.start"].trigger()
    wait(qtbot, loaded, State.READY)
    assert loaded.banners.banners == [], "the fake only takes seq_rm"


def test_a_divergence_pauses_a_comparison(loaded: MainWindow, qtbot: QtBot) -> None:
    loaded.breaks.add(BreakRule.parse("divergence > 1e-12"))
    loaded.actions_by_id["run.compare"].trigger()
    wait(qtbot, loaded, State.PAUSED)
    assert "NMSE" in loaded.breaks.message
    loaded.actions_by_id["run.stop"].trigger()
    wait(qtbot, loaded, State.READY)


def test_stop_wins_over_a_break(loaded: MainWindow, engine: FakeEngine, qtbot: QtBot) -> None:
    engine.rounds = 10_000
    loaded.breaks.add(BreakRule.parse("path = none"))
    loaded.actions_by_id["run.start"].trigger()
    loaded.bridge.stop()
    wait(qtbot, loaded, State.READY)


def test_rules_are_kept(loaded: MainWindow) -> None:
    loaded.breaks.add(BreakRule.parse("depth >= 4"))
    loaded.breaks.add(BreakRule.parse("finding"))
    loaded.breaks.list.item(1).setCheckState(Qt.CheckState.Unchecked)
    loaded.settings.sync()
    kept = Settings().break_rules
    assert kept == [("depth >= 4", True), ("finding", False)]
    loaded.breaks.set_entries([*kept, ("nonsense", True)])
    assert loaded.breaks.entries() == kept, "a line that is not a rule is left out"


# -- runs ----------------------------------------------------------------------------------


def cells(window: MainWindow, row: int) -> list[str]:
    model = window.runs.model
    return [model.index(row, c).data() for c in range(model.columnCount())]


def shown(window: MainWindow) -> int | None:
    run = window.runs.model.shown
    return None if run is None else run.run_id


def test_runs_are_listed_and_shown_on_demand(loaded: MainWindow, qtbot: QtBot) -> None:
    loaded.docks.reveal("runs")
    for _ in range(2):
        loaded.actions_by_id["run.start"].trigger()
        wait(qtbot, loaded, State.READY)
    loaded.runs.refresh_numbers()
    assert [cells(loaded, row)[0] for row in range(2)] == ["0", "1"]
    assert cells(loaded, 0)[3] != "0"
    assert shown(loaded) == 1
    loaded.runs.table.setFocus()
    qtbot.keyClick(loaded.runs.table, Qt.Key.Key_Up)
    qtbot.keyClick(loaded.runs.table, Qt.Key.Key_Return)
    assert shown(loaded) == 0
    stream = loaded.tokens.areas[0].stream
    assert stream is not None and stream.run.run_id == 0


def test_what_a_run_is_in_words() -> None:
    spec = {"types": ("draft-mtp",), "n_max": 3, "n_min": 0, "p_min": 0.0, "accept": "match"}
    options = {
        "spec": spec,
        "rollback": "ring",
        "faults": ("stale-plane",),
        "sampler": {"temp": 0.0},
        "replay": "trust",
        "checkpoint_device": "host",
        "n_batch": 2048,
        "n_ubatch": 512,
    }
    facts = RunFacts({"options": options, "synthetic": True, "n_ctx": 2048, "n_rs_seq": 3})
    assert run_title(facts) == "draft-mtp · ring"
    assert run_title(RunFacts({**facts, "lane": "planes,split=seq"})) == "lane planes,split=seq"
    assert run_title(RunFacts()) == "no drafter"
    assert run_marks(facts) == ("invalid: synthetic acceptance", "fault stale-plane")
    assert run_marks(RunFacts()) == ()
    text = effective(facts)
    assert "n_ctx 2,048" in text and "rollback ring" in text and "greedy" in text
    assert "batch-invariant" not in text
    assert "batch-invariant" in effective(
        RunFacts({"options": {**options, "batch_invariant": True}})
    )
    assert effective(RunFacts()) == ""


def test_a_faulty_run_is_red(loaded: MainWindow, qtbot: QtBot) -> None:
    loaded.docks.reveal("runs")
    loaded.actions_by_id["run.start"].trigger()
    wait(qtbot, loaded, State.READY)
    role = Qt.ItemDataRole.ForegroundRole
    assert loaded.runs.model.index(0, 2).data(role) is None
    loaded.bridge.store.begin_run({"options": {"faults": ("stale-plane",)}, "stops": ["limit"]})
    loaded.runs.refresh_numbers()
    assert loaded.runs.model.index(1, 2).data(role) == loaded.panels.theme.color("status.error")


# -- what is in the way of a run -------------------------------------------------------


def test_options_that_contradict_start_nothing(loaded: MainWindow) -> None:
    loaded.run_panel.synthetic["synth_rates"].setText("2")
    loaded.docks["run"].hide()
    for action in ("run.start", "run.step", "run.compare"):
        loaded.actions_by_id[action].trigger()
        assert loaded.bridge.state is State.READY
    assert not loaded.bridge.store.runs
    assert loaded.docks["run"].isVisible()
    assert [b.message for b in loaded.banners.banners] == [loaded.run_panel.problem]


def test_a_model_without_a_chat_template_says_so(loaded: MainWindow, qtbot: QtBot) -> None:
    loaded.run_panel.prompts.chat_box.setChecked(True)
    loaded.actions_by_id["run.start"].trigger()
    wait(qtbot, loaded, State.READY)
    assert "no chat template" in loaded.banners.banners[0].message
    loaded.run_panel.prompts.chat_box.setChecked(False)
    loaded.actions_by_id["run.start"].trigger()
    wait(qtbot, loaded, State.READY)


# -- one sequence --------------------------------------------------------------------------


def end_sequence(window: MainWindow) -> bool:
    """Open the menu of the first stream and choose to end it; whether that was offered."""
    window.tokens._panels[0].customContextMenuRequested.emit(QPoint(5, 5))
    menu = QApplication.activePopupWidget()
    assert isinstance(menu, QMenu)
    *others, _, action = menu.actions()
    copies = ["file.copy_text", "file.copy_step"]
    assert [one.objectName() for one in others] == [*copies, "go.inspect", "run.fork"]
    offered = action.isEnabled()
    action.trigger()
    menu.close()
    return offered


@pytest.mark.parametrize("paused", [True, False])
def test_one_sequence_is_ended(
    loaded: MainWindow, engine: FakeEngine, qtbot: QtBot, paused: bool
) -> None:
    engine.rounds = 10_000
    for _ in range(3):
        loaded.actions_by_id["run.step"].trigger()
        wait(qtbot, loaded, State.PAUSED)
    if not paused:
        loaded.actions_by_id["run.start"].trigger()
    assert end_sequence(loaded)
    qtbot.waitUntil(lambda: len(engine.cancelled) == 1)
    assert engine.cancelled[0][0] == 0
    if paused:
        assert engine.cancelled == [(0, 3)]
    loaded.bridge.stop()
    wait(qtbot, loaded, State.READY)
    assert not end_sequence(loaded), "the run has ended"


def test_a_sequence_that_is_not_there_is_a_message(loaded: MainWindow, qtbot: QtBot) -> None:
    loaded.actions_by_id["run.step"].trigger()
    wait(qtbot, loaded, State.PAUSED)
    assert loaded.bridge.live is not None
    loaded.bridge.cancel_sequence(loaded.bridge.live, 5)
    qtbot.waitUntil(lambda: bool(loaded.banners.banners))
    assert "no sequence 5" in loaded.banners.banners[0].message
    loaded.actions_by_id["run.stop"].trigger()
    wait(qtbot, loaded, State.READY)


# -- fidelity ------------------------------------------------------------------------------


def test_fidelity_is_measured_with_one_click(
    make_window: Callable[[Bridge], MainWindow], qtbot: QtBot
) -> None:
    window = make_window(Bridge())
    window.run_panel.set_loading("int8", None, "auto")
    window.open_model(DEMO_DRAFT)
    qtbot.waitUntil(lambda: window.bridge.state is State.READY, timeout=120_000)
    window.actions_by_id["run.measure_fidelity"].trigger()
    assert not window.actions_by_id["run.measure_fidelity"].isEnabled()
    qtbot.waitUntil(lambda: window.bridge.state is State.READY, timeout=120_000)
    (said,) = [banner.message for banner in window.banners.banners]
    assert said.startswith("Fidelity: int8 against f32 over ")
    window.run_panel.prompt.setPlainText("def f")
    window.run_panel.n_predict.setValue(3)
    window.actions_by_id["run.start"].trigger()
    qtbot.waitUntil(lambda: 0 in window.bridge.store.runs, timeout=120_000)
    qtbot.waitUntil(lambda: window.bridge.state is State.READY, timeout=120_000)
    facts = window.bridge.store.runs[0]
    assert facts["fidelity"]["compute"] == facts["compute"] == "int8"
    assert "NMSE" in effective(facts)
    assert window.bridge.compute == "int8", "the model in use is still the one that was"


def test_the_first_look_at_a_small_screen_has_all_that_a_run_needs(
    window: MainWindow, qtbot: QtBot
) -> None:
    """Without scrolling; the button that runs is in the tool bar."""
    window.resize(1280, 800)
    settle(qtbot)
    panel = window.run_panel
    for field in (panel.prompt, panel.drafter, panel.n_max, panel.rollback, panel.n_predict):
        seen = field.visibleRegion().boundingRect()
        assert seen.height() >= field.height() - 2, field.accessibleName()
    (run,) = [
        button
        for button in window.findChildren(QToolButton)
        if button.defaultAction() is window.actions_by_id["run.start"]
    ]
    assert run.isVisible() and window.rect().contains(run.mapTo(window, run.rect().center()))


def test_the_run_panel_remembers_its_open_groups(
    make_window: Callable[[Bridge], MainWindow], engine: FakeEngine
) -> None:
    def new() -> MainWindow:
        return make_window(Bridge(engine))

    first = new()
    assert first.run_panel.open_groups() == []
    first.run_panel.limits.header.click()
    first.run_panel.sampling.header.click()
    first.close()
    assert new().run_panel.open_groups() == ["sampling", "limits"]


def test_the_key_of_what_is_disabled_says_what_it_needs(window: MainWindow, qtbot: QtBot) -> None:
    qtbot.keyClick(window, Qt.Key.Key_X)
    assert window.status.currentMessage().startswith("X needs a comparison that has diverged")
