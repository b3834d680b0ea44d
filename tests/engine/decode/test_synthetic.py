"""Synthetic acceptance: which rates are allowed, what they mean, what is recorded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.decode.acceptance import Judge, SyntheticAcceptance, accepted_by_chance, keep
from engine.decode.round import Round
from engine.draft.drafter import Draft
from engine.errors import OptionError
from engine.options import RunOptions, SamplerOptions, SpecOptions
from engine.options.speculation import acceptance_rates
from engine.sampling.sampler import Sampler
from tests.support.golden_runs import decode, options_of, prompt_of, session, tokens_of

MTP = "qwen35-c-v2x-mtp-f32"


def test_no_rates_by_default():
    assert acceptance_rates((), None, 0) == ()
    assert SpecOptions(types=("draft-mtp",)).synthetic == ()


@pytest.mark.parametrize(
    ("rates", "length", "n_max", "message"),
    [
        ((0.5,), 1.5, 1, "both given"),
        ((0.5,), None, 0, "no drafter is given"),
        ((), 1.0, 0, "no drafter is given"),
        ((0.5,), None, 2, "has 1 values"),
        ((0.5, 0.4, 0.3), None, 2, "has 3 values"),
        ((0.5, 0.6), None, 2, "rises"),
        ((1.1, 0.5), None, 2, "outside"),
        ((0.5, -0.1), None, 2, "outside"),
        ((float("nan"), 0.5), None, 2, "outside"),
        ((float("inf"), 0.5), None, 2, "outside"),
        ((), 0.99, 2, "outside 1..3"),
        ((), 3.01, 2, "outside 1..3"),
        ((), float("nan"), 2, "outside 1..3"),
    ],
)
def test_refused(rates, length, n_max, message):
    with pytest.raises(OptionError, match=message):
        acceptance_rates(rates, length, n_max)


def test_rates_are_counted_against_the_longest_draft_of_all_drafters():
    with pytest.raises(OptionError, match="Give 8"):
        SpecOptions(types=("draft-mtp", "ngram-cache"), n_max=3, synth_rates=(0.5, 0.4, 0.3))
    assert SpecOptions(types=("draft-mtp",), synth_rates=(0.5, 0.5, 0.0)).synthetic == (
        0.5,
        0.5,
        0.0,
    )


@given(st.integers(1, 64), st.floats(0, 1))
def test_a_length_is_the_mean_of_the_accepted_list(n_max, part):
    length = 1 + part * n_max
    rates = acceptance_rates((), length, n_max)
    assert 1 + sum(rates) == pytest.approx(length, abs=1e-6)
    assert rates == pytest.approx([rates[0] ** (i + 1) for i in range(n_max)])


def test_the_ends_of_the_range_are_exact():
    assert acceptance_rates((), 1.0, 3) == (0.0, 0.0, 0.0)
    assert acceptance_rates((), 4.0, 3) == (1.0, 1.0, 1.0)


V = 64


def decided(decide, tokens, end_tokens=(), seq_id=0):
    """The accepted list where the target would choose 50 + i at position i."""
    rows = torch.full((len(tokens) + 1, V), -1.0)
    rows[torch.arange(len(rows)), 50 + torch.arange(len(rows))] = 1.0
    sampler = Sampler(SamplerOptions())
    return decide.accept(seq_id, Draft(list(tokens)), sampler.rows(rows), sampler, end_tokens)


def test_only_the_token_behind_the_accepted_ones_is_sampled():
    decide = SyntheticAcceptance((1.0, 1.0, 0.0), seed=1)
    assert decided(decide, [1, 2, 3]) == [1, 2, 52]
    assert decided(decide, [1, 2]) == [1, 2, 52]
    assert decided(decide, [1, 9, 3], {9}) == [1, 51], "an end token is never accepted"
    assert decided(decide, []) == [50]


def test_chance_looks_at_no_drafted_token():
    spec = SpecOptions(("draft-mtp",), n_max=3, synth_rates=(1.0, 1.0, 0.0))
    rows = torch.arange(16.0).reshape(4, 4)
    round_ = Round(0, 0, 0, 0, [0, 1, 2, 3], Draft([1, 2, 3]), logits=rows)
    Judge([Sampler(SamplerOptions())], RunOptions(spec=spec), ()).accept(round_)
    assert round_.accepted == [1, 2, 3] and round_.n_accepted == 2
    assert np.isnan(round_.rule_p).tolist() == [True, True, True, False]
    assert round_.rule_q == ()


def test_penalties_know_what_was_kept():
    sampler = Sampler(SamplerOptions(repeat_penalty=4.0))
    logits = torch.zeros(3, 4)
    logits[:, 1], logits[:, 2] = 3.0, 2.0
    found = keep(Draft([1, 3]), 1, sampler.rows(logits), sampler)
    assert found == [1, 2], "token 1 is penalised once it was kept"


def test_measured_rates_are_those_asked_for():
    rates, n = (0.9, 0.6, 0.6, 0.15), 4000
    decide = SyntheticAcceptance(rates, seed=3)
    lengths = np.array([len(decided(decide, [1] * 4)) - 1 for _ in range(n)])
    for i, rate in enumerate(rates):
        deviation = (rate * (1 - rate) / n) ** 0.5
        assert abs((lengths > i).mean() - rate) < 4 * deviation


def test_sequences_draw_the_same_numbers_and_seeds_other_ones():
    def lengths(decide, seq_id):
        return [len(decided(decide, [1] * 9, seq_id=seq_id)) for _ in range(20)]

    rates = acceptance_rates((), 4.0, 9)
    decide = SyntheticAcceptance(rates, 1)
    assert lengths(decide, 0) == lengths(decide, 1)
    assert lengths(SyntheticAcceptance(rates, 2), 0) != lengths(SyntheticAcceptance(rates, 1), 0)


def test_other_lengths_have_the_same_luck():
    rates = acceptance_rates((), 4.0, 9)
    full = accepted_by_chance(rates, 5, 40)
    for n in (1, 3, 9):
        decide = SyntheticAcceptance(rates[:n], 5)
        found = [len(decided(decide, [1] * n)) - 1 for _ in range(40)]
        assert found == np.minimum(full, n).tolist()
    assert full.min() < full.max(), "rounds differ"


def run(rates, **changes):
    options = options_of(240, "draft-mtp", n_max=3, n_ctx=512, ignore_eos=True)
    spec = replace(options.spec, synth_rates=rates)
    return decode(session(MTP), [prompt_of(MTP)], replace(options, spec=spec, **changes))


def test_a_run_shows_the_rates_in_its_acceptance():
    rates = (0.8, 0.5, 0.2)
    done = run(rates)
    assert done.trace.runs[0]["synthetic"] is True
    summary = done.summary()
    n = summary["num_spec_steps"]
    assert n > 80
    measured = summary["acceptance_per_position"]["unconditional_given_drafted"]
    for rate, found in zip(rates, measured, strict=True):
        assert abs(found - rate) < 4 * (rate * (1 - rate) / n) ** 0.5


def test_every_policy_and_replay_accepts_the_same_tokens():
    expected = tokens_of(run((0.8, 0.5, 0.2), n_predict=40))
    assert expected != tokens_of(run((), n_predict=40))
    for rollback in ("ring", "checkpoint"):
        assert tokens_of(run((0.8, 0.5, 0.2), n_predict=40, rollback=rollback)) == expected
    replayed = run((0.8, 0.5, 0.2), n_predict=40, rollback="checkpoint", replay="verify")
    assert replayed.trace.rounds.column("replay_index").max() == 1, "a replay accepts everything"
    rows = replayed.trace.rounds
    partial = np.array(rows.texts("rollback_path")) == "restore"
    assert partial.any()
    emitted, kept = rows.column("num_emitted"), rows.column("num_accepted_draft_tokens")
    assert (emitted[partial][:-1] == kept[partial][:-1] + 2).all()


def test_a_plain_run_is_not_marked():
    assert run((), n_predict=4).trace.runs[0]["synthetic"] is False
