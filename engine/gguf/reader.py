"""Reads a model's tensors as float32 or as stored, reporting progress in bytes; can be
cancelled."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection, Iterator
from functools import partial
from operator import attrgetter
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from engine.errors import Cancelled, ModelFileError, OutOfMemoryError, UnsupportedModelError
from engine.gguf.binary import shorten
from engine.gguf.file import GgufFile, TensorInfo
from engine.gguf.metadata import REMEDY
from engine.gguf.part_file import PrivateCopy, check_mapped
from engine.long_work import ReportProgress
from kernels.linear.dequant import decodes_on_gpu, dequantise
from kernels.rows import take_rows

# bytes, as GGUF aligns tensors unless a file says otherwise
_ALIGNED = 32
_STEP, _LOOK_S = 64 << 20, 0.1
"""Bytes copied, and seconds waited, between two checks for cancellation."""

_Read = Callable[[TensorInfo, slice, int], Tensor]


def scale_of(name: str) -> str:
    """Name of the tensor that multiplies a matrix: llama.cpp's converter writes one for NVFP4."""
    return name.removesuffix(".weight") + ".scale"


class TensorReader:
    """Reads the tensors of a file one by one; the total of `progress` is the bytes of all.

    mapped: tensors kept as stored are the mapped file itself and change with it; tables_mapped:
    those of `rows` only. in_place: copies have the file's layout, with adjacent ones contiguous;
    otherwise, for tensors that are moved elsewhere, each has memory of its own.
    """

    def __init__(
        self,
        file: GgufFile,
        progress: ReportProgress | None = None,
        cancelled: Callable[[], bool] | None = None,
        *,
        mapped: bool = False,
        tables_mapped: bool = False,
        in_place: bool = True,
    ) -> None:
        self._file = file
        self._progress = progress or (lambda done, total, phase: None)
        self._cancelled = cancelled or (lambda: False)
        self._total = sum(info.n_bytes for info in file.tensors.values())
        self._done = 0
        self._seen: set[str] = set()
        self._mapped, self._in_place = mapped, in_place
        self._tables_mapped = tables_mapped or mapped
        self._parts: dict[tuple[int, bool], tuple[mmap.mmap, Tensor]] = {}
        """Files of the model in memory, and the same as uint8 [its size]."""
        self._copies: dict[int, PrivateCopy] = {}
        self._settled: set[str] = set()

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor as float32 of `shape` (numpy order), as a copy, multiplied by its scale.

        Dimensions of 1 that the file has or lacks at either end are ignored. Raises Cancelled,
        ModelFileError (missing, other shape), UnsupportedModelError (a type without a decoder) and
        OutOfMemoryError.
        """
        (tensor,) = self._pieces(name, shape, 1, "dequantising", self._decode)
        scale = self.scale(name)
        if scale is not None:
            tensor = tensor.reshape(len(scale), -1).mul_(scale.unsqueeze(1))
        return tensor.reshape(shape)

    def take_halves(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """An F16 or BF16 tensor as bfloat16 of `shape`, as a copy. Raises as `take`, but never for
        its type."""
        (tensor,) = self._pieces(name, shape, 1, "reading", self._in_bf16)
        return tensor.reshape(shape)

    def take_ids(self, name: str, shape: tuple[int, ...], n: int) -> Tensor:
        """An I32 tensor as int64 of `shape`, numbers from 0 to n - 1. Raises as `take`."""
        (data,) = self._pieces(name, shape, 1, "reading", partial(self._stored, False))
        info = self._file.tensors[name]
        if info.type.name != "I32":
            what = f"has type {info.type.name}, but I32 is needed"
            raise ModelFileError(self._file.parts[info.part], f"tensor {name}", what, REMEDY)
        ids = data.view(torch.int32).to(torch.int64).reshape(shape)
        if int(ids.min()) < 0 or int(ids.max()) >= n:
            what = f"a number is outside 0..{n - 1}"
            raise ModelFileError(self._file.parts[info.part], f"tensor {name}", what, REMEDY)
        return ids

    def take_each(self, name: str, shape: tuple[int, ...]) -> Iterator[Tensor]:
        """The slices of a tensor along its first dimension, read on demand.

        Otherwise as `take`, with cancellation between slices.
        """
        scale = self.scale(name)
        scales = scale if scale is not None else torch.ones(1)
        for piece, one in zip(
            self._pieces(name, shape, shape[0], "dequantising", self._decode),
            scales.expand(shape[0]),
            strict=True,
        ):
            yield (piece if scale is None else piece.mul_(one)).reshape(shape[1:])

    def take_blocks(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor as stored, uint8 [..., rows, bytes per row], read-only.

        shape: ends in rows and columns; a row must consist of whole blocks, as GGUF requires.
        Raises Cancelled, ModelFileError and OutOfMemoryError as `take`.
        """
        read = partial(self._stored, self._mapped)
        (tensor,) = self._pieces(name, shape, 1, "reading", read)
        return tensor.reshape(*shape[:-1], -1)

    def settle(self, names: Collection[str], joined: Tensor) -> Tensor:
        """Store a rearranged copy of all rows of tensors from `take_blocks`, which are no longer
        used: at their place in the copied file if they are adjacent there."""
        infos = sorted((self._file.tensors[name] for name in names), key=attrgetter("offset"))
        first, last = infos[0], infos[-1]
        part = self._parts.get((first.part, self._mapped))
        if part and not self._mapped and all(info.part == first.part for info in infos):
            place = part[1][first.offset : last.offset + last.n_bytes]
            is_whole = len(place) == sum(info.n_bytes for info in infos)
            if is_whole and place.data_ptr() % _ALIGNED == 0:
                self._settled.update(names)
                return place.view(joined.shape).copy_(joined)
        return joined

    def release(self, names: Collection[str]) -> None:
        """Free the memory of tensors from `take_blocks` that have been copied, unless a copy was
        stored there."""
        for info in (self._file.tensors[name] for name in names if name not in self._settled):
            start = -(-info.offset // mmap.PAGESIZE) * mmap.PAGESIZE
            stop = (info.offset + info.n_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
            part = self._parts.get((info.part, self._mapped))
            if part and start < stop and hasattr(mmap, "MADV_DONTNEED"):
                self._settled.add(info.name)
                part[0].madvise(mmap.MADV_DONTNEED, start, stop - start)

    def rows(self, name: str, shape: tuple[int, ...]) -> StoredRows:
        """A table for row look-ups; the first row is decoded as a check. Raises as `take`."""
        info = self._find(name, shape)
        self._decode(info, slice(0, info.n_bytes // shape[0]), shape[1])
        read = self._row_by_row if self._tables_mapped else partial(self._stored, False)
        (data,) = self._pieces(name, shape, 1, "reading", read)
        return StoredRows(data, info.type.name, shape)

    def is_scaled(self, name: str) -> bool:
        """Whether a matrix has a separate scale, so that its blocks alone are not its values."""
        return scale_of(name) in self._file.tensors

    def scale(self, name: str) -> Tensor | None:
        """The scale of a matrix, f32 [1], or [n] for each of n experts; None for 1. Raises
        ModelFileError if it is not finite."""
        if not self.is_scaled(name):
            return None
        scale = torch.from_numpy(self._file.raw(scale_of(name)).view(np.float32))
        if not scale.isfinite().all():
            raise ModelFileError(
                self._file.path,
                f"tensor {scale_of(name)}",
                "a number is not finite",
                "The file is damaged, or its conversion failed: download or convert it again.",
            )
        return scale

    def type(self, name: str) -> str:
        """Name of the GGML type of a tensor of the file."""
        return self._file.tensors[name].type.name

    def _pieces(
        self, name: str, shape: tuple[int, ...], count: int, what: str, read: _Read
    ) -> Iterator[Tensor]:
        """A tensor in `count` equal parts, included in the progress the first time."""
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
            check_mapped()
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
                f"missing, but the model needs it with shape {_text(shape)}",
                REMEDY,
            )
        if not info.fits(shape):
            raise ModelFileError(
                self._file.parts[info.part],
                f"tensor {name}",
                f"has shape {_text(info.shape)}, but by the metadata it must be {_text(shape)}",
                REMEDY,
            )
        return info

    def _stored(self, mapped: bool, info: TensorInfo, part: slice, n_elements: int) -> Tensor:
        """A tensor as stored; each of its pages is touched once."""
        if mapped:
            tensor = self._place(info, mapped=True)
            tensor[:: mmap.PAGESIZE].amax()  # a byte of each page
        else:
            tensor = self._copied(info)
        # tensors may start anywhere in the file, but products read whole words
        is_aligned = not (mapped or self._in_place) or tensor.data_ptr() % _ALIGNED == 0
        return tensor if is_aligned else tensor.clone()

    def _row_by_row(self, info: TensorInfo, part: slice, n_elements: int) -> Tensor:
        return self._place(info, mapped=True)

    def _copied(self, info: TensorInfo) -> Tensor:
        is_placed = self._in_place and info.name not in self._settled
        try:
            if is_placed:
                tensor = self._place(info, mapped=False)
                into = tensor.numpy()
            else:
                into = np.empty(info.n_bytes, np.uint8)
                tensor = torch.from_numpy(into)
        except (MemoryError, OSError) as error:
            raise _no_memory(info, info.n_bytes) from error
        copy = self._copies.get(info.part) if is_placed else None
        while (
            copy
            and (there := copy.has(info.offset, info.offset + info.n_bytes, _LOOK_S)) is not False
        ):
            if there:
                return tensor
            if self._cancelled():
                raise Cancelled
        for start in range(0, info.n_bytes, _STEP):
            if start and self._cancelled():
                raise Cancelled
            self._file.read(info.name, into[start : start + _STEP], start)
        return tensor

    def _place(self, info: TensorInfo, *, mapped: bool) -> Tensor:
        """The tensor's place in the mapped file, or in a copy of it that may still have to be
        filled."""
        key = info.part, mapped
        if key not in self._parts:
            if mapped:
                memory = self._file.mapped(info.part)
            else:
                copy = self._copies[info.part] = self._file.files[info.part].copy()
                memory = copy.memory
            self._parts[key] = memory, _as_tensor(memory)
        return self._parts[key][1][info.offset : info.offset + info.n_bytes]

    def _in_bf16(self, info: TensorInfo, part: slice, n_elements: int) -> Tensor:
        dtype = torch.bfloat16 if info.type.name == "BF16" else torch.float16
        return torch.from_numpy(self._file.raw(info.name, part)).view(dtype).to(torch.bfloat16)

    def _decode(self, info: TensorInfo, part: slice, n_elements: int) -> Tensor:
        try:
            stored = torch.from_numpy(self._file.raw(info.name, part))
            return dequantise(stored, info.type.name, n_elements)
        except NotImplementedError:
            raise UnsupportedModelError(
                f"{self._file.parts[info.part].name}: tensor {shorten(info.name)} has type "
                f"{info.type.name}, which cannot be dequantised here.",
                "Use a file with another quantisation, such as Q4_K_M or Q8_0.",
            ) from None
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "allocate" not in str(error):
                raise
            raise _no_memory(info, 4 * n_elements) from error


def _no_memory(info: TensorInfo, n_bytes: int) -> OutOfMemoryError:
    return OutOfMemoryError(
        f"There is not enough memory for tensor {shorten(info.name)}, which needs "
        f"{n_bytes / 2**20:.0f} MiB.",
        "Close other programs, or use a smaller model.",
    )


def _as_tensor(memory: mmap.mmap) -> Tensor:
    """A uint8 tensor over a mapping, which lives as long as any part of it.

    torch warns about read-only arrays, such as mapped files, so the array is presented as writable.
    """
    array = np.frombuffer(memory, np.uint8)
    interface = {**array.__array_interface__, "data": (array.ctypes.data, False)}
    return torch.from_numpy(np.asarray(SimpleNamespace(__array_interface__=interface, whole=array)))


def _group(name: str) -> str:
    """The part of the model a tensor belongs to: "blk.12", "output"."""
    words = name.split(".")
    return ".".join(words[:2]) if words[0] == "blk" else words[0]


def _text(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


class StoredRows:
    """A table whose rows are decoded on demand: a tensor as stored, mapped or copied.

    data: uint8 [n_bytes]. type: name of the GGML type. shape: rows and columns.
    """

    def __init__(self, data: Tensor, type: str, shape: tuple[int, ...]) -> None:
        n_rows, self._width = shape
        self._rows, self._type = data.view(n_rows, -1), type

    @property
    def n_bytes(self) -> int:
        return self._rows.nbytes

    def to(self, device: torch.device) -> StoredRows:
        """The table on a CUDA device, for row numbers on that device."""
        shape = len(self._rows), self._width
        if decodes_on_gpu(self._type):
            return StoredRows(self._rows.view(-1).to(device), self._type, shape)
        numbers = self.take(torch.arange(len(self._rows))).view(torch.uint8)
        return StoredRows(numbers.view(-1).to(device), "F32", shape)

    def take(self, numbers: Tensor) -> Tensor:
        """Rows by number, int64 of any shape on the table's device, as float32 [*numbers.shape,
        width] there. Does not synchronise with the host."""
        blocks = take_rows(self._rows, numbers.flatten())
        if self._type == "F32":
            rows = blocks.view(torch.float32)
        else:
            rows = dequantise(blocks.view(-1), self._type, numbers.numel() * self._width)
        return rows.view(*numbers.shape, self._width)
