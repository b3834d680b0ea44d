"""An export that is killed anywhere leaves the trace before it or the new one, and is cleaned up
after."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.errors import TraceFileError
from engine.trace.export import SESSION_FILE, export_csv, recover_export
from engine.trace.reopen import open_trace
from engine.trace.store import TraceStore

ROOT = Path(__file__).parents[3]
OPERATIONS = ("mkdir", "rename", "replace", "unlink", "rmdir")
DEAD = 999_999_999
"""No process has this number."""


class KilledError(BaseException):
    """From here on, the process does nothing to the disk any more."""


@contextmanager
def killed_at(n: int, *, after: bool) -> Iterator[list[str]]:
    """Operations on the disk work until the nth, which works only if the kill comes after it. The
    process that is killed counts as another one, which is dead."""
    done: list[str] = []

    def wrapped(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operate(*args: Any, **kwargs: Any) -> Any:
            done.append(name)
            if len(done) < n or (len(done) == n and after):
                result = real(*args, **kwargs)
                if len(done) < n:
                    return result
            raise KilledError

        return operate

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getpid", lambda: DEAD)
        for name in OPERATIONS:
            patch.setattr(os, name, wrapped(name, getattr(os, name)))
        yield done


def stores() -> tuple[TraceStore, TraceStore]:
    """A trace and a later one."""
    made = TraceStore(), TraceStore()
    for n, store in enumerate(made, start=1):
        store.begin_run({})
        for number in range(n):
            store.rounds.append(run_id=0, round=number, seq_id=0)
    return made


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("foreign", [False, True], ids=["", "foreign file"])
@pytest.mark.thinned(4)
def test_a_kill_loses_nothing(tmp_path: Path, after: bool, foreign: bool) -> None:
    first, second = stores()
    n = 0
    for n in range(1, 100):
        folder = tmp_path / f"{n}" / "out"
        export_csv(first, folder)
        try:
            with killed_at(n, after=after) as done:
                export_csv(second, folder)
            break  # it came to its end before the nth
        except KilledError:
            pass
        if foreign and folder.exists():
            (folder / "notes.txt").write_text("mine")
        recover_export(folder)
        assert len(open_trace(folder).rounds) in (1, 2), done
        left = [path.name for path in folder.parent.iterdir()]
        assert left == ["out"], done
        if (folder / "notes.txt").exists():
            (folder / "notes.txt").unlink()
        export_csv(second, folder)
        assert len(open_trace(folder).rounds) == 2
        assert [path.name for path in folder.parent.iterdir()] == ["out"]
    assert n > 12, "the kills that are meant"


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_kill_of_a_first_export_leaves_nothing_or_all(tmp_path: Path, after: bool) -> None:
    _, store = stores()
    for n in range(1, 100):
        folder = tmp_path / f"{n}" / "out"
        folder.parent.mkdir()
        try:
            with killed_at(n, after=after):
                export_csv(store, folder)
            break
        except KilledError:
            pass
        recover_export(folder)
        assert [path.name for path in folder.parent.iterdir()] in ([], ["out"])
        if folder.exists():
            assert len(open_trace(folder).rounds) == 2
    assert n > 2


def test_a_process_that_really_ends(tmp_path: Path) -> None:
    first, _ = stores()
    export_csv(first, tmp_path / "out")
    code = f"""
import os
from pathlib import Path
from engine.trace.export import export_csv
from engine.trace.store import TraceStore
real, calls = os.rename, []
def rename(*args):
    calls.append(args)
    real(*args)
    if len(calls) == 2:
        os._exit(7)
os.rename = rename
export_csv(TraceStore(), Path({str(tmp_path / "out")!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 7
    assert not (tmp_path / "out").exists()
    recover_export(tmp_path / "out")
    assert len(open_trace(tmp_path / "out").rounds) == 0  # the new one is complete already
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_only_stages_of_exports_to_the_same_place_are_cleaned(tmp_path: Path) -> None:
    store, _ = stores()
    others = [".out", ".out.part", f".other.draftscope-{DEAD}-abcd1234.part", ".out.1234abcd"]
    others.append(f".out.draftscope-{os.getppid()}-abcd1234.part")  # that process is alive
    for name in (*others, f".out.draftscope-{DEAD}-abcd1234.part"):
        (tmp_path / name).mkdir()
    export_csv(store, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*others, "out"])


def test_a_file_that_appears_meanwhile_stays(tmp_path: Path) -> None:
    first, second = stores()
    folder = tmp_path / "out"
    export_csv(first, folder)

    def appear(*_: object) -> None:
        (folder / "notes.txt").write_text("mine")

    with pytest.raises(TraceFileError, match=r"notes\.txt"):
        export_csv(second, folder, progress=appear)
    assert (folder / "notes.txt").read_text() == "mine"
    assert (folder / SESSION_FILE).is_file()
    (folder / "notes.txt").unlink()
    assert len(open_trace(folder).rounds) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_file_that_appears_at_the_last_moment_goes_into_the_new_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = stores()
    folder = tmp_path / "out"
    export_csv(first, folder)
    real = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path == folder:
            (folder / "notes.txt").write_text("mine")
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    export_csv(second, folder)
    assert (folder / "notes.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    store, _ = stores()
    folder = tmp_path / "out"

    def appear(*_: object) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "photo.png").write_bytes(b"mine")

    with pytest.raises(TraceFileError, match=r"photo\.png"):
        export_csv(store, folder, progress=appear)
    assert [path.name for path in folder.iterdir()] == ["photo.png"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
