"""Mapped files whose bytes are used where they are: for how long, and whether they are the same."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from engine.errors import ModelFileError
from engine.gguf.content import FileStamp, ModelFilePart


@dataclass(slots=True)
class LentFiles:
    """The files of a model as they were when opened, and their mappings.

    A mapping is closed with its file unless views of it are in use; it ends with the last view.
    keeps_pages: pages may be others than the file's by now (engine.moved_pages), which would not
    come back if they were released.
    """

    contents: Sequence[ModelFilePart]
    maps: Sequence[mmap.mmap]
    keeps_pages: bool = False

    def release(self, part: int, offset: int, n_bytes: int) -> None:
        """Take the pages of some bytes out of this process's memory, where they count as much as
        any others; they come back when they are used again."""
        start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (offset + n_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if start < stop and not self.keeps_pages and hasattr(mmap, "MADV_DONTNEED"):
            self.maps[part].madvise(mmap.MADV_DONTNEED, start, stop - start)

    def check(self) -> None:
        """Raises ModelFileError for a file that was written to while views of it are in use.

        They would show what it holds now, and nothing behind its new end, where reading them
        kills the process. A file that was only replaced by another, or removed, is there for them.
        """
        for part, data in zip(self.contents, self.maps, strict=True):
            if data.closed:
                continue
            with suppress(OSError):
                now = FileStamp.of(part.path.stat())
                same = (now.size, now.mtime_ns) == (part.stamp.size, part.stamp.mtime_ns)
                if now.inode == part.stamp.inode and not same:
                    raise ModelFileError(
                        part.path, "file", "has changed since it was opened", "Open it again."
                    )
