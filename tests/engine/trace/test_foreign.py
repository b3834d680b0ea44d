"""Every column of a trace, damaged: it opens as it is, or one sentence says where."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from engine.errors import TraceFileError
from engine.trace.export import SESSION_FILE
from engine.trace.records import TABLES
from tests.support.foreign_traces import (
    DAMAGES,
    JUNK,
    columns,
    damaged,
    export_real_trace,
    facts,
    is_refused,
    keep_only,
    opened,
    read_rows,
    replaced,
    without_tables,
    write_rows,
)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real") / "trace"
    export_real_trace(folder)
    return folder


CHECKED_BY = {"run_id": "round", "token_id": "token_hex"}
"""Columns that another one shows to be wrong."""


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.thinned(4)
def test_a_damaged_column_opens_or_is_named(real: Path, tmp_path: Path, table: str) -> None:
    folder = tmp_path / "trace"
    shutil.copytree(real, folder)
    keep_only(folder, table)
    rows = read_rows(real, table)
    n_errors = 0
    mine = [found for found in columns() if found[0] == table]
    for number, (_, column, name) in enumerate(mine):
        # half of the damages for each column, the other half for the next one
        for damage in DAMAGES[number % 2 :: 2]:
            write_rows(folder, table, damaged(rows, name, column, damage))
            found = opened(folder)
            if isinstance(found, TraceFileError):
                names = f"({name}|{CHECKED_BY.get(name, name)})"
                wanted = rf"{table}\.csv line \d+: {names} .*\. Export"
                assert re.search(wanted, str(found)), f"{table}.{name}: {found}"
                assert len(str(found)) < 500
                n_errors += 1
            else:
                assert not (column.required and "empty" in damage), f"{table}.{name}"
                assert len(found.tables[table]) == len(rows) - 1
    assert n_errors > 10, "the damage that is meant"


@pytest.mark.parametrize("junk", JUNK, ids=lambda junk: str(junk)[:12])
@pytest.mark.thinned(6)
def test_a_damaged_fact_opens_or_is_named(real: Path, tmp_path: Path, junk: object) -> None:
    session = without_tables(json.loads((real / SESSION_FILE).read_text("utf-8")))
    # of two neighbours each damage changes one
    for place in facts(session)[JUNK.index(junk) % 2 :: 2]:
        said = is_refused(tmp_path, replaced(session, place, junk))
        if said:
            assert f"session.json: {'.'.join(place)}" in said
            assert len(said) < 500


@pytest.mark.parametrize(
    ("place", "junk", "message"),
    [
        (("options",), [], "runs.0.options [] is not an object."),
        (("options", "n_predict"), 10**12, "is not a whole number from -1 to 2,147,483,647."),
        (("options", "faults"), "all", "runs.0.options.faults 'all' is not a list of at most"),
        (("options", "spec", "types"), [1], "runs.0.options.spec.types.0 1 is not a text of"),
        (("options", "sampler", "temp"), "hot", "runs.0.options.sampler.temp 'hot' is not a num"),
        (("stops",), "end", "runs.0.stops 'end' is not a list of"),
        (("fidelity",), {"nmse": 1}, "runs.0.fidelity.compute is missing."),
        (("columns",), {"rounds": {"t_ms": "felt"}}, "'felt' is not one of observed, derived, abs"),
        (("lane_tolerance",), "wide", "runs.0.lane_tolerance 'wide' is not a number"),
    ],
)
def test_facts_are_named_with_what_they_should_be(
    real: Path, tmp_path: Path, place: tuple[str, ...], junk: object, message: str
) -> None:
    session = json.loads((real / SESSION_FILE).read_text("utf-8"))
    assert message in is_refused(tmp_path, replaced(session, ("runs", "0", *place), junk))


def test_values_nested_without_end_and_too_many_runs_and_lanes_are_refused(
    real: Path, tmp_path: Path
) -> None:
    session = json.loads((real / SESSION_FILE).read_text("utf-8"))
    deep: object = 0
    for _ in range(200):
        deep = [deep]
    for changed, message in (
        ({"more": deep}, "it is nested more than 64 times"),
        ({"runs": {str(i): {} for i in range(10_001)}}, "more than 10,000 runs"),
        ({"runs": {str(i): {"lane": "planes"} for i in range(300)}}, "more than 256 lanes"),
        ({"pieces": {"1": "00" * 70_000}}, "pieces.1 '0000"),
        ({"pieces": {"-1": "00"}}, "not a token id"),
    ):
        assert message in is_refused(tmp_path, session | changed)
