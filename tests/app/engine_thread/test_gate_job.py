"""The checks of a llama.cpp build as lanes of the window, over a double of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.engine_thread.opening import LocalSession
from app.trace_models.compared_lanes import lanes_of
from engine.options.llama_cpp import DEFAULT_GATE
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from tests.support.fake_llama import FakeLlama, use
from tests.support.golden_runs import DATA, MTP_MODELS, session


def test_every_lane_knows_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, trace = session(MTP_MODELS[0]), TraceStore()
    fake = FakeLlama(opened, drift=0.01)
    use(monkeypatch, fake)
    local = LocalSession(opened, DATA / f"{MTP_MODELS[0]}.gguf")
    checks = local.check_rollback(Path("some/build"), (DEFAULT_GATE,), trace)
    assert fake.library == Path("some/build")
    assert checks.run_id == 0 and lanes_of(RunRef(trace, 0))
    for _ in range(4):  # the lanes that follow in the same scenario
        assert checks.step()
    checks.stop()
    assert not checks.step()
    found = {facts.gate.policy: facts.gate for facts in trace.runs.values() if facts.gate}
    assert found["planes"].outcome == "right" and found["checkpoint"].outcome == "WRONG"
    assert found["checkpoint"].about.startswith("state-wrong: ")
    assert {(one.scenario, one.n_draft) for one in found.values()} == {("every depth", 1)}
