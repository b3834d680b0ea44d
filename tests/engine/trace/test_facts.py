"""Facts of a run with their types: reading, writing, damage, and that nothing else reads them."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from engine.options import RunOptions, SpecOptions
from engine.trace.facts import RequestFacts, RunFacts, TurnFacts, problems, recorded_options

ROOT = Path(__file__).parents[3]
OF_EXPERIMENTS = ("reader.py", "writer.py", "table.py", "suite.py", "results.py")
"""Facts there are those of an experiment's results, texts by name, and no run's."""
UNTYPED = re.compile(r"\bfacts(\.get\(|\[)")


def test_facts_are_read_by_their_types_outside_the_trace() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in ("app", "engine", "kernels")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not path.is_relative_to(ROOT / "engine" / "trace")
        if path.name not in OF_EXPERIMENTS
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if UNTYPED.search(line)
    ]
    assert found == []
    assert UNTYPED.search('run.facts.get("lane")') and UNTYPED.search('facts["lane"]')


def test_options_come_back_as_they_were_from_memory_and_from_a_file() -> None:
    spec = SpecOptions(types=("draft-mtp",), n_max=5, synth_rates=(0.5,) * 5)
    options = RunOptions(spec=spec, n_rs_seq=3, faults=("stale-plane",))
    written = asdict(options)
    assert RunFacts(options=written).options == options
    assert RunFacts(options=json.loads(json.dumps(written))).options == options


def test_options_of_another_version_keep_what_can_be_read() -> None:
    found = recorded_options(
        {"rollback": "later", "faults": ["gone"], "spec": {"n_max": "x"}, "new": 1}
    )
    assert found is not None
    assert (found.rollback, found.faults, found.n_ctx) == ("later", ("gone",), 0)
    assert found.spec == SpecOptions()
    assert recorded_options([]) is None is recorded_options("x")


def test_what_a_version_does_not_know_stays_at_every_depth() -> None:
    known = {"options": {"spec": {"n_max": 4, "tree": [1, {"a": None}]}}, "later": {"x": 1}}
    facts = RunFacts(known)
    assert facts.options is not None and facts.options.spec.n_max == 4
    facts.lane = "planes"
    assert facts == known | {"lane": "planes"}
    assert list(facts) == ["options", "later", "lane"]


def test_a_fact_that_is_not_known_or_damaged_is_missing() -> None:
    facts = RunFacts(n_ctx="x", stops="end", lane=3, synthetic=[], audit=7, n_rs_seq=2**70)
    assert [facts.n_ctx, facts.stops, facts.lane, facts.synthetic, facts.audit] == [None] * 5
    assert facts.n_rs_seq is None is facts.compute


def test_damaged_entries_of_a_list_are_left_out() -> None:
    right = {"round": 1, "seq_id": 0, "pos": 5, "where": "trunk", "what": "NaN"}
    rows = RunFacts(non_finite=[right, 3, right | {"pos": "x"}, {}, right]).non_finite
    assert rows is not None and [row.pos for row in rows] == [5, 5]
    requests = RunFacts(requests=[{"prompt": [1, 2], "path": "/x", "settings": 3}]).requests
    assert requests == [RequestFacts(path="/x")]


def test_a_part_is_written_as_json_with_its_fields_in_order() -> None:
    facts = RunFacts()
    facts.turn = TurnFacts(0, 1, None, [{"role": "user", "content": "a"}])
    assert list(facts["turn"])[:5] == ["conversation", "number", "parent", "messages", "answer"]
    assert facts.turn.number == 1
    facts.add_to("logit_rows", {"round": 1, "seq_id": 0, "row": 2, "of": None})
    assert facts.pick("logit_rows", "n_ctx")["n_ctx"] is None
    json.dumps(facts)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"n_ctx": 2**40}, "n_ctx 1099511627776 is not a whole number from 0 to 2,147,483,647"),
        ({"n_ctx": True}, "n_ctx True is not a whole number"),
        ({"lane_margin": "1"}, "lane_margin '1' is not a number"),
        ({"requests": [{"seq_ids": [-1]}]}, "requests.0.seq_ids.0 -1 is not a whole number"),
        ({"fidelity": {"compute": "f32"}}, "fidelity.n_tokens is missing"),
        ({"turn": {"number": 0}}, "turn.conversation is missing"),
        ({"columns": {"rounds": {"pos0": 1}}}, "columns.rounds.pos0 1 is not one of observed"),
        ({"options": {"spec": {"n_max": 1.5}}}, "options.spec.n_max 1.5 is not a whole number"),
        ({"options": {"sampler": {"logit_bias": [[1]]}}}, "logit_bias.0 [1] is not a list of two"),
        ({"prompt_reuse": [{"seq_id": 0}]}, "prompt_reuse.0.slot is missing"),
    ],
)
def test_a_wrong_fact_is_named_with_what_would_be_right(facts: dict, said: str) -> None:
    place, problem = next(iter(problems(facts)))
    assert said in f"{place} {problem}"


def test_what_only_findings_read_is_no_error_in_a_file() -> None:
    facts = {"audit": 3, "failure": [], "state_origins": "x", "library": 0, "later": {"deep": []}}
    assert list(problems(facts)) == []
