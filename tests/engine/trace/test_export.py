"""The CSV files as a stranger would read them, and what an export leaves on disk."""

from __future__ import annotations

import csv
import errno
import json
import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from engine.errors import Cancelled, TraceFileError
from engine.trace.export import COLUMNS_FILE, SESSION_FILE, check_target, export_csv, header
from engine.trace.records import SCHEMA_VERSION, TABLES
from engine.trace.store import TraceStore


def read(folder: Path, table: str) -> list[dict[str, str]]:
    with open(folder / f"{table}.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_one_file_per_table_and_session_json(small_trace: TraceStore, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    export_csv(small_trace, folder)
    others = {SESSION_FILE, COLUMNS_FILE}
    assert {p.name for p in folder.iterdir()} == {f"{t}.csv" for t in TABLES} | others
    with open(folder / COLUMNS_FILE, encoding="utf-8", newline="") as file:
        columns = list(csv.DictReader(file))
    for name in TABLES:
        with open(folder / f"{name}.csv", encoding="utf-8", newline="") as file:
            heads = next(csv.reader(file))
        assert [c["column"] for c in columns if c["table"] == name] == heads
    units = {c["column"]: c["unit"] for c in columns}
    assert units["verify_ms"] == "ms"
    assert units["checkpoint_bytes"] == "bytes"
    assert units["num_draft_tokens"] == "tokens"
    assert all(c["meaning"] for c in columns)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    for name in TABLES:
        raw = (folder / f"{name}.csv").read_bytes()
        assert not raw.startswith(b"\xef\xbb\xbf")
        assert b"\r" not in raw
        assert raw.endswith(b"\n")
        assert raw.decode("utf-8").splitlines()[0] == ",".join(header(small_trace.tables[name]))


def test_values_are_written_as_the_design_says(small_trace: TraceStore, tmp_path: Path) -> None:
    export_csv(small_trace, tmp_path / "out")
    prompt, _, newline, target, rejected = read(tmp_path / "out", "tokens")
    assert (prompt["kind"], prompt["token_id"]) == ("prompt", "1")
    assert (prompt["token_hex"], prompt["token_text"]) == ("646566", "def")
    assert prompt["draft_p"] == prompt["draft_index"] == prompt["target_top_id_1"] == ""
    assert (newline["token_hex"], newline["token_text"]) == ("0a09", r"\n\t")
    assert target["token_text"] == r"\xE4\xBD"
    assert target["target_entropy"] == "0.333333333"
    assert [target[f"target_top_id_{i}"] for i in range(1, 6)] == ["4", "1", "", "", ""]
    assert target["target_top_p_2"] == "0.100000001"  # the float32, to the last bit
    assert rejected["token_text"] == ",\"'"
    rounds = read(tmp_path / "out", "rounds")
    assert rounds[0]["num_draft_tokens"] == ""
    assert rounds[1]["rollback_depth"] == "0"
    assert rounds[2]["t_ms"] == "41"
    assert read(tmp_path / "out", "findings")[0]["message"] == 'said "so",\nthen nothing'


def test_a_token_follows_its_id_and_tops_are_numbered() -> None:
    names = header(TraceStore().tokens)
    at = names.index("token_id")
    assert names[at : at + 3] == ["token_id", "token_hex", "token_text"]
    assert [n for n in names if n.startswith("draft_top_p")] == [
        f"draft_top_p_{i}" for i in range(1, 6)
    ]


def test_session_json_holds_schema_runs_and_docs(
    small_trace: TraceStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    small_trace.runs[0]["odd"] = {"nan": float("nan"), "pair": (1, np.int64(2))}
    export_csv(small_trace, tmp_path / "out")
    text = (tmp_path / "out" / SESSION_FILE).read_text(encoding="utf-8")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not strict JSON")

    session = json.loads(text, parse_constant=refuse)
    assert session["schema_version"] == SCHEMA_VERSION
    assert session["rows"]["tokens"] == 5
    assert session["rows"]["divergence"] == 0
    run = session["runs"]["0"]
    assert run["options"] == {"n_predict": 6}
    assert run["odd"] == {"nan": None, "pair": [1, 2]}
    assert run["summary"]["draft_n_accepted"] == 3
    assert run["environment"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert run["environment"]["torch"] is None
    assert set(session["columns"]) == set(TABLES)
    assert session["columns"]["rounds"]["t_ms"].startswith("end of the round")
    assert "token_hex" in session["columns"]["tokens"]


def test_an_export_replaces_an_earlier_one_as_a_whole(
    small_trace: TraceStore, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    export_csv(TraceStore(), folder)
    before = folder.stat().st_ino
    export_csv(small_trace, folder)
    assert len(read(folder, "tokens")) == 5
    assert folder.stat().st_ino != before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_an_empty_folder_and_missing_parents_are_fine(
    small_trace: TraceStore, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    export_csv(small_trace, tmp_path / "empty")
    export_csv(small_trace, tmp_path / "new" / "deeper" / "out")
    assert snapshot(tmp_path / "empty") == snapshot(tmp_path / "new" / "deeper" / "out")


@pytest.mark.parametrize("names", [["notes.txt"], ["tokens.csv"], [SESSION_FILE, "photo.png"]])
def test_a_folder_with_foreign_files_is_refused(
    small_trace: TraceStore, tmp_path: Path, names: list[str]
) -> None:
    for name in names:
        (tmp_path / name).write_text("mine")
    with pytest.raises(TraceFileError, match=r"not a trace .* Choose another folder"):
        check_target(tmp_path)
    with pytest.raises(TraceFileError):
        export_csv(small_trace, tmp_path)
    assert snapshot(tmp_path) == dict.fromkeys(names, b"mine")


def test_a_file_in_the_place_of_the_folder_is_refused(
    small_trace: TraceStore, tmp_path: Path
) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(TraceFileError, match="not a folder"):
        export_csv(small_trace, tmp_path / "out")


@pytest.mark.parametrize("after", [0, 1, 3])
def test_cancelling_leaves_nothing_behind(tmp_path: Path, after: int) -> None:
    store = TraceStore()
    store.tokens.extend({"run_id": np.zeros(20_000, np.int64)})
    asked = 0

    def cancelled() -> bool:
        nonlocal asked
        asked += 1
        return asked > after

    with pytest.raises(Cancelled):
        export_csv(store, tmp_path / "a" / "out", cancelled=cancelled)
    assert list(tmp_path.iterdir()) == []


def test_an_earlier_export_survives_a_failed_one(
    small_trace: TraceStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    export_csv(small_trace, folder)
    before = snapshot(folder)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("engine.trace.export._fields", full)
    with pytest.raises(TraceFileError, match=r"out cannot be written: No space .*\. Free some"):
        export_csv(small_trace, folder)
    assert snapshot(folder) == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_an_error_names_the_folder_that_was_asked_for(
    small_trace: TraceStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path, **_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(folder))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(TraceFileError) as raised:
        export_csv(small_trace, tmp_path / "out")
    assert raised.value.message == f"{tmp_path / 'out'} cannot be written: Read-only file system."
    assert raised.value.remedy == "Choose another folder."


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_one_error(
    small_trace: TraceStore, tmp_path: Path
) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(TraceFileError, match="cannot be written"):
            export_csv(small_trace, tmp_path / "out")
    finally:
        tmp_path.chmod(0o700)


def test_progress_counts_rows_up_to_the_total(tmp_path: Path) -> None:
    store = TraceStore()
    store.rounds.extend({"run_id": np.zeros(10, np.int64)})
    store.tokens.extend({"run_id": np.zeros(20_000, np.int64)})
    calls: list[tuple[int, int, str]] = []
    export_csv(store, tmp_path / "out", progress=lambda *call: calls.append(call))
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert done[-1] == 20_010
    assert {call[1] for call in calls} == {20_010}
    assert calls[0][2] == "writing rounds.csv"


def test_a_growing_store_is_exported_as_it_was_at_the_start(tmp_path: Path) -> None:
    store = TraceStore()
    stop = threading.Event()

    def grow() -> None:
        i = 0
        while not stop.is_set():
            store.pieces[i] = b"%d" % i
            store.tokens.append(run_id=0, pos=i, token_id=i, kind="target")
            i += 1

    store.begin_run({})
    writer = threading.Thread(target=grow)
    writer.start()
    try:
        while len(store.tokens) < 100:
            pass
        export_csv(store, tmp_path / "out")
    finally:
        stop.set()
        writer.join()
    rows = read(tmp_path / "out", "tokens")
    session = json.loads((tmp_path / "out" / SESSION_FILE).read_text())
    assert len(rows) == session["rows"]["tokens"] >= 100
    assert [row["pos"] for row in rows] == [str(i) for i in range(len(rows))]
    assert [row["token_text"] for row in rows] == [str(i) for i in range(len(rows))]
