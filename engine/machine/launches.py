"""A computation on the processor as the launches of compiled kernels it comes to.

Recording runs Python's part of it and computes nothing: it notes which kernel is called with which
addresses and numbers. So all that the computation does to numbers has to be done by kernels of
kernels.llvm; tensors of torch are made and seen as views. Memory for it is
shared: as recorded passes never run side by side, each uses all of it.
"""

from __future__ import annotations

import bisect
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from enum import Enum, auto
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.llvm.program import Launch, LaunchTable, watched

_MAKE = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))
# views by their declaration, of tensors that no one keeps
_MAKE_CONSTANTS = frozenset(("lift", "lift_fresh"))

Tensors = tuple[torch.Tensor, ...]


class RecordOnProcessor:
    """A `Record` of engine.machine.graphs. The tensors of all recordings lie in one arena."""

    def __init__(self) -> None:
        self._arena = Arena()
        # compiles the loop over launches before any pass is timed
        LaunchTable([])()

    @property
    def n_bytes(self) -> int:
        """Bytes that the tensors of the recordings take."""
        return self._arena.n_bytes

    def __call__(self, compute: Callable[[], Tensors]) -> tuple[Tensors, LaunchTable]:
        """Raises NotImplementedError where something is done to numbers by no kernel; nothing was
        computed then, so that the pass can still be run."""
        launches: list[Launch] = []
        with _NothingButViews(self._arena.regions()), watched(launches.append):
            outputs = compute()
        return outputs, LaunchTable(launches)


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


_BLOCK = 4 << 20
"""Bytes of a block; a larger tensor gets one of its own size."""
_ALIGNED = 64

Region = tuple[int, int, int]
"""Number of a block, first byte, one above the last byte."""


class Arena:
    """Blocks that stay where they are; there are as many as the largest recording needs."""

    def __init__(self) -> None:
        self._blocks: list[np.ndarray] = []

    @property
    def n_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.nbytes for block in self._blocks)

    def regions(self) -> Regions:
        """The tensors of one more recording: whatever others have here, all of it is free."""
        return Regions(self._blocks)


class Regions:
    """The tensors of one recording. Where one is not referred to any more, others may be put: what
    is computed later does not need it."""

    def __init__(self, blocks: list[np.ndarray]) -> None:
        self._blocks = blocks
        self._free: list[Region] = [(i, 0, block.nbytes) for i, block in enumerate(blocks)]

    def empty_like(self, like: torch.Tensor) -> torch.Tensor:
        """An uninitialised tensor of the sizes, strides and dtype of another one, which has no
        gaps."""
        n_bytes = like.numel() * like.element_size()
        region = self._take(-(-max(n_bytes, 1) // _ALIGNED) * _ALIGNED)
        block, start, _ = region
        held = self._blocks[block][start : start + n_bytes]
        # a tensor and its views keep the array, and with it the region
        weakref.finalize(held, self._give_back, region).atexit = False
        flat = torch.from_numpy(held).view(like.dtype)
        return flat.as_strided(like.size(), like.stride())

    def _take(self, n_bytes: int) -> Region:
        i = next((i for i, (_, a, b) in enumerate(self._free) if b - a >= n_bytes), None)
        if i is None:
            i, size = len(self._free), max(n_bytes, _BLOCK)
            self._free.append((len(self._blocks), 0, size))
            # torch's memory lies on cache lines
            self._blocks.append(torch.empty(size, dtype=torch.uint8).numpy())
        block, start, stop = self._free[i]
        rest = (block, start + n_bytes, stop)
        self._free[i : i + 1] = [rest] if rest[1] < stop else []
        return block, start, start + n_bytes

    def _give_back(self, region: Region) -> None:
        bisect.insort(self._free, region)
        self._free = list(_joined(self._free))


def _joined(regions: list[Region]) -> Iterator[Region]:
    """Sorted regions, neighbours as one."""
    ends = [i for i, (a, b) in enumerate(pairwise(regions)) if a[0] != b[0] or a[2] != b[1]] + [
        len(regions) - 1
    ]
    first = 0
    for last in ends:
        block, start, _ = regions[first]
        yield block, start, regions[last][2]
        first = last + 1
