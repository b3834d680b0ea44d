"""A function of the program that fails once, at a chosen call, and where that may be."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from engine.errors import ContextFullError, NonFiniteError, RollbackRefusedError

DECODING = (
    "engine.decode.scheduler:Scheduler.step",
    "engine.decode.scheduler:Scheduler.settle",
    "engine.model.hybrid:HybridModel.forward",
    "engine.draft.chain:DrafterChain.draft",
    "engine.draft.chain:DrafterChain.observe",
    "engine.decode.verify_loop:Rollback.undo",
    "engine.decode.verify_loop:Rollback.checkpoints",
    "engine.memory.hybrid:HybridMemory.begin",
    "engine.memory.hybrid:HybridMemory.commit",
    "engine.memory.hybrid:HybridMemory.seq_rm",
    "engine.memory.recurrent:SnapshotPolicy.save",
    "engine.sampling.sampler:Sampler.draw",
    "engine.trace.store:Table.extend",
    "engine.run:record_findings",
    "engine.trace.writer:TraceWriter.end",
    "engine.session:Session.start",
    "engine.session:Session.make_memory",
    "engine.session:Session.prompt",
    "engine.gguf.tokenizer:Tokenizer.piece",
)
"""Called often while anything is decoded."""
_COMPARING = (
    "engine.compare.comparison:Comparison.step",
    "engine.compare.comparison:Comparison.results",
)
_EXPORTING = ("engine.trace.export:_write", "engine.trace.export:_session")
_OBSERVING = (
    "engine.observe.rounds.observed_run:ObservedRequest.data",
    "engine.observe.rounds.observed_run:ObservedRequest.done",
    "engine.observe.rounds.observed_run:ObservedRun.counters",
    "engine.observe.rounds.answer:RequestRun.ready",
    "engine.observe.rounds.observed_run:ObservedRun.end",
    "engine.observe.server.server_run:ServerRun._record",
    "engine.observe.server.reply:Inbox.take",
)
_TUNING = (
    "engine.session:Session.open",
    "engine.experiments.tune.record:_cost_rounds",
    "engine.analysis.what_if.recorded:RecordedRounds.of",
    "engine.analysis.what_if.recorded:RoundCosts.measured",
    "engine.experiments.tune.advice:simulate",
    "engine.experiments.tune.tune:to_confirm",
    "engine.experiments.bench.request:timed_run",
    "engine.experiments.tune.confirm:compare",
    "engine.experiments.tune.tune:verdict",
    "engine.experiments.tune.tune:_data",
    "engine.experiments.tune.report:_recommended",
    "engine.experiments.tune.tune:tune_rows",
    "engine.experiments.results.writer:ResultsWriter.add",
)
STAGES = {
    "running": DECODING,
    "stepping": DECODING,
    "paused": DECODING,
    "comparing": (*DECODING, *_COMPARING),
    "exporting": (*DECODING, *_EXPORTING),
    "observing": _OBSERVING,
    "tuning": (*DECODING, *_TUNING),
}
"""What may fail by what is done meanwhile; a window without a run has acts of its own, in
idle_acts."""

ERRORS: dict[str, Callable[[], BaseException]] = {
    "RuntimeError": lambda: RuntimeError("planted"),
    "MemoryError": MemoryError,
    "OSError": lambda: OSError(28, "No space left on device"),
    "KeyError": lambda: KeyError("planted"),
    "AssertionError": lambda: AssertionError("planted"),
    "RecursionError": lambda: RecursionError("planted"),
    "ContextFullError": lambda: ContextFullError("It is full.", "Make it larger."),
    "NonFiniteError": lambda: NonFiniteError("It is not finite.", "Look at it."),
    "RollbackRefusedError": lambda: RollbackRefusedError("It is refused.", "Choose another."),
    "GeneratorExit": GeneratorExit,
}


class Fault:
    """While it is entered, call number `at` of the function `stage`, "module:Class.name", raises an
    error of ERRORS. struck: it has."""

    def __init__(self, stage: str, error: str, at: int) -> None:
        module, _, path = stage.partition(":")
        *owners, self._name = path.split(".")
        self._owner: Any = import_module(module)
        for owner in owners:
            self._owner = getattr(self._owner, owner)
        self._original = self._owner.__dict__[self._name]
        self._left, self._error = at, ERRORS[error]
        self.struck = False

    def __enter__(self) -> Fault:
        is_of_class = isinstance(self._original, classmethod)
        original = self._original.__func__ if is_of_class else self._original

        def failing(*args: Any, **kwargs: Any) -> Any:
            self._left -= 1
            if self._left == -1:
                self.struck = True
                raise self._error()
            return original(*args, **kwargs)

        setattr(self._owner, self._name, classmethod(failing) if is_of_class else failing)
        return self

    def __exit__(self, *_: object) -> None:
        setattr(self._owner, self._name, self._original)
