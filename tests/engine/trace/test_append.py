"""Rows appended to a saved trace: the folder is as if written anew, and whole after any crash."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.errors import TraceFileError
from engine.trace import export
from engine.trace.export import COLUMNS_FILE, SESSION_FILE, append_csv, export_csv
from engine.trace.reopen import open_trace
from engine.trace.session_file import change_facts, read_json
from tests.support.trace_builder import TraceBuilder


def grow(builder: TraceBuilder, n: int) -> None:
    for i in range(n):
        builder.draft([" c", f" {i}ä\n,"], " d", [" e"])


@pytest.fixture
def builder() -> TraceBuilder:
    made = TraceBuilder()
    made.prompt(["a", "b"])
    grow(made, 3)
    return made


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_appended_trace_has_the_files_of_one_written_at_once(
    tmp_path: Path, builder: TraceBuilder
) -> None:
    saved = None
    for _ in range(3):
        saved = append_csv(builder.store, tmp_path / "saved", saved)
        grow(builder, 2)
    before = (tmp_path / "saved" / "tokens.csv").stat().st_ino
    append_csv(builder.store, tmp_path / "saved", saved)
    export_csv(builder.store, tmp_path / "whole")
    appended, whole = files(tmp_path / "saved"), files(tmp_path / "whole")
    del whole[COLUMNS_FILE]
    sizes = read_json(tmp_path / "saved" / SESSION_FILE)["bytes"]
    assert sizes == {n[:-4]: len(text) for n, text in whole.items() if n != SESSION_FILE}
    appended.pop(SESSION_FILE), whole.pop(SESSION_FILE)
    assert appended == whole
    assert (tmp_path / "saved" / "tokens.csv").stat().st_ino == before, "written anew"


def test_a_crash_at_any_byte_leaves_the_rows_of_before(
    tmp_path: Path, builder: TraceBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, store = tmp_path / "saved", builder.store
    saved, n_before = append_csv(store, folder, None), store.size()
    grow(builder, 2)

    def crash(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(export, "write_session", crash)
        with pytest.raises(TraceFileError, match="No space"):
            append_csv(store, folder, saved)
    new = {name: text for name, text in files(folder).items() if name != SESSION_FILE}
    name, text = "tokens.csv", new["tokens.csv"]
    for size in range(saved.sizes["tokens"], len(text) + 1, 7):
        (folder / name).write_bytes(text[:size])
        assert open_trace(folder).size() == n_before
    change_facts(folder, {0: {"note": "still opens"}})
    assert open_trace(folder).size() == n_before
    append_csv(store, folder, saved)
    assert open_trace(folder).size() == store.size()


def test_a_file_shorter_than_announced_is_refused(tmp_path: Path, builder: TraceBuilder) -> None:
    saved = append_csv(builder.store, tmp_path, None)
    path = tmp_path / "tokens.csv"
    path.write_bytes(path.read_bytes()[: saved.sizes["tokens"] // 2])
    with pytest.raises(TraceFileError, match=r"tokens\.csv"):
        open_trace(tmp_path)
    append_csv(builder.store, tmp_path, saved)  # written anew
    assert open_trace(tmp_path).size() == builder.store.size()


def test_cells_filled_later_are_written_too(tmp_path: Path, builder: TraceBuilder) -> None:
    store = builder.store
    saved = append_csv(store, tmp_path, None)
    assert store.rounds.row(1)["sampler_wrong"] is None
    store.rounds.fill(np.array([1]), {"sampler_wrong": np.array([5])})
    append_csv(store, tmp_path, saved)
    assert open_trace(tmp_path).rounds.row(1)["sampler_wrong"] == 5
