"""A session without a model: scripted rounds, written into a real trace store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.engine_thread.events import ModelFiles
from app.engine_thread.jobs import CompareRequest, OpenRequest, ScriptRequest
from engine.errors import Cancelled, ModelFileError, OptionError
from engine.options import Prompt, RunOptions
from engine.trace.store import TraceStore
from tests.support.lane_traces import CLEAN, NOISE, LaneBuilder
from tests.support.trace_builder import TraceBuilder

TENSORS = 4


@dataclass(frozen=True)
class FakeLayer:
    index: int
    kind: str
    quant: str = "Q8_0"
    n_bytes: int = 1_000_000


@dataclass(frozen=True)
class FakeInfo:
    architecture: str = "qwen35"
    name: str = "fake"
    n_params: int = 9_000_000
    weight_bytes: int = 9_400_000
    n_ctx_train: int = 2048
    n_vocab: int = 4096
    layers: tuple[FakeLayer, ...] = tuple(
        FakeLayer(i, "mtp" if i == 8 else "attention" if i % 4 == 3 else "recurrent")
        for i in range(9)
    )
    quant_mix: dict[str, int] = field(default_factory=lambda: {"Q8_0": 9_300_000, "F32": 100_000})
    rollback: str = "partial seq_rm over snapshot planes"

    def memory(
        self, n_seqs: int, n_rs_seq: int, n_ctx: int, policy: str = "planes", compute: str = ""
    ) -> dict[str, int]:
        parts = {
            "weights": self.weight_bytes * (2 if compute else 1),
            "kv": n_seqs * n_ctx * 1000,
            "state": n_seqs * 500_000,
            "snapshots": n_seqs * n_rs_seq * 500_000,
            "checkpoint": n_seqs * 500_000 * (policy == "checkpoint"),
        }
        return {**parts, "total": sum(parts.values())}


@dataclass
class FakeEngine:
    """What opens fake sessions, and how they are to behave.

    gate: while it is clear, loading and every round wait for it (and for a cancel).
    rounds: rounds of a run. fail_round: the round in which the engine breaks.
    """

    gate: threading.Event = field(default_factory=threading.Event)
    rounds: int = 12
    fail_load: Exception | None = None
    fail_round: int | None = None
    opened: list[tuple[Path, Path | None, str]] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)
    compared: list[CompareRequest | ScriptRequest] = field(default_factory=list)
    cancelled: list[tuple[int, int]] = field(default_factory=list)
    """Sequences that were ended, each with the round before which it was."""
    steps: int = 0

    def __post_init__(self) -> None:
        self.gate.set()

    def inspect(self, request: OpenRequest) -> ModelFiles:
        if request.target.suffix != ".gguf":
            raise ModelFileError(request.target, "byte 0", "no GGUF file", "Choose another.")
        draft_info: Any = FakeInfo() if request.draft else None
        info: Any = FakeInfo()
        return ModelFiles(
            request.target, request.draft, info, draft_info, {"name": request.target.name}
        )

    def open(
        self,
        target: Path,
        draft: Path | None,
        *,
        compute: str,
        progress: Callable[[int, int, str], None],
        cancelled: Callable[[], bool],
    ) -> Any:
        self.threads.add(threading.current_thread().name)
        for done in range(TENSORS):
            progress(done, TENSORS, f"dequantising blk.{done}")
            while not self.gate.wait(0.005):
                if cancelled():
                    raise Cancelled
            if cancelled():
                raise Cancelled
        if self.fail_load is not None:
            raise self.fail_load
        self.opened.append((target, draft, compute))
        return FakeSession(self, "f32" if compute == "auto" else compute)

    def compare(
        self, session: Any, request: CompareRequest | ScriptRequest, trace: TraceStore
    ) -> Any:
        self.compared.append(request)
        if isinstance(request, ScriptRequest):
            return FakeComparison(self, (f"{request.policy} A",), trace)
        if not request.texts[0]:
            raise OptionError("The prompt is empty.", "Give at least one token of text.")
        return FakeComparison(self, [lane.name for lane in request.lanes], trace)


class FakeComparison:
    """Lanes that get one position a round."""

    def __init__(self, engine: FakeEngine, names: Sequence[str], trace: TraceStore) -> None:
        self._engine = engine
        self._builder = LaneBuilder(trace)
        self._begun: list[int] = []
        self._names = names
        for name in names:
            self._begun.append(self._builder.lane(name, ()))

    def step(self) -> bool:
        while not self._engine.gate.wait(0.005):
            pass
        self._engine.threads.add(threading.current_thread().name)
        number = self._engine.steps = self._engine.steps + 1
        for run_id, name in zip(self._begun, self._names, strict=True):
            errors = NOISE if name == "noise" else CLEAN
            self._builder.row(run_id, name, number - 1, errors[(number - 1) % len(errors)])
        return number < self._engine.rounds

    def stop(self) -> None:
        self._builder.end()


class FakeSession:
    def __init__(self, engine: FakeEngine, compute: str) -> None:
        self._engine, self.compute, self.chat = engine, compute, None

    def prompt(self, text: str) -> Prompt:
        return Prompt(tuple(range(len(text.split()))), text)

    def start(self, prompts: Sequence[Prompt], options: RunOptions, trace: TraceStore) -> FakeRun:
        return FakeRun(self._engine, prompts[0].text, options, trace)


class FakeRun:
    """Drafts of three, of which 0 to 3 are accepted in turn."""

    def __init__(
        self, engine: FakeEngine, text: str, options: RunOptions, trace: TraceStore
    ) -> None:
        self._engine, self._options = engine, options
        self._builder = TraceBuilder(trace)
        trace.runs[self._builder.run_id]["n_predict"] = options.n_predict
        self.trace, self.run_id = trace, self._builder.run_id
        self.done = False
        self.stopped = False
        self._round = 0
        self._text = text

    def step(self) -> bool:
        while not self._engine.gate.wait(0.005):
            pass
        self._engine.threads.add(threading.current_thread().name)
        if self._round == self._engine.fail_round:
            raise RuntimeError("scripted failure")
        if self._round == 0:
            self._builder.prompt([self._text or " "])
            self.trace.rounds.append(
                run_id=self.run_id,
                round=0,
                seq_id=0,
                pos0=0,
                t_ms=1.0,
                verify_ms=1.0,
                verify_width=1,
                num_draft_tokens=0,
                num_accepted_draft_tokens=0,
                num_emitted=0,
                stop_kind="target",
                rollback_depth=0,
                rollback_path="none",
            )
        else:
            accepted = self._round % 4
            pieces = [f" a{self._round}.{i}" for i in range(3)]
            if self._options.spec.types:
                self._builder.draft(pieces[:accepted], " last", pieces[accepted:])
            else:
                self._builder.plain(f" t{self._round}")
        self._round += 1
        self.done = self._round >= self._engine.rounds
        return not self.done

    def cancel(self, seq_id: int) -> None:
        if seq_id != 0:
            raise OptionError(f"The run has no sequence {seq_id}.", "Name 0.")
        self._engine.cancelled.append((seq_id, self._round))

    def stop(self) -> None:
        self.stopped = True
        self.done = True
