"""Files that a user names: errors about them, reading one that may be anything, and writing one as
a whole or not at all."""

from __future__ import annotations

import os
import stat
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from engine.errors import DraftscopeError, OptionError
from engine.size_text import size_text


def unreadable(
    path: Path, error: OSError, kind: type[DraftscopeError] = OptionError
) -> DraftscopeError:
    """The error, of this kind, about a file that the system does not let us read."""
    return kind(
        f"{path} cannot be read: {error.strerror or error}.", "Check the path and its rights."
    )


@contextmanager
def opened_file(path: Path, kind: type[DraftscopeError] = OptionError) -> Iterator[BinaryIO]:
    """A regular file, opened to be read.

    What was opened is looked at, and not its name: a pipe or a device might never end, and is not
    waited for. Raises an error of this kind for one, for a folder, and for what cannot be opened
    or read, in the body too.
    """
    try:
        with open(_regular(path, kind), "rb") as file:
            yield file
    except OSError as error:
        raise unreadable(path, error, kind) from error


def _regular(path: Path, kind: type[DraftscopeError]) -> int:
    """A descriptor, opened without waiting for the other end of a pipe."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", getattr(os, "O_BINARY", 0))
    try:
        opened = os.open(path, flags)
    except ValueError as error:  # a name with a null character or half of a character
        raise OSError(str(error)) from error
    mode = os.fstat(opened).st_mode
    if stat.S_ISREG(mode):
        return opened
    os.close(opened)
    if stat.S_ISDIR(mode):
        raise kind(f"{path} is not a regular file but a folder.", "Name a file in it.")
    raise kind(
        f"{path} is not a regular file but {'a pipe' if stat.S_ISFIFO(mode) else 'a device'}.",
        "Save what it gives to a file first, and name that one.",
    )


def file_bytes(path: Path, most_bytes: int, kind: type[DraftscopeError] = OptionError) -> bytes:
    """The bytes of a file that a user names; raises what `opened_file` does, and the same error
    for one with more than `most_bytes`, before it is read."""
    with opened_file(path, kind) as file:
        raw = b""
        if os.fstat(file.fileno()).st_size <= most_bytes:
            raw = file.read(most_bytes + 1) or b""  # None from a file of the kernel that waits
            if len(raw) <= most_bytes:
                return raw
    raise kind(f"{path} is larger than {size_text(most_bytes)}.", "Split it, or name another file.")


def file_head(path: Path, n_bytes: int) -> bytes:
    """The first bytes of a file; nothing of one that cannot be read or is no regular file."""
    try:
        with opened_file(path) as file:
            return file.read(n_bytes) or b""
    except OptionError:
        return b""


def user_text(
    path: Path, most_bytes: int, kind: type[DraftscopeError] = OptionError, *, packed: bool = False
) -> str:
    """The text of a file that a user names, without a byte order mark. packed: it may be gzipped.

    Raises what `file_bytes` does, and the same error for one that is not UTF-8.
    """
    raw = file_bytes(path, most_bytes, kind)
    if packed:
        raw = unpacked(raw, str(path), most_bytes, kind)
    return decoded(raw, str(path), kind)


def decoded(raw: bytes, name: str, kind: type[DraftscopeError] = OptionError) -> str:
    """Bytes as text without a byte order mark. Raises an error that names the line where they are
    not UTF-8."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise kind(f"{name}: line {line} is not UTF-8 text.", "Convert it to UTF-8.") from error


def unpacked(
    data: bytes,
    name: str,
    most_bytes: int,
    kind: type[DraftscopeError] = OptionError,
    *,
    whole: bool = True,
) -> bytes:
    """The content of bytes that may be gzipped, in several members too.

    whole: False for the beginning of a file, of which as much is unpacked as there is. Raises an
    error of this kind for what is damaged, cut short or followed by something else, for more than
    `most_bytes`, and for what grows more than any text does.
    """
    if not data.startswith(_GZIP):
        return data
    found, decoder, n_members = bytearray(), zlib.decompressobj(31), 1
    try:
        for at in range(0, len(data), _PIECE):
            piece = data[at : at + _PIECE]
            most = min(most_bytes, _ALWAYS + _MOST_RATIO * (at + _PIECE))
            while piece:
                if decoder.eof and not piece.strip(b"\0"):
                    break  # filled up to whole blocks, as on tapes
                if decoder.eof:
                    decoder, n_members = zlib.decompressobj(31), n_members + 1
                found += decoder.decompress(piece, most + 1 - len(found))
                if len(found) > most or n_members > _MOST_MEMBERS:
                    if not whole:
                        return bytes(found[:most])
                    raise kind(
                        f"{name} unpacks to more than {size_text(most)}.",
                        "Unpack it yourself, and split what comes out.",
                    )
                piece = decoder.unused_data
    except zlib.error as error:
        if whole:
            raise _damaged(name, kind) from error
    if whole and not decoder.eof:
        raise _damaged(name, kind)
    return bytes(found)


_GZIP = b"\x1f\x8b"
_PIECE = 1 << 16
_ALWAYS, _MOST_RATIO = 16 << 20, 200
"""Bytes that anything may unpack to, and how often a text repeats itself at most."""
_MOST_MEMBERS = 1 << 14


def _damaged(name: str, kind: type[DraftscopeError]) -> DraftscopeError:
    return kind(
        f"{name} is a damaged gzip file: it is cut short, or more follows.",
        "Copy or download it again, or unpack it.",
    )


def is_unicode(text: str) -> bool:
    """Whether a text can be written at all: JSON may hold halves of characters."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


@contextmanager
def written_whole(path: Path, kind: type[DraftscopeError] = OptionError) -> Iterator[Path]:
    """A path beside `path` to write to; the file takes the place of `path` when the body is done.

    After an error in the body nothing is left of it. Raises an error of this kind where the system
    does not let us write.
    """
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        try:
            yield part
            part.replace(path)
        except BaseException:
            with suppress(OSError):  # what went wrong before is what is told
                part.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise kind(
            f"{path} cannot be written: {error.strerror or error}.",
            "Choose another path, or free some space.",
        ) from error
