"""Facts of servers and of runs of other engines in words, whatever types they have."""

from __future__ import annotations

from typing import Any

import pytest

from app.trace_models.run_facts import effective, engine_name, is_ours, observed_text, run_names
from app.trace_models.server_facts import known_facts, server_name, slot_lines
from engine.observe.rounds.observed_run import ServerFacts
from engine.trace.facts import RunFacts
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore

FACTS: dict[str, Any] = {
    "source": {"engine": "llama-server", "version": "b1-0c1e570"},
    "attachment": "ask",
    "server": {"address": "http://127.0.0.1:8080"},
    "model": {"name": "demo.gguf"},
    "speculative_types": ["none", "draft-mtp"],
    "requests": [
        {"path": "/completion", "prompt": "def f", "settings": {"n_predict": 9, "seed": 7}}
    ],
    "columns": {
        "rounds": {"num_draft_tokens": "observed", "rollback_path": "derived"},
        "tokens": {"token_id": "observed", "target_p": "absent"},
    },
}


def test_a_run_says_where_it_was_observed_and_what_was_told() -> None:
    untold = (
        "phase times, checkpoint bytes, KV cells, target probabilities, "
        "draft probabilities, snapshot slots"
    )
    assert effective(RunFacts(FACTS)).splitlines() == [
        "source: llama-server b1-0c1e570, requested by this window, http://127.0.0.1:8080",
        "model: demo.gguf",
        "drafting: draft-mtp",
        "request: /completion, n_predict 9, seed 7",
        "prompt: def f",
        "reported: num_draft_tokens, token_id",
        "derived: rollback_path",
        f"not observed: {untold}",
    ]


def test_what_a_log_added_is_not_called_unobserved() -> None:
    """Its columns are not among the stated ones; the rows have them."""
    store = TraceStore()
    run = RunRef(store, store.begin_run(dict(FACTS)))
    store.rounds.append(run_id=0, seq_id=0, round=0, verify_ms=3.0)
    store.tokens.append(run_id=0, seq_id=0, round=0, target_p=0.5)
    store.tokens.append(run_id=1, seq_id=0, round=0, draft_p=0.5)
    *_, reported, _, untold = effective(run.facts, run).splitlines()
    assert reported == "reported: num_draft_tokens, verify_ms, token_id"
    assert "phase times" not in untold and "checkpoint bytes" in untold
    assert "target probabilities" in untold, "the run says that it is absent"
    assert "draft probabilities" in untold, "of another run"


def test_what_no_row_of_a_run_that_ended_has_is_not_called_reported() -> None:
    store = TraceStore()
    run = RunRef(store, store.begin_run(dict(FACTS)))
    assert "token_id" in effective(run.facts, run), "it may come"
    run.facts["stops"] = ["end"]
    *_, untold = effective(run.facts, run).splitlines()
    assert "token ids" in untold and "token_id" not in effective(run.facts, run)


def test_rates_without_counts_are_listed_from_the_lowest_to_the_highest() -> None:
    """An interval of a log has no counts, so that there is no rate of the whole run."""
    rates = [{"told": {"draft_acceptance_rate": rate}} for rate in (0.6, 0.55)]
    text = observed_text(RunFacts(FACTS | {"requests": [*rates, {}]}))
    assert "of its drafts: acceptance rate 0.55 to 0.6" in text.splitlines()
    counts = {"told": {"draft_n": 4, "draft_n_accepted": 3}}
    text = observed_text(RunFacts(FACTS | {"requests": [counts, *rates]}))
    assert "of its drafts: 3 of 4 drafted accepted in 1 of 3" in text.splitlines()


@pytest.mark.parametrize("wrong", [None, 7, "text", ["a"], {"a": 1}, [None], {"rounds": 3}])
def test_facts_of_any_type_are_survived(wrong: Any) -> None:
    for name in FACTS:
        facts = RunFacts(FACTS | {name: wrong})
        assert observed_text(facts)
        assert engine_name(facts)
    server = ServerFacts("http://h:1", props={"model_path": wrong, "total_slots": wrong})
    assert known_facts(server, [{"params": wrong, "speculative": True}])["server"]
    models = ServerFacts("http://h:1", models={"data": wrong})
    assert known_facts(models)["model"] == "" or wrong
    assert slot_lines([{"id": wrong, "next_token": wrong, "is_processing": True}])


def test_runs_of_two_traces_go_by_where_they_come_from() -> None:
    ours, theirs = TraceStore(), TraceStore()
    ours.begin_run({"source": {"engine": "draftscope"}, "model": {"name": "demo.gguf"}})
    theirs.begin_run(dict(FACTS))
    one, two = RunRef(ours, 0), RunRef(theirs, 0)
    assert is_ours(one.facts) and not is_ours(two.facts)
    assert run_names(one, two) == ("run 0 of demo", "run 0 of 127.0.0.1:8080")
    assert run_names(one, one) == ("run 0", "run 0")


def test_a_slot_is_told_in_a_line() -> None:
    assert slot_lines(None) == ["not observed: the server does not report"]
    slots = [
        {"id": 0, "is_processing": False},
        {"id": 1, "is_processing": True, "id_task": 5, "next_token": [{"n_decoded": 1200}]},
    ]
    assert slot_lines(slots) == ["0: idle", "1: generating, 1,200 tokens of task 5"]
    types = [{"speculative": True, "params": {"speculative.types": "none,draft-mtp"}}]
    assert known_facts(ServerFacts("http://h:1"), types)["drafting"] == "draft-mtp"
    assert server_name(ServerFacts("http://h:1")) == "llama-server h:1"
