"""The recurrent states that llama.cpp exports of a sequence, decoded.

`llama_state_seq_get_data_ext` with PARTIAL_ONLY writes, little endian and packed: magic, sequence,
number of cells (0 or 1), position, 0, whether S is transposed (0), number of layers. Then for each
recurrent layer: type, bytes per row and row of R (its convolution window), and for a layer with
n-gram embeddings also bytes per row and row of their window. After all layers: type, bytes per row
and row of S of each (empty for a short convolution). Layers come in order without an index;
attention layers are omitted. A memory with rings (deepseek4) writes after magic and sequence: a
magic of its own, version and mode; the cells of its window, stream by stream; and the rings `csa`,
`hca` and `lid`, each with a header and for every layer its number, values and scores, by position
as here.

The content is what the next batch would read: while a removal is pending, the plane that it points
to. The library may be under development, so every size is checked before use.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from engine.compare.divergence import MemoryDifference
from engine.errors import StateBlobError
from engine.memory.recurrent import RecurrentCheckpoint
from engine.model.recurrence import Recurrence, RecurrentLayout, StateKey

_MAGIC = 0xAF143CD8
_F32 = 0
_HEAD = struct.Struct("<IiI")
_CELL = struct.Struct("<iI")
_SIZES = struct.Struct("<II")
_TYPE = struct.Struct("<i")
_N_BYTES = struct.Struct("<Q")
_RINGS = struct.Struct("<IiIII")
_RINGS_MAGIC, _PARTIAL = 0x34565344, 1
_RING = struct.Struct("<IIIIII")
_RING_ROWS = struct.Struct("<iQQQ")
_CELL_ROWS = struct.Struct("<iQ")
_NUMBER = struct.Struct("<I")
_WINDOWS = ("window", "ngrams")
_STATE = "state"
_MOST_STREAMS = 256


def decode_state(blob: bytes, layout: RecurrentLayout, n_layers: int) -> RecurrentCheckpoint:
    """Decode a blob of a model with n_layers layers and this layout. pos is -1 for an empty
    sequence, which has no states; what llama.cpp does not keep, such as the newest tokens for
    n-grams, is absent. Raises StateBlobError for another model or format."""
    reader = _BlobReader(blob)
    if layout.by_position:
        return _rings(reader, layout)
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
    states = {}
    for names in (_WINDOWS, (_STATE,)):
        for layer in layout.layers:
            reader.type(layer)
            for name in names:
                key = StateKey(layer, name)
                if key in layout.states:
                    states[key] = reader.row(key, n_cells, layout.states[key])
                elif name == _STATE:
                    reader.row(key, n_cells, None)
    reader.end()
    return RecurrentCheckpoint(pos, states if n_cells else {})


def _rings(reader: _BlobReader, layout: RecurrentLayout) -> RecurrentCheckpoint:
    magic, _, own, version, mode = reader.read(_RINGS)
    if (magic, own, version, mode) != (_MAGIC, _RINGS_MAGIC, 1, _PARTIAL):
        found = f"{magic:#x}, {own:#x}, version {version}, mode {mode}"
        raise _wrong(f"is not of a memory with rings ({found})")
    pos = -1
    (n_streams,) = reader.read(_NUMBER)
    for _ in range(min(n_streams, _MOST_STREAMS)):
        (n_cells,) = reader.read(_NUMBER)
        for _ in range(n_cells):
            at, n_ids = reader.read(_CELL)
            reader.skip(4 * n_ids)
            pos = max(pos, at)
        if n_cells:
            _, n_layers = reader.read(_SIZES)
            for _ in range(n_layers):
                _, row_bytes = reader.read(_CELL_ROWS)
                reader.skip(row_bytes * n_cells)
    states: dict[StateKey, Tensor] = {}
    for name in ("csa ring", "hca ring", "lid ring"):
        layers = [key.layer for key in layout.states if key.name == name]
        _, _, n_rows, width, n_streams, n_layers = reader.read(_RING)
        if n_layers != len(layers) or n_streams != 1:
            raise _wrong(f"has {n_layers} layers of {n_streams} sequences with a {name}")
        for layer in layers:
            (number,) = reader.read(_NUMBER)
            key = StateKey(layer, name)
            recurrence = layout.states[key]
            if number != layer or (n_rows, 2 * width) != recurrence.shape:
                raise _wrong(f"has a {name} of {n_rows} x {width} numbers in layer {number}")
            halves = [reader.ring_half(key, n_rows, width) for _ in range(2)]
            states[key] = recurrence.needed(torch.cat(halves, 1), pos + 1)
    reader.end()
    return RecurrentCheckpoint(pos, states if pos >= 0 else {})


def relative_errors(
    reference: Mapping[StateKey, Tensor], others: Mapping[StateKey, Tensor]
) -> dict[StateKey, float]:
    """|a - b| / |a| of each pair, in float64; 0 / 0 counts as 0, non-finite values as infinite."""
    found = {}
    for key, a in reference.items():
        exact = a.double()
        error, size = (float(one.norm()) for one in (exact - others[key], exact))
        found[key] = error / size if error and size else math.inf if error else 0.0
        if math.isnan(found[key]):
            found[key] = math.inf
    return found


def state_difference(
    layout: RecurrentLayout,
    reference: RecurrentCheckpoint,
    other: RecurrentCheckpoint,
    n_cells: int,
) -> MemoryDifference | None:
    """Distance of a sequence's states from the reference's, None for an empty one. n_cells: of the
    result."""
    if not reference.states or not other.states:
        return None
    errors = relative_errors(reference.states, other.states)
    known = dict.fromkeys(layout.states, 0.0) | errors  # a blob lacks the newest tokens
    states, windows = (layout.worst(known, windows=windows) for windows in (False, True))
    return MemoryDifference(layout.layers, states, windows, n_cells)


class _BlobReader:
    """Reads a blob part by part."""

    def __init__(self, blob: bytes) -> None:
        self._blob, self._at = blob, 0

    def read(self, form: struct.Struct) -> tuple[int, ...]:
        return form.unpack(self._take(form.size))

    def type(self, layer: int) -> None:
        (kind,) = self.read(_TYPE)
        if kind != _F32:
            raise _wrong(f"has states of type {kind} in layer {layer}, not float32")

    def skip(self, n: int) -> None:
        self._take(n)

    def ring_half(self, key: StateKey, n_rows: int, width: int) -> Tensor:
        """Values or scores of a ring."""
        kind, *sizes = self.read(_RING_ROWS)
        if kind != _F32 or sizes != [width, n_rows, 4 * width]:
            raise _wrong(f"has a {key.name} of type {kind} and sizes {sizes} in layer {key.layer}")
        return _floats(self._take(4 * width * n_rows)).view(n_rows, width)

    def row(self, key: StateKey, n_cells: int, recurrence: Recurrence | None) -> Tensor:
        """One state in our shape; None for one without elements."""
        shape = recurrence.shape if recurrence else (0,)
        (n_bytes,) = self.read(_N_BYTES)
        expected = 4 * math.prod(shape)
        if n_bytes != expected:
            raise _wrong(
                f"has {n_bytes} bytes for the {key.name} of layer {key.layer}, not {expected}"
            )
        if not n_cells:
            return torch.empty(0)
        row = _floats(self._take(n_bytes))
        if recurrence is None or not recurrence.llama_cpp_turns:
            return row.view(shape)
        return row.view(*shape[:-2], *shape[:-3:-1]).transpose(-1, -2)

    def end(self) -> None:
        if left := len(self._blob) - self._at:
            raise _wrong(f"has {left} bytes after its last layer")

    def _take(self, n: int) -> bytes:
        part = self._blob[self._at : self._at + n]
        if len(part) < n:
            raise _wrong(f"ends after {len(self._blob)} bytes")
        self._at += n
        return part


def _floats(raw: bytes) -> Tensor:
    return torch.from_numpy(np.array(np.frombuffer(raw, "<f4")))


def _wrong(what: str) -> StateBlobError:
    return StateBlobError(
        f"The state saved by llama.cpp {what}.",
        "Use a build whose state format is that of llama.cpp 0c1e570.",
    )
