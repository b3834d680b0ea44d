"""acceptance and drafter-diff: what they print and leave with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.app.cli.conftest import Outcome

Cli = Callable[..., Outcome]

_RUN = ("run", "--demo", "-p", "class Stack:", "-n", 80, "--spec-type", "draft-mtp")


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("why")


def test_acceptance_and_the_difference_of_two(cli: Cli, traces: Path) -> None:
    a, b = traces / "a", traces / "b"
    assert cli(*_RUN, "--trace", a).status == 0
    assert (
        cli(*_RUN, "--spec-draft-n-max", 6, "--spec-draft-adapt", "step", "--trace", b).status == 0
    )
    one = cli("acceptance", a)
    assert one.status == 0
    for table in ("by position in draft", "by token class", "after a round with", "log odds"):
        assert table in one.out
    two = cli("acceptance", a, b, "--json")
    found = json.loads(two.out)
    assert found["total"]["a"]["n"] and found["total"]["b"]["n"]
    other = cli("drafter-diff", a, b)
    assert other.status == 1
    assert "n_max 3 in A, 6 in B" in other.out
    same = cli("drafter-diff", a, "run", "--demo", "--json")
    assert same.status == 0
    assert json.loads(same.out)["first"] is None


def test_what_cannot_be_compared_says_what_is_missing(cli: Cli, tmp_path: Path) -> None:
    assert cli("run", "--demo", "-p", "a", "-n", 4, "--trace", tmp_path / "plain").status == 0
    for words in (
        ("acceptance", tmp_path / "plain"),
        ("drafter-diff", tmp_path / "plain", "run", "--demo"),
        ("drafter-diff", "run", "run", "--demo"),
        ("drafter-diff", tmp_path / "plain", "run"),
    ):
        outcome = cli(*words)
        assert outcome.status == 2
        assert outcome.err.count("\n") <= 3
    facts = tmp_path / "plain" / "session.json"
    session = json.loads(facts.read_text())
    session["runs"]["0"]["server"] = {"launch": {"refusal": ["token 3 differs"]}}
    facts.write_text(json.dumps(session))
    assert "refused its drafter, token 3 differs" in cli("acceptance", tmp_path / "plain").err
