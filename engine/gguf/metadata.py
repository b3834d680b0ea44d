"""Typed access to a model's metadata; errors name the key of a wrong or missing value."""

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
REQUIRED: Any = object()  # default of a required key


class TypedMetadata:
    """`metadata` holds str, int, float, bool, StringArray or a one-dimensional numpy array.

    Each method returns the value of `key` in its type, or `default` if the key is missing. A key
    that begins with a dot belongs to the model's architecture. Raises ModelFileError for a wrong
    type, and for a missing key without a default.
    """

    def __init__(self, path: Path, metadata: dict[str, Any]) -> None:
        self.path = path
        self.metadata = metadata

    @property
    def architecture(self) -> str:
        """`general.architecture`, "" if missing."""
        return self.str_("general.architecture", "")

    def full(self, key: str) -> str:
        """The key as it is in the file."""
        return f"{self.architecture}{key}" if key.startswith(".") else key

    def wrong(self, key: str, what: str) -> ModelFileError:
        """An error for an impossible value."""
        return ModelFileError(self.path, f"key {self.full(key)}", what, REMEDY)

    def get(self, key: str) -> Any:
        """The value of any type, None if the key is missing."""
        return self.metadata.get(self.full(key))

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
        found = self.get(key)
        if found is None:
            if default is not REQUIRED:
                return default
            raise self.wrong(key, "missing from the metadata")
        value = convert(found)
        if value is None:
            raise self.wrong(key, f"must be {wanted}, but is {_describe(found)}")
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
