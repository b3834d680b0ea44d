"""A validated, read-only view of a GGUF model: metadata, tensor directory and tensor bytes. It may
be split over several files, `name-00001-of-00003.gguf` etc."""

from __future__ import annotations

import hashlib
import mmap
import re
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from engine.errors import DraftscopeError, ModelFileError
from engine.gguf.binary import HeadAllowance, check_cancelled, never, shorten
from engine.gguf.content import kept_hash
from engine.gguf.directory import Directory, TensorInfo, read_directory
from engine.gguf.metadata import REQUIRED, TypedMetadata
from engine.gguf.part_file import PartFile

__all__ = ["REQUIRED", "GgufFile", "TensorInfo"]


class GgufFile(TypedMetadata):
    """A model's files: heads have been read, tensors are read on demand.

    path: part 1. parts: all files. n_bytes: their total size. metadata: of part 1. tensors: the
    directory of all parts, by name. contents: the parts as they were when opened. files: the parts,
    which report changes even after they were closed.
    """

    def __init__(self, files: list[PartFile], directories: list[Directory]) -> None:
        super().__init__(files[0].path, directories[0].metadata)
        self.files = tuple(files)
        self.parts = tuple(file.path for file in files)
        self.version = directories[0].version
        self.n_bytes = sum(file.n_bytes for file in files)
        self.tensors = _join(self.parts, directories)
        self.contents = tuple(
            (file.path, file.stamp, len(directory.head))
            for file, directory in zip(files, directories, strict=True)
        )
        self._is_closed = False
        self._sha256 = hashlib.sha256(b"".join(each.head for each in directories)).hexdigest()

    @classmethod
    def open(
        cls, path: Path | str, cancelled: Callable[[], bool] = never, *, part_alone: bool = False
    ) -> GgufFile:
        """Read metadata and directory of a model, given its only file or part 1 of several.

        part_alone: read only this part, whichever it is. Raises ModelFileError for a file that is
        missing, unreadable, damaged, not GGUF or modified meanwhile, and Cancelled soon after
        `cancelled` returns True.
        """
        paths = [Path(path)]
        allowance = HeadAllowance()
        files: list[PartFile] = []
        try:
            files.append(PartFile(paths[0]))
            directories = [read_directory(files[0], 0, allowance, cancelled)]
            head = TypedMetadata(paths[0], directories[0].metadata)
            count = 1 if part_alone else _part_count(head)
            if count > 1:
                paths += _part_paths(paths[0], count)
            for part in range(1, count):
                check_cancelled(cancelled)
                files.append(PartFile(paths[part]))
                directories.append(read_directory(files[part], part, allowance, cancelled))
                head_of_part = TypedMetadata(paths[part], directories[part].metadata)
                _check_part(head_of_part, part + 1, count)
            return cls(files, directories)
        except BaseException as error:
            _close(files, error)
            raise

    def raw(self, name: str, part: slice = slice(None)) -> np.ndarray:
        """Bytes of a tensor, uint8 [n_bytes], as a copy. part: which of them.

        Raises KeyError for a name not in `tensors`, ValueError after `close`, and ModelFileError if
        the file has become shorter since it was opened.
        """
        start, stop, _ = part.indices(self.tensors[name].n_bytes)
        found = np.empty(stop - start, np.uint8)
        self.read(name, found, start)
        return found

    def read(self, name: str, into: np.ndarray, start: int = 0) -> None:
        """Fill uint8 [n] with bytes of a tensor, starting at its byte `start`. Raises as `raw`."""
        info = self.tensors[name]
        if self._is_closed:
            raise ValueError(f"{self.path.name} is closed")
        self.files[info.part].read(info.offset + start, into.data)

    def read_ahead(self) -> None:
        """Start to copy tensors stored in blocks in the background, for a reader that keeps them in
        file layout (engine.gguf.reader)."""
        for number, file in enumerate(self.files):
            spans: list[tuple[int, int]] = []
            mine = (one for one in self.tensors.values() if one.part == number)
            for one in sorted(mine, key=attrgetter("offset")):
                if one.type.block > 1:
                    stop = one.offset + one.n_bytes
                    start = spans.pop()[0] if spans and spans[-1][1] == one.offset else one.offset
                    spans.append((start, stop))
            if spans:
                file.read_ahead(spans)

    def mapped(self, part: int) -> mmap.mmap:
        """A whole part, from PartFile.mapped. Raises ValueError after `close`."""
        if self._is_closed:
            raise ValueError(f"{self.path.name} is closed")
        return self.files[part].mapped()

    def identity(self) -> dict[str, Any]:
        """What identifies the model (engine.trace.run_ref).

        name and size in bytes; modified_ns: modification time in ns since 1970; sha256: of the
        metadata and directory of all parts; content: of the tensors, None while unknown.
        """
        return {
            "name": self.path.name,
            "size": self.n_bytes,
            "modified_ns": max(stamp.mtime_ns for _, stamp, _ in self.contents),
            "sha256": self._sha256,
            "content": kept_hash(self.contents),
        }

    def close(self) -> None:
        """Close the files; those with mapped bytes in use stay open until these are freed."""
        for file in self.files:
            file.close()
        self._is_closed = True

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close. Raises ModelFileError if a file was modified since it was opened, because what was
        read is then neither the old nor the new one."""
        self._is_closed = True
        _close(self.files, error)


def _close(files: Sequence[PartFile], error: BaseException | None) -> None:
    """Close files after reading, possibly after an error. Raises ModelFileError if one was modified
    meanwhile, which explains the error."""
    try:
        if error is None or isinstance(error, DraftscopeError):
            for file in files:
                file.check_unchanged()
    finally:
        for file in files:
            file.close()


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
                f"{wanted} tensors are expected, but the parts have {len(tensors)}",
                "Use parts that belong to one download, under their original names.",
            )
    return tensors


_PART_NAME = re.compile(r"(?P<stem>.*)-\d{5}-of-\d{5}\.gguf", re.DOTALL)


def _part_count(head: TypedMetadata) -> int:
    """Number of files of a model, from the metadata of one of them.

    Raises ModelFileError if that one is not the first.
    """
    count = head.int_("split.count", 0)
    number = head.int_("split.no", 0)
    if count <= 1:
        return 1
    if number != 0:
        first = _part_name(head.path, 1, count) or "the first part"
        is_named_so = first == head.path.name
        raise ModelFileError(
            head.path,
            "key split.no",
            f"this is part {number + 1} of {count}; open a model with its part 1",
            "Give the parts their original names." if is_named_so else f"Open {first} instead.",
        )
    return count


def _part_paths(first: Path, count: int) -> list[Path]:
    """The files after part 1; raises ModelFileError if any is missing."""
    if _part_name(first, 1, count) != first.name:
        raise ModelFileError(
            first,
            "file name",
            "its other parts cannot be found, because of this file name",
            f"Give part 1 its original name, which ends in -00001-of-{count:05d}.gguf.",
        )
    paths: list[Path] = []
    for number in range(2, count + 1):
        path = first.with_name(_part_name(first, number, count) or "")
        if not path.exists():
            raise ModelFileError(
                first,
                f"part {number} of {count}",
                f"{path.name} is missing",
                f"Put {path.name} into the folder of part 1.",
            )
        paths.append(path)
    return paths


def _check_part(head: TypedMetadata, number: int, count: int) -> None:
    """Raise ModelFileError unless the metadata describe part `number` of `count`."""
    found = head.int_("split.no"), head.int_("split.count")
    if found != (number - 1, count):
        raise ModelFileError(
            head.path,
            "key split.no",
            f"part {number} of {count} is expected, but this is part {found[0] + 1} of {found[1]}",
            "Use parts that belong to one download, under their original names.",
        )


def _part_name(path: Path, number: int, count: int) -> str | None:
    match = _PART_NAME.fullmatch(path.name)
    return f"{match['stem']}-{number:05d}-of-{count:05d}.gguf" if match else None
