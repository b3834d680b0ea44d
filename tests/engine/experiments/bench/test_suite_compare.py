"""Result files: what comes back is what was written, differences by hand, and every refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.cli.bench_suite import diff_lines
from engine.errors import OptionError
from engine.experiments.bench.request import Configuration
from engine.experiments.bench.suite_compare import (
    SUITE_KIND,
    SUITE_VERSION,
    compare_results,
    read_result,
)
from engine.experiments.bench.suite_report import suite_report
from engine.options import RunOptions
from tests.support.request_results import made_up


def result(name: str = "draft-mtp", **figures: Any) -> dict[str, Any]:
    plain = Configuration.plain(RunOptions())
    other = Configuration(name, RunOptions())
    done = {"plain": [made_up("fox", "plain")], name: [made_up("fox", name, **figures)]}
    configurations = suite_report([plain, other], done)
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
    assert [(p.a_name, p.b_name) for p in diff.pairs] == [
        ("plain", "plain"),
        ("draft-mtp", "draft-simple"),
    ]
    assert "draft-mtp (A), draft-simple (B):" in list(diff_lines("a", "b", diff))
    one = result("draft-mtp")
    one["configurations"] = one["configurations"][:1]
    diff = compare_results(one, result("draft-simple"))
    assert (diff.only_a, diff.only_b) == ([], ["draft-simple"])
    assert list(diff_lines("a", "b", diff))[-1] == "only in B: draft-simple"


def test_prompts_of_one_file_alone_are_left_out() -> None:
    a, b = result(), result()
    b["configurations"][0]["rows"][0]["name"] = "other"
    assert [len(pair.prompts) for pair in compare_results(a, b).pairs] == [0, 1]


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
    with pytest.raises(OptionError, match=r"x\.json is no result file of `draftscope bench`"):
        read_result(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"gone\.json cannot be read"):
        read_result(tmp_path / "gone.json")
