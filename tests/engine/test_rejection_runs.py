"""Whole runs whose drafts are judged by rejection."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.compare.comparison import Comparison
from engine.decode import acceptance
from engine.options import RunOptions, SamplerOptions, SpecOptions
from engine.session import Session
from engine.trace.export import export_csv
from engine.trace.reopen import open_trace
from resources import DEMO_DRAFT, DEMO_TARGET
from tests.support.all_texts import texts, written
from tests.support.chi_square import chi_square
from tests.support.golden_runs import (
    decode,
    options_of,
    prompt_of,
    session,
    tokens_of,
    tokens_table,
)
from tests.support.sampler_runs import MTP, PAIRS, SAMPLERS, WAYS, plain, prompts_of


@pytest.fixture(scope="module")
def demo() -> Session:
    return Session.open(DEMO_TARGET, DEMO_DRAFT, compute="f32")


def test_rejection_knows_what_the_penalties_saw(demo):
    """Greedy, so the outcome is plain decoding's if the history is right after every rejection."""
    prompt = [demo.prompt("for i in range(")]
    plain_run = options_of(20, ignore_eos=True, sampler=SamplerOptions(repeat_penalty=1.3))
    spec = SpecOptions(("draft-mtp",), accept="rejection")
    for policy in ("planes", "checkpoint"):
        run = decode(demo, prompt, replace(plain_run, spec=spec, rollback=policy))
        assert tokens_of(run) == tokens_of(decode(demo, prompt, plain_run))


def rejecting(n: int, temp: float = 0.8, drafter: str = "draft-mtp", **others: Any) -> RunOptions:
    spec = SpecOptions((drafter,), n_max=others.pop("n_max", 3), accept="rejection")
    return RunOptions(n_predict=n, sampler=SamplerOptions(temp=temp, seed=3), spec=spec, **others)


def test_rejection_without_chance_is_match():
    run = decode(session(MTP), prompts_of(MTP), rejecting(20, temp=0))
    assert tokens_of(run) == plain(MTP, None, SamplerOptions())
    matched = decode(session(MTP), prompts_of(MTP), options_of(20, "draft-mtp"))
    for column in ("num_draft_tokens", "num_accepted_draft_tokens", "rollback_depth"):
        ours, theirs = (r.trace.rounds.column(column).tolist() for r in (run, matched))
        assert ours == theirs


@pytest.mark.parametrize(("name", "draft", "drafter"), PAIRS, ids=str)
@pytest.mark.thinned(4)
def test_rejection_is_reproducible_and_the_same_for_every_rollback(name, draft, drafter):
    opened, prompts = session(name, draft), prompts_of(name)
    first = tokens_of(decode(opened, prompts, rejecting(14, drafter=drafter)))
    assert first != [tokens[:14] for tokens in plain(name, draft, SamplerOptions(temp=0.8, seed=3))]
    for policy, replay in WAYS if name == MTP else WAYS[1::4]:
        options = rejecting(14, drafter=drafter, rollback=policy, replay=replay, parallel=3)
        assert tokens_of(decode(opened, prompts, options)) == first


def test_tokens_accepted_by_rejection_are_never_sampled_again():
    options = rejecting(40, n_max=5, rollback="checkpoint", replay="verify")
    rounds = decode(session(MTP), [prompt_of(MTP)], options).trace.rounds
    restored = np.array(rounds.texts("rollback_path")) == "restore"
    assert restored.sum() > 3
    more = rounds.column("num_emitted") - rounds.column("num_accepted_draft_tokens")
    assert (more[restored][:-1] == 1).all()


def test_what_the_rule_went_by_is_recorded(tmp_path: Path) -> None:
    run = decode(session(MTP), [prompt_of(MTP)], rejecting(40, temp=1.5))
    assert run.trace.runs[0]["options"]["spec"]["accept"] == "rejection"
    table = tokens_table(run)
    kind, p, q = table["kind"], table["rule_p"], table["rule_q"]
    judged = np.isin(kind, ("accepted", "rejected"))
    own = np.isin(kind, ("target", "bonus", "replacement"))
    assert {"accepted", "rejected", "ignored", "replacement", "bonus", "target"} <= set(kind)
    assert (np.isfinite(p) == (judged | own)).all()
    assert (np.isfinite(q) == judged).all()
    assert (q[judged] > 0).all() and (p[own] > 0).all()
    assert (p[kind == "rejected"] < q[kind == "rejected"]).all()
    assert not np.allclose(p[judged], table["target_p"][judged], atol=1e-3)
    assert not np.allclose(q[judged], table["draft_p"][judged], atol=1e-3)
    rule = np.array(run.trace.rounds.texts("accept_rule"))
    drafted = run.trace.rounds.column("num_draft_tokens") > 0
    assert (rule == np.where(drafted, "rejection", "")).all()
    export_csv(run.trace, tmp_path / "out")
    back = open_trace(tmp_path / "out")
    np.testing.assert_allclose(back.tokens.column("rule_q"), q, rtol=1e-8)
    assert back.rounds.texts("accept_rule") == rule.tolist()


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.parametrize("rule", ["match", "rejection"])
@pytest.mark.thinned(4)
def test_stale_logits_still_show(rule, sampler):
    spec = SpecOptions(("draft-mtp",), n_max=5, accept=rule)
    clean = RunOptions(n_predict=30, spec=spec, sampler=sampler)
    faulty = replace(clean, faults=("stale-logits",))
    opened, prompt = session(MTP), prompt_of(MTP)
    right, wrong = (decode(opened, [prompt], options) for options in (clean, faulty))
    assert tokens_of(right) != tokens_of(wrong)


def test_lanes_can_be_led_by_rejection():
    job = Comparison(session(MTP), prompt_of(MTP), rejecting(16))
    while job.step():
        pass
    assert len(job.emitted[0]) == 16
    assert not any(verdict.is_beyond for verdict in job.results())
    runs = range(len(job.trace.runs))
    led = {job.trace.runs[i]["lane"]: i for i in runs}["planes"]
    mine = job.trace.rounds.column("run_id") == led
    assert "rejection" in np.array(job.trace.rounds.texts("accept_rule"))[mine]


def test_texts_are_distributed_as_by_plain_sampling():
    found, drafted, accepted = written(session(MTP), 60)
    assert len(texts()) == 81
    assert 0.2 < accepted / drafted < 0.9
    assert chi_square(found, texts()) > 1e-2


def test_resampling_from_p_would_show_in_the_texts(monkeypatch):
    monkeypatch.setattr(acceptance, "residual", lambda p, q: p)
    assert chi_square(written(session(MTP), 60)[0], texts()) < 1e-3
