"""The JSON of `draftscope tune` as results: what it holds, and what is refused in one sentence."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import TraceFileError
from engine.experiments.results.reader import (
    find_results,
    kind_of_json,
    read_results,
    read_results_json,
)
from engine.experiments.tune.tune import write_results

SETTING = {"drafter": "draft-mtp", "n_max": 3, "p_min": 0.5}
REAL = {
    "setting": SETTING,
    "tokens_per_second": 20.0,
    "low": 19.0,
    "high": 21.0,
    "undo_bytes": 1024,
    "costs": {"acceptance": 0.75},
}
DATA: dict[str, Any] = {
    "kind": "draftscope tune",
    "version": 1,
    "model": {"name": "a model"},
    "environment": {"date": "2026-01-01", "cpu": "one"},
    "device": "cpu",
    "confirmed": [{**REAL, "setting": None, "costs": None}, REAL],
    "estimates": [
        {"setting": {**SETTING, "p_min": 0.0}, "tokens_per_second": 18.0, "acceptance": 0.5},
        {"setting": SETTING, "tokens_per_second": 22.0, "acceptance": None},
    ],
}


def written(folder: Path, data: Any) -> Path:
    path = folder / "t.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data, indent=2), "utf-8")
    return path


def test_the_json_and_the_result_file_have_the_same_rows(tmp_path: Path) -> None:
    path = written(tmp_path, DATA)
    assert kind_of_json(path)
    found = read_results_json(path)
    table = read_results(write_results(DATA, tmp_path / "out"))
    assert (found.title, found.n, found.axes) == (table.title, 4, table.axes)
    for name, values in table.columns.items():
        if name not in ("finished", "key"):
            np.testing.assert_array_equal(found.columns[name], values, err_msg=name)
    assert found.columns["predicted_per_second"].tolist() == [20.0, 20.0, 18.0, 22.0]
    assert found.machine(0)["cpu"] == "one" and found.model(1) == {"name": "a model"}
    assert found.trace(0) is None


def put(*path: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        one: Any = data
        for step in path[:-1]:
            one = one[step]
        one[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put("kind", value="other"), "is not a result of"),
        (put("version", value=9), "has a version that this program does not read"),
        (put("confirmed", value={}), "confirmed is wrong: expected `array`"),
        (put("confirmed", 1, value=7), "confirmed[1] is wrong: expected `object`, got `int`"),
        (put("confirmed", 1, "low", value=True), "confirmed[1].low is wrong: expected `float`"),
        (put("confirmed", 1, "high", value=10**400), "is wrong: "),
        (put("confirmed", 1, "costs", value=[]), "confirmed[1].costs is wrong: expected `object"),
        (
            put("estimates", 0, "setting", value=None),
            "estimates[0].setting is wrong: expected `object`",
        ),
        (
            put("estimates", 0, "setting", "drafter", value=[]),
            "estimates[0].setting.drafter is wrong",
        ),
        (put("estimates", 1, "tokens_per_second", value=-1.0), "estimates[1].tokens_per_"),
        (
            put("estimates", 0, "setting", "p_min", value="<b>"),
            "estimates[0].setting.p_min is wrong",
        ),
        (put("model", value=None), "model is wrong: expected `object`"),
    ],
)
def test_a_wrong_value_is_named_with_its_place(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    data = copy.deepcopy(DATA)
    change(data)
    path = written(tmp_path, data)
    with pytest.raises(TraceFileError) as error:
        read_results_json(path)
    assert error.value.message.startswith(str(path)) and said in error.value.message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{\n"kind": oops}', ", line 2, column 9: "),
        ("[" * 100_000, "nested more than 64 times"),
        ('{"a": NaN}', "NaN is not a number"),
        ("[]", "is not a result of"),
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = written(tmp_path, text)
    assert not kind_of_json(path)
    with pytest.raises(TraceFileError) as error:
        read_results_json(path)
    assert said in error.value.message


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("none", "pipe", "."):
        assert not kind_of_json(tmp_path / name)
        assert find_results(tmp_path / name) is None
        with pytest.raises(TraceFileError, match=r"cannot be read|is not a regular file"):
            read_results_json(tmp_path / name)
