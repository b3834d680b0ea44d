"""Result files: what comes back is what was written, differences by hand, and every refusal."""

from __future__ import annotations

import json
import re
import sqlite3
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from app.cli.bench_compare import diff_lines
from engine.errors import DraftscopeError, OptionError
from engine.experiments.bench.request import Configuration
from engine.experiments.bench.suite import (
    SUITE_KIND,
    SUITE_VERSION,
    SuiteWriter,
    compare_results,
    read_result,
)
from engine.experiments.bench.suite_report import options_of, suite_report
from engine.experiments.results.reader import read_results
from engine.options import RunOptions
from tests.support.request_results import made_up
from tests.support.sweeps import write_results


def result(name: str = "draft-mtp", **figures: Any) -> dict[str, Any]:
    plain = Configuration.plain(RunOptions())
    other = Configuration(name, RunOptions())
    done = {"plain": [made_up("fox", "plain")], name: [made_up("fox", name, **figures)]}
    configurations = suite_report(options_of([plain, other]), done)
    return {"kind": SUITE_KIND, "version": SUITE_VERSION, "configurations": configurations}


def test_a_result_file_comes_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    written = json.loads(json.dumps(result(draft_n=4, draft_n_accepted=3)))
    path.write_text(json.dumps(written), encoding="utf-8")
    assert read_result(path) == written


def test_the_diff_is_as_written_by_hand() -> None:
    a = result(predicted_ms=80.0, draft_n=8, draft_n_accepted=4, wall_s=0.5)
    b = result(predicted_ms=50.0, draft_n=8, draft_n_accepted=6, wall_s=0.25)
    diff = compare_results(a, b)
    lines = list(diff_lines("a.json", "b.json", diff))
    start = lines.index("draft-mtp:")
    assert lines[:4] == ["A: a.json", "B: b.json", "", "plain:"]
    assert lines[start:] == [
        "draft-mtp:",
        "n_requests                     1          1",
        "total_predicted               11         11",
        "total_draft                    8          8",
        "total_draft_accepted           4          6",
        "aggregate_accept_rate        0.5       0.75",
        "wall_s_total                 0.5       0.25",
        "prompt                   A tok/s    B tok/s     B/A  A rate  B rate",
        "fox                        125.0      200.0    1.60   0.500   0.750",
    ]


def test_configurations_are_paired_by_name_and_a_single_rest_with_the_other() -> None:
    diff = compare_results(result("draft-mtp"), result("draft-simple"))
    assert [(p["a_name"], p["b_name"]) for p in diff["pairs"]] == [
        ("plain", "plain"),
        ("draft-mtp", "draft-simple"),
    ]
    assert "draft-mtp (A), draft-simple (B):" in list(diff_lines("a", "b", diff))
    one = result("draft-mtp")
    one["configurations"] = one["configurations"][:1]
    diff = compare_results(one, result("draft-simple"))
    assert (diff["only_a"], diff["only_b"]) == ([], ["draft-simple"])
    assert list(diff_lines("a", "b", diff))[-1] == "only in B: draft-simple"


def test_prompts_of_one_file_alone_are_left_out() -> None:
    a, b = result(), result()
    b["configurations"][0]["rows"][0]["name"] = "other"
    assert [len(pair["prompts"]) for pair in compare_results(a, b)["pairs"]] == [0, 1]


def broken(path: str, value: Any) -> dict[str, Any]:
    whole = json.loads(json.dumps(result()))
    *way, last = path.split("/")
    place: Any = whole
    for step in way:
        place = place[int(step) if step.isdigit() else step]
    place[last] = value
    return dict(whole)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "3",
        "{}",
        '{"kind": "draftscope bench w1", "version": 1, "configurations": []}',
        json.dumps(broken("version", 2)),
        json.dumps(broken("configurations", None)),
        json.dumps(broken("configurations/0/name", 3)),
        json.dumps(broken("configurations/0/aggregate", {})),
        json.dumps(broken("configurations/0/aggregate/total_draft", None)),
        json.dumps(broken("configurations/0/rows/0/predicted_per_second", "fast")),
        json.dumps(broken("configurations/0/rows/0/accept_rate", True)),
        json.dumps(broken("configurations/0/rows", {"a": 1})),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(
        OptionError, match=r"x\.json( is not a result file of `draftscope bench|, line)"
    ):
        read_result(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"gone\.json cannot be read"):
        read_result(tmp_path / "gone.json")


FACTS = {
    "repeat": 2,
    "model": {"name": "m.gguf", "size": 3, "sha256": "a", "modified_ns": 1, "content": None},
    "compute": "f32",
    "device": "cpu",
    "prompts": "two",
    "chat": False,
    "environment": {"date": "2026-11-27", "processor": "one", "threads": 1},
}
OPTIONS = options_of([Configuration.plain(RunOptions()), Configuration("draft-mtp", RunOptions())])
TEXTS = {"fox": "The quick", "hen": "A brown"}


def writer(folder: Path, **changes: Any) -> SuiteWriter:
    facts, options, texts = (
        changes.get(name, default)
        for name, default in (("facts", FACTS), ("options", OPTIONS), ("texts", TEXTS))
    )
    return SuiteWriter(folder, facts, options, texts, 8)


def write(folder: Path, n: int) -> None:
    """Write the first n requests, those that are there already left out."""
    with writer(folder) as file:
        for i, (prompt, name, repeat) in enumerate(product(TEXTS, OPTIONS, range(2))):
            if i < n and (name, prompt, repeat) not in file.measured:
                ms = 100.0 - 10 * repeat - i
                request = made_up(prompt, name, predicted_ms=ms, draft_n=8, draft_n_accepted=6)
                file.add(request, repeat)


def test_the_results_file_gives_what_was_measured(tmp_path: Path) -> None:
    write(tmp_path, 8)
    whole = read_result(tmp_path)
    assert whole == read_result(tmp_path / "results.sqlite") and whole["complete"]
    assert {name: whole[name] for name in FACTS} == FACTS
    assert [one["name"] for one in whole["configurations"]] == ["plain", "draft-mtp"]
    plain = whole["configurations"][0]
    assert [row["name"] for row in plain["rows"]] == ["fox", "hen"]
    # the lower of two times: of repetition 1
    assert [row["predicted_ms"] for row in plain["rows"]] == [89.0, 85.0]
    assert plain["rows"][0]["tokens"] == made_up("fox", "plain").tokens
    again = json.loads(json.dumps(whole))
    assert compare_results(whole, again)["pairs"][1]["prompts"][1]["ratio"] == 1.0
    table = read_results(tmp_path)
    assert (table.n, table.planned, table.title) == (8, 8, "suite: m.gguf")
    assert table.axes == ("configuration", "prompt", "repeat")
    assert table.columns["draft_acceptance_rate"].tolist() == [0.75] * 8
    assert table.machine(0) == {"processor": "one", "threads": 1, "device": "cpu"}


def test_a_suite_goes_on_where_it_stopped(tmp_path: Path) -> None:
    write(tmp_path, 3)
    assert not read_result(tmp_path)["complete"]
    with writer(tmp_path) as file:
        assert list(file.measured) == [
            ("plain", "fox", 0),
            ("plain", "fox", 1),
            ("draft-mtp", "fox", 0),
        ]
    later = {**FACTS, "environment": {**FACTS["environment"], "date": "2027-01-01"}}
    with writer(tmp_path, facts=later) as file:
        assert len(file.measured) == 3
    write(tmp_path, 8)
    assert read_results(tmp_path).n == 8


@pytest.mark.parametrize(
    "changes",
    [
        {"texts": {**TEXTS, "hen": "Another"}},
        {"facts": {**FACTS, "compute": "bf16"}},
        {"facts": {**FACTS, "model": {**FACTS["model"], "sha256": "b"}}},
        {"options": {"plain": OPTIONS["plain"]}},
    ],
)
def test_results_of_something_else_are_not_gone_on_with(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    write(tmp_path, 1)
    with pytest.raises(OptionError, match="has results of another model or machine"):
        writer(tmp_path, **changes)


def test_results_of_a_sweep_are_refused(tmp_path: Path) -> None:
    sweep = write_results(tmp_path, 1, 1)
    with pytest.raises(OptionError, match="has results of `sweep`, not of `suite`"):
        writer(sweep.parent)
    with pytest.raises(OptionError, match="not a result file of `draftscope bench suite`"):
        read_result(sweep.parent)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        (
            "DELETE FROM facts WHERE name LIKE 'detail%'",
            "row 1, detail is not a request of a suite",
        ),
        ("UPDATE results SET settings = '{}'", "row 1, detail is not a request"),
        ("UPDATE facts SET value = '[]' WHERE name LIKE 'detail%'", "row 1, a JSON text is no"),
        (
            "UPDATE facts SET value = '{}' WHERE name LIKE 'detail%'",
            "detail,  is wrong: object missing required field `prompt`",
        ),
        (
            "UPDATE facts SET value = replace(value, '\"wall_s\": ', '\"wall_s\": -')",
            "detail, wall_s is wrong: expected `float` >= 0",
        ),
        (
            "UPDATE facts SET value = replace(value, '\"tokens\": [', '\"tokens\": [true, ')",
            "detail, tokens[0] is wrong: expected `int`, got `bool`",
        ),
        ("UPDATE facts SET value = '{}' WHERE name = 'plan'", "is not a result file"),
        ("UPDATE facts SET value = '[' WHERE name = 'plan'", "a JSON text is not an object"),
        (
            "UPDATE facts SET value = replace(value, '\"plain\"', '\"plan\"')",
            "is not a result file",
        ),
    ],
)
def test_a_damaged_results_file_is_refused_in_a_sentence(
    tmp_path: Path, statement: str, message: str
) -> None:
    write(tmp_path, 4)
    with closing(sqlite3.connect(tmp_path / "results.sqlite")) as file, file:
        file.execute(statement)
    with pytest.raises(DraftscopeError, match=re.escape(message)):
        read_result(tmp_path)
