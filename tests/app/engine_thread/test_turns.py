"""How long the window's Python may keep the engine's thread waiting."""

from __future__ import annotations

import sys

import pytest

from app.engine_thread import worker


def test_the_engine_waits_less_than_a_round_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    set_: list[float] = []
    monkeypatch.setattr(sys, "setswitchinterval", set_.append)
    made = worker.EngineWorker(lambda _event: None, None, None)  # type: ignore[arg-type]
    assert made.close(5.0)
    assert len(set_) == 1
    assert set_[0] < 0.001
