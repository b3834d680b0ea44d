"""Reading a trace back: nothing lost, and nothing believed."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import TraceFileError
from engine.trace.export import SESSION_FILE, export_csv
from engine.trace.records import MISSING, N_TOP, TABLES, Column
from engine.trace.reopen import open_trace
from engine.trace.store import TraceStore


def values(column: Column) -> st.SearchStrategy[Any]:
    if column.name == "run_id":
        return st.integers(0, 1)
    if column.choices:
        return st.sampled_from(column.choices)
    if column.kind == "text":
        return st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
    if column.kind == "tops":
        if column.is_whole:
            most = 1 if column.name.endswith("_forbidden") else 2**31 - 1
            return st.lists(st.integers(0, most), max_size=N_TOP)
        return st.lists(st.floats(0, 1, width=32), max_size=N_TOP)
    if column.kind == "real":
        is_bound = math.isfinite(column.least)
        numbers = st.floats(column.least, column.most) if is_bound else st.floats()
    else:
        numbers = st.integers(int(column.least), int(column.most))
    return numbers if column.required else st.none() | numbers


@st.composite
def traces(draw: st.DrawFn) -> TraceStore:
    store = TraceStore()
    for _ in range(2):
        store.begin_run(
            draw(st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3)))
        )
    for name, columns in TABLES.items():
        rows = [
            {column.name: draw(values(column)) for column in columns}
            for _ in range(draw(st.integers(0, 3)))
        ]
        if name != "findings":
            rows.sort(key=lambda row: row["round"])
        for row in rows:
            store.tables[name].append(**row)
            if row.get("token_id") is not None and draw(st.booleans()):
                store.pieces[row["token_id"]] = draw(st.binary(max_size=6))
    return store


def nine_digits(array: np.ndarray) -> np.ndarray:
    return np.array([float(f"{v:.9g}") for v in array.ravel().tolist()]).reshape(array.shape)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(store=traces())
def test_round_trip(store: TraceStore, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("trip")
    export_csv(store, folder / "first")
    again = open_trace(folder / "first")
    export_csv(again, folder / "second")
    assert snapshot(folder / "first") == snapshot(folder / "second")
    assert again.pieces == store.pieces
    for run_id, facts in store.runs.items():
        assert facts.items() <= again.runs[run_id].items()
    for name, columns in TABLES.items():
        for column in columns:
            want = store.tables[name].column(column.name)
            got = again.tables[name].column(column.name)
            if column.kind == "text":
                texts = store.tables[name].texts(column.name)
                want = np.array([t.replace("\r\n", "\n").replace("\r", "\n") for t in texts])
                got = np.array(again.tables[name].texts(column.name))
            elif column.kind == "real":
                want = nine_digits(want)  # float32 columns must come back exactly
            np.testing.assert_array_equal(got, want, f"{name}.{column.name}")
    shutil.rmtree(folder)


@pytest.fixture
def exported(small_trace: TraceStore, tmp_path: Path) -> Path:
    export_csv(small_trace, tmp_path / "out")
    return tmp_path / "out"


def in_csv(table: str, old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / f"{table}.csv"
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.write_text(text.replace(old, new, 1), encoding="utf-8")

    return change


def in_session(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / SESSION_FILE
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def replaced(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def removed(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def linked(name: str, target: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return change


def piped(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


BAD = {
    "no session": (removed(SESSION_FILE), "is not an exported trace"),
    "no table": (removed("memory.csv"), r"memory\.csv is missing"),
    "endless table": (linked("memory.csv", "/dev/zero"), r"memory\.csv is not a regular file"),
    "endless session": (linked(SESSION_FILE, "/dev/zero"), r"session\.json is not a regular file"),
    "a pipe": (piped("rounds.csv"), r"rounds\.csv is not a regular file"),
    "session is text": (replaced(SESSION_FILE, b"hello"), "not valid JSON"),
    "session is binary": (replaced(SESSION_FILE, b"\xff\xfe\x00"), "not UTF-8"),
    "session is deep": (replaced(SESSION_FILE, b"[" * 100_000), "not valid JSON"),
    "session is a list": (replaced(SESSION_FILE, b"[]"), "does not describe a trace"),
    "another format": (in_session(format="x"), "does not describe a trace"),
    "another schema": (in_session(schema_version=1), "schema version 1, this program reads 3"),
    "runs are a list": (in_session(runs=[]), r"runs \[\] is not an object"),
    "runs with a gap": (in_session(runs={"1": {}}), "not numbered from 0"),
    "a run that is text": (in_session(runs={"0": "x"}), "runs.0 'x' is not an object"),
    "pieces that are no bytes": (in_session(pieces={"1": "zz"}), "hexadecimal"),
    "pieces of a wrong type": (in_session(pieces={"1": 5}), "hexadecimal"),
    "a piece that contradicts": (in_session(pieces={}), r"tokens\.csv line 2: token_hex '646566'"),
    "rows of a wrong type": (in_session(rows={"rounds": "3"}), "rows.rounds '3' is not a whole"),
    "a header of another schema": (
        in_csv("rounds", "t_ms", "t_ns"),
        r"rounds\.csv line 1: column t_ms is",
    ),
    "an empty file": (replaced("rounds.csv", b""), r"rounds\.csv line 1"),
    "a short row": (in_csv("memory", "0,2,0,", "0,2,"), r"memory\.csv line 2: 5 fields inst.* 6"),
    "a word for a number": (in_csv("rounds", "0,1,0,30", "0,x,0,30"), r"line 3: round 'x' is not"),
    "a huge number": (in_csv("rounds", "30,3,", "30," + "9" * 30 + ","), "line 3: pos0"),
    "a number of 10,000 digits": (in_csv("rounds", "0,1,0", "0," + "1" * 10_000 + ",0"), "1111…'"),
    "a word for a real": (in_csv("rounds", "0,1,0,30", "0,1,0,late"), "late. is not a number"),
    "a top id beyond int32": (in_csv("tokens", ",4,1,,,,", ",4,4294967296,,,,"), "target_top_id_2"),
    "a probability beyond float32": (in_csv("tokens", "0.5,0.1", "1e300,0.1"), "target_top_p_1"),
    "an unknown kind": (in_csv("tokens", "rejected", "maybe"), "6: kind .maybe. is not one of"),
    "an unknown slot state": (in_csv("memory", "live", "alive"), "state 'alive' is not one of"),
    "an unknown run": (in_csv("rounds", "\n0,1,", "\n7,1,"), "line 3: run_id '7' is not a run"),
    "a sequence too far": (in_csv("rounds", "0,2,0,41", "0,2,99999999,41"), "between 0 and 65535"),
    "a negative round": (in_csv("rounds", "0,2,0,41", "0,-2,0,41"), "round '-2' is not between"),
    "a field beyond all measure": (
        in_csv("findings", "toy", "x" * 200_000),
        r"findings\.csv line 3: a field has more than",
    ),
    "an open quote": (in_csv("findings", "toy", '"toy'), r"findings\.csv line \d: (not|\d+ f)"),
    "no UTF-8": (replaced("memory.csv", b"run_id\xff\n"), r"memory\.csv is not UTF-8"),
    "a lost last row": (
        lambda folder: (folder / "rounds.csv").write_bytes(
            b"".join((folder / "rounds.csv").read_bytes().splitlines(keepends=True)[:-1])
        ),
        r"rounds\.csv has 2 rows where session\.json announces 3",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_damage_is_named_with_file_and_remedy(exported: Path, case: str) -> None:
    damage, message = BAD[case]
    damage(exported)
    with pytest.raises(TraceFileError, match=message) as caught:
        open_trace(exported)
    assert caught.value.remedy.endswith(".")
    assert len(str(caught.value)) < 600


def test_the_undamaged_folder_opens(exported: Path) -> None:
    store = open_trace(exported)
    assert [len(table) for table in store.tables.values()] == [3, 5, 1, 0, 1, 0, 0, 1]
    assert store.pieces[3] == b"\n\t"
    assert store.runs[0]["options"] == {"n_predict": 6}
    assert store.rounds.row(0)["num_draft_tokens"] is None
    assert store.rounds.column("num_draft_tokens")[0] == MISSING


@pytest.mark.parametrize("path", ["missing", "file"])
def test_a_path_that_is_no_folder_is_an_error(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(TraceFileError):
        open_trace(tmp_path / path)


def test_every_row_of_a_block_is_checked(tmp_path: Path) -> None:
    store = TraceStore()
    store.begin_run({})
    zero, number = np.zeros(20_000, np.int64), np.arange(20_000)
    store.rounds.extend({"run_id": zero, "round": number, "seq_id": zero, "pos0": number})
    export_csv(store, tmp_path / "out")
    in_csv("rounds", "\n0,12345,0,,12345,", "\n0,12345,0,,twelve,")(tmp_path / "out")
    with pytest.raises(TraceFileError, match=r"rounds\.csv line 12347: pos0 'twelve'"):
        open_trace(tmp_path / "out")


@pytest.mark.parametrize("layer", ["-1", "4096", "9" * 12])
def test_a_layer_that_no_model_has_is_refused(tmp_path: Path, layer: str) -> None:
    store = TraceStore()
    store.begin_run({})
    store.states.append(run_id=0, lane="ring", round=1, seq_id=0, pos=7, layer=5)
    export_csv(store, tmp_path / "out")
    in_csv("states", "0,ring,1,0,7,5,", f"0,ring,1,0,7,{layer},")(tmp_path / "out")
    with pytest.raises(TraceFileError, match=r"states\.csv line 2: layer .* between 0 and 4095"):
        open_trace(tmp_path / "out")
