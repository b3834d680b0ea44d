"""The window's engine in this process: what it learns of a file next to a run."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from app.engine_thread.events import OpenRequest, RunRequest
from app.engine_thread.opening import LocalEngine
from engine.errors import OptionError
from engine.options import RunOptions
from engine.run import Run
from engine.trace.run_ref import RunRef, same_model
from engine.trace.store import TraceStore
from tests.support.golden_runs import tokens_of

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


def test_a_run_begins_again_with_the_prompts_in_its_trace() -> None:
    session = LocalEngine().open(OpenRequest(MODEL, (), "f32"), lambda *_: None)
    trace, options = TraceStore(), RunOptions(n_predict=6)
    first = session.start(RunRequest(("abc", "a longer one"), options), trace)
    while first.advance():
        pass
    of = RunRef(trace, first.run_id)
    second = session.start(RunRequest((), options, of=of), TraceStore())
    while second.advance():
        pass
    texts = [tokens_of(run) for run in (first, second) if isinstance(run, Run)]
    assert texts[0] == texts[1] and len(texts[0]) == 2
    trace.runs[first.run_id]["model"] = {"name": "other.gguf", "size": 1}
    with pytest.raises(OptionError, match=r"had another model, other\.gguf"):
        session.start(RunRequest((), options, of=of), TraceStore())
    session.close()
