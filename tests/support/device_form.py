"""The form of a run on a CUDA device, on the processor: passes end with the record of their rows,
drafts stay where they are, and passes are recorded by a double of CUDA's graphs.

The double repeats operations of torch on the very tensors that they were recorded with, and looks
at nothing else: what the host decided is repeated. For processes with DRAFTSCOPE_KERNELS=torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.decode import scheduler
from engine.machine.graphs import PassTensors, StepGraphs
from engine.memory import hybrid

_LOOKS = ("aten._local_scalar_dense", "aten.nonzero")


@dataclass
class Tape:
    """n_recorded, n_replayed: passes."""

    n_recorded: int = 0
    n_replayed: int = 0

    def record(self, compute: Callable[[], PassTensors]) -> tuple[PassTensors, Callable[[], None]]:
        """See engine.machine.graphs.Record."""
        calls: list[tuple[Any, Any, Any, Any]] = []
        with _Listening(calls):
            outputs = compute()
        self.n_recorded += 1

        done = False

        def replay() -> None:
            nonlocal done
            if not done:  # CUDA records without computing, and the first replay follows at once
                done = True
                return
            self.n_replayed += 1
            for func, args, kwargs, result in calls:
                again = func(*args, **kwargs)
                for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        return outputs, replay


class _Listening(TorchDispatchMode):
    def __init__(self, calls: list[tuple[Any, Any, Any, Any]]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(func).startswith(_LOOKS):
            raise AssertionError(f"{func} looks at values in a recorded pass")
        result = func(*args, **kwargs)
        # reshape, for instance, is a view where it can be one
        is_view = func.is_view and _storages(result) <= _storages((args, kwargs))
        if not is_view and "empty" not in func.overloadpacket.__name__:
            self._calls.append((func, args, kwargs, result))
        return result


def _storages(values: Any) -> set[int]:
    tensors = (x for x in tree_leaves(values) if isinstance(x, torch.Tensor))
    return {x.untyped_storage().data_ptr() for x in tensors}


@contextmanager
def device_form(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tape]:
    """Runs within are in this form."""
    tape = Tape()
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "drafts_may_stay", lambda device: True)
        patch.setattr(hybrid, "graphs_for", lambda device: StepGraphs(tape.record, 64))
        yield tape


@contextmanager
def host_form(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs within look at every step, and their passes go by numbers but are not recorded."""
    with monkeypatch.context() as patch:
        patch.setattr(hybrid, "graphs_for", lambda device: StepGraphs(_never, 64))
        patch.setattr(
            StepGraphs,
            "run",
            lambda self, inputs, arguments, compute, *_, **__: compute(*arguments),
        )
        patch.setattr(hybrid.HybridMemory, "takes_parts", lambda self, n_tokens: False)
        yield


def _never(compute: Callable[[], PassTensors]) -> tuple[PassTensors, Callable[[], None]]:
    raise AssertionError("nothing is recorded")
