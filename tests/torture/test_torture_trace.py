"""Changes of traces do what they say: some that must be taken are taken, whatever their version."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from engine.errors import TraceFileError
from engine.trace.records import READ_VERSIONS, SCHEMA_MINOR, TABLES
from engine.trace.reopen import open_trace
from tests.support.foreign_traces import read_rows
from tests.torture.foreign_steps import draw_others, others, write_other
from tests.torture.trace_steps import apply, draw, real_trace


@pytest.mark.parametrize("version", READ_VERSIONS)
@pytest.mark.parametrize("minor", range(SCHEMA_MINOR + 2))
@pytest.mark.thinned(4)
def test_earlier_and_later_schemas_open(tmp_path: Path, version: int, minor: int) -> None:
    folder = _copy(tmp_path)
    how = "earlier" if minor < SCHEMA_MINOR else "later"
    apply({"do": "schema", "how": how, "version": version, "minor": minor}, folder)
    names = {name for table in TABLES for name in read_rows(folder, table)[0]}
    newest = {c.name for records in TABLES.values() for c in records if c.since > minor}
    assert newest.isdisjoint(names) and ("moon" in names) == (how == "later")
    store, whole = open_trace(folder), open_trace(real_trace())
    assert store.runs == whole.runs
    assert [len(store.tables[name]) for name in TABLES] == [len(whole.tables[n]) for n in TABLES]


def test_what_is_gently_changed_is_mostly_taken(tmp_path: Path) -> None:
    """And steps do the same once they have been JSON."""
    n_taken = 0
    for seed in range(24):
        step = draw(np.random.default_rng(seed), gently=True)
        found = []
        for name in ("one", "other"):
            folder = _copy(tmp_path / f"{seed}-{name}")
            apply(json.loads(json.dumps(step)), folder)
            found.append({path.name: path.read_bytes() for path in folder.iterdir()})
        assert found[0] == found[1]
        try:
            open_trace(folder)
        except TraceFileError:
            continue
        n_taken += 1
    assert n_taken > 16


def test_what_other_engines_wrote_is_changed(tmp_path: Path) -> None:
    n_changed = 0
    for seed in range(20):
        name, steps = draw_others(np.random.default_rng(seed))
        folder = tmp_path / str(seed)
        folder.mkdir()
        path = write_other(name, json.loads(json.dumps(steps)), folder)
        n_changed += path.read_bytes() != others()[name].read_bytes()
    assert n_changed > 16


def _copy(folder: Path) -> Path:
    return Path(shutil.copytree(real_trace(), folder / "trace"))
