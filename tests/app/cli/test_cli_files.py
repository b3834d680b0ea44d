"""Files and folders that commands write: as a whole or not at all, and checked before the work."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.errors import DraftscopeError, TraceFileError
from engine.observe.files.capture import Capture, write_capture
from engine.report.page import write_report
from engine.report.parts import Report
from engine.trace.export import SESSION_FILE, check_export, export_csv
from engine.trace.reopen import open_trace
from engine.trace.session_file import change_facts
from engine.trace.store import TraceStore
from tests.app.cli.conftest import Outcome

Cli = Callable[..., Outcome]
CAPTURE = Path(__file__).parents[2] / "data" / "captures" / "mtp.json.gz"


def traced(n: int = 1) -> TraceStore:
    store = TraceStore()
    for _ in range(n):
        store.begin_run({})
    return store


def capture(path: Path) -> None:
    write_capture(path, Capture(log="a"))


def packed_capture(path: Path) -> None:
    write_capture(path, Capture(log="a"))


def facts(path: Path) -> None:
    change_facts(path.parent, {0: {"a": 1}})


def report(path: Path) -> None:
    write_report(Report("title", "summary"), path)


def trace(path: Path) -> None:
    export_csv(traced(2), path.parent)


WRITERS: dict[str, Callable[[Path], None]] = {
    "a.json": capture,
    "a.json.gz": packed_capture,
    "page.html": report,
    SESSION_FILE: facts,
    "runs.csv": trace,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_leaves_the_earlier_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = tmp_path / "folder"
    export_csv(traced(), folder)
    is_trace = WRITERS[name] in (facts, trace)
    if not is_trace:
        (folder / name).write_bytes(b"old")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DraftscopeError, match="cannot be written: No space left on device"):
        WRITERS[name](folder / name)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_what_a_killed_change_of_facts_left_is_part_of_the_trace(tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    export_csv(traced(), folder)
    (folder / ".draftscope-0123abcd.json").write_bytes(b"{")
    export_csv(traced(2), folder)
    assert not list(folder.glob(".*")) and len(open_trace(folder).runs) == 2


@pytest.mark.parametrize("is_there", [True, False])
def test_the_trace_goes_where_a_link_leads(tmp_path: Path, cli: Cli, is_there: bool) -> None:
    folder, link = tmp_path / "disk" / "trace", tmp_path / "link"
    folder.parent.mkdir()
    if is_there:
        export_csv(traced(), folder)
    link.symlink_to(Path("disk", "trace"))
    for _ in range(2):
        assert cli("import", CAPTURE, "--trace", link).status == 0
        assert link.is_symlink() and open_trace(folder).rounds
        assert [path.name for path in folder.parent.iterdir()] == ["trace"]
    assert {path.name for path in tmp_path.iterdir()} == {"disk", "link"}


def test_links_that_no_trace_can_go_to(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "to-file").symlink_to("file")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "far").symlink_to("file/below")
    for name, why in (
        ("to-file", "is not a folder"),
        ("loop", "Too many levels"),
        ("far", "Not a directory"),
    ):
        outcome = cli("import", CAPTURE, "--trace", tmp_path / name)
        assert outcome.status == 2 and why in outcome.err, outcome.err
        with pytest.raises(TraceFileError):
            export_csv(traced(), tmp_path / name)
    assert (tmp_path / "file").read_bytes() == b"old"
    assert {path.name for path in tmp_path.iterdir()} == {"file", "to-file", "loop", "far"}


def test_permissions_of_a_trace_stay(tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    export_csv(traced(), folder)
    folder.chmod(0o711)
    export_csv(traced(2), folder)
    assert folder.stat().st_mode & 0o777 == 0o711


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--demo", "-p", "a", "--trace"),
        ("compare", "--demo", "-p", "a", "--trace"),
        ("import", CAPTURE, "--trace"),
        ("memory", "--demo", "--all", "--trace"),
        ("check-rollback", "--demo", "--trace"),
    ],
)
@pytest.mark.parametrize("name", ["x" * 226, "x" * 256, "ä" * 120])
def test_a_name_that_the_export_cannot_use_is_refused_first(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, words: tuple[object, ...], name: str
) -> None:
    """The names of an export's own stages are longer than that of the trace."""

    def work(*_: object, **__: object) -> None:
        raise AssertionError("the work has started")

    monkeypatch.setattr("engine.trace.store.TraceStore.begin_run", work)
    outcome = cli(*words, tmp_path / name)
    assert outcome.status == 2 and "cannot be written: File name too long" in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_a_name_is_refused_just_where_the_export_would_fail(tmp_path: Path) -> None:
    refused = []
    for n in range(205, 240):
        folder = tmp_path / ("x" * n)
        try:
            check_export(folder)
        except OSError:
            refused.append(n)
            with pytest.raises(TraceFileError, match="too long"):
                export_csv(traced(), folder)
        else:
            export_csv(traced(), folder)
    assert 0 < len(refused) < 35 and refused[-1] == 239


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("run", "--demo", "-p", "a"), "--report"),
        (("logits", "--demo", "--tokens", "1"), "--out"),
        (("bench", "w1", "--demo"), "--out"),
        (("tune", "--demo"), "--json"),
        (("export", "none"), "--aiperf"),
        (("observe", "http://127.0.0.1:1", "-p", "a"), "--capture"),
    ],
)
def test_files_are_checked_before_the_work(
    tmp_path: Path, cli: Cli, words: tuple[str, ...], option: str
) -> None:
    for name in ("x" * 256, "none/x", "folder/", ".", "..", "file/x"):
        (tmp_path / "file").write_bytes(b"")
        outcome = cli(*words, option, f"{tmp_path}/{name}")
        assert outcome.status == 2 and option in outcome.err
        assert "cannot be written" in outcome.err or "is a folder" in outcome.err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("logits", "a.gguf", "--tokens", "1"), "--out"),
        (("run", "--demo", "-f", "./a.gguf"), "--report"),
        (("run", "-m=b.gguf", "-p", "a"), "--report"),
        (("sweep", "b.gguf"), "--report"),
    ],
)
def test_what_a_command_reads_or_wrote_is_not_replaced(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], option: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.gguf").write_bytes(b"weights")
    (tmp_path / "b.gguf").symlink_to("a.gguf")
    outcome = cli(*words, option, tmp_path / "a.gguf")
    assert outcome.status == 2
    assert f"{option} {tmp_path / 'a.gguf'} is given twice in this command" in outcome.err
    assert (tmp_path / "a.gguf").read_bytes() == b"weights"


def test_two_new_files_of_one_name(tmp_path: Path, cli: Cli) -> None:
    outcome = cli("export", "none", "--html", tmp_path / "a", "--aiperf", tmp_path / "a")
    assert (outcome.status, "--aiperf" in outcome.err) == (2, True)


def test_an_earlier_output_is_replaced(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "a").write_bytes(b"earlier")
    outcome = cli("export", "none", f"--html={tmp_path / 'a'}", "--aiperf", tmp_path / "b")
    assert (outcome.status, "none does not exist" in outcome.err) == (1, True)
