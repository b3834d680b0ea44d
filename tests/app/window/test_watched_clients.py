"""Other programs talk to a real llama-server through the window, which draws meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from pytestqt.qtbot import QtBot

from app.engine_thread.bridge import Bridge
from app.engine_thread.events import State
from app.engine_thread.serving import ServerEngine
from app.window.window import MainWindow
from resources import DEMO_TARGET
from tests.support.fake_session import FakeEngine
from tests.support.llama_server import free_port, llama_server
from tests.support.openai_reader import Reader, told_apart_from_time
from tests.support.window_acts import trigger


@pytest.mark.peer
def test_the_openai_package_gets_the_same_bytes_while_the_window_draws(
    make_window: Callable[..., MainWindow], engine: FakeEngine, qtbot: QtBot, tmp_path: Path
) -> None:
    words = ("-m", DEMO_TARGET, "-np", 1, "-c", 2048, "--spec-type", "draft-mtp")
    with llama_server(tmp_path / "log", *words, "--spec-draft-n-max", 3) as url:
        straight = Reader(url)
        straight.chat(400, cache_prompt=False)  # drafts differ the first time
        straight.chat(400, cache_prompt=False)
        window = make_window(Bridge(engine, servers=ServerEngine()))
        window.control.connect_server(url, port=free_port())
        qtbot.waitUntil(lambda: window.bridge.state is State.RUNNING)
        qtbot.waitUntil(lambda: window.feed.run is not None)
        assert window.feed.run is not None
        through = Reader(window.feed.run.facts["listens_at"])
        client = threading.Thread(target=lambda: through.chat(400, cache_prompt=False))
        client.start()
        qtbot.waitUntil(lambda: not client.is_alive())
        store = window.feed.run.store
        qtbot.waitUntil(lambda: int(store.rounds.column("num_emitted").sum()) == 400)
        drawn = window.tokens.areas[0].stream
        assert drawn is not None
        qtbot.waitUntil(lambda: len(drawn.text()) > 400)
        with qtbot.waitSignal(window.bridge.run_ended):
            trigger(window, "run.stop")
        for reader in (straight, through):
            reader.client.close()
    same = [told_apart_from_time(*reader.bytes.values()) for reader in (straight, through)]
    assert same[0] == same[1] and same[0].count(b"data: ") > 300
