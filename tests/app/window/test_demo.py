"""The window with the real engine and the bundled models, used as a newcomer would."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PySide6.QtCore import Qt
from pytestqt.qtbot import QtBot

from app.engine_thread.bridge import Bridge
from app.engine_thread.events import State
from app.trace_models.run_facts import run_row
from app.trace_models.run_rows import Position
from app.window.dialogs.files import ExportDialog
from app.window.dialogs.runs import ForkDialog
from app.window.dock_area import LAYOUTS, TITLES
from app.window.window import MainWindow
from engine.observe.rescoring.triage import triage
from engine.trace.records import EMITTED_KINDS
from resources import DEMO_DRAFT, DEMO_TARGET, demo_prompts
from tests.support.window_acts import enabled, messages, settle

DATA = Path(__file__).parents[2] / "data"


@pytest.fixture
def real_window(make_window: Callable[[Bridge], MainWindow]) -> MainWindow:
    return make_window(Bridge())


def wait(qtbot: QtBot, window: MainWindow, state: State) -> None:
    qtbot.waitUntil(lambda: window.bridge.state is state)


def press(qtbot: QtBot, window: MainWindow, key: Qt.Key) -> None:
    qtbot.keyClick(window, key)


def colours(window: MainWindow) -> set[str]:
    """Every colour painted in the token view."""
    image = window.tokens.grab().toImage()
    return {
        image.pixelColor(x, y).name()
        for x in range(0, image.width(), 2)
        for y in range(0, image.height(), 2)
    }


def test_open_run_pause_step_resume_stop_export(
    real_window: MainWindow, qtbot: QtBot, tmp_path: Path
) -> None:
    window = real_window
    window.actions_by_id["file.open_demo"].trigger()
    qtbot.waitUntil(lambda: window.bridge.files is not None)
    assert window.model_map.facts["architecture"].startswith("qwen35 · 8 layers")
    wait(qtbot, window, State.READY)
    assert window.run_panel.texts() == [demo_prompts()[0]]
    assert window.run_panel.drafter.text() == "draft-mtp"
    window.run_panel.n_predict.setValue(2000)
    window.run_panel.ignore_eos.setChecked(True)

    store = window.bridge.store
    press(qtbot, window, Qt.Key.Key_F5)
    qtbot.waitUntil(lambda: len(store.rounds) >= 15)
    press(qtbot, window, Qt.Key.Key_F6)
    wait(qtbot, window, State.PAUSED)
    kinds = set(store.tokens.texts("kind"))
    assert {"prompt", "accepted", "rejected", "replacement"} <= kinds
    tints = {window.panels.theme.color(f"{kind}.tint").name() for kind in ("accepted", "rejected")}
    assert tints <= colours(window)
    assert window.status.chips["acceptance"].text != "–"
    assert window.status.chips["tokens_per_second"].text != "–"

    rounds = len(store.rounds)
    press(qtbot, window, Qt.Key.Key_F10)
    wait(qtbot, window, State.PAUSED)
    assert len(store.rounds) == rounds + 1
    press(qtbot, window, Qt.Key.Key_F5)
    qtbot.waitUntil(lambda: len(store.rounds) >= rounds + 4)
    window.actions_by_id["run.stop"].trigger()
    wait(qtbot, window, State.READY)

    text = window.tokens.copy_text()
    assert text == emitted_text(window)
    window.actions_by_id["file.export"].trigger()
    (dialog,) = window.findChildren(ExportDialog)
    dialog.folder.setText(str(tmp_path))
    with qtbot.waitSignal(window.bridge.exported) as exported:
        dialog.accept()
    folder: Path = exported.args[0].folder
    with (folder / "tokens.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(store.tokens)
    written = b"".join(bytes.fromhex(r["token_hex"]) for r in rows if r["kind"] in EMITTED_KINDS)
    assert written.decode("utf-8", "replace") == text
    session = json.loads((folder / "session.json").read_text(encoding="utf-8"))
    assert session["runs"]["0"]["options"]["spec"]["types"] == ["draft-mtp"]


def emitted_text(window: MainWindow) -> str:
    store = window.bridge.store
    kinds, ids = store.tokens.texts("kind"), store.tokens.column("token_id").tolist()
    pieces = (store.pieces[i] for i, k in zip(ids, kinds, strict=True) if k in EMITTED_KINDS)
    return b"".join(pieces).decode("utf-8", "replace")


def test_every_drafter_and_policy_gives_the_same_text(
    real_window: MainWindow, qtbot: QtBot
) -> None:
    window, panel = real_window, real_window.run_panel
    window.open_demo()
    wait(qtbot, window, State.READY)
    panel.n_predict.setValue(24)
    texts = []
    for drafter, policy in (
        ("none", "planes"),
        ("draft-mtp", "planes"),
        ("draft-simple", "checkpoint"),
    ):
        panel.drafter.set_names([drafter])
        panel.rollback.setCurrentText(policy)
        window.actions_by_id["run.start"].trigger()
        wait(qtbot, window, State.READY)
        texts.append(window.tokens.copy_text())
    assert texts[0]
    assert texts[0] == texts[1] == texts[2]
    assert sorted(window.bridge.store.runs) == [0, 1, 2]
    assert window.settings.recent_models == [], "the demo has its own entry in the menu"


def test_cancelled_load_and_close_while_loading(real_window: MainWindow, qtbot: QtBot) -> None:
    window = real_window
    window.open_demo()
    wait(qtbot, window, State.LOADING)
    window.status.cancel_asked.emit()
    wait(qtbot, window, State.INSPECTED)
    window.model_map.load_asked.emit()
    wait(qtbot, window, State.LOADING)
    window.close()


def truncated(folder: Path) -> Path:
    path = folder / "short.gguf"
    path.write_bytes(DEMO_TARGET.read_bytes()[:100_000])
    return path


def letter(folder: Path) -> Path:
    path = folder / "letter.gguf"
    path.write_text("Dear engine, this is not a model.")
    return path


def absurd(folder: Path) -> Path:
    path = folder / "absurd.gguf"
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 16)
    return path


@pytest.mark.parametrize("make", [truncated, letter, absurd])
def test_bad_files_are_banners(
    real_window: MainWindow, qtbot: QtBot, tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    path = make(tmp_path)
    real_window.open_model(path)
    qtbot.waitUntil(lambda: bool(real_window.banners.banners))
    banner = real_window.banners.banners[0]
    assert banner.severity == "error"
    assert path.name in banner.message
    assert banner.remedy
    qtbot.waitUntil(lambda: real_window.bridge.state is State.EMPTY)
    assert real_window.actions_by_id["file.open"].isEnabled()


def test_draft_with_another_vocabulary_is_a_banner(real_window: MainWindow, qtbot: QtBot) -> None:
    real_window.open_model(DATA / "qwen35-a-f32.gguf", DEMO_DRAFT)
    qtbot.waitUntil(lambda: bool(real_window.banners.banners))
    assert "vocabular" in real_window.banners.banners[0].message.lower()
    wait(qtbot, real_window, State.INSPECTED)


@pytest.mark.repeats("test_layouts.py")
def test_no_panel_makes_a_small_window_larger(real_window: MainWindow, qtbot: QtBot) -> None:
    window = real_window
    window.resize(1024, 720)
    window.actions_by_id["file.open_demo"].trigger()
    wait(qtbot, window, State.READY)
    press(qtbot, window, Qt.Key.Key_F5)
    qtbot.waitUntil(lambda: window.tokens.end_card.isVisible())
    for layout in LAYOUTS:
        window.actions_by_id[f"view.layout_{layout}"].trigger()
        for name in TITLES:
            window.docks.reveal(name)
            settle(qtbot)
            size = window.width(), window.height()
            assert size == (1024, 720), f"{name} in {layout}"


def test_a_run_goes_on_from_a_token_with_other_options(
    real_window: MainWindow, qtbot: QtBot
) -> None:
    window = real_window
    assert "run.fork" not in enabled(window)
    window.actions_by_id["file.open_demo"].trigger()
    wait(qtbot, window, State.READY)
    window.run_panel.n_predict.setValue(48)
    press(qtbot, window, Qt.Key.Key_F5)
    qtbot.waitUntil(lambda: window.bridge.state is State.READY and window.feed.run is not None)
    parent, tokens = window.feed.run, window.bridge.store.tokens
    assert parent is not None
    window.feed.move_cursor(None)
    window.actions_by_id["run.fork"].trigger()
    assert any("No position is chosen" in message for message in messages(window))
    out = np.flatnonzero(np.isin(tokens.texts("kind"), EMITTED_KINDS))
    pos, round_ = (int(tokens.column(name)[out[40]]) for name in ("pos", "round"))
    window.feed.move_cursor(Position(parent, 0, round_, pos))
    window.actions_by_id["run.fork"].trigger()
    (dialog,) = window.findChildren(ForkDialog)
    assert dialog.changes.text() == "Nothing is changed."
    assert len({dialog.token.itemText(i).split()[0] for i in range(dialog.token.count())}) > 4
    window.run_panel.rollback.setCurrentText("ring")
    dialog.token.setEditText("x")
    qtbot.keyClick(dialog, Qt.Key.Key_Return)
    assert dialog.isVisible() and dialog.changes.text().startswith("A token is an id")
    dialog.token.setEditText("100")
    assert dialog.changes.text() == "Changed: rollback ring, token 100."
    qtbot.keyClick(dialog, Qt.Key.Key_Return)
    with qtbot.waitSignal(window.bridge.run_ended, timeout=60_000):
        pass
    run = window.feed.run
    assert run is not None and run == parent.sibling(1)
    assert run.facts.fork is not None and run.facts.fork.token == 100
    assert run.facts.options is not None and run.facts.options.rollback == "ring"
    assert window.feed.overlay is not None and window.feed.overlay.run == parent
    assert triage(parent, run).verdict == "forced"
    ids = tokens.column("token_id")
    mine = np.isin(tokens.texts("kind"), EMITTED_KINDS) & (tokens.column("run_id") == 1)
    found = dict(zip(tokens.column("pos")[mine].tolist(), ids[mine].tolist(), strict=True))
    assert found[pos] == 100
    assert all(found[int(tokens.column("pos")[i])] == ids[i] for i in out[:40])
    said = f"fork of run 0 at round {run.facts.fork.round}, restored checkpoint of"
    qtbot.waitUntil(lambda: said in window.status.texts["going"])
    assert run_row(run).drafter == f"round {run.facts.fork.round}: rollback ring, another token"
