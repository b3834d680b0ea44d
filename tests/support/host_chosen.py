"""Passes whose rows the host chooses, for tests that break its choice: by default, passes on the
processor go by numbers in memory, so that they can be recorded."""

from __future__ import annotations

import pytest

from engine.machine.graphs import VARIABLE


@pytest.fixture
def host_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memories made from here on have no recordings."""
    monkeypatch.setenv(VARIABLE, "off")
