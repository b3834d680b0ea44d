"""The results file: columns that a sweep wrote, and files that are none or were tampered with."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from engine.errors import TraceFileError
from engine.experiments.results import table as schema
from engine.experiments.results.reader import find_results, read_results
from tests.support.counted_calls import counted_calls
from tests.support.sweeps import demo_identity, write_results


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_results(tmp_path_factory.mktemp("sweep"), 3, 8)


@pytest.fixture
def copied(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(written, tmp_path / schema.RESULTS_FILE))


def test_columns_are_those_of_the_jobs(written: Path) -> None:
    results = read_results(written.parent)
    assert (results.n, results.planned, results.title) == (24, 24, "lengths")
    assert results.axes == ("spec-draft-n-max", "seed")
    numbers = results.columns["number"]
    assert numbers.tolist() == list(range(1, 25))
    failed = numbers % 7 == 0
    assert results.done.tolist() == (~failed).tolist()
    speeds = results.columns["predicted_per_second"]
    assert np.isnan(speeds[failed]).all()
    assert (speeds[~failed] == numbers[~failed]).all()
    assert results.columns["spec-draft-n-max"].tolist() == [1.0] * 8 + [2.0] * 8 + [3.0] * 8
    assert results.columns["seed"].tolist() == [*map(float, range(8))] * 3
    assert set(results.columns["spec-type"]) == {"draft-mtp"}
    assert results.columns["error"][6] == "Job 7 failed."
    assert results.settings(0)["spec-draft-n-max"] == 1
    assert (results.machine(0), results.machine(6)) == ({"processor": "a"}, {"node": "a"})
    assert (results.model(0), results.model(6)) == (demo_identity(), {})
    assert results.trace(0) is None
    assert set(schema.FIGURES) <= set(results.columns)


def test_ten_thousand_rows_are_read_in_few_calls_each(tmp_path: Path) -> None:
    path = write_results(tmp_path, 1, 1)
    with closing(sqlite3.connect(path)) as file, file:
        names = [row[1] for row in file.execute("PRAGMA table_info(results)")]
        (row,) = file.execute("SELECT * FROM results")
        first = dict(zip(names, row, strict=True))
        rows = (
            tuple((first | {"key": f"{i:016x}", "number": i}).values()) for i in range(2, 10_001)
        )
        marks = ", ".join("?" * len(names))
        file.executemany(f"INSERT INTO results VALUES ({marks})", rows)
    with counted_calls() as count:
        results = read_results(path)
    assert count.n < 400 * results.n
    assert (results.n, len(results.columns["seed"])) == (10_000, 10_000)


def test_a_link_to_a_folder_that_is_not_there_yet_is_followed(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    write_results(tmp_path, 1, 1)
    assert (tmp_path / "out").is_symlink()
    assert read_results(tmp_path / "elsewhere").n == 1


def test_what_a_path_means(written: Path, tmp_path: Path) -> None:
    assert find_results(written) == find_results(written.parent) == written
    (tmp_path / "other.sqlite").write_bytes(b"SQLite format 3\0" + bytes(100))
    for path in (tmp_path, tmp_path / "other.sqlite", tmp_path / "none", Path(__file__)):
        assert find_results(path) is None


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("PRAGMA application_id = 1", "is not a result file"),
        ("PRAGMA user_version = 9", "has version 9"),
        ("DROP TABLE facts", "is not a result file"),
        ("CREATE TABLE more (a)", "is not a result file"),
        ("ALTER TABLE results ADD COLUMN more TEXT", "is not a result file"),
        ("CREATE VIEW v AS SELECT 1", "is not a result file"),
        ("CREATE INDEX i ON results (number)", "is not a result file"),
        ("UPDATE results SET key = '../../etc' WHERE number = 3", "row 3, key is not a job's key"),
        ("UPDATE results SET status = 'good' WHERE number = 3", "row 3, status is neither"),
        ("UPDATE results SET error = NULL WHERE number = 3", "row 3, error is not text"),
        ("UPDATE results SET error = x'ff' WHERE number = 3", "row 3, error is not text"),
        (
            "UPDATE results SET error = CAST(x'ff' AS TEXT)",
            "row 1, a text of table results is not UTF-8",
        ),
        (
            "UPDATE results SET error = printf('%2000000d', 1) WHERE number = 3",
            "row 3, a text of table results is longer than 1 MiB",
        ),
        (
            "UPDATE results SET error = zeroblob(2000000) WHERE number = 3",
            "row 3, a text of table results is longer than 1 MiB",
        ),
        (
            "UPDATE facts SET value = CAST(x'ff' AS TEXT)",
            "row 1, a text of table facts is not UTF-8",
        ),
        ("UPDATE descriptions SET text = x'00' WHERE id = 1", "row 1, a description is not text"),
        ("UPDATE results SET number = 'x' WHERE number = 24", "row 24, number has the wrong type"),
        ("UPDATE results SET number = -1 WHERE number = 3", "row 3, number is not a place"),
        ("UPDATE results SET wall_s = 'x' WHERE number = 3", "row 3, wall_s is not a number"),
        ("UPDATE results SET machine = 'x' WHERE number = 3", "row 3, machine is not a number"),
        ("UPDATE results SET model = 9e99 WHERE number = 3", "row 3, model is not a number of"),
        (
            "UPDATE results SET wall_s = 9e999 WHERE number = 3",
            "row 3, wall_s is not a number from",
        ),
        (
            "UPDATE results SET wall_s = -9e999 WHERE number = 3",
            "row 3, wall_s is not a number from",
        ),
        (
            "UPDATE results SET prompt_n = -1 WHERE number = 3",
            "row 3, prompt_n is not a number from",
        ),
        (
            "UPDATE results SET draft_n = x'00' WHERE number = 3",
            "row 3, draft_n is not a number from",
        ),
        (
            "UPDATE results SET settings = '[]' WHERE number = 3",
            "row 3, a JSON text is not an object",
        ),
        ("UPDATE results SET settings = '{\"a\": {}}'", "row 1, settings are no settings"),
        ("UPDATE results SET settings = '{\"wall_s\": 1}'", "row 1, settings are no settings"),
        ("UPDATE facts SET value = 3.5 WHERE name = 'title'", None),
        ("UPDATE facts SET value = NULL WHERE name = 'title'", "title is not text"),
        ("UPDATE facts SET value = 'many' WHERE name = 'planned'", None),
    ],
)
def test_what_a_sweep_would_not_write(copied: Path, statement: str, message: str | None) -> None:
    with closing(sqlite3.connect(copied)) as file, file:
        file.execute(statement)
    if message is None:
        assert read_results(copied).n == 24
        return
    with pytest.raises(TraceFileError) as caught:
        read_results(copied)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_damaged_file_never_raises_anything_else(copied: Path, tmp_path: Path) -> None:
    whole = copied.read_bytes()
    rng = np.random.default_rng(1)
    for cut in (0, 50, 100, 4096, len(whole) // 2):
        copied.write_bytes(whole[:cut])
        with pytest.raises(TraceFileError):
            read_results(copied)
    for _ in range(60):
        bytes_ = bytearray(whole)
        for at in rng.integers(100, len(whole), 20).tolist():
            bytes_[at] = int(rng.integers(256))
        copied.write_bytes(bytes_)
        try:
            results = read_results(copied)
        except TraceFileError:
            continue
        for row in range(results.n):
            results.settings(row)
            results.trace(row)
