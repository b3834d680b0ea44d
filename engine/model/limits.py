"""Bounded numbers from an untrusted file: read within limits, or refused with the name of their
key."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from engine.errors import UnsupportedModelError
from engine.gguf.file import GgufFile
from engine.gguf.metadata import REMEDY as REMEDY

MAX_LAYERS = 1024
MAX_WIDTH = 1 << 24
MAX_HEADS = 1 << 16
MAX_HEAD_DIM = 1 << 12
MAX_TAPS = 64
MAX_CONTEXT = (1 << 31) - 1
INCOMPLETE = "The file is damaged or incomplete; download or convert the model again."
OTHER_TARGET = "Choose a drafter that was made for this target."
NOT_HERE = (
    "This variant of the model does not run here: run it in llama-server, and inspect that with "
    "`draftscope observe`."
)


def count(
    file: GgufFile, key: str, default: int | None = None, *, low: int = 1, high: int = MAX_WIDTH
) -> int:
    """An integer within low..high; without a default the key is required."""
    value = file.int_(key) if default is None else file.int_(key, default)
    if not low <= value <= high:
        raise file.wrong(key, f"{value} is outside {low}..{high}")
    return value


def real(
    file: GgufFile, key: str, default: float | None = None, *, high: float = math.inf
) -> float:
    """A finite positive number up to `high`; without a default the key is required."""
    value = file.float_(key) if default is None else file.float_(key, default)
    if not math.isfinite(value) or not 0.0 < value <= high:
        raise file.wrong(key, f"{value} is not a usable positive number")
    return value


def uniform(
    file: GgufFile,
    key: str,
    blocks: int,
    used: Sequence[int],
    default: int | None = None,
    *,
    high: int = MAX_WIDTH,
) -> int:
    """A count given once, or per block with one value over the blocks that use it."""
    values = file.get(key)
    if not isinstance(values, np.ndarray):
        return count(file, key, default, high=high)
    if values.dtype.kind not in "iu" or len(values) != blocks:
        raise file.wrong(key, f"not {blocks} whole numbers")
    found = {int(values[index]) for index in (used or range(blocks))}
    if len(found) != 1:
        raise UnsupportedModelError(
            f"{file.path.name}: {file.full(key)} differs between layers.",
            "Open a model whose layers share one size.",
        )
    value = found.pop()
    if not 1 <= value <= high:
        raise file.wrong(key, f"{value} is outside 1..{high}")
    return value


def each(
    file: GgufFile,
    key: str,
    blocks: int,
    default: int | None = None,
    *,
    low: int = 0,
    high: int = MAX_WIDTH,
) -> list[int]:
    """A count for each block, given once or as an array; without a default the key is required."""
    values = file.get(key)
    if not isinstance(values, np.ndarray):
        return [count(file, key, default, low=low, high=high)] * blocks
    if values.dtype.kind not in "iu" or len(values) != blocks:
        raise file.wrong(key, f"not {blocks} whole numbers")
    found = [int(value) for value in values]
    outside = [value for value in found if not low <= value <= high]
    if outside:
        raise file.wrong(key, f"{outside[0]} is outside {low}..{high}")
    return found
