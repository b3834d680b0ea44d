"""Anything that may fail fails once, while the window does anything: it goes on, and so do runs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from app.engine_thread.events import State
from app.engine_thread.jobs import CompareRequest
from engine.errors import ContextFullError, NonFiniteError, RollbackRefusedError
from engine.options import RunOptions, SpecOptions
from engine.session import Session
from engine.trace.reopen import open_trace
from tests.support.golden_files import DATA
from tests.support.scripted_server import ScriptedServer
from tests.torture.campaign import Campaign, Case, Figures
from tests.torture.real_window import RealWindow

_MODEL = DATA / "qwen35-c-v2x-mtp-f32.gguf"
_STAGES = (
    "engine.decode.scheduler:Scheduler.step",
    "engine.decode.scheduler:Scheduler.settle",
    "engine.model.hybrid:HybridModel.forward",
    "engine.draft.chain:DrafterChain.draft",
    "engine.draft.chain:DrafterChain.observe",
    "engine.decode.rollback:Rollback.undo",
    "engine.decode.rollback:Rollback.checkpoints",
    "engine.memory.hybrid:HybridMemory.begin",
    "engine.memory.hybrid:HybridMemory.commit",
    "engine.memory.hybrid:HybridMemory.seq_rm",
    "engine.memory.recurrent:SnapshotPolicy.save",
    "engine.sampling.sampler:Sampler.draw",
    "engine.trace.store:Table.append",
    "engine.run:record_findings",
    "engine.trace.writer:TraceWriter.end",
    "engine.session:Session.start",
    "engine.session:Session.make_memory",
    "engine.session:Session.prompt",
    "engine.compare.comparison:Comparison.step",
    "engine.compare.comparison:Comparison.results",
    "engine.trace.export:_write",
    "engine.gguf.tokenizer:Tokenizer.piece",
)
_OF_SERVERS = (
    "engine.observe.rounds.observed_run:ObservedRequest.data",
    "engine.observe.rounds.observed_run:ObservedRequest.done",
    "engine.observe.rounds.observed_run:ObservedRun.counters",
    "engine.observe.rounds.observed_run:ObservedRun.ready",
    "engine.observe.rounds.observed_run:ObservedRun.end",
    "engine.observe.server.server_run:ServerRun._record",
    "engine.observe.server.inbox:Inbox.take",
)
_ERRORS: dict[str, Callable[[], BaseException]] = {
    "RuntimeError": lambda: RuntimeError("planted"),
    "MemoryError": MemoryError,
    "OSError": lambda: OSError(28, "No space left on device"),
    "KeyError": lambda: KeyError("planted"),
    "AssertionError": AssertionError,
    "RecursionError": lambda: RecursionError("planted"),
    "ContextFullError": lambda: ContextFullError("It is full.", "Make it larger."),
    "NonFiniteError": lambda: NonFiniteError("It is not finite.", "Look at it."),
    "RollbackRefusedError": lambda: RollbackRefusedError("It is refused.", "Choose another."),
    "GeneratorExit": GeneratorExit,
}
_DOINGS = ("running", "stepping", "paused", "comparing", "exporting")
_SETTLED = (State.READY, State.INSPECTED, State.EMPTY)


def _draw(random: np.random.Generator, number: int) -> Case:
    stage = (*_STAGES, *_OF_SERVERS)[number % (len(_STAGES) + len(_OF_SERVERS))]
    return {
        "stage": stage,
        "error": str(random.choice(list(_ERRORS))),
        "at": int(random.integers(1 + 40 * (random.random() < 0.7))),
        "doing": "observing" if stage in _OF_SERVERS else str(random.choice(_DOINGS)),
        "rollback": str(random.choice(["planes", "replay", "checkpoint"])),
    }


@contextmanager
def _served(doing: str) -> Iterator[ScriptedServer | None]:
    """A server, if one is observed."""
    if doing == "observing":
        with ScriptedServer("mtp") as server:
            yield server
    else:
        yield None


class _Fault:
    """A function of the program that fails once, at a chosen call."""

    def __init__(self, case: Case) -> None:
        module, _, path = case["stage"].partition(":")
        *owners, self._name = path.split(".")
        self._owner: Any = import_module(module)
        for owner in owners:
            self._owner = getattr(self._owner, owner)
        self._original = self._owner.__dict__[self._name]
        self._left, self._error = case["at"], _ERRORS[case["error"]]
        self.struck = False

    def __enter__(self) -> _Fault:
        def failing(*args: Any, **kwargs: Any) -> Any:
            self._left -= 1
            if self._left == -1:
                self.struck = True
                raise self._error()
            return self._original(*args, **kwargs)

        setattr(self._owner, self._name, failing)
        return self

    def __exit__(self, *_: object) -> None:
        setattr(self._owner, self._name, self._original)


_shown: list[RealWindow] = []
"""The window of this process, once a case has made it."""


def _play(case: Case, folder: Path) -> Figures:
    if not _shown:
        _shown.append(RealWindow(Path(tempfile.mkdtemp(dir=os.path.dirname(folder)))))
        _shown[0].window.open_model(_MODEL)
    real = _shown[0]
    bridge = real.window.bridge
    real.until(lambda: bridge.state is State.READY, "a model", 60.0)
    options = RunOptions(
        n_predict=24, spec=SpecOptions(("draft-mtp",), n_max=3), rollback=case["rollback"], n_ctx=96
    )
    with _served(case["doing"]) as server:
        if server is not None:
            real.window.control.connect_server(server.url)
            real.until(lambda: bridge.server is not None and bridge.can_start, "a server", 40.0)
        before = _runs(real)
        with _Fault(case) as fault:
            _do(case["doing"], real, options, folder)
            real.until(lambda: bridge.state in _SETTLED, f"the end of {case['doing']}", 40.0)
        real.until(lambda: not bridge.exporting, "the end of the export")
        assert bridge.state is State.READY, f"the window is left {bridge.state.value}"
        stored = bridge.session_store
        for run_id in list(stored.runs)[before:]:
            assert "stops" in stored.runs[run_id], f"run {run_id} has no end: {case['stage']}"
        assert _runs(real) >= before, "runs are lost"
        made = _runs(real) - before
        if server is not None:
            n_loaded = real.n_loaded
            real.window.open_model(_MODEL)
            real.until(lambda: real.n_loaded > n_loaded and bridge.can_start, "the model", 60.0)
    stored = bridge.session_store
    n = _runs(real)
    bridge.start(["x y x y"], options)
    real.until(lambda: bridge.state is State.READY and _runs(real) > n, "the next run", 40.0)
    last = stored.runs[list(stored.runs)[-1]]
    assert last["stops"] == ["limit"], f"the next run ends by {last['stops']}"
    bridge.export(stored, folder / "after")
    real.until(lambda: not bridge.exporting, "the export")
    assert open_trace(folder / "after").runs.keys() == stored.runs.keys()
    real.check()
    real.window.banners.clear()
    return {"struck": fault.struck, "runs": made, case["doing"]: 1}


def _runs(real: RealWindow) -> int:
    return len(real.window.bridge.session_store.runs)


def _do(doing: str, real: RealWindow, options: RunOptions, folder: Path) -> None:
    bridge = real.window.bridge
    if doing == "comparing":
        bridge.compare(_comparison(options))
    elif doing == "exporting":
        bridge.start(["x y x y"], options)
        bridge.export(bridge.session_store, folder / "meanwhile")
    else:
        bridge.start(["x y x y"], options, 2 if doing == "paused" else None)
    if doing == "paused":
        real.until(lambda: bridge.state is not State.RUNNING, "a pause", 40.0)
        bridge.resume()
    if doing == "stepping":
        bridge.pause()
        real.until(lambda: bridge.state is not State.RUNNING, "a pause", 40.0)
        for _ in range(50):
            bridge.resume(1)
            real.until(lambda: bridge.state is not State.RUNNING, "a step", 40.0)


@cache
def _comparison(options: RunOptions) -> CompareRequest:
    from engine.compare.lane_spec import NOISE_LANE, LaneSpec

    lanes = (NOISE_LANE, LaneSpec.parse(options.rollback))
    return CompareRequest(("x y x y",), options, lanes)


def _prepare() -> None:
    import app.shell.window  # noqa: F401

    Session.open(_MODEL, compute="f32")


CAMPAIGN = Campaign(
    "faults",
    "The engine answers, every run has an end, the next one succeeds, the trace is kept.",
    _draw,
    _play,
    _prepare,
    seconds=120.0,
    n_bytes=2**30,
    batch=10,
)
