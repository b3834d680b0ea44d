"""A sequence's whole state as a file: attention cells and, of a hybrid, the recurrent state.

Layout, all little-endian: magic, u32 version, u32 size of the header, the header as JSON, the
tensors without gaps, u32 CRC-32 of everything before. Tensors in order: positions int64; then, in
float32, keys of every attention layer, values of every attention layer, delta-net states of every
recurrent layer, convolution windows of every recurrent layer. Nothing in it depends on the
snapshot policy or on where cells were placed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import struct
import uuid
import zlib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from engine.errors import TraceFileError
from engine.memory.kv import AttentionState
from engine.memory.recurrent import RecurrentCheckpoint

_MAGIC = b"DSSEQ\r\n\x1a"
_VERSION = 1
_FRAME = struct.Struct("<8sII")
_CRC = struct.Struct("<I")
_MAX_HEADER = 1 << 12
_MAX_LAYERS = 1 << 12
_MAX_SIZE = 1 << 31
_REMEDY = "Save the sequence again, or choose another file."


@dataclass(frozen=True, slots=True)
class SequenceState:
    """Everything that a sequence is. recurrent is None for a model without recurrent layers."""

    attention: AttentionState
    recurrent: RecurrentCheckpoint | None


@dataclass(frozen=True, slots=True)
class _Header:
    """Sizes of the tensors. pos: last position of the recurrent state, None without one."""

    n_cells: int
    n_attention: int
    n_recurrent: int
    kv_shape: tuple[int, ...]
    state_shape: tuple[int, ...]
    window_shape: tuple[int, ...]
    pos: int | None

    @classmethod
    def of(cls, state: SequenceState) -> _Header:
        cells, recurrent = state.attention, state.recurrent
        return cls(
            n_cells=len(cells.positions),
            n_attention=len(cells.k),
            n_recurrent=len(recurrent.states) if recurrent else 0,
            kv_shape=tuple(cells.k[0].shape[1:]) if cells.k else (0, 0),
            state_shape=tuple(recurrent.states[0].shape) if recurrent else (0, 0, 0),
            window_shape=tuple(recurrent.windows[0].shape) if recurrent else (0, 0),
            pos=recurrent.pos if recurrent else None,
        )

    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the float32 tensors, in file order."""
        cells = [(self.n_cells, *self.kv_shape)] * (2 * self.n_attention)
        return (
            cells + [self.state_shape] * self.n_recurrent + [self.window_shape] * self.n_recurrent
        )

    def n_bytes(self) -> int:
        """Bytes of all tensors."""
        return 8 * self.n_cells + 4 * sum(map(math.prod, self.shapes()))


def save_state(path: Path | str, state: SequenceState) -> None:
    """Write a state, replacing the file as a whole. Raises TraceFileError if that fails."""
    path = Path(path).absolute()
    stage = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        try:
            with stage.open("wb") as file:
                _write(file, state)
            os.replace(stage, path)
        finally:
            with contextlib.suppress(OSError):
                stage.unlink()
    except OSError as error:
        raise TraceFileError(
            f"{path} cannot be written: {error.strerror or error}.",
            "Choose another folder, or free some space.",
        ) from error


def load_state(path: Path | str) -> SequenceState:
    """Read a state; its tensors are on the host.

    Raises TraceFileError for anything that save_state would not write.
    """
    path = Path(path)
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its other end
            raise TraceFileError(f"{path} is no regular file.", "Choose a saved sequence.")
        with path.open("rb") as file:
            return _Reader(path, file).state()
    except OSError as error:
        raise TraceFileError(
            f"{path} cannot be read: {error.strerror or error}.", "Check the path and its rights."
        ) from error


def _write(file: BinaryIO, state: SequenceState) -> None:
    header = _Header.of(state)
    tensors = [*state.attention.k, *state.attention.v]
    if state.recurrent:
        tensors += [*state.recurrent.states, *state.recurrent.windows]
    assert [tuple(t.shape) for t in tensors] == header.shapes()
    text = json.dumps(asdict(header)).encode()
    arrays = [t.detach().cpu().contiguous().numpy().astype("<f4", copy=False) for t in tensors]
    positions = state.attention.positions.numpy().astype("<i8", copy=False)
    pieces: list[bytes | memoryview] = [_FRAME.pack(_MAGIC, _VERSION, len(text)), text]
    pieces += [array.data for array in (positions, *arrays)]
    crc = 0
    for piece in pieces:
        file.write(piece)
        crc = zlib.crc32(piece, crc)
    file.write(_CRC.pack(crc))


class _Reader:
    """Reads one file from its beginning; every size is checked before memory is taken for it."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._left = os.fstat(file.fileno()).st_size
        self._crc = 0

    def state(self) -> SequenceState:
        header = self._header()
        if self._left != header.n_bytes() + _CRC.size:
            raise self._error("has not the size that its header tells")
        positions = self._positions(header)
        shapes = header.shapes()
        tensors = [self._floats(shape) for shape in shapes]
        crc = self._crc
        if _CRC.unpack(self._bytes(_CRC.size)) != (crc,):
            raise self._error("is damaged: its checksum is wrong")
        n, m = header.n_attention, header.n_recurrent
        attention = AttentionState(positions, tuple(tensors[:n]), tuple(tensors[n : 2 * n]))
        if header.pos is None:
            return SequenceState(attention, None)
        states, windows = tensors[2 * n : 2 * n + m], tensors[2 * n + m :]
        return SequenceState(
            attention, RecurrentCheckpoint(header.pos, tuple(states), tuple(windows))
        )

    def _header(self) -> _Header:
        magic, version, size = _FRAME.unpack(self._bytes(_FRAME.size))
        if magic != _MAGIC:
            raise self._error("is no saved sequence")
        if version != _VERSION:
            raise self._error(f"has version {version} of the format, not {_VERSION}")
        if size > _MAX_HEADER:
            raise self._error(f"has a header of {size} bytes")
        try:
            values = json.loads(self._bytes(size))
        except (ValueError, RecursionError):
            raise self._error("has a header that is not valid JSON") from None
        names = [field.name for field in fields(_Header)]
        if not isinstance(values, dict) or sorted(values) != sorted(names):
            raise self._error("has a header without the right fields")
        pos = values["pos"]
        return _Header(
            n_cells=self._whole(values["n_cells"]),
            n_attention=self._whole(values["n_attention"], _MAX_LAYERS),
            n_recurrent=self._whole(values["n_recurrent"], 0 if pos is None else _MAX_LAYERS),
            kv_shape=self._shape(values["kv_shape"], 2),
            state_shape=self._shape(values["state_shape"], 3),
            window_shape=self._shape(values["window_shape"], 2),
            pos=None if pos is None else self._whole(pos, low=-1),
        )

    def _whole(self, value: Any, high: int = _MAX_SIZE, low: int = 0) -> int:
        if type(value) is not int or not low <= value <= high:
            raise self._error(f"has a header with a size outside {low}..{high}")
        return value

    def _shape(self, value: Any, rank: int) -> tuple[int, ...]:
        if not isinstance(value, list) or len(value) != rank:
            raise self._error(f"has a header with a shape of other than {rank} sizes")
        return tuple(self._whole(size) for size in value)

    def _positions(self, header: _Header) -> torch.Tensor:
        positions = np.frombuffer(self._bytes(8 * header.n_cells), "<i8").astype(np.int64)
        rising = (np.diff(positions) >= 0).all()
        if header.n_cells and not (rising and positions[0] >= 0 and positions[-1] < _MAX_SIZE):
            raise self._error("has positions that do not rise from 0 or more")
        return torch.from_numpy(positions)

    def _floats(self, shape: tuple[int, ...]) -> torch.Tensor:
        values = np.frombuffer(self._bytes(4 * math.prod(shape)), "<f4")
        if not np.isfinite(values).all():  # would spread to every sequence in the same pool
            raise self._error("holds numbers that are not finite")
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
