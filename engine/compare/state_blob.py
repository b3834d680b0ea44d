"""The recurrent states that llama.cpp hands out of a sequence, decoded.

`llama_state_seq_get_data_ext` with PARTIAL_ONLY writes, little endian and packed: magic, sequence,
number of cells (0 or 1), position, 0, whether S is transposed (0), number of layers; then for each
recurrent layer the type, bytes per row and row of R, and after all of them the same of S. Layers
come in order without an index; attention layers are left out. What is written is what the next
batch would read: behind a removal that is pending, the plane that it points to.

A blob comes from a library that may be under work, so every size is checked against the blob and
the layout before anything is made of it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.errors import StateBlobError

_MAGIC = 0xAF143CD8
_F32 = 0
_HEAD = struct.Struct("<IiI")
_CELL = struct.Struct("<iI")
_SIZES = struct.Struct("<II")
_ROW = struct.Struct("<iQ")


@dataclass(frozen=True, slots=True)
class StateShape:
    """What the recurrent layers of a model keep: layers, their indices in the model; S of each is
    [n_heads, d_value, d_key], R [n_channels, window]."""

    layers: tuple[int, ...]
    n_heads: int
    d_value: int
    d_key: int
    n_channels: int
    window: int


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """One sequence's states. pos: the last position in them, -1 for an empty sequence, which has
    no arrays. s: per layer float32 [n_heads, d_key, d_value]; r: float32 [window, n_channels],
    oldest first. Both are views of the blob, transposed to the order of this engine."""

    pos: int
    s: tuple[np.ndarray, ...]
    r: tuple[np.ndarray, ...]


def decode_state(blob: bytes, shape: StateShape, n_layers: int) -> RecurrentState:
    """Read a blob of a model with n_layers layers. Raises StateBlobError where it is another."""
    reader = _Reader(blob)
    magic, _, n_cells = reader.read(_HEAD)
    if magic != _MAGIC:
        raise _wrong(f"begins with {magic:#x} and not with {_MAGIC:#x}")
    if n_cells > 1:
        raise _wrong(f"holds {n_cells} cells of one sequence")
    pos = -1
    if n_cells:
        pos, n_ids = reader.read(_CELL)
        if n_ids or pos < 0:
            raise _wrong(f"has a cell at position {pos} with {n_ids} sequence ids")
    is_transposed, found = reader.read(_SIZES)
    if is_transposed or found != n_layers:
        raise _wrong(f"is of {found} layers and not of {n_layers}, transposed {is_transposed}")
    r = [
        reader.row(layer, "R", n_cells, (shape.n_channels, shape.window)) for layer in shape.layers
    ]
    s = [
        reader.row(layer, "S", n_cells, (shape.n_heads, shape.d_value, shape.d_key))
        for layer in shape.layers
    ]
    reader.end()
    if not n_cells:
        return RecurrentState(pos, (), ())
    return RecurrentState(
        pos, tuple(one.transpose(0, 2, 1) for one in s), tuple(one.T for one in r)
    )


def relative_errors(reference: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> list[float]:
    """|a - b| / |a| of each pair, in float64; nothing over nothing is no error."""
    found = []
    for a, b in zip(reference, others, strict=True):
        error = float(np.linalg.norm(a.astype(np.float64) - b))
        found.append(error / float(np.linalg.norm(a.astype(np.float64))) if error else 0.0)
    return found


class _Reader:
    """Takes one part after another off a blob."""

    def __init__(self, blob: bytes) -> None:
        self._blob, self._at = blob, 0

    def read(self, form: struct.Struct) -> tuple[int, ...]:
        return form.unpack(self._take(form.size))

    def row(self, layer: int, name: str, n_cells: int, shape: tuple[int, ...]) -> np.ndarray:
        kind, n_bytes = self.read(_ROW)
        expected = 4 * int(np.prod(shape))
        if kind != _F32 or n_bytes != expected:
            raise _wrong(
                f"has {n_bytes} bytes of type {kind} for {name} of layer {layer}, not {expected} "
                "of float32"
            )
        if not n_cells:
            return np.empty((0,) * len(shape), np.float32)
        return np.frombuffer(self._take(n_bytes), "<f4").reshape(shape)

    def end(self) -> None:
        if left := len(self._blob) - self._at:
            raise _wrong(f"has {left} bytes behind its last layer")

    def _take(self, n: int) -> bytes:
        part = self._blob[self._at : self._at + n]
        if len(part) < n:
            raise _wrong(f"ends after {len(self._blob)} bytes")
        self._at += n
        return part


def _wrong(what: str) -> StateBlobError:
    return StateBlobError(
        f"The state that llama.cpp saved {what}.",
        "Use a build whose state format is that of llama.cpp 0c1e570.",
    )
