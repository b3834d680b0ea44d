"""`draftscope run --from`: a recorded run is gone on from with its options and those that are
given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.__main__ import main
from engine.trace.reopen import open_trace

Cli = Callable[..., Any]
WORDS = ["-n", "20", "--spec-type", "draft-mtp", "--compute", "f32", "--threads", "1"]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fork") / "trace"
    words = ["--seed", "4", "--temp", "0.9", "--trace", str(folder)]
    assert main(["run", "--demo", "-p", "def quicksort(arr):", *WORDS, *words]) == 0
    return folder


def test_it_goes_on_with_the_options_of_its_parent(cli: Cli, trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "both"
    outcome = cli("run", "--demo", "--from", trace, "--round", 3, "--trace", out)
    assert outcome.status == 0, outcome.err
    assert "decoding rounds 0 to 2 of run 0 again" in outcome.err
    assert outcome.out.rstrip().endswith("sequence 0: the same text")
    store = open_trace(out)
    assert store.runs[1].options == store.runs[0].options
    assert store.runs[1]["fork"] == {
        "parent": 0,
        "round": 3,
        "rebuilt": "rounds 0 to 2 decoded again",
        "token": None,
        "seq_id": 0,
        "n_kept": None,
    }
    for name in ("token_id", "round", "pos", "target_p"):
        values, runs = store.tokens.column(name), store.tokens.column("run_id")
        np.testing.assert_array_equal(values[runs == 0], values[runs == 1])


def test_options_that_are_given_take_the_place_of_those(cli: Cli, trace: Path) -> None:
    words = ["run", "--demo", "--from", trace, "--round", 2, "--json"]
    found = cli(*words, "-n8", "--seed=4", "--spec-draft-n-max", 1, "--rollback", "ring")
    assert found.status == 0, found.err
    options = found.json["options"]
    assert options["n_predict"] == 8 and options["rollback"] == "ring"
    assert options["spec"]["n_max"] == 1 and options["spec"]["types"] == ["draft-mtp"]
    assert options["sampler"]["temp"] == 0.9 and options["compute"] == "f32"
    plain = cli(*words, "--spec-type", "none", "--temp", 0.0)
    assert plain.json["options"]["spec"]["types"] == []


def test_a_position_and_a_token(cli: Cli, trace: Path) -> None:
    tokens = open_trace(trace).tokens
    n_prompt = tokens.texts("kind").count("prompt")
    words = ("--position", n_prompt + 4, "--force", 100)
    found = cli("run", "--demo", "--from", trace, *words, "--json")
    assert found.status == 0, found.err
    assert found.json["sequences"][0]["tokens"][4] == 100
    assert found.json["fork"]["token"] == 100


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--round", 2, "-p", "a"], "A prompt cannot be combined"),
        ([], "needs either --round or --position"),
        (["--round", 999], "no round 999"),
        (["--round", 2, "--from-run", 5], "no run 5"),
        (["--position", 2], "no token at position 2"),
        (["--round", 4, "-n", 2], "-n 2 is less than the"),
        (["--round", 2, "--from-seq", 3, "--force", 5], "no sequence 3"),
        (["--round", 2, "--parallel", 4], "--parallel"),
        (["--round", 2, "--force", 10**7], "outside the vocabulary"),
        (["--round", 2, "--compute", "bf16"], "computed in f32"),
    ],
)
def test_wrong_use_is_answered_in_a_sentence(
    cli: Cli, trace: Path, words: list[object], message: str
) -> None:
    outcome = cli("run", "--demo", "--from", trace, *words)
    assert outcome.status == 2 and message in outcome.err


def test_where_to_go_on_from_needs_a_trace(cli: Cli) -> None:
    outcome = cli("run", "--demo", "-p", "a", "--round", 3)
    assert outcome.status == 2 and "--from" in outcome.err
