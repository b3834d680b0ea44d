"""bench: tables and JSON of all measurements at small sizes, and every refusal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.options import ROLLBACK_POLICIES
from tests.app.cli.conftest import ROOT, Outcome

Cli = Callable[..., Outcome]

MODEL = ROOT / "tests" / "data" / "qwen35-c-v2x-mtp-f32.gguf"
SMALL = ("--heads", 2, "--dim", 8, "--layers", 2, "--conv-dim", 48, "--repeat", 2)
PHASES = {"save", "verify", "rollback", "restore", "replay", "total"}


def test_the_rollback_table_has_every_policy_at_every_width(cli: Cli) -> None:
    outcome = cli("bench", "rollback", "--rollback", "all", *SMALL, "--widths", "1,4,8")
    assert outcome.status == 0
    lines = outcome.out.splitlines()
    (header,) = (line for line in lines if line.split()[:3] == ["T", "kept", "policy"])
    found = [line.split() for line in lines[lines.index(header) + 1 :] if line]
    assert [(words[0], words[2]) for words in found] == [
        (width, policy) for width in "148" for policy in ("none", *ROLLBACK_POLICIES)
    ]
    titles = header.replace("x none", "x_none").split()
    for words in found:
        cells = dict(zip(titles, words, strict=True))
        assert float(cells["verify"]) > 0
        if cells["policy"] in ("ring", "replay"):
            assert cells["copied"] == cells["restored"] == "0"
    # a column is as wide as its widest cell, so that the table stays straight
    assert len({len(line) for line in lines[lines.index(header) :] if line}) == 1


def test_rollback_as_json(cli: Cli) -> None:
    report = cli(
        "bench", "rollback", "--rollback", "ring,planes", *SMALL, "--widths", 4, "--json"
    ).json
    assert report["state_bytes"] == 4 * 2 * (2 * 8 * 8 + 3 * 48)
    assert [row["policy"] for row in report["rows"]] == ["none", "ring", "planes"]
    for row in report["rows"]:
        assert set(row["ms"]) == PHASES
        assert row["width"] == 4
    ring = report["rows"][1]
    assert ring["copied"] == ring["saved"] == ring["restored"] == 0
    assert report["rows"][2]["held"] == 4 * report["state_bytes"]


def test_splits_as_table_and_json(cli: Cli) -> None:
    words = ["bench", "forward", MODEL, "--splits", "--sequences", 3, "--draft", 2, "--rounds", 2]
    table = cli(*words, "--threads", 1)
    assert table.status == 0
    assert "3 sequences x 3 tokens" in table.out
    assert "times as fast as seq" in table.out
    report = cli(*words, "--threads", 1, "--json").json
    assert set(report["figures"]) == {"equal", "seq"}
    assert report["figures"]["seq"]["n_ubatches"] == 3
    assert report["compute"] == "f32"
    assert report["ratio"] > 0


def test_steps_as_table_and_json(cli: Cli) -> None:
    words = ["bench", "forward", MODEL, "--steps", "1,4,16", "--repeat", 2, "--threads", 1]
    table = cli(*words)
    assert table.status == 0
    assert [line.split()[0] for line in table.out.splitlines()[-4:]] == ["T", "1", "4", "16"]
    report = cli(*words, "--json", "--outputs", "all").json
    assert [row["width"] for row in report["rows"]] == [1, 4, 16]
    assert report["outputs"] == "all"


def test_a_random_model_can_be_written_and_looked_at(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "random.gguf"
    words = ["bench", "random-model", path, "--size", "tiny", "--quant", "q4_k"]
    report = cli(*words, "--json").json
    assert report == {
        "path": str(path),
        "arch": "qwen35",
        "size": "tiny",
        "drafter": None,
        "quant": "q4_k",
        "bytes": path.stat().st_size,
    }
    info = cli("info", path, "--json").json
    assert info["architecture"] == "qwen35"
    kinds = ["delta net"] * 3 + ["attention", "mtp"]
    assert [layer["kind"] for layer in info["layers"]] == kinds
    assert set(info["quant_mix"]) == {"Q4_K", "Q6_K", "F32"}
    report = cli(*words, "--drafter", "dflash2", "--json").json
    assert report["drafter"] == "dflash2"
    info = cli("info", path, "--parallel", 2, "--json").json
    assert (info["drafter"], info["n_target"], info["taps"]) == ("draft-dflash", 256, [1, 2, 3])
    cells = 2 * 4096 * (info["cell_bytes"] + info["row_bytes"])
    assert info["memory"]["total"] == info["weight_bytes"] + cells
    assert "the inputs of layers 1, 2, 3 of a target with n_embd = 256" in cli("info", path).out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "No model is given"),
        (["forward", "--splits", "--steps", "1"], "not allowed with"),
        (["--rollback", "rings"], "'rings' is not one of "),
        (["recording"], "No model is given"),
        (["recording", "--demo", "-n", "0"], "-n is 0 or below -1"),
        (["rollback", "--rollback", "ring", "--widths", "66"], "--widths 66 is above 65"),
        (
            ["rollback", "--rollback", "ring", "--widths", "4,0"],
            "'0' is not a whole number of 1 or more",
        ),
        (["rollback", "--rollback", "ring", "--n-rs-seq", "65"], "--n-rs-seq is outside 1..64"),
        (["rollback", "--rollback", "ring", "--conv-dim", "100"], "does not fit --heads 16"),
        (["forward", "--splits"], "No model is given"),
        (["forward", "--splits", "--demo", "--draft", "65"], "is above 64"),
        (["forward", "--steps", "x", "--demo"], "'x' is not a whole number"),
        (["forward", "--steps", "5000", str(MODEL)], "longer than the trained context of 4096"),
        (["random-model", "no/such/folder/x.gguf"], "cannot be written"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_refused_in_one_line(cli: Cli, words: list[str], message: str) -> None:
    outcome = cli("bench", *words)
    assert outcome.status == 2
    assert outcome.out == ""
    assert message in outcome.err.splitlines()[-1]
