"""Builds GGUF files byte by byte, so that any part of one can be wrong on purpose."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

U32, STRING, ARRAY = 4, 8, 9
_ITEM_TYPES = {
    "uint8": 0,
    "int8": 1,
    "uint16": 2,
    "int16": 3,
    "uint32": 4,
    "int32": 5,
    "float32": 6,
    "bool": 7,
    "uint64": 10,
    "int64": 11,
    "float64": 12,
}


@dataclass(frozen=True)
class Typed:
    """A metadata value given as its type number and its bytes."""

    type_id: int
    payload: bytes


@dataclass(frozen=True)
class Tensor:
    """A directory entry and its data; `offset` overrides the place that follows from the order."""

    name: str | bytes
    ne: Sequence[int]
    data: bytes = b""
    type_id: int = 0
    offset: int | None = None
    n_dims: int | None = None

    @classmethod
    def of(cls, name: str, array: np.ndarray, type_name: str = "F32") -> Tensor:
        """A float32 array, quantised by gguf-py to the type named."""
        type_ = gguf.GGMLQuantizationType[type_name]
        data = gguf.quants.quantize(np.ascontiguousarray(array, np.float32), type_)
        return cls(name, array.shape[::-1], data.tobytes(), int(type_))


def string(text: str | bytes) -> bytes:
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def value(item: Any) -> Typed:
    """The GGUF form of a Python value; a numpy scalar or array keeps its dtype."""
    if isinstance(item, Typed):
        return item
    if isinstance(item, str | bytes):
        return Typed(STRING, string(item))
    if isinstance(item, list):
        head = struct.pack("<IQ", STRING, len(item))
        return Typed(ARRAY, head + b"".join(map(string, item)))
    if isinstance(item, np.ndarray):
        head = struct.pack("<IQ", _ITEM_TYPES[item.dtype.name], item.size)
        return Typed(ARRAY, head + item.tobytes())
    if type(item) is int:
        item = np.uint32(item) if 0 <= item < 2**32 else np.int64(item)
    elif type(item) is float:
        item = np.float32(item)
    scalar = np.asarray(item)
    return Typed(_ITEM_TYPES[scalar.dtype.name], scalar.tobytes())


def build(
    metadata: dict[str, Any] | Iterable[tuple[str | bytes, Any]] = (),
    tensors: Sequence[Tensor] = (),
    *,
    version: int = 3,
    alignment: int = 32,
    n_keys: int | None = None,
    n_tensors: int | None = None,
) -> bytes:
    """A whole file. The counts are those of what is given unless they are overridden."""
    pairs = list(metadata.items()) if isinstance(metadata, dict) else list(metadata)
    n_keys = len(pairs) if n_keys is None else n_keys
    n_tensors = len(tensors) if n_tensors is None else n_tensors
    head = [b"GGUF", struct.pack("<IQQ", version, n_tensors, n_keys)]
    for key, item in pairs:
        typed = value(item)
        head += [string(key), struct.pack("<I", typed.type_id), typed.payload]
    body = b""
    for tensor in tensors:
        offset = len(body) if tensor.offset is None else tensor.offset
        n_dims = len(tensor.ne) if tensor.n_dims is None else tensor.n_dims
        head += [string(tensor.name), struct.pack("<I", n_dims)]
        head += [struct.pack(f"<{len(tensor.ne)}Q", *tensor.ne)]
        head += [struct.pack("<IQ", tensor.type_id, offset)]
        body += _padded(tensor.data, alignment)
    return _padded(b"".join(head), alignment) + body


def write(path: Path, *args: Any, **kwargs: Any) -> Path:
    """`build` into a file; returns its path."""
    path.write_bytes(build(*args, **kwargs))
    return path


def _padded(data: bytes, alignment: int) -> bytes:
    return data + b"\0" * (-len(data) % alignment)
