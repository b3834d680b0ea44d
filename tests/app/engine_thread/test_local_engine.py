"""The window's engine in this process: what it learns of a file next to a run."""

from __future__ import annotations

import time
from pathlib import Path

from app.engine_thread.opening import LocalEngine
from app.engine_thread.requests import OpenRequest, RunRequest
from engine.options import RunOptions
from engine.trace.run_ref import same_model
from engine.trace.store import TraceStore

MODEL = Path(__file__).parents[2] / "data" / "qwen35-a-f32.gguf"


def test_tensors_are_hashed_behind_the_first_token(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    data = bytearray(MODEL.read_bytes())
    path.write_bytes(data)
    engine, request = LocalEngine(), OpenRequest(path, (), "f32")
    found = engine.inspect(request)
    session = engine.open(request, lambda *_: None)
    trace = TraceStore()
    run = session.start(RunRequest(("abc",), RunOptions(n_predict=2)), trace)
    time.sleep(0.15)
    assert found.identity["content"] is None
    while run.advance():
        pass
    until = time.monotonic() + 120
    while not found.identity["content"] and time.monotonic() < until:
        time.sleep(0.01)
    assert len(found.identity["content"]) == 64
    assert trace.runs[run.run_id]["model"]["content"] == found.identity["content"]
    session.close()
    assert same_model(engine.inspect(request).identity, found.identity)
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert not same_model(engine.inspect(request).identity, found.identity)
