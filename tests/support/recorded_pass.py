"""What a CUDA graph does, on the processor: operations again with the tensors they had before.

Recording keeps every operation that reaches torch's dispatcher and every call of a program for the
processor, with their very arguments; replaying runs them in turn and puts results where the first
ones were. A number that the host has chosen, a row for instance, is thus chosen for ever, as in a
graph. Unlike a graph, recording computes: the first replay does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.graphs import PassTensors, StepGraphs
from kernels.llvm.program import Program

Step = Callable[[], None]
WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")
"""Operations whose result the host looks at."""


class Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        # addresses that programs were given stay those of these tensors
        self.memory: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in WAITS:
            raise RuntimeError(f"{name} waits for the device")
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.memory.append(result)
        if not name.startswith(("empty", "new_empty")):
            self.steps.append(lambda: _again(func, args, kwargs, result))
        return result


def _again(func: Any, args: Any, kwargs: Any, before: Any) -> None:
    olds, news = tree_leaves(before), tree_leaves(func(*args, **kwargs))
    for old, new in zip(olds, news, strict=True):
        # a view, or what was changed in place, is there already
        if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
            old.copy_(new)


class Recorder:
    """A `Record` of engine.graphs; counts what it was asked to do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n_recorded = self.n_replayed = 0
        self._recording: Recording | None = None
        for name in ("__call__", "alone"):
            monkeypatch.setattr(Program, name, self._watched(getattr(Program, name)))

    def _watched(self, run: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **others: int) -> None:
            run(*args, **others)
            if self._recording:
                self._recording.steps.append(lambda: run(*args, **others))

        return call

    def __call__(self, compute: Callable[[], PassTensors]) -> tuple[PassTensors, Step]:
        self.n_recorded += 1
        with Recording() as recording:
            self._recording = recording
            outputs = compute()
        self._recording = None
        is_new = True

        def replay() -> None:
            nonlocal is_new
            self.n_replayed += 1
            if not is_new:
                for step in recording.steps:
                    step()
            is_new = False

        return outputs, replay


def use_recordings(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """From here on, memories on the processor have their passes recorded."""
    recorder = Recorder(monkeypatch)
    monkeypatch.setattr("engine.memory.hybrid.graphs_for", lambda device: StepGraphs(recorder))
    return recorder
