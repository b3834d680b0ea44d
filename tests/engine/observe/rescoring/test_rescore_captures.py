"""Captures of llama-server on the bundled model, judged again."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from engine.analysis.acceptance.accept_rules import AcceptRule
from engine.analysis.findings.check import recorded
from engine.observe.files.importing import import_file
from engine.observe.rescoring.rescore import NothingToRescoreError, SameModelUnknownError, rescore
from engine.observe.rescoring.triage import triage
from engine.session import Session
from engine.trace.records import EMITTED_KINDS
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from tests.support.observed_texts import CAPTURED_TARGET
from tests.support.scripted_replies import CAPTURES

pytestmark = pytest.mark.skipif(not CAPTURES.is_dir(), reason="the captures are not at hand")

RIGHT = ("mtp", "mtp-2-slots", "draft", "plain", "ngram-mod", "chain", "stops")


@cache
def session(compute: str = "f32") -> Session:
    return Session.open(CAPTURED_TARGET, compute=compute)


def imported(name: str | Path) -> RunRef:
    store = TraceStore()
    path = name if isinstance(name, Path) else CAPTURES / f"{name}.json.gz"
    (run_id,) = import_file(store, path)
    return RunRef(store, run_id)


def token_rows(run: RunRef) -> list[dict[str, Any]]:
    return [run.store.tokens.row(i) for i in range(len(run.store.tokens))]


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.thinned(4)
def test_every_greedy_token_is_of_rank_one_and_no_refused_one(name: str) -> None:
    run = imported(name)
    result = rescore(session(), run.store, run.run_id)
    assert result.identity.verdict == "same as far as can be known"
    greedy = {one.seq_id for one in result.sequences if one.greedy}
    assert greedy and all(one.greedy is not None and not one.gap for one in result.sequences)
    rows = [row for row in token_rows(run) if row["seq_id"] in greedy]
    emitted = [row["target_rank"] for row in rows if row["kind"] in EMITTED_KINDS]
    assert emitted == [1] * sum(one.n_tokens for one in result.sequences if one.greedy)
    refused = [row["target_rank"] for row in rows if row["kind"] == "rejected"]
    assert all(rank > 1 for rank in refused)
    if name in ("mtp", "draft", "chain"):
        assert len(refused) == {"mtp": 45, "draft": 20, "chain": 9}[name]
    assert "text-changed" not in {finding.rule for finding in recorded(run.store)}


@pytest.mark.parametrize("compute", ["int8", "blocks", "bf16"])
@pytest.mark.thinned(4)
def test_other_compute_modes_find_nothing_wrong_either(compute: str) -> None:
    for name in ("mtp", "chain", "plain"):
        run = imported(name)
        assert rescore(session(compute), run.store, run.run_id).n_changed == 0


def test_one_altered_id_in_a_capture_is_caught_at_that_token(tmp_path: Path) -> None:
    with gzip.open(CAPTURES / "mtp.json.gz") as file:
        capture = json.load(file)
    events = capture["requests"][0]["reply"]["events"]
    at, text = events[40]
    said = json.loads(text.removeprefix("data: "))
    place, said["tokens"] = said["timings"]["predicted_n"] - 1, [1234]
    events[40] = [at, f"data: {json.dumps(said)}"]
    del capture["log"]
    (tmp_path / "altered.json").write_text(json.dumps(capture))
    run = imported(tmp_path / "altered.json")
    result = rescore(session(), run.store, run.run_id, assume_same=True)
    changed = result.sequences[0].changed
    assert changed is not None and changed.token_id == 1234
    (row,) = [
        row
        for row in token_rows(run)
        if row["seq_id"] == 0 and row["pos"] == changed.pos
        if row["kind"] in EMITTED_KINDS
    ]
    assert row["token_id"] == 1234 and place == 40
    (finding,) = [one for one in recorded(run.store) if one.rule == "text-changed"]
    assert (finding.round, finding.seq_id) == (row["round"], 0)
    found = triage(imported("mtp"), run)
    assert (found.verdict, found.pairs[0].n_same) == ("different", place)


def test_what_synthetic_acceptance_keeps_is_no_change_by_rounding_or_rollback() -> None:
    run = imported("synthetic")
    result = rescore(session(), run.store, run.run_id)
    assert (result.rule, result.is_rule_known, result.n_changed) == ("synthetic", True, 0)
    assert result.sequences[0].n_lossy == 2 and not result.acceptance[0].expected
    strict = imported("synthetic")
    with pytest.raises(SameModelUnknownError):
        rescore(session(), strict.store, strict.run_id, rule=AcceptRule())
    result = rescore(session(), strict.store, strict.run_id, assume_same=True, rule=AcceptRule())
    changed = result.sequences[0].changed
    assert changed is not None and changed.kind == "accepted" and changed.rank > 1
    assert "text-changed" in {finding.rule for finding in recorded(strict.store)}


def test_chat_streams_are_re_scored_by_their_pieces() -> None:
    run = imported("endpoints")
    result = rescore(session(), run.store, run.run_id)
    scored = {one.seq_id: (one.n_tokens, one.n_first) for one in result.sequences if one.n_tokens}
    assert len(scored) >= 5 and all(n == first for n, first in scored.values())


def test_ids_that_a_stream_hides_are_not_guessed_and_the_log_tells_them(tmp_path: Path) -> None:
    with gzip.open(CAPTURES / "utf8.json.gz") as file:
        capture = json.load(file)
    del capture["log"], capture["requests"][1:]  # the second is a reply in one piece, with its ids
    (tmp_path / "streams.json").write_text(json.dumps(capture))
    hidden = imported(tmp_path / "streams.json")
    with pytest.raises(NothingToRescoreError, match="is not known"):
        rescore(session(), hidden.store, hidden.run_id)
    logged = imported("utf8")
    with pytest.raises(SameModelUnknownError, match="None of its tokens can be checked"):
        rescore(session(), logged.store, logged.run_id)
    result = rescore(session(), logged.store, logged.run_id, assume_same=True)
    assert result.n_tokens > 30 and "grammar" in result.sequences[0].not_judged


def test_with_and_without_speculation_the_texts_are_the_same() -> None:
    found = triage(imported("plain"), imported("mtp"))
    assert found.verdict == "same" and found.pairs[0].n_same == 48
