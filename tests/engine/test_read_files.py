"""Files that a user names, whatever they are: read, or refused in a sentence before they are."""

from __future__ import annotations

import gzip
import os
import socket
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.errors import DraftscopeError, OptionError, TraceFileError
from engine.files import file_bytes, file_head, unpacked, user_text

MIB = 1 << 20


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 10 << 30)


MADE: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a socket": _socket,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a terminal": lambda path: path.symlink_to("/dev/ptmx"),
    "nothing": lambda path: None,
    "a link to itself": lambda path: path.symlink_to(path),
    "a sparse file": _sparse,
}


@pytest.mark.parametrize("what", MADE)
def test_what_is_no_file_or_a_huge_one_is_refused_at_once(what: str, tmp_path: Path) -> None:
    path = tmp_path / "named"
    MADE[what](path)
    for kind in (OptionError, TraceFileError):
        with pytest.raises(kind) as refused:
            file_bytes(path, MIB, kind)
        assert str(path) in refused.value.message and refused.value.remedy
    assert what == "a sparse file" or file_head(path, 9) == b""


def test_a_pipe_is_told_from_a_device(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OptionError, match=r"but a pipe\. Save its output to a file first"):
        user_text(tmp_path / "pipe", MIB)
    with pytest.raises(OptionError, match="but a device"):
        user_text(Path("/dev/zero"), MIB)


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_a_name_that_cannot_be_is_refused(name: str) -> None:
    with pytest.raises(OptionError):
        file_bytes(Path(name), MIB)


def test_errors_of_those_who_read_are_theirs(tmp_path: Path) -> None:
    path = tmp_path / "bad"
    path.write_bytes(b"good\nb\xffd")
    with pytest.raises(TraceFileError, match="line 2 is not UTF-8"):
        user_text(path, MIB, TraceFileError)
    path.write_bytes(b"\xef\xbb\xbfgood")
    assert user_text(path, MIB) == "good"
    assert user_text(path, 7) == "good"
    with pytest.raises(OptionError, match="larger than 6 B"):
        user_text(path, 6)


def test_several_members_and_filled_blocks_are_unpacked() -> None:
    data = gzip.compress(b"one ", mtime=0) + gzip.compress(b"") + gzip.compress(b"two") + bytes(512)
    assert unpacked(data, "f", MIB) == b"one two"
    assert unpacked(b"plain", "f", MIB) == b"plain"
    assert unpacked(data[:20], "f", MIB, whole=False) in (b"", b"one ", b"one")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (gzip.compress(bytes(2 * MIB)), "f unpacks to more than 1 MiB"),
        (gzip.compress(bytes(MIB)) * 9, "f unpacks to more than 1 MiB"),
        (gzip.compress(b"", mtime=0) * 20_000, "f unpacks to more than"),
        (gzip.compress(b"text", mtime=0)[:-1], "damaged gzip"),
        (gzip.compress(b"text", mtime=0) + b"rest", "damaged gzip"),
        (b"\x1f\x8bnonsense", "damaged gzip"),
        (b"\x1f\x8b", "damaged gzip"),
    ],
)
def test_what_cannot_be_unpacked_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(DraftscopeError, match=said):
        unpacked(data, "f", MIB)


def test_what_grows_more_than_any_text_is_refused() -> None:
    data = gzip.compress(bytes(64 * MIB))
    with pytest.raises(OptionError, match="unpacks to more than"):
        unpacked(data, "f", 512 * MIB)


def test_reading_takes_as_much_memory_as_the_file(tmp_path: Path) -> None:
    path = tmp_path / "small"
    path.write_bytes(b"x" * 100)
    tracemalloc.start()
    try:
        assert file_bytes(path, 1 << 29) == b"x" * 100
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("n", [0, 1, 70_000, 200_000])
def test_a_file_has_at_most_as_many_bytes_as_it_may(tmp_path: Path, n: int) -> None:
    path, data = tmp_path / "file", os.urandom(n)
    path.write_bytes(data)
    assert file_bytes(path, n) == data
    if n:
        with pytest.raises(OptionError, match="is larger than"):
            file_bytes(path, n - 1)


def test_a_file_may_hold_more_than_the_system_says() -> None:
    assert Path("/proc/self/maps").stat().st_size == 0
    assert b"/" in file_bytes(Path("/proc/self/maps"), 1 << 24)
    with pytest.raises(OptionError, match="is larger than"):
        file_bytes(Path("/proc/self/maps"), 100)
