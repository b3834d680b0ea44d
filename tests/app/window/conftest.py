"""A server that does as it is told, and a window that looks at it often."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from app.engine_thread.bridge import Bridge
from app.engine_thread.serving import ServerEngine
from app.window.window import MainWindow
from tests.support.fake_session import FakeEngine
from tests.support.scripted_server import ScriptedServer


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer("mtp") as server:
        yield server


@pytest.fixture
def at_servers(make_window: Callable[..., MainWindow], engine: FakeEngine) -> MainWindow:
    """A window that looks at servers often."""
    return make_window(Bridge(engine, servers=ServerEngine(look_s=0.05)))
