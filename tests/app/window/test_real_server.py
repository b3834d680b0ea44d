"""The window at a real llama-server: streamed, joined with the log, counted, re-scored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pytestqt.qtbot import QtBot

from app.engine_thread.bridge import Bridge
from app.engine_thread.events import State
from app.engine_thread.serving import ServerEngine
from app.window.window import MainWindow
from engine.trace.records import EMITTED_KINDS
from resources import DEMO_TARGET
from tests.support.llama_server import llama_server, logged_rounds
from tests.support.window_acts import messages, trigger

pytestmark = pytest.mark.peer


def test_a_run_is_that_of_the_log_and_its_tokens_are_the_models(
    make_window: Callable[..., MainWindow],
    qtbot: QtBot,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    words = ("-m", DEMO_TARGET, "--spec-type", "draft-mtp", "--spec-draft-n-max", 3, "-np", 2)
    with llama_server(out, *words, "-c", 2048) as url:
        window = make_window(Bridge(servers=ServerEngine(look_s=0.2)))
        window.control.connect_server(url)
        qtbot.waitUntil(lambda: window.bridge.state is State.READY)
        window.run_panel.prompt.setPlainText("def quicksort(arr):")
        window.run_panel.prompts.copies.setValue(2)
        window.run_panel.n_predict.setValue(48)
        with qtbot.waitSignal(window.bridge.run_ended):
            trigger(window, "run.start")
        qtbot.waitUntil(lambda: window.bridge.state is State.READY)
        run = window.feed.run
        assert run is not None
        rounds, tokens = run.store.rounds, run.store.tokens
        drafted = rounds.column("num_draft_tokens")
        told = logged_rounds(out.read_text(errors="replace"))
        assert sorted(map(len, told)) == sorted(
            int(((rounds.column("seq_id") == seq) & (drafted > 0)).sum()) for seq in (0, 1)
        )
        counts = f"{int(drafted[drafted > 0].sum()):,} drafted"
        qtbot.waitUntil(lambda: window.model_map.server.facts["counters"].count(counts) == 2)
        monkeypatch.setattr("app.window.run_control.ask_model", lambda *_: DEMO_TARGET)
        trigger(window, "run.rescore")
        qtbot.waitUntil(lambda: bool(messages(window)))
        assert "all of them possible choices of the model" in messages(window)[0]
        emitted = [kind in EMITTED_KINDS for kind in tokens.texts("kind")]
        p = tokens.column("target_p")[emitted]
        assert len(p) == 96 and (p > 0).all()
        trigger(window, "file.disconnect")
        qtbot.waitUntil(lambda: window.bridge.server is None)
