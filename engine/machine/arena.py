"""Memory that recorded passes share: as they never run side by side, each uses all of it."""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch

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
