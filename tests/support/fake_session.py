"""A session without a model: scripted rounds, written into a real trace store."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.engine_thread.events import Decoding, OpenedFiles, OpenRequest, RunRequest, TurnRequest
from engine.compare.memory_script import MemoryScript
from engine.errors import Cancelled, ModelFileError, OptionError
from engine.long_work import ReportProgress
from engine.options import COMPUTE_MODES
from engine.trace.store import TraceStore
from tests.support.fake_run import FakeRun
from tests.support.lane_traces import CLEAN, NOISE, LaneBuilder

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
        FakeLayer(i, "mtp" if i == 8 else "attention" if i % 4 == 3 else "delta net")
        for i in range(9)
    )
    quant_mix: dict[str, int] = field(default_factory=lambda: {"Q8_0": 9_300_000, "F32": 100_000})
    rollback: str = "partial seq_rm over snapshot planes"
    llama_cpp: str = "partial rollback"
    kv_bytes_per_token: int = 1000
    mtp_kv_bytes_per_token: int = 0
    mtp_row_bytes: int = 0
    cell: tuple[int, int] = (128, 128)
    mtp_cell: tuple[int, int] = (0, 0)
    window: int = 0
    block_rows: tuple[tuple[int, int], ...] = ()
    draft_head_bytes: int = 0
    has_llama_cpp_planes: bool = True
    tokenizer: str = "gpt2 (qwen35), 4,096 tokens"
    state_bytes: int = 500_000
    log_bytes_per_token: int = 125_000
    loaded_bytes: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(COMPUTE_MODES, 18_800_000)
    )

    def note_on_context(self, n_ctx: int) -> str:
        return f"{n_ctx} cells" if n_ctx > self.n_ctx_train else ""


@dataclass
class FakeEngine:
    """An engine that opens fake sessions, and how they are to behave.

    gate: while it is clear, loading and every round wait for it (and for a cancel).
    rounds: rounds of a run. fail_round: the round in which the engine breaks.
    fail_at: what is raised, once, at a stage: inspect, open, start, started (after the run's entry
    in the trace), round, compare (with some lanes started), cancel, stop, close.
    """

    gate: threading.Event = field(default_factory=threading.Event)
    rounds: int = 12
    fail_load: Exception | None = None
    fail_round: int | None = None
    fail_at: dict[str, BaseException] = field(default_factory=dict)
    opened: list[tuple[Path, tuple[Path, ...], str]] = field(default_factory=list)
    closed: list[Path] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)
    compared: list[RunRequest | tuple[MemoryScript, str]] = field(default_factory=list)
    cancelled: list[tuple[int, int]] = field(default_factory=list)
    """Sequences that were ended, each with the round before which it was."""
    steps: int = 0
    waits: threading.Event = field(default_factory=threading.Event)
    """Set while a round waits for the gate."""
    identity: dict[str, Any] = field(default_factory=dict)
    """Of the model opened last."""

    def __post_init__(self) -> None:
        self.gate.set()

    def inspect(self, request: OpenRequest) -> OpenedFiles:
        """Any file that ends with .gguf has metadata."""
        self.raise_at("inspect")
        if request.target.suffix != ".gguf":
            raise ModelFileError(request.target, "byte 0", "no GGUF file", "Choose another.")
        info: Any = FakeInfo()
        drafts = tuple((path, "draft-simple", info) for path in request.drafts)
        identity = {"name": request.target.name}
        return OpenedFiles(request.target, drafts, info, identity)

    def open(self, request: OpenRequest, progress: ReportProgress) -> FakeSession:
        """A session, tensor by tensor."""
        self.threads.add(threading.current_thread().name)
        self.raise_at("open")
        for done in range(TENSORS):
            progress(done, TENSORS, f"dequantising blk.{done}")
            while not self.gate.wait(0.005):
                if request.cancelled.is_set():
                    raise Cancelled
            if request.cancelled.is_set():
                raise Cancelled
        if self.fail_load is not None:
            raise self.fail_load
        self.opened.append((request.target, request.drafts, request.compute))
        self.identity = {"name": request.target.name}
        compute = "f32" if request.compute == "auto" else request.compute
        return FakeSession(self, request.target, compute)

    def raise_at(self, stage: str) -> None:
        """Break where the test says so, once."""
        error = self.fail_at.pop(stage, None)
        if error is not None:
            raise error

    def wait(self) -> None:
        """Until the gate is open."""
        while not self.gate.wait(0.005):
            self.waits.set()
        self.waits.clear()
        self.raise_at("round")
        self.threads.add(threading.current_thread().name)


class FakeSession:
    """A model in use that has no weights."""

    memory = None

    def __init__(self, engine: FakeEngine, target: Path, compute: str) -> None:
        self._engine, self._target, self.compute = engine, target, compute

    def start(self, request: RunRequest, trace: TraceStore) -> Decoding:
        """A scripted run; there is no chat template."""
        if request.chat is not None:
            raise OptionError("The model has no chat template.", "Switch the chat template off.")
        self._engine.raise_at("start")
        run = FakeRun(self._engine, request, self.compute, trace)
        self._engine.raise_at("begun")
        return run

    def say(self, request: TurnRequest, trace: TraceStore) -> Decoding:
        """Always refused."""
        raise OptionError("Nothing is said to a fake model.", "Open another.")

    def play(self, script: MemoryScript, policy: str, trace: TraceStore) -> Decoding:
        """One scripted lane."""
        self._engine.compared.append((script, policy))
        return FakeComparison(self._engine, [f"{policy} A"], trace)

    def compare(self, request: RunRequest, trace: TraceStore) -> Decoding:
        """Scripted lanes."""
        self._engine.compared.append(request)
        if not request.texts[0]:
            raise OptionError("The prompt is empty.", "Give at least one token of text.")
        return FakeComparison(self._engine, [lane.name for lane in request.lanes], trace)

    def close(self) -> None:
        """Note it."""
        self._engine.raise_at("close")
        self._engine.closed.append(self._target)


class FakeComparison:
    """Lanes that get one position a round. run_id: the reference lane."""

    def __init__(self, engine: FakeEngine, names: list[str], trace: TraceStore) -> None:
        self._engine, self._trace = engine, trace
        self._builder = LaneBuilder(trace)
        self.run_id = self._builder.reference
        self._names = names
        self._lanes = []
        for name in self._names:
            self._lanes.append(self._builder.lane(name, ()))
            engine.raise_at("compare")
        self._done = False

    def step(self) -> bool:
        """One position of every lane."""
        self._engine.wait()
        number = self._engine.steps = self._engine.steps + 1
        for run_id, name in zip(self._lanes, self._names, strict=True):
            errors = NOISE if name == "noise" else CLEAN
            self._builder.row(run_id, name, number - 1, errors[(number - 1) % len(errors)])
        if number >= self._engine.rounds:
            self.stop()
        return not self._done

    def advance(self) -> bool:
        """The same."""
        return self.step()

    def cancel(self, seq_id: int) -> None:
        """Always refused."""
        raise OptionError(f"Sequence {seq_id} cannot be ended by itself.", "Stop all of them.")

    def stop(self) -> None:
        """End all lanes."""
        if not self._done:
            self._engine.raise_at("stop")
            self._done = True
            for run_id in (self.run_id, *self._lanes):
                self._trace.runs[run_id]["stops"] = ["limit"]
