"""Typed access to a model's metadata: a wrong or missing value is an error that names its key."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from engine.errors import ModelFileError
from engine.gguf.binary import StringArray, shorten

D = TypeVar("D")
V = TypeVar("V")
REMEDY = "The file is damaged or unusual: download or convert the model again."
REQUIRED: Any = object()  # default of a key that must be there


class TypedMetadata:
    """`metadata` holds str, int, float, bool, StringArray or a one-dimensional numpy array.

    Each method returns the value of `key` in its type, or `default` where the key is absent.
    Raises ModelFileError for a wrong type, and for an absent key without a default.
    """

    def __init__(self, path: Path, metadata: dict[str, Any]) -> None:
        self.path = path
        self.metadata = metadata

    def int_(self, key: str, default: D = REQUIRED) -> int | D:
        """An integer of any width."""
        return self._get(key, default, _as_int, "an integer")

    def float_(self, key: str, default: D = REQUIRED) -> float | D:
        """A finite real; an integer is accepted."""
        return self._get(key, default, _as_float, "a finite number")

    def str_(self, key: str, default: D = REQUIRED) -> str | D:
        return self._get(key, default, _as_str, "a string")

    def bool_(self, key: str, default: D = REQUIRED) -> bool | D:
        return self._get(key, default, _as_bool, "a boolean")

    def ints(self, key: str, default: D = REQUIRED) -> list[int] | D:
        """An array of integers or booleans; a single integer counts as an array of one."""
        return self._get(key, default, _as_ints, "an array of integers")

    def floats(self, key: str, default: D = REQUIRED) -> list[float] | D:
        """An array of numbers."""
        return self._get(key, default, _as_floats, "an array of numbers")

    def strs(self, key: str, default: D = REQUIRED) -> Sequence[str] | D:
        """An array of strings."""
        return self._get(key, default, _as_strs, "an array of strings")

    def _get(self, key: str, default: D, convert: Callable[[Any], V | None], wanted: str) -> V | D:
        if key not in self.metadata:
            if default is not REQUIRED:
                return default
            raise ModelFileError(self.path, f"key {key}", "missing from the metadata", REMEDY)
        value = convert(self.metadata[key])
        if value is None:
            raise ModelFileError(
                self.path,
                f"key {key}",
                f"must be {wanted}, but is {_describe(self.metadata[key])}",
                REMEDY,
            )
        return value


def _as_int(value: Any) -> int | None:
    return value if type(value) is int else None


def _as_float(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and math.isfinite(value) else None


def _as_str(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _as_bool(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _as_ints(value: Any) -> list[int] | None:
    if isinstance(value, np.ndarray) and value.dtype.kind in "iub":
        return (value.view(np.uint8) if value.dtype == np.bool_ else value).tolist()
    return [value] if type(value) is int else None


def _as_floats(value: Any) -> list[float] | None:
    if isinstance(value, np.ndarray) and value.dtype.kind in "iuf":
        return [float(item) for item in value.tolist()]
    return None


def _as_strs(value: Any) -> Sequence[str] | None:
    return value if isinstance(value, (list, StringArray)) else None


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.size} x {value.dtype.name}"
    if _as_strs(value) is not None:
        return f"an array of {len(value)} strings"
    return f"{type(value).__name__} {shorten(repr(value), 40)}"
