"""Files that the user names: errors about them, reading one of any kind, and writing one completely
or not at all."""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import stat
import sys
import tempfile
import tomllib
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, BinaryIO

from engine.errors import DraftscopeError, OptionError
from engine.foreign import JsonError, parse_json
from engine.plain_text import size_text

_OTHERS = Path(__file__).with_name("other_files.toml")
_MOST_LINKS = 40
_LONGEST_SUFFIX = 16
_FULL = (errno.ENOSPC, errno.EDQUOT)
_DATABASE_FULL = 13  # SQLITE_FULL
PART = ".draftscope-"
"""Prefix of the temporary file that replaces a file once it is complete."""


def unreadable(
    path: Path, error: OSError, kind: type[DraftscopeError] = OptionError
) -> DraftscopeError:
    """An error of this kind about a file that the system does not let us read."""
    return kind(
        f"{path} cannot be read: {error.strerror or error}.", "Check the path and its rights."
    )


def unwritable(
    path: Path | str, error: Exception, remedy: str, kind: type[DraftscopeError] = OptionError
) -> DraftscopeError:
    """An error of this kind about what the system does not let us write. remedy: given unless the
    disk is full, for which no option is to blame."""
    reason = error.strerror or error if isinstance(error, OSError) else error
    is_full = getattr(error, "sqlite_errorcode", None) == _DATABASE_FULL
    if is_full or (isinstance(error, OSError) and error.errno in _FULL):
        remedy = "Free some space, or choose another disk."
        kind = DraftscopeError if kind is OptionError else kind
    return kind(f"{path} cannot be written: {reason}.", remedy)


def known_kind(head: bytes, read_as: str) -> tuple[str, str] | None:
    """What a file of another kind is, and the remedy, if known. read_as: "model" or "import"."""
    text = head.decode("utf-8", "surrogateescape")
    tables = tomllib.loads(_OTHERS.read_text("utf-8"))
    every = (*tables["both"], *tables[read_as])
    return next(((one["is"], one["remedy"]) for one in every if re.search(one["has"], text)), None)


@contextmanager
def opened_file(path: Path, kind: type[DraftscopeError] = OptionError) -> Iterator[BinaryIO]:
    """A regular file, opened for reading.

    The opened file is checked, not its name: a pipe or a device might never end, and is not waited
    for. Raises an error of this kind for one, for a folder, and for what cannot be opened or read,
    in the body, too.
    """
    try:
        with open(_regular(path, kind), "rb") as file:
            yield file
    except OSError as error:
        raise unreadable(path, error, kind) from error


def _regular(path: Path, kind: type[DraftscopeError]) -> int:
    """A file descriptor, opened without waiting for the other end of a pipe."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", getattr(os, "O_BINARY", 0))
    try:
        opened = os.open(path, flags)
    except ValueError as error:  # a name with a NUL character or a lone surrogate
        raise OSError(str(error)) from error
    mode = os.fstat(opened).st_mode
    if stat.S_ISREG(mode):
        return opened
    os.close(opened)
    if stat.S_ISDIR(mode):
        raise kind(f"{path} is not a regular file but a folder.", "Name a file in it.")
    raise kind(
        f"{path} is not a regular file but {'a pipe' if stat.S_ISFIFO(mode) else 'a device'}.",
        "Save its output to a file first, and name that file.",
    )


def file_bytes(path: Path, most_bytes: int, kind: type[DraftscopeError] = OptionError) -> bytes:
    """The bytes of a file that the user names; raises as `opened_file` does, and the same error for
    a file with more than `most_bytes`, before reading it."""
    with opened_file(path, kind) as file:
        expected, n = os.fstat(file.fileno()).st_size, 0
        if expected <= most_bytes:
            parts = []
            # a read allocates as much as it may return
            while part := file.read(min(max(expected, _PIECE), most_bytes + 1 - n)):
                parts.append(part)
                n += len(part)
            if n <= most_bytes:
                return b"".join(parts)
    raise kind(f"{path} is larger than {size_text(most_bytes)}.", "Split it, or name another file.")


def file_head(path: Path, n_bytes: int) -> bytes:
    """The first bytes of a file; empty if it cannot be read or is not a regular file."""
    try:
        with opened_file(path) as file:
            return file.read(n_bytes) or b""
    except OptionError:
        return b""


def user_text(
    path: Path, most_bytes: int, kind: type[DraftscopeError] = OptionError, *, packed: bool = False
) -> str:
    """The text of a file that the user names, without a byte order mark. packed: it may be gzipped.

    Raises as `file_bytes` does, and the same error for text that is not UTF-8.
    """
    raw = file_bytes(path, most_bytes, kind)
    if packed:
        raw = unpacked(raw, str(path), most_bytes, kind)
    return decoded(raw, str(path), kind)


def decoded(raw: bytes, name: str, kind: type[DraftscopeError] = OptionError) -> str:
    """Bytes as text without a byte order mark. Raises an error that names the line if they are not
    UTF-8."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise kind(f"{name}: line {line} is not UTF-8 text.", "Convert it to UTF-8.") from error


def json_values(path: Path, text: str, noun: str, remedy: str) -> Iterator[tuple[str, Any]]:
    """The values of a text that is a JSON list, one value or JSON lines, each with its place: in a
    list the noun and its number, else its line. Raises OptionError that names path and line."""

    def value(of: str, first_line: int) -> Any:
        try:
            return parse_json(of)
        except JsonError as error:
            line = first_line + error.line - 1
            raise OptionError(
                f"{path}: line {line} is not valid JSON (column {error.column}: {error.what}).",
                remedy,
            ) from error

    lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    is_of_lines = len(lines) > 1 and _is_json(lines[0][1])
    if is_of_lines or not lines:
        yield from ((f"line {n}", value(line, n)) for n, line in lines)
    elif isinstance(whole := value(text, 1), list):
        yield from ((f"{noun} {n}", one) for n, one in enumerate(whole, 1))
    else:
        yield f"line {lines[0][0]}", whole


def _is_json(text: str) -> bool:
    try:
        parse_json(text)
    except JsonError:
        return False
    return True


def unpacked(
    data: bytes,
    name: str,
    most_bytes: int,
    kind: type[DraftscopeError] = OptionError,
    *,
    whole: bool = True,
) -> bytes:
    """The content of bytes that may be gzipped, in several members, too.

    whole: False for the beginning of a file, which is unpacked as far as it goes. Raises an error
    of this kind for data that is damaged, truncated or followed by something else, for more than
    `most_bytes`, and for a compression ratio that no text has.
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
                    break  # padded to whole blocks, as on tapes
                if decoder.eof:
                    decoder, n_members = zlib.decompressobj(31), n_members + 1
                found += decoder.decompress(piece, most + 1 - len(found))
                if len(found) > most or n_members > _MOST_MEMBERS:
                    if not whole:
                        return bytes(found[:most])
                    raise _too_large(name, most, kind)
                piece = decoder.unused_data
    except zlib.error as error:
        if whole:
            raise _damaged(name, kind) from error
    if whole and not decoder.eof:
        raise _damaged(name, kind)
    return bytes(found)


def is_archive(data: bytes) -> bool:
    """Whether unpacked bytes, or their beginning, are a zip or tar file."""
    return data.startswith(_ZIP) or data[257:262] == b"ustar"


def members(
    data: bytes, name: str, most_bytes: int, kind: type[DraftscopeError] = OptionError
) -> Iterator[tuple[str, bytes]]:
    """The files in a zip or tar file: the last part of each path, or the whole path where two have
    the same, and the bytes.

    Raises an error of this kind for a damaged or encrypted file, for more than `most_bytes` in
    total, and for a compression ratio that no text has.
    """
    import lzma  # most starts need none of them
    import tarfile
    import zipfile

    most = left = min(most_bytes, _ALWAYS + _MOST_RATIO * len(data))
    faults = zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, OSError
    files: Iterable[tuple[str, Callable[[], IO[bytes] | None]]]
    try:
        if data.startswith(_ZIP):
            zipped = zipfile.ZipFile(io.BytesIO(data))
            named = (one for one in zipped.infolist() if one.filename[-1:] not in ("", "/"))
            files = ((one.filename, partial(zipped.open, one)) for one in named)
        else:
            tape = tarfile.TarFile(fileobj=io.BytesIO(data))
            files = ((one.name, partial(tape.extractfile, one)) for one in tape if one.isreg())
        listed = [*islice(files, _MOST_MEMBERS)]
        lasts = [re.split(r"[/\\]", path)[-1] for path, _ in listed]
        times = Counter(lasts)
        for (path, opened), last in zip(listed, lasts, strict=True):
            with opened() or io.BytesIO() as file:
                content = file.read(left + 1)
            if (left := left - len(content)) < 0:
                raise _too_large(name, most, kind)
            yield last if times[last] == 1 else path.removeprefix("./"), content
    except (*faults, ValueError, RuntimeError) as error:  # another compression, or a password
        remedy = "Copy or download it again, or unpack it yourself and name its files."
        raise kind(f"{name} cannot be unpacked: {error}.", remedy) from error


def shown_files(data: bytes, name: str, kind: type[DraftscopeError]) -> Iterator[tuple[str, bytes]]:
    """The files that `head` or `tail` printed into a text, each with its printed part.

    Raises an error of this kind for more files than are read.
    """
    _, *parts = SHOWN.split(data, _MOST_PARTS)
    found: dict[bytes, list[bytes]] = {}
    for one, part in zip(parts[::2], parts[1::2], strict=True):
        found.setdefault(one, []).append(part)
    if len(found) > _MOST_SHOWN:
        said = f"{name} has more than {_MOST_SHOWN:,} files to read."
        raise kind(said, "Name the files directly, and fewer of them.")
    yield from ((one.decode("utf-8", "replace"), b"".join(of)) for one, of in found.items())


_GZIP, _ZIP = b"\x1f\x8b", b"PK\x03\x04"
_PIECE = 1 << 16
_ALWAYS, _MOST_RATIO = 16 << 20, 200
"""Bytes that anything may unpack to, and the largest compression ratio of a text."""
_MOST_MEMBERS = 1 << 14
SHOWN = re.compile(rb"(?m)^==> (.{1,200}) <==\r?\n")
"""The header that `head` and `tail` print before each of several files."""
_MOST_SHOWN, _MOST_PARTS = 1 << 10, 1 << 18


def _too_large(name: str, most: int, kind: type[DraftscopeError]) -> DraftscopeError:
    return kind(
        f"{name} unpacks to more than {size_text(most)}.",
        "Unpack it yourself, and split the result.",
    )


def _damaged(name: str, kind: type[DraftscopeError]) -> DraftscopeError:
    return kind(
        f"{name} is a damaged gzip file: it is truncated, or has other data at its end.",
        "Copy or download it again, or unpack it.",
    )


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded: JSON may hold lone surrogates."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


@contextmanager
def written_whole(path: Path, kind: type[DraftscopeError] = OptionError) -> Iterator[Path]:
    """A path to write a regular file to, which replaces `path` when the body has ended.

    After an error in the body it is removed, and an earlier file stays. The new file gets the
    permissions of the earlier one. If `path` is a link, its target is replaced. A pipe, a device or
    /dev/stdout gets the bytes once they are complete. Raises an error of this kind if the system
    does not let us write, DraftscopeError if the disk is full.
    """
    try:
        stream = _stream(path)
        if stream is not None:
            with tempfile.TemporaryDirectory() as folder:
                part = Path(folder, _part_name(path))
                yield part
                _copy(part, stream)
        else:
            yield from _replaced(_target(path))
    except OSError as error:
        raise unwritable(path, error, "Choose another path.", kind) from error


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file completely or not at all. Raises OptionError."""
    with written_whole(path) as part:
        part.write_text(text, encoding="utf-8")


def check_writable(path: Path) -> Path | None:
    """The file that `written_whole` would replace, None for a pipe or device. Raises OSError if it
    could not; removes what it tried."""
    if _stream(path) is not None:
        return None
    target = _target(path)
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    # the name itself, which the file system may refuse, and another file in its folder
    for probe in (target, target.with_name(_part_name(target))):
        if not probe.exists():
            probe.touch(exist_ok=False)
            probe.unlink()
    return target


def _stream(path: Path) -> Path | int | None:
    """A target for bytes that cannot be replaced: a pipe, a device, or the number of an open file,
    which /dev/stdout and a shell's `>(…)` refer to. None for anything else."""
    link = path
    for _ in range(_MOST_LINKS):
        if os.path.realpath(link.parent) in (f"/proc/{os.getpid()}/fd", "/dev/fd"):
            os.stat(link)
            return int(link.name)
        if not link.is_symlink():
            break
        link = link.parent / os.readlink(link)
    return path if path.is_fifo() or path.is_char_device() else None


def _target(path: Path) -> Path:
    """The file to replace, with links resolved."""
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return target


def _part_name(path: Path) -> str:
    """A name in the same folder with the same suffix, since that decides the format."""
    return f"{PART}{uuid.uuid4().hex[:8]}{path.suffix[:_LONGEST_SUFFIX]}"


def _copy(part: Path, target: Path | int) -> None:
    if isinstance(target, int):
        for stream in (sys.stdout, sys.stderr):  # after what was printed before
            if stream is not None:
                stream.flush()
    with (
        part.open("rb") as whole,
        open(target, "wb", closefd=not isinstance(target, int)) as opened,
    ):
        shutil.copyfileobj(whole, opened)


def _replaced(target: Path) -> Iterator[Path]:
    part = target.with_name(_part_name(target))
    try:
        yield part
        if target.exists():
            part.chmod(stat.S_IMODE(target.stat().st_mode))
        synced(part)
        part.replace(target)
    except BaseException:
        with suppress(OSError):  # the first error is the one to report
            part.unlink(missing_ok=True)
        raise


def synced(path: Path) -> None:
    """Sync a file to the disk, so that it is not empty after a power cut."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
