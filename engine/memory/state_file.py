"""State files: a sequence's whole state, attention cells and, of a hybrid, recurrent states.

Layout, little-endian: magic, u32 version, u32 size of the header, the header as JSON, the tensors
without gaps, u32 CRC-32 of everything before. Tensors in order: positions int64; then, in float32,
keys of every attention layer, values of those that have them, and the recurrent states in the order
of the header, which gives name, shape and layers of each kind. The contents do not depend on the
snapshot policy or on the placement of cells.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, BinaryIO

import numpy as np
import torch
from msgspec import Meta, Struct, ValidationError, convert, structs

from engine.errors import TraceFileError
from engine.files import opened_file, written_whole
from engine.foreign import parse_json
from engine.memory.kv import AttentionState
from engine.memory.recurrent import RecurrentCheckpoint
from engine.model.recurrence import StateKey

_MAGIC = b"DSSEQ\r\n\x1a"
_VERSION = 3
_FRAME = struct.Struct("<8sII")
_CRC = struct.Struct("<I")
_MAX_HEADER = 1 << 16
_MAX_LAYERS = 1 << 12
_MAX_KINDS = 16
_MAX_RANK = 4
_MAX_SIZE = 1 << 31
_REMEDY = "Save the sequence again, or choose another file."


@dataclass(frozen=True, slots=True)
class SequenceCheckpoint:
    """What a restore needs: a copy of the recurrent part, None without recurrent layers; and the
    length of the attention part.

    attention is set only in a full checkpoint, which is independent of the sequence.
    """

    pos_max: int
    recurrent: RecurrentCheckpoint | None
    attention: AttentionState | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes of the recurrent part, and of the attention part if it is held."""
        held = self.recurrent.n_bytes if self.recurrent else 0
        return held + (self.attention.n_bytes if self.attention else 0)

    @property
    def cells(self) -> AttentionState:
        """The attention part of a full checkpoint."""
        assert self.attention is not None
        return self.attention


_Size = Annotated[int, Meta(ge=0, le=_MAX_SIZE)]
_Rows = Annotated[tuple[tuple[_Size, _Size], ...], Meta(max_length=_MAX_LAYERS)]
_Kind = tuple[
    str,
    Annotated[tuple[_Size, ...], Meta(min_length=1, max_length=_MAX_RANK)],
    Annotated[
        tuple[Annotated[int, Meta(ge=0, le=_MAX_LAYERS)], ...],
        Meta(min_length=1, max_length=_MAX_LAYERS),
    ],
]
"""States of one name and shape, in these layers."""


class _Header(Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of the tensors. keys, values: heads and columns, layer by layer. pos: last position of
    the recurrent states, None without any."""

    n_cells: _Size
    keys: _Rows
    values: _Rows
    states: Annotated[tuple[_Kind, ...], Meta(max_length=_MAX_KINDS)]
    pos: Annotated[int, Meta(ge=-1, le=_MAX_SIZE)] | None

    @classmethod
    def of(cls, state: SequenceCheckpoint) -> _Header:
        cells, recurrent = state.cells, state.recurrent
        states = recurrent.states if recurrent else {}
        kinds = groupby(states, lambda key: (key.name, tuple(states[key].shape)))
        return cls(
            n_cells=len(cells.positions),
            keys=tuple((t.shape[1], t.shape[2]) for t in cells.k),
            values=tuple((t.shape[1], t.shape[2]) for t in cells.v),
            states=tuple((*kind, tuple(key.layer for key in keys)) for kind, keys in kinds),
            pos=recurrent.pos if recurrent else None,
        )

    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the float32 tensors, in file order."""
        cells = [(self.n_cells, *row) for row in (*self.keys, *self.values)]
        return cells + [shape for _, shape, layers in self.states for _ in layers]

    def state_keys(self) -> list[StateKey]:
        """The recurrent states, in file order."""
        return [StateKey(layer, name) for name, _, layers in self.states for layer in layers]

    def n_bytes(self) -> int:
        """Bytes of all tensors."""
        return 8 * self.n_cells + 4 * sum(map(math.prod, self.shapes()))


def save_state(path: Path | str, state: SequenceCheckpoint) -> None:
    """Write a full checkpoint as a file, replaced as a whole. Raises TraceFileError."""
    path = Path(path).absolute()
    with written_whole(path, TraceFileError) as part, part.open("wb") as file:
        _write(file, state)


def load_state(path: Path | str) -> SequenceCheckpoint:
    """Read a state; its tensors are on the host.

    Raises TraceFileError for anything that save_state would not write.
    """
    path = Path(path)
    with opened_file(path, TraceFileError) as file:
        return _Reader(path, file).state()


def _write(file: BinaryIO, state: SequenceCheckpoint) -> None:
    header = _Header.of(state)
    tensors = [*state.cells.k, *state.cells.v]
    if state.recurrent:
        tensors += state.recurrent.states.values()
    assert [tuple(t.shape) for t in tensors] == header.shapes()
    text = json.dumps(structs.asdict(header)).encode()
    arrays = [t.detach().cpu().contiguous().numpy().astype("<f4", copy=False) for t in tensors]
    positions = state.cells.positions.numpy().astype("<i8", copy=False)
    pieces: list[bytes | memoryview] = [_FRAME.pack(_MAGIC, _VERSION, len(text)), text]
    pieces += [array.data for array in (positions, *arrays)]
    crc = 0
    for piece in pieces:
        file.write(piece)
        crc = zlib.crc32(piece, crc)
    file.write(_CRC.pack(crc))


class _Reader:
    """Reads one file; every size is checked before memory is allocated for it."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._left = os.fstat(file.fileno()).st_size
        self._crc = 0

    def state(self) -> SequenceCheckpoint:
        header = self._header()
        if self._left != header.n_bytes() + _CRC.size:
            raise self._error("does not have the size in its header")
        positions = self._positions(header)
        shapes = header.shapes()
        tensors = [self._floats(shape) for shape in shapes]
        crc = self._crc
        if _CRC.unpack(self._bytes(_CRC.size)) != (crc,):
            raise self._error("is damaged: its checksum is wrong")
        keys, cells = len(header.keys), len(header.keys) + len(header.values)
        attention = AttentionState(positions, tuple(tensors[:keys]), tuple(tensors[keys:cells]))
        last = int(positions[-1]) if header.n_cells else -1
        if header.pos is None:
            return SequenceCheckpoint(last, None, attention)
        states = dict(zip(header.state_keys(), tensors[cells:], strict=True))
        recurrent = RecurrentCheckpoint(header.pos, states)
        return SequenceCheckpoint(min(last, header.pos), recurrent, attention)

    def _header(self) -> _Header:
        magic, version, size = _FRAME.unpack(self._bytes(_FRAME.size))
        if magic != _MAGIC:
            raise self._error("is not a saved sequence")
        if version != _VERSION:
            raise self._error(f"has version {version} of the format, not {_VERSION}")
        if size > _MAX_HEADER:
            raise self._error(f"has a header of {size} bytes")
        try:
            header: _Header = convert(parse_json(self._bytes(size).decode()), _Header)
        except ValidationError as error:
            raise self._error(f"has a header that is wrong: {error}") from None
        except ValueError:  # invalid JSON or UTF-8
            raise self._error("has a header that is not valid JSON") from None
        keys = header.state_keys()
        if len(set(keys)) < len(keys):
            raise self._error("has a header that names a state twice")
        if keys and header.pos is None:
            raise self._error("has a header with states that have no position")
        return header

    def _positions(self, header: _Header) -> torch.Tensor:
        positions = np.frombuffer(self._bytes(8 * header.n_cells), "<i8").astype(np.int64)
        rising = (np.diff(positions) >= 0).all()
        if header.n_cells and not (rising and positions[0] >= 0 and positions[-1] < _MAX_SIZE):
            raise self._error("has positions that are negative or do not increase")
        return torch.from_numpy(positions)

    def _floats(self, shape: tuple[int, ...]) -> torch.Tensor:
        values = np.frombuffer(self._bytes(4 * math.prod(shape)), "<f4")
        if not np.isfinite(values).all():  # would spread to every sequence in the same pool
            raise self._error("has numbers that are not finite")
        return torch.from_numpy(values.astype(np.float32).reshape(shape))

    def _bytes(self, n: int) -> bytes:
        data = self._file.read(n) if n <= self._left else b""
        if len(data) != n:
            raise self._error("is cut short")
        self._left -= n
        self._crc = zlib.crc32(data, self._crc)
        return data

    def _error(self, what: str) -> TraceFileError:
        return TraceFileError(f"{self._path} {what}.", _REMEDY)
