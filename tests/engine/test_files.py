"""Files that are written as a whole or not at all, wherever a name leads."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from engine.errors import DraftscopeError, OptionError
from engine.files import PART, check_writable, written_whole

needs_links = pytest.mark.skipif(sys.platform == "win32", reason="needs symbolic links")


def write(path: Path, data: bytes = b"new") -> None:
    with written_whole(path) as part:
        part.write_bytes(data)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space"), KeyboardInterrupt()])
def test_an_earlier_file_survives(tmp_path: Path, failure: BaseException) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail() -> None:
        with written_whole(path) as part:
            part.write_bytes(b"half")
            raise failure

    with pytest.raises((DraftscopeError, KeyboardInterrupt)) as caught:
        fail()
    assert not isinstance(caught.value, OptionError), "no option is to blame for a full disk"
    assert path.read_bytes() == b"old" and names(tmp_path) == {"file"}


def test_bytes_are_on_the_disk_before_the_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tmp_path / "file", list[tuple[int, bool]]()
    real = os.fsync

    def fsync(number: int) -> None:
        seen.append((os.fstat(number).st_size, path.exists()))
        real(number)

    monkeypatch.setattr(os, "fsync", fsync)
    write(path)
    assert seen == [(3, False)]


def test_a_file_that_gets_too_large_leaves_the_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OptionError, match="cannot be written: File too large"):
            write(path, bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == b"old" and names(tmp_path) == {"file"}


@needs_links
def test_the_file_is_replaced_that_a_link_leads_to(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    file, link, second = tmp_path / "a" / "file", tmp_path / "link", tmp_path / "second"
    file.write_bytes(b"old")
    link.symlink_to(Path("a", "file"))
    second.symlink_to(link)
    check_writable(second)
    write(second)
    assert file.read_bytes() == b"new" and link.is_symlink() and second.is_symlink()
    assert names(tmp_path / "a") == {"file"}


@needs_links
def test_links_that_lead_nowhere(tmp_path: Path) -> None:
    dangling, loop = tmp_path / "dangling", tmp_path / "loop"
    dangling.symlink_to("later")
    write(dangling)
    assert dangling.is_symlink() and (tmp_path / "later").read_bytes() == b"new"
    loop.symlink_to("loop")
    with pytest.raises(OSError, match="Too many levels"):
        check_writable(loop)
    with pytest.raises(OptionError, match="Too many levels"):
        write(loop)
    assert loop.is_symlink()


def test_permissions_stay_and_a_new_file_has_those_of_the_user(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_bytes(b"")
    old.chmod(0o640)
    umask = os.umask(0o027)
    try:
        write(old)
        write(new)
    finally:
        os.umask(umask)
    assert old.stat().st_mode & 0o777 == 0o640
    assert new.stat().st_mode & 0o777 == 0o640
    old.chmod(0o604)
    write(old)
    assert old.stat().st_mode & 0o777 == 0o604


def test_a_file_that_is_protected_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(PermissionError):
        check_writable(path)
    with pytest.raises(OptionError, match="Permission denied"):
        write(path)
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("name", ["x" * 255, "ä" * 127, "x." + "y" * 253, "x" * 250 + ".json"])
def test_the_longest_names_can_be_written(tmp_path: Path, name: str) -> None:
    check_writable(tmp_path / name)
    assert names(tmp_path) == set()
    write(tmp_path / name)
    assert names(tmp_path) == {name}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("x" * 256, "too long"),
        ("ä" * 128, "too long"),
        ("/".join(["x" * 250] * 17), "too long"),
        ("no/such/folder", "No such file"),
        ("file/below", "Not a directory"),
        (".", "Is a directory"),
        ("..", "Is a directory"),
        ("a\0b", "null"),
    ],
)
def test_a_name_that_cannot_be_written_is_known_before(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises((OSError, ValueError), match=why):
        check_writable(tmp_path / name)
    assert names(tmp_path) == {"file"}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_a_pipe_gets_the_bytes_and_stays(tmp_path: Path) -> None:
    pipe, got = tmp_path / "pipe", list[bytes]()
    os.mkfifo(pipe)
    check_writable(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    write(pipe)
    reader.join(30)
    assert got == [b"new"] and pipe.is_fifo() and names(tmp_path) == {"pipe"}


@pytest.mark.skipif(not Path("/dev/null").exists(), reason="there are no devices")
def test_a_device_stays_one() -> None:
    check_writable(Path("/dev/null"))
    write(Path("/dev/null"))
    assert Path("/dev/null").is_char_device()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="there are no numbers of files")
def test_an_open_file_is_written_on(tmp_path: Path) -> None:
    """Where standard output goes to a file, what was printed before stays, as what comes after."""
    program = (
        "from engine.files import *; print('before')\n"
        "check_writable(Path('/dev/stdout'))\n"
        "with written_whole(Path('/dev/stdout')) as part: part.write_text('whole ')\n"
        "with written_whole(Path('/dev/fd/1')) as part: part.write_text('again\\n')\n"
        "print('behind')"
    )
    with open(tmp_path / "out", "wb") as out:
        subprocess.run([sys.executable, "-c", program], stdout=out, check=True)
    assert (tmp_path / "out").read_text() == "before\nwhole again\nbehind\n"
    piped = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert piped.stdout == (tmp_path / "out").read_bytes()
    assert names(tmp_path) == {"out"}
    with pytest.raises(OSError, match="No such file"):
        check_writable(Path("/dev/fd/999"))


def test_what_is_being_written_has_the_suffix_of_the_file(tmp_path: Path) -> None:
    with written_whole(tmp_path / "plot.svg") as part:
        assert part.suffix == ".svg" and part.name.startswith(PART)
        part.write_bytes(b"")


def test_a_disk_without_room_for_another_file_is_known_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def full(self: Path, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "touch", full)
    with pytest.raises(OSError, match="No space"):
        check_writable(path)
