"""Comparisons in the window: started, paused, stopped, shown, linked; fake and real engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QTabBar
from pytestqt.qtbot import QtBot

from app.engine_thread.bridge import Bridge
from app.engine_thread.events import RunRequest, State
from app.saved.settings import Settings
from app.widgets.fitted_labels import ScrollPage
from app.window.dialogs.runs import ScenarioDialog
from app.window.window import MainWindow
from engine.compare.lane_spec import NOISE_LANE, LaneSpec
from engine.compare.memory_script_parser import parse_script, read_script
from engine.options import RunOptions, SpecOptions
from engine.trace.export import export_csv
from engine.trace.reopen import open_trace
from engine.trace.run_ref import RunRef
from resources import MEMORY_SCRIPTS
from tests.support.clean import passed
from tests.support.fake_session import FakeEngine
from tests.support.window_acts import settle


def wait(qtbot: QtBot, window: MainWindow, state: State) -> None:
    qtbot.waitUntil(lambda: window.bridge.state is state)


@pytest.fixture
def loaded(loaded: MainWindow) -> MainWindow:
    """With a prompt."""
    loaded.run_panel.prompt.setPlainText("def f")
    return loaded


def press_compare(qtbot: QtBot, window: MainWindow) -> None:
    assert window.actions_by_id["run.compare"].isEnabled()
    qtbot.keyClick(window, Qt.Key.Key_F5, Qt.KeyboardModifier.ControlModifier)


def verdicts(window: MainWindow) -> list[str]:
    cards = window.divergence.header.cards.cards.values()
    return [passed(card.verdict.verdict) for card in cards if card.verdict is not None]


def test_the_first_look_has_no_lanes(window: MainWindow) -> None:
    assert not window.divergence.isVisible()
    assert not window.findings.isVisible()
    assert not window.actions_by_id["run.compare"].isEnabled(), "there is no model"
    assert not window.scenarios


def test_compare_takes_prompt_options_and_lanes(
    loaded: MainWindow, engine: FakeEngine, qtbot: QtBot
) -> None:
    loaded.run_panel.n_predict.setValue(77)
    loaded.divergence.header.editor.text.setPlainText("ring,split=seq")
    press_compare(qtbot, loaded)
    wait(qtbot, loaded, State.RUNNING)
    assert loaded.divergence.isVisible()
    wait(qtbot, loaded, State.READY)
    request = engine.compared[0]
    assert request.texts == ("def f",)
    assert request.options == loaded.run_panel.options()
    assert request.options.n_predict == 77
    assert request.lanes == (NOISE_LANE, LaneSpec.parse("ring,split=seq"))
    assert engine.threads == {"engine_0"}
    assert verdicts(loaded) == ["reference", "passed", "passed"]
    store = loaded.bridge.store
    assert [store.runs[run]["lane"] for run in range(3)] == ["reference", "noise", "ring,split=seq"]
    assert not loaded.divergence.header.editor.isVisible()


def test_a_wrong_lane_is_said_in_its_place(
    loaded: MainWindow, engine: FakeEngine, qtbot: QtBot
) -> None:
    loaded.divergence.header.editor.text.setPlainText("rings")
    press_compare(qtbot, loaded)
    assert loaded.bridge.state is State.READY
    assert engine.compared == []
    assert loaded.divergence.header.editor.isVisible()
    assert "'rings' is not a rollback policy" in loaded.divergence.header.editor.error


def test_what_the_engine_refuses_is_a_banner(loaded: MainWindow, qtbot: QtBot) -> None:
    loaded.run_panel.prompt.clear()
    press_compare(qtbot, loaded)
    wait(qtbot, loaded, State.READY)
    assert "The prompt is empty." in loaded.banners.banners[0].message
    loaded.run_panel.prompt.setPlainText("x")
    press_compare(qtbot, loaded)
    wait(qtbot, loaded, State.READY)


def test_pause_step_resume_stop(loaded: MainWindow, engine: FakeEngine, qtbot: QtBot) -> None:
    engine.rounds = 10**6
    press_compare(qtbot, loaded)
    wait(qtbot, loaded, State.RUNNING)
    assert not loaded.actions_by_id["run.compare"].isEnabled()
    qtbot.keyClick(loaded, Qt.Key.Key_F6)
    wait(qtbot, loaded, State.PAUSED)
    assert loaded.divergence.header.progress.isVisible()
    done = engine.steps
    qtbot.keyClick(loaded, Qt.Key.Key_F10)
    wait(qtbot, loaded, State.PAUSED)
    assert engine.steps == done + 1
    assert loaded.divergence.header.progress.toolTip().startswith(
        f"{done + 1:,} of 8 tokens in 5 lanes"
    )
    qtbot.keyClick(loaded, Qt.Key.Key_F5)
    qtbot.waitUntil(lambda: engine.steps > done + 2)
    qtbot.keyClick(loaded, Qt.Key.Key_F5, Qt.KeyboardModifier.ShiftModifier)
    wait(qtbot, loaded, State.READY)
    assert not loaded.divergence.header.progress.isVisible()
    assert loaded.bridge.store.runs[0]["stops"]


def test_close_while_comparing_leaves_nothing(
    loaded: MainWindow, engine: FakeEngine, qtbot: QtBot
) -> None:
    engine.rounds = 10**6
    press_compare(qtbot, loaded)
    qtbot.waitUntil(lambda: engine.steps > 2)
    loaded.close()  # the window fixture looks for threads and timers


def test_findings_are_counted_in_the_title(loaded: MainWindow, qtbot: QtBot) -> None:
    press_compare(qtbot, loaded)
    wait(qtbot, loaded, State.READY)
    loaded.bridge.store.findings.append(
        run_id=3, round=1, seq_id=0, rule="r", severity="error", message="m.", evidence="e"
    )
    loaded.feed.refresh()
    assert loaded.docks["findings"].windowTitle() == "Findings (1)"
    assert loaded.actions_by_id["view.panel_findings"].text() == "Fi&ndings"


def test_reset_closes_the_tabs_and_leaves_no_bar(loaded: MainWindow, qtbot: QtBot) -> None:
    for _ in range(2):
        loaded.docks.reveal("divergence", "findings")
        qtbot.waitUntil(loaded.divergence.isVisible)
        loaded.actions_by_id["view.reset_layout"].trigger()
        assert not loaded.docks["divergence"].isVisible()
    loaded.docks.reveal("divergence", "findings")
    qtbot.waitUntil(loaded.divergence.isVisible)

    def seen() -> list[str]:
        bars = [bar for bar in loaded.findChildren(QTabBar) if bar.parent() is loaded]
        return sorted(bar.tabText(0) for bar in bars if bar.isVisible() and bar.count())

    qtbot.waitUntil(lambda: seen() == ["Divergence", "Memory"])  # Qt hides those that it changed


@dataclass(frozen=True)
class FakeScenario:
    name: str = "full-rejection"
    title: str = "Full rejection & more"
    about: str = "Every draft is wrong"
    prompts: tuple[str, ...] = ("one two",)
    options: RunOptions = RunOptions(n_predict=5, spec=SpecOptions(types=("draft-mtp",)))  # noqa: RUF009
    lanes: tuple[LaneSpec, ...] = (NOISE_LANE, LaneSpec.parse("carry"))
    draft_accept: tuple[int, ...] = (0,)
    symptom: str = "Nothing is accepted."


def texts(dialog: ScenarioDialog) -> list[tuple[str, str]]:
    """What is seen, and the title, of every scenario on offer."""
    groups = [dialog.list.topLevelItem(at) for at in range(dialog.list.topLevelItemCount())]
    rows = [group.child(at) for group in groups for at in range(group.childCount())]
    return [(row.text(0), row.text(1)) for row in rows]


def test_a_scenario_is_chosen_by_what_is_seen_and_compares(
    qtbot: QtBot, engine: FakeEngine, model_file: Path
) -> None:
    bridge = Bridge(engine)
    window = MainWindow(bridge, Settings(), scenarios=[FakeScenario()])
    qtbot.addWidget(window)
    window.show()
    (action,) = window.scenarios
    assert (action.text(), action.toolTip()) == ("Full rejection && more", "Every draft is wrong")
    window.actions_by_id["run.scenarios"].trigger()
    dialog = window.findChild(ScenarioDialog)
    assert dialog is not None
    (row,) = texts(dialog)
    assert row == ("Nothing is accepted.", "Full rejection & more")
    assert not dialog.play.isEnabled() and "Open a model" in dialog.about.text()
    window.open_model(model_file)
    wait(qtbot, window, State.READY)
    assert dialog.play.isEnabled() and dialog.about.text() == "Every draft is wrong"
    dialog.play.click()
    wait(qtbot, window, State.RUNNING)
    wait(qtbot, window, State.READY)
    scenario = FakeScenario()
    expected = RunRequest(("one two",), scenario.options, lanes=scenario.lanes, draft_accept=(0,))
    assert engine.compared == [expected]
    window.close()


def test_scripts_of_memory_operations_stand_behind_the_scenarios(
    qtbot: QtBot, engine: FakeEngine, model_file: Path
) -> None:
    script = parse_script("s", "s", "title Say & do\nabout It\npolicies ring carry\ncontext A")
    bridge = Bridge(engine)
    window = MainWindow(bridge, Settings(), scenarios=[FakeScenario(), script])
    qtbot.addWidget(window)
    window.show()
    window.actions_by_id["run.scenarios"].trigger()
    dialog = window.findChild(ScenarioDialog)
    assert dialog is not None
    assert texts(dialog)[1] == ("It.", "Say & do")
    _, action = window.scenarios
    window.open_model(model_file)
    wait(qtbot, window, State.READY)
    for chosen, played in (("planes", "carry"), ("ring", "ring")):
        window.run_panel.rollback.setCurrentText(chosen)
        action.trigger()
        qtbot.waitUntil(lambda: bool(engine.compared))
        wait(qtbot, window, State.READY)
        assert engine.compared.pop() == (script, played)
    window.close()


def test_a_script_plays_on_the_demo(
    make_window: Callable[[Bridge], MainWindow], qtbot: QtBot
) -> None:
    window = make_window(Bridge())
    window.open_demo()
    wait(qtbot, window, State.READY)
    window.control.open_scenario(read_script(MEMORY_SCRIPTS / "1-save-after-rollback.toml"))
    wait(qtbot, window, State.RUNNING)
    wait(qtbot, window, State.READY)
    qtbot.waitUntil(lambda: verdicts(window) == ["reference", "reference", "passed"])
    assert window.divergence.isVisible()


def test_the_demo_compared_with_a_faulty_lane(
    make_window: Callable[[Bridge], MainWindow], qtbot: QtBot, tmp_path: Path
) -> None:
    window = make_window(Bridge())
    window.open_demo()
    wait(qtbot, window, State.READY)
    window.run_panel.n_predict.setValue(24)
    window.run_panel.ignore_eos.setChecked(True)
    editor = window.divergence.header.editor
    editor.text.setPlainText("checkpoint\nplanes\ncheckpoint,fault=keep-stale-kv")
    press_compare(qtbot, window)
    wait(qtbot, window, State.RUNNING)
    wait(qtbot, window, State.READY)
    assert verdicts(window) == ["reference", "passed", "passed", "passed", "suspect"]
    assert window.tokens.areas[0].stream.run.run_id == 2, "the first lane that rolls back"
    cards = window.divergence.header.cards.cards
    assert [card.time_text == "–" for card in cards.values()] == [True, True, False, False, False]
    assert " restores" in cards[2].work_text and " passes" in cards[0].work_text
    assert cards[3].moved_text == "0 B" and cards[2].moved_text.endswith("iB")
    costs = window.divergence.header.cost_model
    names = [costs.data(costs.index(row, 0)) for row in range(costs.n_rows())]
    assert names == ["checkpoint", "planes", "checkpoint,fault=keep-stale-kv"]

    window.actions_by_id["go.first_divergence"].trigger()
    faulty = window.divergence._lanes.verdicts[4]
    assert window.divergence.tables.shown == faulty.first_pos
    area = window.tokens.areas[0]
    assert area.stream.run.run_id == 4, "the other views follow to the lane"
    assert area.stream.position(area.current) == faulty.first_pos
    assert window.plots.rollback.plot.cursor_line.value() == faulty.first_round
    window.plots.rollback.plot.clicked.emit(1.0, 0.5)
    assert window.divergence._pos == window.divergence._lanes.first_pos_of_round(4, 1)

    rows = window.divergence.tables.detail_model.rows
    recorded = [cell.bar for *_, cells in rows for cell in cells if cell.bar is not None]
    assert len(recorded) == 5 * 5, "five tokens of five lanes"
    columns = zip(*([cell.bar or 0.0 for cell in cells] for *_, cells in rows), strict=True)
    assert all(0.0 < sum(column) <= 1.0001 for column in columns)

    export_csv(window.bridge.store, tmp_path / "out")
    other = make_window(Bridge())
    other.feed.show_run(RunRef(open_trace(tmp_path / "out"), 4))
    other.docks.reveal("divergence")
    assert verdicts(other) == verdicts(window)
    other.divergence.go_first()
    assert other.divergence.tables.shown == faulty.first_pos


@pytest.mark.usefixtures("each_font")
@pytest.mark.thinned(4)
def test_the_divergence_layout_fits_a_small_screen(loaded: MainWindow, qtbot: QtBot) -> None:
    """However many lanes there are and with their editor open: what is too high scrolls."""
    loaded.resize(1280, 800)
    loaded.actions_by_id["view.layout_divergence"].trigger()
    lanes = [f"planes,n_rs_seq={n}" for n in range(1, 13)]
    loaded.divergence.header.editor.text.setPlainText("\n".join(lanes))
    press_compare(qtbot, loaded)
    wait(qtbot, loaded, State.READY)
    loaded.divergence.header.set_editing(True)
    settle(qtbot)
    (page,) = loaded.divergence.findChildren(ScrollPage)
    loaded.banners.add("warning", "Something to read.", "And what to do about it. " * 4)
    settle(qtbot)
    assert len(loaded.divergence.header.cards.cards) == 14
    assert loaded.divergence.header.editor.isVisible()
    assert loaded.minimumSizeHint().height() <= 640
    assert (loaded.width(), loaded.height()) == (1280, 800)
    loaded.resize(1280, 560)
    qtbot.waitUntil(lambda: page.verticalScrollBar().maximum() > 0)


@pytest.mark.usefixtures("each_font")
@pytest.mark.thinned(4)
def test_the_usual_lanes_fit_without_scrolling(loaded: MainWindow, qtbot: QtBot) -> None:
    loaded.resize(1280, 800)
    loaded.actions_by_id["view.layout_divergence"].trigger()
    press_compare(qtbot, loaded)
    wait(qtbot, loaded, State.READY)
    (page,) = loaded.divergence.findChildren(ScrollPage)
    for editing in (False, True):
        loaded.divergence.header.set_editing(editing)
        settle(qtbot)
        assert page.verticalScrollBar().maximum() == 0, editing


def test_a_build_of_llama_cpp_is_kept_for_its_lanes(
    qtbot: QtBot, engine: FakeEngine, model_file: Path, tmp_path: Path
) -> None:
    window = MainWindow(Bridge(engine), Settings(), scenarios=[FakeScenario()])
    qtbot.addWidget(window)
    window.show()
    (tmp_path / "libllama.so").touch()
    window.control.use_llama_library(str(tmp_path / "nothing"))
    assert window.settings.llama_library is None
    assert "There is no llama.cpp library at" in window.banners.banners[0].message
    window.control.use_llama_library(f" {tmp_path} ")
    assert Settings().llama_library == tmp_path.resolve()
    window.open_model(model_file)
    wait(qtbot, window, State.READY)
    window.scenarios[0].trigger()
    wait(qtbot, window, State.RUNNING)
    wait(qtbot, window, State.READY)
    assert engine.compared[0].llama_library == tmp_path.resolve()
    window.control.use_llama_library("")
    assert Settings().llama_library is None
    window.close()
