"""The log file of a server: followed from its present end, over cuts and replacements."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest

from engine.errors import OptionError
from engine.observe.server.log_file import LogFollower

STARTUP = "0.00.000.001 I srv  load_model: n_rs_seq = 3\n0.00.000.002 I srv  ready\n"
OLD = "0.01.000.001 I slot launch_slot_: id  0 | task 5 | processing task\n"


def test_the_startup_and_what_comes_are_read_and_nothing_between(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(STARTUP + OLD)
    with closing(LogFollower(path)) as follower:
        assert follower.more() == STARTUP and follower.more() == ""
        with path.open("a") as file:
            file.write("new ä"[:5])
        assert follower.more() == "new ä"


def test_characters_may_be_cut(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"")
    with closing(LogFollower(path)) as follower:
        whole = "ein Zeichen: 漢\n".encode()
        seen = ""
        for cut in (whole[:14], whole[14:15], whole[15:]):
            with path.open("ab") as file:
                file.write(cut)
            seen += follower.more()
        assert seen == whole.decode()


def test_a_file_that_shrinks_or_is_replaced_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(STARTUP + OLD)
    with closing(LogFollower(path)) as follower:
        follower.more()
        path.write_text("again\n")
        assert follower.more() == "again\n"
        path.unlink()
        assert follower.more() == ""
        other = tmp_path / "other"
        other.write_text("replaced, and longer than before\n")
        os.replace(other, path)
        assert follower.more() == "replaced, and longer than before\n"


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be read: No such file"):
        LogFollower(tmp_path / "none")
    with pytest.raises(OptionError, match="not a regular file"):
        LogFollower(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OptionError, match="not a regular file"):
        LogFollower(tmp_path / "pipe")


def test_much_comes_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"")
    with closing(LogFollower(path)) as follower:
        path.write_bytes(b"x" * (5 * 2**20))
        assert [len(follower.more()) for _ in range(3)] == [4 * 2**20, 2**20, 0]
