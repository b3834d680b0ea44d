"""`draftscope import`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.trace.reopen import open_trace
from tests.app.cli.conftest import Outcome
from tests.support.captures import OURS, load

Cli = Callable[..., Outcome]
MTP = OURS / "mtp.json.gz"


def test_a_capture_becomes_a_trace(cli: Cli, tmp_path: Path) -> None:
    outcome = cli("import", MTP, "--trace", tmp_path / "out")
    assert outcome.status == 0
    assert outcome.out == (
        "mtp.json.gz: 3 requests, 103 rounds, 232 tokens, 106 of 357 drafted accepted\n"
    )
    store = open_trace(tmp_path / "out")
    assert store.runs[0]["source"]["engine"] == "llama-server"
    assert store.runs[0]["columns"]["rounds"]["rollback_path"] == "derived"
    assert len(store.rounds) == 103


def test_figures_and_findings_as_json(cli: Cli) -> None:
    outcome = cli("import", MTP, "--json")
    found = json.loads(outcome.out)
    assert found["runs"][0]["rounds"] == 103
    assert found["runs"][0]["summary"]["draft_n_accepted"] == 106
    assert found["findings"] == []


def test_a_log_is_joined_to_a_capture_without_one(cli: Cli, tmp_path: Path) -> None:
    capture = json.loads(_text(MTP))
    log = tmp_path / "server.log"
    log.write_text("\n".join(capture.pop("log")), encoding="utf-8")
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(capture), encoding="utf-8")
    assert cli("import", path, "--log", log, "--trace", tmp_path / "out").status == 0
    store = open_trace(tmp_path / "out")
    assert set(store.rounds.column("n_rs_seq").tolist()) == {3}
    assert "rejected" in store.tokens.texts("kind")
    assert "106 of 357" in cli("import", log).out


def test_several_files_are_runs_of_one_trace(cli: Cli, tmp_path: Path) -> None:
    outcome = cli("import", MTP, OURS / "utf8.json.gz", "--trace", tmp_path / "out")
    assert outcome.status == 0
    assert len(open_trace(tmp_path / "out").runs) == 2


def test_the_log_of_another_run_is_a_finding(cli: Cli, tmp_path: Path) -> None:
    capture = json.loads(_text(MTP))
    del capture["log"]
    path, log = tmp_path / "mine.json", tmp_path / "server.log"
    path.write_text(json.dumps(capture), encoding="utf-8")
    log.write_text(load("utf8").log, encoding="utf-8")
    outcome = cli("import", path, "--log", log)
    assert outcome.status == 0
    assert "warning: log-of-another-run" in outcome.err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b" \n", "is empty"),
        (b"hello", "The format of"),
        (b'{"format": "draftscope-capture", "requests": 3}', "neither requests nor a log"),
        (b"srv  llama_server: initializing ...\n", "nor the end of a request"),
        (b"\x1f\x8bbroken", "damaged gzip"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(
    cli: Cli, tmp_path: Path, content: bytes, said: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    outcome = cli("import", path)
    assert outcome.status == 1
    assert said in outcome.err
    assert outcome.err.count("\n") == 1


def test_an_exported_trace_is_not_imported_again(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "session.json").write_text("{}")
    assert "is a trace already and needs no import" in cli("import", tmp_path).err


def test_a_log_belongs_to_one_capture(cli: Cli) -> None:
    assert cli("import", MTP, MTP, "--log", MTP).status == 2
    assert "cannot be read" in cli("import", "nowhere.json").err


def _text(path: Path) -> bytes:
    from engine.files import unpacked

    return unpacked(path.read_bytes(), path.name, 1 << 26)
