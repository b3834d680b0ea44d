"""The store against a plain list of rows, and read while it grows."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.trace.records import MISSING, N_TOP, Column
from engine.trace.store import Table, TextPool, TraceStore

COLUMNS = (
    Column("number", "int", ""),
    Column("value", "real", ""),
    Column("word", "text", ""),
    Column("near_id", "tops", ""),
    Column("near_p", "tops", ""),
)

rows = st.fixed_dictionaries(
    {},
    optional={
        "number": st.none() | st.integers(-(2**31) + 1, 2**53),
        "value": st.none() | st.floats(allow_nan=False),
        "word": st.none() | st.text(max_size=4),
        "near_id": st.lists(st.integers(0, 10**6), max_size=N_TOP),
        "near_p": st.lists(st.floats(0, 1, width=32), max_size=N_TOP),
    },
)


def expected(row: dict[str, Any]) -> dict[str, Any]:
    def padded(name: str) -> list[Any]:
        values = list(row.get(name, []))
        return values + [None] * (N_TOP - len(values))

    return {
        "number": row.get("number"),
        "value": row.get("value"),
        "word": row.get("word") or "",
        "near_id": padded("near_id"),
        "near_p": padded("near_p"),
    }


def full_column(rows: list[dict[str, Any]], name: str) -> list[Any]:
    missing = {"number": MISSING, "value": np.nan, "word": "", "near_id": MISSING, "near_p": np.nan}
    model = [expected(row)[name] for row in rows]
    if name.startswith("near"):
        return [[missing[name] if v is None else v for v in tops] for tops in model]
    return [missing[name] if v is None else v for v in model]


def observed_column(rows: list[dict[str, Any]], name: str) -> list[Any]:
    return [row.get(name) for row in rows]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(rows, max_size=40), max_size=6), st.data())
def test_append_and_extend_agree_with_a_list_of_rows(
    batches: list[list[dict[str, Any]]], data: st.DataObject
) -> None:
    table = Table("t", COLUMNS, TextPool())
    model: list[dict[str, Any]] = []
    for batch in batches:
        how = data.draw(st.sampled_from(("one by one", "filled up", "as observed")))
        if how == "one by one":
            for row in batch:
                assert table.append(**row) == len(model)
                model.append(row)
        else:
            make = full_column if how == "filled up" else observed_column
            table.extend({c.name: make(batch, c.name) for c in COLUMNS if batch} or {"number": []})
            model.extend(batch)
        assert len(table) == len(model)
    assert [table.row(i) for i in range(len(table))] == [expected(row) for row in model]
    start = data.draw(st.integers(0, len(model)), "start")
    stop = data.draw(st.none() | st.integers(0, len(model) + 5), "stop")
    assert table.texts("word", start, stop) == full_column(model, "word")[start:stop]
    np.testing.assert_array_equal(
        table.column("number", start, stop),
        np.array(full_column(model, "number"), np.int64)[start:stop],
    )


def test_what_was_not_named_is_not_observed() -> None:
    store = TraceStore()
    store.tokens.append(run_id=0, token_id=7, target_top_id=[1, 2], draft_p=None)
    row = store.tokens.row(0)
    assert row["token_id"] == 7
    assert row["draft_p"] is None
    assert row["pos"] is None
    assert row["kind"] == ""
    assert row["target_top_id"] == [1, 2, None, None, None]
    assert row["target_top_p"] == [None] * N_TOP
    assert store.tokens.column("pos")[0] == MISSING
    assert np.isnan(store.tokens.column("target_p")[0])


def test_extend_leaves_columns_it_does_not_name_unobserved_after_growing() -> None:
    table = Table("t", COLUMNS, TextPool())
    table.extend({"number": np.arange(5000)})
    assert np.isnan(table.column("value")).all()
    assert (table.column("near_id") == MISSING).all()
    assert set(table.texts("word")) == {""}


def test_extend_refuses_columns_of_different_lengths_and_changes_nothing() -> None:
    table = Table("t", COLUMNS, TextPool())
    table.append(number=1)
    with pytest.raises(ValueError, match="different lengths"):
        table.extend({"number": [2, 3], "value": [1.0]})
    assert len(table) == 1


def test_a_row_outside_the_table_is_an_index_error() -> None:
    table = Table("t", COLUMNS, TextPool())
    table.append(number=1)
    for index in (-1, 1):
        with pytest.raises(IndexError):
            table.row(index)


def test_a_slice_is_read_only_and_keeps_its_rows_while_the_table_grows() -> None:
    table = Table("t", COLUMNS, TextPool())
    table.extend({"number": np.arange(10)})
    view = table.column("number")
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 5
    table.extend({"number": np.arange(10, 10_000)})
    np.testing.assert_array_equal(view, np.arange(10))
    np.testing.assert_array_equal(table.column("number"), np.arange(10_000))


def test_texts_are_stored_once_and_found() -> None:
    pool = TextPool()
    assert pool.find("seq_rm") == -1
    code = pool.code("seq_rm")
    assert pool.code("seq_rm") == code == pool.find("seq_rm")
    assert pool.code("") == 0
    assert pool.decode(np.array([code, 0], np.int32)) == ["seq_rm", ""]


def test_runs_count_from_zero_and_size_grows_with_every_row() -> None:
    store = TraceStore()
    assert [store.begin_run({"n": n}) for n in range(3)] == [0, 1, 2]
    assert store.runs[1] == {"n": 1}
    sizes = [store.size()]
    store.rounds.append(run_id=0)
    sizes.append(store.size())
    store.memory.extend({"run_id": [0, 0]})
    sizes.append(store.size())
    assert sizes == [0, 1, 3]


def test_a_reader_on_another_thread_sees_only_complete_rows() -> None:
    """Every row says the same number in all columns; a torn or unwritten row would differ."""
    table = Table("t", COLUMNS, TextPool())
    n_rows = 60_000
    problems: list[str] = []
    looks = 0
    done = threading.Event()

    def read() -> None:
        nonlocal looks
        seen = 0
        while not done.is_set() or seen < n_rows:
            n = len(table)
            if n < seen:
                problems.append(f"shrank from {seen} to {n}")
            start = max(0, n - 500)
            number = table.column("number", start, n)
            value = table.column("value", start, n)
            near = table.column("near_id", start, n)
            words = table.texts("word", start, n)
            want = np.arange(start, n)
            if not (
                np.array_equal(number, want)
                and np.array_equal(value, want)
                and (near == want[:, None]).all()
                and words == [str(i % 7) for i in range(start, n)]
            ):
                problems.append(f"rows {start}..{n}")
            seen = n
            looks += 1

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for i in range(0, n_rows, 3):
            table.append(number=i, value=float(i), word=str(i % 7), near_id=[i] * N_TOP)
            pair = [i + 1, i + 2]
            table.extend(
                {
                    "number": pair,
                    "value": pair,
                    "word": [str(p % 7) for p in pair],
                    "near_id": np.repeat(pair, N_TOP).reshape(2, N_TOP),
                }
            )
    finally:
        done.set()
        reader.join(60)
    assert not reader.is_alive()
    assert problems == []
    assert looks > 10


@pytest.fixture
def stained(monkeypatch) -> int:
    """The byte that fills memory no one has written to."""
    stain = 0x5C

    def empty(shape: Any, dtype: Any) -> np.ndarray:
        array = np.ndarray(shape, dtype)
        array.view(np.uint8)[...] = stain
        return array

    monkeypatch.setattr("engine.trace.store.np.empty", empty)
    return stain


def bytes_written(table: Table, stain: int) -> int:
    """Up to the last byte that is not a stain, over all columns."""
    total = 0
    for array in table._arrays.values():
        other = np.flatnonzero(array.reshape(-1).view(np.uint8) != stain)
        total += int(other[-1]) + 1 if other.size else 0
    return total


@pytest.mark.parametrize("n", [1, 1024, 1025, 9000, 40_000])
@pytest.mark.parametrize("at_once", [1, 700])
def test_memory_is_written_only_as_far_as_rows_reach(stained, n, at_once):
    """What is not written takes no memory, however far a table has grown ahead."""
    table = Table("t", COLUMNS, TextPool())
    for start in range(0, n, at_once):
        if at_once == 1:
            table.append(number=start)
        else:
            count = min(at_once, n - start)
            table.extend({"number": list(range(start, start + count))})
    row_bytes = 8 + 8 + 4 + 4 * N_TOP + 4 * N_TOP
    assert bytes_written(table, stained) <= row_bytes * (n + 1024)


@pytest.mark.parametrize("first", [1, 1000, 1024, 1500])
@pytest.mark.parametrize("more", [1, 30, 5000])
def test_what_is_not_named_is_not_observed_wherever_a_table_grows(stained, first, more):
    table = Table("t", COLUMNS, TextPool())
    for number in range(first):
        table.append(number=number)
    table.extend({"value": [0.5] * more})
    table.append(word="end")
    assert table.column("number").tolist() == [*range(first), *[MISSING] * (more + 1)]
    assert np.array_equal(table.column("value")[first:-1], np.full(more, 0.5))
    assert np.isnan(table.column("value")[:first]).all()
    assert set(table.texts("word")[:-1]) == {""}
    assert (table.column("near_id") == MISSING).all() and np.isnan(table.column("near_p")).all()


def test_only_cells_in_which_nothing_is_observed_are_filled_and_the_size_tells() -> None:
    store = TraceStore()
    for p in (None, 0.25, None):
        store.tokens.append(run_id=0, target_p=p, target_top_id=(7, 8) if p else ())
    before = store.size()
    tops = np.arange(2 * N_TOP).reshape(2, N_TOP)
    store.tokens.fill(
        np.array([0, 1]), {"target_p": [0.5, 0.75], "target_rank": [3, 4], "target_top_id": tops}
    )
    rows = [store.tokens.row(i) for i in range(3)]
    assert [row["target_p"] for row in rows] == [0.5, 0.25, None]
    assert [row["target_rank"] for row in rows] == [3, 4, None]
    assert rows[0]["target_top_id"] == tops[0].tolist()
    assert rows[1]["target_top_id"] == [7, 8, *tops[1, 2:].tolist()]
    assert rows[2]["target_top_id"] == [None] * N_TOP
    assert store.size() > before and len(store.tokens) == 3


def test_a_column_that_nothing_was_observed_in_takes_no_memory() -> None:
    table = TraceStore().rounds
    table.extend({"round": np.arange(5000), "t_ms": np.ones(5000)})
    early = table.column("draft_ms", 0, 10)
    assert len(early) == 10 and np.isnan(early).all() and not early.flags.writeable
    assert table.column("drafter", 4990).tolist() == [0] * 10
    assert len(table.column("draft_ms", 4000, 9000)) == 1000
    assert table.n_bytes() == 5000 * 16 and table.row(3)["draft_ms"] is None
    table.append(round=5000, draft_ms=2.5)
    assert table.column("draft_ms")[-2:].tolist()[1] == 2.5 and np.isnan(early).all()
    assert np.isnan(table.column("draft_ms")[:5000]).all() and table.row(5000)["t_ms"] is None


def test_a_column_that_is_the_same_in_all_rows_takes_no_memory_until_one_differs() -> None:
    table = TraceStore().rounds
    for start in (0, 3000):
        table.extend({"round": np.arange(start, start + 3000)}, seq_id=7, drafter="mtp")
    early = table.column("seq_id", 0, 10)
    assert table.n_bytes() == 6000 * 8
    assert early.tolist() == [7] * 10 and not early.flags.writeable
    assert set(table.texts("drafter")) == {"mtp"} and table.row(5999)["seq_id"] == 7
    table.append(round=6000, drafter="mtp")  # its sequence is not observed
    table.append(round=6001, seq_id=8)
    assert table.column("seq_id", 5999).tolist() == [7, MISSING, 8]
    assert table.texts("drafter")[-3:] == ["mtp", "mtp", ""] and early.tolist() == [7] * 10
