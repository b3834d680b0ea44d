"""A validated, read-only view of a GGUF model: metadata, tensor directory, mapped bytes."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from engine.errors import ModelFileError
from engine.gguf import multipart
from engine.gguf.binary import DAMAGED, HeadAllowance, check_cancelled, never, shorten
from engine.gguf.content import FileStamp, ModelFilePart, kept_hash
from engine.gguf.directory import Directory, TensorInfo, read_directory
from engine.gguf.lent import LentFiles
from engine.gguf.metadata import REQUIRED, TypedMetadata

__all__ = ["REQUIRED", "GgufFile", "TensorInfo"]


class GgufFile(TypedMetadata):
    """A model's files, mapped; reading tensor data touches only the pages asked for.

    path: part 1. parts: all files. n_bytes: their size together. metadata: that of part 1.
    tensors: the directory over all parts, by name. contents: the parts as they were when opened.
    lent: what views of tensors still use after the file has been closed.
    """

    def __init__(
        self,
        parts: tuple[Path, ...],
        maps: list[mmap.mmap],
        stamps: list[FileStamp],
        directories: list[Directory],
    ) -> None:
        super().__init__(parts[0], directories[0].metadata)
        self.parts = parts
        self.version = directories[0].version
        self.n_bytes = sum(len(data) for data in maps)
        self.tensors = _join(parts, directories)
        self.contents = tuple(
            ModelFilePart(path, stamp, directory.n_bytes)
            for path, stamp, directory in zip(parts, stamps, directories, strict=True)
        )
        self._maps = maps
        self.lent = LentFiles(self.contents, maps)
        self._is_closed = False
        self._sha256 = _digest(maps, directories)

    @classmethod
    def open(cls, path: Path | str, cancelled: Callable[[], bool] = never) -> GgufFile:
        """Read metadata and directory of a model, given its only file or part 1 of several.

        Raises ModelFileError for a file that is absent, unreadable, damaged or not GGUF, and
        Cancelled soon after `cancelled` returns True.
        """
        paths = [Path(path)]
        allowance = HeadAllowance()
        maps: list[mmap.mmap] = []
        stamps: list[FileStamp] = []
        try:
            _map(paths[0], maps, stamps)
            directories = [read_directory(maps[0], paths[0], 0, allowance, cancelled)]
            head = TypedMetadata(paths[0], directories[0].metadata)
            count = multipart.part_count(head)
            if count > 1:
                paths += multipart.part_paths(paths[0], count)
            for part in range(1, count):
                check_cancelled(cancelled)
                _map(paths[part], maps, stamps)
                directories.append(
                    read_directory(maps[part], paths[part], part, allowance, cancelled)
                )
                head_of_part = TypedMetadata(paths[part], directories[part].metadata)
                multipart.check_part(head_of_part, part + 1, count)
            return cls(tuple(paths), maps, stamps, directories)
        except BaseException:
            _unmap(maps)
            raise

    @property
    def architecture(self) -> str:
        """`general.architecture`, or "" where it is absent."""
        return self.str_("general.architecture", "")

    def raw(self, name: str) -> np.ndarray:
        """The bytes of a tensor, uint8 [n_bytes]: a read-only slice of the mapped file, no copy.

        Raises KeyError for a name not in `tensors`, ValueError after `close`, and
        ModelFileError when the file has been cut short since it was opened.
        """
        info = self.tensors[name]
        if self._is_closed:
            raise ValueError(f"{self.path.name} is closed")
        data = self._maps[info.part]
        # reading a mapping beyond the end of its file kills the process
        if info.offset + info.n_bytes > data.size():
            raise ModelFileError(
                self.parts[info.part],
                f"tensor {shorten(name)}",
                "the file has become shorter since it was opened",
                DAMAGED,
            )
        return np.frombuffer(data, np.uint8)[info.offset : info.offset + info.n_bytes]

    def stays_whole(self, name: str) -> Callable[[], bool]:
        """Tells whether the file still reaches to the end of a tensor, also after `close` as long
        as there is a view of it."""
        info = self.tensors[name]
        data = self._maps[info.part]
        return lambda: info.offset + info.n_bytes <= data.size()

    def identity(self) -> dict[str, Any]:
        """What tells the model from others (engine.trace.run_ref).

        name and size in bytes; modified_ns: time of the last change in ns since 1970; sha256: of
        the metadata and directory of all parts; content: of the tensors, None while not known.
        """
        return {
            "name": self.path.name,
            "size": self.n_bytes,
            "modified_ns": max(part.stamp.mtime_ns for part in self.contents),
            "sha256": self._sha256,
            "content": kept_hash(self.contents),
        }

    def close(self) -> None:
        """Give the mappings back; those with views still in use live on as long as these."""
        _unmap(self._maps)
        self._is_closed = True

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _map(path: Path, maps: list[mmap.mmap], stamps: list[FileStamp]) -> None:
    """Append the mapped file, and what tells later whether it is still the same."""
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise ModelFileError(path, "path", "this is a folder", "Choose a GGUF file in it.")
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for its other end
            raise ModelFileError(path, "path", "not a regular file", "Choose a GGUF file.")
        if status.st_size == 0:
            raise ModelFileError(path, "byte 0", "the file is empty", DAMAGED)
        with path.open("rb") as file:
            stamps.append(FileStamp.of(os.fstat(file.fileno())))
            maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except FileNotFoundError:
        raise ModelFileError(
            path, "path", "no such file", "Check the path, or choose the file again."
        ) from None
    except PermissionError:
        raise ModelFileError(
            path, "path", "no permission to read it", "Change the file's permissions."
        ) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ModelFileError(
            path, "path", f"cannot be opened ({reason})", "Check the path and the disk."
        ) from None


def _digest(maps: list[mmap.mmap], directories: list[Directory]) -> str:
    digest = hashlib.sha256()
    for data, directory in zip(maps, directories, strict=True):
        digest.update(data[: directory.n_bytes])
    return digest.hexdigest()


def _unmap(maps: list[mmap.mmap]) -> None:
    for data in maps:
        with contextlib.suppress(BufferError):  # views of it are still in use
            data.close()


def _join(parts: tuple[Path, ...], directories: list[Directory]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for path, directory in zip(parts, directories, strict=True):
        for name, info in directory.tensors.items():
            if name in tensors:
                raise ModelFileError(
                    path,
                    f"tensor {shorten(name)}",
                    f"already in {parts[tensors[name].part].name}",
                    "Use parts that belong to one download, under their original names.",
                )
            tensors[name] = info
    if len(parts) > 1:
        head = TypedMetadata(parts[0], directories[0].metadata)
        wanted = head.int_("split.tensors.count", len(tensors))
        if wanted != len(tensors):
            raise ModelFileError(
                parts[0],
                "key split.tensors.count",
                f"{wanted} tensors are expected, but the parts hold {len(tensors)}",
                "Use parts that belong to one download, under their original names.",
            )
    return tensors
