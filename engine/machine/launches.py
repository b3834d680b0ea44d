"""A computation on the processor as the launches of compiled kernels it comes to.

Recording runs Python's part of it and computes nothing: it notes which kernel is called with which
addresses and numbers. So all that the computation does to numbers has to be done by kernels of
kernels.llvm; tensors of torch are made and seen as views.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from enum import Enum, auto
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.machine.arena import Arena, Regions
from kernels.llvm.launch_table import LaunchTable
from kernels.llvm.program import Launch, watched

_MAKE = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))
# views by their declaration, of tensors that no one keeps
_MAKE_CONSTANTS = frozenset(("lift", "lift_fresh"))

Tensors = tuple[torch.Tensor, ...]


class RecordOnProcessor:
    """A `Record` of engine.machine.graphs. The tensors of all recordings lie in one arena."""

    def __init__(self) -> None:
        self._arena = Arena()
        # compiles the loop over launches before any pass is timed
        LaunchTable([]).run()

    @property
    def n_bytes(self) -> int:
        """Bytes that the tensors of the recordings take."""
        return self._arena.n_bytes

    def __call__(self, compute: Callable[[], Tensors]) -> tuple[Tensors, Callable[[], None]]:
        """Raises NotImplementedError where something is done to numbers by no kernel; nothing was
        computed then, so that the pass can still be run."""
        launches: list[Launch] = []
        with _NothingButViews(self._arena.regions()), watched(launches.append):
            outputs = compute()
        return outputs, LaunchTable(launches).run


class _NothingButViews(TorchDispatchMode):
    """Refuses every operation of torch but new tensors, which lie in an arena, and views."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled by torch here; asked to skip that, it would import its compiler."""
        return False

    def __init__(self, regions: Regions) -> None:
        super().__init__()
        self._regions = regions

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = _kind(func)
        if kind is _Kind.MAKES:
            return self._regions.empty_like(func(*args, **(kwargs or {})))
        if kind is _Kind.VIEWS:
            result = func(*args, **(kwargs or {}))
            # reshape, for instance, is a view where it can be one
            if set(_storages((result,))) <= {*_storages(args), *_storages((kwargs or {}).values())}:
                return result
        raise NotImplementedError(f"{func} computes, and is not a kernel of kernels.llvm")


class _Kind(Enum):
    """What an operation of torch does."""

    MAKES = auto()
    VIEWS = auto()
    COMPUTES = auto()


@functools.cache
def _kind(func: Any) -> _Kind:
    name = func.overloadpacket.__name__
    if name in _MAKE:
        return _Kind.MAKES
    is_view = func.is_view and not func._schema.is_mutable and name not in _MAKE_CONSTANTS
    return _Kind.VIEWS if is_view else _Kind.COMPUTES


def _storages(values: Iterable[Any]) -> Iterator[int]:
    """Addresses of the storage of every tensor among arguments or results."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value.untyped_storage().data_ptr()
        elif isinstance(value, (list, tuple)):
            yield from _storages(value)
