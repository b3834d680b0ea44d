"""Reads a model's tensors, as float32 or where they lie in the mapped file, with progress by bytes
and a way to cancel."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import torch

from engine.errors import Cancelled, ModelFileError, OutOfMemoryError, UnsupportedModelError
from engine.gguf.binary import shorten
from engine.gguf.file import GgufFile, TensorInfo
from engine.gguf.mapped_rows import MappedRows
from engine.progress import ReportProgress
from kernels.dequant import dequantise

# bytes, as GGUF aligns tensors unless a file says otherwise
_ALIGNED = 32

_Read = Callable[[TensorInfo, slice, int], torch.Tensor]


class TensorReader:
    """Hands out the tensors of a file one by one; the total of `progress` is the bytes of all."""

    def __init__(
        self,
        file: GgufFile,
        progress: ReportProgress | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> None:
        self._file = file
        self._progress = progress or (lambda done, total, phase: None)
        self._cancelled = cancelled or (lambda: False)
        self._total = sum(info.n_bytes for info in file.tensors.values())
        self._done = 0
        self._seen: set[str] = set()
        self._in_place: dict[str, np.ndarray] = {}

    def has(self, name: str) -> bool:
        """Whether the file has a tensor of this name."""
        return name in self._file.tensors

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor as float32 of `shape` (numpy order), in memory of its own.

        Dimensions of 1 that the file has or lacks at either end are ignored. Raises Cancelled,
        ModelFileError (absent, other shape), UnsupportedModelError (a type without a decoder)
        and OutOfMemoryError.
        """
        (tensor,) = self._pieces(name, shape, 1, "dequantising", self._decode)
        return tensor.reshape(shape)

    def take_each(self, name: str, shape: tuple[int, ...]) -> Iterator[torch.Tensor]:
        """The slices of a tensor along its first dimension in turn, each read when asked for.

        Otherwise as `take`, cancelled between slices as well.
        """
        for piece in self._pieces(name, shape, shape[0], "dequantising", self._decode):
            yield piece.reshape(shape[1:])

    def take_blocks(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor as stored, uint8 [..., rows, bytes per row]: the mapped file itself, for
        reading only, which stays mapped as long as the result is used.

        shape: ends in rows and columns; a row has to be whole blocks, as GGUF wants it. All of it
        has been read once, so it is in memory as long as there is room. Raises Cancelled and
        ModelFileError as `take`.
        """
        (tensor,) = self._pieces(name, shape, 1, "reading", self._where_it_is)
        return tensor.reshape(*shape[:-1], -1)

    def release(self, name: str) -> None:
        """Take the pages of a tensor that has been copied out of this process's memory."""
        self._in_place.pop(name, None)
        info = self._file.tensors[name]
        self._file.lent.release(info.part, info.offset, info.n_bytes)

    def in_place(self) -> list[np.ndarray]:
        """The bytes, uint8 [n], of every tensor that `take_blocks` lent and nobody released."""
        return list(self._in_place.values())

    def mapped_rows(self, name: str, shape: tuple[int, ...]) -> MappedRows:
        """A table that stays in the file; its first row is decoded to see that it can be.

        Raises as `take`.
        """
        info = self._find(name, shape)
        self._decode(info, slice(0, info.n_bytes // shape[0]), shape[1])
        if name not in self._seen:
            self._seen.add(name)
            self._done += info.n_bytes
        data, path = _lend(self._file.raw(name)), self._file.parts[info.part]
        is_whole = self._file.stays_whole(name)
        return MappedRows(data, info.type.name, shape, is_whole, path, name)

    def type(self, name: str) -> str:
        """Name of the GGML type of a tensor of the file."""
        return self._file.tensors[name].type.name

    def _pieces(
        self, name: str, shape: tuple[int, ...], count: int, what: str, read: _Read
    ) -> Iterator[torch.Tensor]:
        """A tensor in `count` equal parts, which count as progress the first time."""
        info = self._find(name, shape)
        size = info.n_bytes // count
        is_new = name not in self._seen
        self._seen.add(name)
        phase = f"{what} {_group(name)}"
        for i in range(count):
            if self._cancelled():
                raise Cancelled
            self._progress(self._done, self._total, phase)
            piece = read(info, slice(i * size, (i + 1) * size), info.n_elements // count)
            if is_new:
                self._done += size
            self._progress(self._done, self._total, phase)
            yield piece

    def _find(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        info = self._file.tensors.get(name)
        if info is None:
            raise ModelFileError(
                self._file.path,
                f"tensor {name}",
                f"missing, while the model needs it with shape {_text(shape)}",
                "Convert the model again with a current llama.cpp, or use another file.",
            )
        if not info.fits(shape):
            raise ModelFileError(
                self._file.parts[info.part],
                f"tensor {name}",
                f"has shape {_text(info.shape)}, while the metadata ask for {_text(shape)}",
                "Convert the model again with a current llama.cpp, or use another file.",
            )
        return info

    def _where_it_is(self, info: TensorInfo, part: slice, n_elements: int) -> torch.Tensor:
        raw = self._file.raw(info.name)
        raw[:: mmap.PAGESIZE].max(initial=0)  # a byte of each page
        tensor = _lend(raw)
        if raw.ctypes.data % _ALIGNED:  # anywhere in the file, while products read whole words
            return tensor.clone()
        self._in_place[info.name] = raw
        return tensor

    def _decode(self, info: TensorInfo, part: slice, n_elements: int) -> torch.Tensor:
        try:
            return dequantise(_lend(self._file.raw(info.name))[part], info.type.name, n_elements)
        except NotImplementedError:
            raise UnsupportedModelError(
                f"{self._file.parts[info.part].name}: tensor {shorten(info.name)} has type "
                f"{info.type.name}, which cannot be turned into numbers here.",
                "Use a file with another quantisation, such as Q4_K_M or Q8_0.",
            ) from None
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "allocate" not in str(error):
                raise
            raise OutOfMemoryError(
                f"No memory is left for tensor {shorten(info.name)}, which needs "
                f"{4 * n_elements / 2**20:.0f} MiB.",
                "Close other programs, or use a smaller model.",
            ) from error


def _lend(part: np.ndarray) -> torch.Tensor:
    """A uint8 tensor over a slice of a read-only array, for reading only; it keeps that alive.

    Its storage is the whole array, so slices that follow each other are seen to. torch warns about
    arrays that cannot be written, which mapped ones cannot; so this one is presented to it as if
    it could be.
    """
    whole = part.base
    assert isinstance(whole, np.ndarray)
    address = whole.ctypes.data
    interface = {**whole.__array_interface__, "data": (address, False)}
    lent = np.asarray(SimpleNamespace(__array_interface__=interface, whole=whole))
    start = part.ctypes.data - address
    return torch.from_numpy(lent)[start : start + part.size]


def _group(name: str) -> str:
    """The part of the model a tensor belongs to: "blk.12", "output"."""
    words = name.split(".")
    return ".".join(words[:2]) if words[0] == "blk" else words[0]


def _text(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
