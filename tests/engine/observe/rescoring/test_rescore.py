"""Tokens of llama-server judged again on the bundled model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.analysis.acceptance.accept_rules import AcceptRule
from engine.analysis.acceptance.breakdown import breakdown
from engine.analysis.findings.check import record_findings, recorded
from engine.errors import Cancelled, OptionError, UnsupportedModelError
from engine.observe.rescoring.rescore import SameModelUnknownError, rescore
from engine.options import RunOptions, SpecOptions
from engine.sampling.options import SamplerOptions
from engine.session import Session
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from tests.support.observed_texts import (
    CAPTURED_TARGET,
    GREEDY,
    META,
    N_PROMPT,
    PROMPT,
    emitted_ids,
    emitted_rows,
    observed_run,
    with_token,
)

IDS = emitted_ids()


@pytest.fixture(scope="module")
def session() -> Session:
    return Session.open(CAPTURED_TARGET, compute="f32")


@pytest.fixture(scope="module")
def logits(session: Session) -> np.ndarray:
    """By this engine's other way: rows that predict each emitted token, [n, n_vocab]."""
    return session.logits([*session.prompt(PROMPT).tokens, *IDS])[N_PROMPT - 1 : -1]


def test_every_token_of_a_greedy_server_is_of_rank_one(session, logits) -> None:
    run = observed_run()
    result = rescore(session, run.store, run.run_id)
    assert (result.n_tokens, result.n_first, result.n_changed) == (len(IDS),) * 2 + (0,)
    rows = emitted_rows(run)
    assert [row["target_rank"] for row in rows] == [1] * len(IDS)
    p = torch.softmax(torch.from_numpy(logits).double(), 1)
    for i, row in enumerate(rows):
        assert row["target_p"] == pytest.approx(float(p[i, IDS[i]]), rel=1e-4)
        assert row["target_entropy"] == pytest.approx(float(-(p[i] * p[i].log()).sum()), rel=1e-4)
        assert row["target_top_id"][0] == IDS[i]
        assert row["target_top_id"] == torch.topk(p[i], 5).indices.tolist()
    assert not [f for f in recorded(run.store) if f.rule == "text-changed"]


def test_the_run_says_that_and_how_it_was_re_scored(session) -> None:
    run = observed_run()
    result = rescore(session, run.store, run.run_id)
    assert run.facts["rescored"]["compute"] == "f32"
    assert run.facts["rescored"]["by"].startswith("draftscope ")
    assert run.facts["columns"]["tokens"]["target_p"] == "derived"
    assert result.identity.verdict == "same as far as can be known"
    assert set(run.store.pieces) >= set(IDS)


def test_refused_tokens_are_scored_in_the_row_that_refused_them(session, logits) -> None:
    run = observed_run(rejected={2: 77, 3: 99})
    rescore(session, run.store, run.run_id)
    rows = [run.store.tokens.row(i) for i in range(len(run.store.tokens))]
    refused = [row for row in rows if row["kind"] == "rejected"]
    p = torch.softmax(torch.from_numpy(logits).double(), 1)
    for row, token in zip(refused, (77, 99), strict=True):
        place = row["pos"] - N_PROMPT
        assert row["target_p"] == pytest.approx(float(p[place, token]), rel=1e-4)
        assert row["target_rank"] == 1 + int((logits[place] > logits[place, token]).sum())


@pytest.mark.parametrize("place", [0, 7, 20, len(IDS) - 1])
def test_one_altered_token_is_found_where_it_is(session, logits, place) -> None:
    """The best of the tokens whose logits are more than 1 below the largest."""
    row = logits[place]
    token = int(np.where(row < row.max() - 1, row, -np.inf).argmax())
    run = observed_run(with_token(GREEDY, place, token))
    result = rescore(session, run.store, run.run_id, assume_same=True)
    changed = result.sequences[0].changed
    assert changed is not None and changed.pos == N_PROMPT + place
    assert (changed.token_id, changed.best_id) == (token, IDS[place])
    assert changed.rank == 1 + int((row > row[token]).sum())
    assert changed.gap == pytest.approx(float(row.max() - row[token]), rel=1e-3)
    assert result.noise is not None and 0 < result.noise < changed.gap
    (finding,) = [f for f in recorded(run.store) if f.rule == "text-changed"]
    (there,) = [row for row in emitted_rows(run) if row["pos"] == N_PROMPT + place]
    assert (finding.round, finding.seq_id, finding.severity) == (there["round"], 0, "error")


def test_the_finding_names_the_rollback_before_and_the_width_of_the_pass(session) -> None:
    run = observed_run(with_token(GREEDY, 20, 700))
    rescore(session, run.store, run.run_id, assume_same=True)
    (finding,) = [f for f in recorded(run.store) if f.rule == "text-changed"]
    assert finding.round == 11 and finding.message.startswith("Speculation changed the text")
    assert "after the rollback of round 10, depth 2 by seq_rm" in finding.evidence
    assert "pass of width 4" in finding.evidence and "top-2 gap" in finding.evidence


def test_a_near_tie_is_no_change(session, logits) -> None:
    """The runner-up, where the two best logits lie closest: a little rounding would choose it."""
    two = np.sort(logits, axis=1)[:, -2:]
    place = int((two[:, 1] - two[:, 0]).argmin())
    second = int(np.argsort(logits[place])[-2])
    rounds = [(0, 0, [token]) for token in [*IDS[:place], second]]
    run = observed_run(rounds)
    result = rescore(session, run.store, run.run_id)
    assert result.noise is not None and result.noise >= two[place, 1] - two[place, 0]
    assert (result.sequences[0].n_near_ties, result.n_changed) == (1, 0)
    assert (result.n_tokens, result.n_first) == (place + 1, place)
    assert not recorded(run.store)


@pytest.mark.parametrize("compute", ["bf16", "int8", "blocks"])
def test_rounding_of_other_compute_modes_is_no_change(compute) -> None:
    run = observed_run()
    result = rescore(Session.open(CAPTURED_TARGET, compute=compute), run.store, run.run_id)
    assert result.n_changed == 0 and result.compute == compute


def test_tokens_known_by_their_text_are_looked_up_and_others_end_it(session) -> None:
    tokenizer = session.tokenizer
    texts = {i: tokenizer.decode([IDS[i]]) for i in (0, 3)}
    assert all(len(tokenizer.ids_of_piece(text.encode())) == 1 for text in texts.values())
    run = observed_run(texts=texts | {30: ""})
    result = rescore(session, run.store, run.run_id)
    assert result.n_tokens == 30 and result.n_first == 30
    assert f"position {N_PROMPT + 30}" in result.sequences[0].gap
    rows = emitted_rows(run)
    assert [row["token_id"] for row in rows[:30]] == IDS[:30]
    assert rows[30]["token_id"] is None and rows[31]["target_p"] is None


def test_a_prompt_of_another_length_is_not_guessed(session) -> None:
    run = observed_run(n_prompt=N_PROMPT + 1)
    with pytest.raises(OptionError, match="has 10 tokens in this vocabulary, 11 in the run"):
        rescore(session, run.store, run.run_id)
    assert "rescored" not in run.facts


def test_figures_of_another_model_refuse_it(session) -> None:
    run = observed_run(meta=META | {"n_params": 1})
    with pytest.raises(UnsupportedModelError, match="1 parameters"):
        rescore(session, run.store, run.run_id, assume_same=True)


def test_a_text_of_another_model_refuses_it(session) -> None:
    rng = np.random.default_rng(0)
    rounds = [(0, 0, [int(t)]) for t in rng.integers(300, 4000, 60)]
    run = observed_run(rounds, meta={})
    with pytest.raises(UnsupportedModelError, match="are this model's choice"):
        rescore(session, run.store, run.run_id, assume_same=True)
    assert all(row["target_p"] is None for row in emitted_rows(run))


def test_a_text_between_the_two_asks_and_writes_nothing(session) -> None:
    run = observed_run(with_token(GREEDY, 20, 700))
    before = run.store.size()
    with pytest.raises(SameModelUnknownError, match=r"is not known.* The first is "):
        rescore(session, run.store, run.run_id)
    assert run.store.size() == before and "rescored" not in run.facts


def test_tokens_drawn_at_a_temperature_are_judged_by_the_filters(session, logits) -> None:
    """Ranks 1 to 3 may be drawn with top-k 3 and nothing else; rank 9 by no means."""
    order = np.argsort(-logits[0])
    settings = {"temperature": 1.0, "top_k": 3, "top_p": 1.0, "min_p": 0.0}
    for rank, is_changed in ((1, False), (3, False), (9, True)):
        token = int(order[rank - 1])
        run = observed_run([(0, 0, [token])], settings=settings)
        result = rescore(session, run.store, run.run_id, assume_same=True)
        assert bool(result.n_changed) is is_changed, rank
        assert result.sequences[0].greedy is False
    finding = recorded(run.store)[-1]
    assert "not one that it can sample" in finding.message and not finding.message.startswith(
        "Spec"
    )


def test_settings_that_are_not_computed_are_said_and_nothing_is_judged(session) -> None:
    run = observed_run(settings={"temperature": 0, "grammar": "root ::= [a-z]"})
    result = rescore(session, run.store, run.run_id, assume_same=True)
    assert result.n_first == len(IDS)
    assert "grammar" in result.sequences[0].not_judged and result.sequences[0].greedy is None


def test_a_run_of_our_own_is_checked_and_keeps_its_values(session) -> None:
    store = _own_run(session)
    before = [store.tokens.row(i) for i in range(len(store.tokens))]
    result = rescore(session, store, 0)
    assert (result.identity.verdict, result.n_first, result.n_changed) == ("same", 60, 0)
    assert [store.tokens.row(i) for i in range(len(store.tokens))] == before


def _own_run(session: Session, **options: Any) -> TraceStore:
    store = TraceStore()
    options = {"n_predict": 60, "spec": SpecOptions(types=("draft-mtp",))} | options
    run = session.start([session.prompt(PROMPT)], RunOptions(**options), store)
    while run.step():
        pass
    return store


def test_a_fault_of_our_own_engine_is_found_where_plain_decoding_parts_from_it(session) -> None:
    store = _own_run(session, rollback="planes", faults=("no-conv-rollback",))
    emitted = [row["token_id"] for row in emitted_rows(RunRef(store, 0))]
    plain = list(session.continuation(session.prompt(PROMPT), RunOptions(n_predict=60)))
    first = next(i for i, (a, b) in enumerate(zip(emitted, plain, strict=True)) if a != b)
    changed = rescore(session, store, 0).sequences[0].changed
    assert changed is not None and changed.pos == N_PROMPT + first
    assert (changed.token_id, changed.best_id) == (emitted[first], plain[first])


def test_a_run_in_another_compute_mode_is_judged_by_that_modes_noise(session) -> None:
    store = _own_run(Session.open(CAPTURED_TARGET, compute="int8"))
    assert rescore(session, store, 0).n_changed == 0


def test_it_can_be_cancelled_and_reports_how_far_it_is(session) -> None:
    run, seen = observed_run(), []
    rescore(session, run.store, run.run_id, lambda *told: seen.append(told))
    assert seen[-1][0] <= seen[-1][1] == N_PROMPT + len(IDS)
    run = observed_run()
    with pytest.raises(Cancelled):
        rescore(session, run.store, run.run_id, cancelled=lambda: True)
    assert "rescored" not in run.facts


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0, "logit_bias": [[10**9, 1.0]]},
        {"temperature": 0, "logit_bias": [["text", 1.0], 7]},
        {"temperature": 0, "top_k": 1e300, "repeat_last_n": -1e300, "repeat_penalty": 2.0},
        {"temperature": 0, "repeat_penalty": 0},
        {"temperature": "0"},
        {"temperature": 0, "mirostat": 2},
        {"temperature": 0, "samplers": ["top_k"]},
        {},
    ],
)
def test_settings_that_mean_nothing_are_not_judged_and_break_nothing(session, settings) -> None:
    run = observed_run(settings=settings)
    (sequence,) = rescore(session, run.store, run.run_id, assume_same=True).sequences
    assert sequence.n_first == len(IDS)
    assert bool(sequence.not_judged) is (sequence.greedy is None)


def test_hostile_facts_make_no_finding_that_cannot_be_written(session) -> None:
    run = observed_run(with_token(GREEDY, 20, 700))
    rescore(session, run.store, run.run_id, assume_same=True)
    found = run.facts["rescored"]
    for name, value in (("round", 10**30), ("pos", -1), ("gap", "x"), ("p", None), ("rank", 1.5)):
        (sequence,) = found["sequences"]
        wrong = {**sequence, "seq_id": 1, "changed": {**sequence["changed"], name: value}}
        run.facts["rescored"] = {**found, "sequences": [wrong]}
        record_findings(run.store, [run.run_id])
    assert len(run.store.findings) == 1


def test_a_text_longer_than_the_model_was_trained_for_is_scored(session) -> None:
    n = session.config.n_ctx_train + 100
    run = observed_run([(0, 0, [220])] * n, settings={"temperature": 0, "mirostat": 2})
    (sequence,) = rescore(session, run.store, run.run_id, assume_same=True).sequences
    assert sequence.n_tokens == n


def test_a_lossy_rule_allows_accepted_tokens_what_it_says(session, logits) -> None:
    """The runner-up in an accepted place, by rules that just allow it, and just do not."""
    starts = np.cumsum([0, *(len(ids) for _, _, ids in GREEDY)])
    gaps = {n: np.diff(np.sort(logits[starts[n]])[-2:])[0] for n in (9, 12, 14)}
    number = max(gaps, key=lambda n: gaps[n])
    token = int(np.argsort(logits[starts[number]])[-2])
    for scale, expected in ((1.2, (1, 0)), (0.5, (0, 1))):
        run = observed_run([*GREEDY[:number], (3, 1, (token,))])
        rule = AcceptRule("relaxed", (float(np.exp(-gaps[number] * scale)),))
        result = rescore(session, run.store, run.run_id, assume_same=True, rule=rule)
        (one,) = result.sequences
        assert (one.n_lossy, one.n_changed) == expected
        assert run.facts.accept_rule == rule.text


def test_a_run_by_rejection_is_expected_to_accept_what_p_and_q_say(session) -> None:
    sampler = SamplerOptions(temp=1.0, top_k=40, seed=5)
    spec = SpecOptions(types=("draft-mtp",), accept="rejection")
    store = _own_run(session, n_predict=150, spec=spec, sampler=sampler)
    result = rescore(session, store, 0)
    assert (result.rule, result.is_rule_known, result.n_changed) == ("rejection", True, 0)
    groups = breakdown(RunRef(store, 0)).by("position in draft")
    for share, group in zip(result.acceptance, groups, strict=True):
        assert (share.n, share.accepted) == (group.a.n, group.a.accepted)
        # the sum over all that may be drawn, and the mean of those that were
        assert share.expected == pytest.approx(group.a.expected, abs=2 / share.n**0.5)
        assert share.expected is not None and share.most is not None
        assert 0 < share.expected <= share.most <= 1
