"""Acceptance rules of servers: their names, and how likely each accepts."""

from __future__ import annotations

import math
from dataclasses import asdict

import numpy as np
import pytest

from engine.analysis.acceptance.accept_rules import ABOUT, AcceptRule, rule_of, rule_said
from engine.errors import OptionError
from engine.options import RunOptions, SpecOptions
from engine.trace.facts import RunFacts


@pytest.mark.parametrize("text", [*ABOUT, "relaxed:0.5", "threshold:0.3,0.9", "threshold:0.3"])
def test_a_rule_is_read_as_it_is_written(text: str) -> None:
    rule = AcceptRule.read(text)
    assert AcceptRule.read(rule.text) == rule and rule.text.startswith(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "strict",
        "match:1",
        "relaxed:0",
        "relaxed:2",
        "relaxed:x",
        "threshold:1,1,1",
        "synthetic:0.1,0.2",
    ],
)
def test_what_is_no_rule_is_refused_with_the_names(text: str) -> None:
    with pytest.raises(OptionError, match="is not an acceptance rule") as error:
        AcceptRule.read(text)
    assert "rejection" in error.value.remedy
    assert rule_of(RunFacts(accept_rule=text)) is None


@pytest.mark.parametrize(
    ("said", "rule"),
    [
        ("llama-server -m x.gguf --spec-draft-sampling probabilistic", "rejection"),
        ('["--spec-draft-sampling", "probabilistic"]', "rejection"),
        ("LLAMA_ARG_SPEC_DRAFT_SAMPLING=probabilistic", "rejection"),
        (
            (
                "non-default args: {'speculative_config': {'method': 'dspark', "
                "'draft_sample_method': 'probabilistic', 'rejection_sample_method': 'block'}}"
            ),
            "block",
        ),
        (
            (
                'speculative-config {"draft_sample_method":"probabilistic",'
                '"rejection_sample_method":"standard"}'
            ),
            "rejection",
        ),
        ("'rejection_sample_method': 'standard', 'draft_sample_method': 'greedy'", "match"),
        ("{'rejection_sample_method': 'synthetic'}", "synthetic"),
        ('["--spec-synth-rates", "0.8,0.4"]', "synthetic:0.8,0.4"),
        ("--spec-synth-rates 0.4,0.8", "synthetic"),
        ("{'relax_ratio': 0.5, 'relax_top_k': 3}", "relaxed:0.5"),
        (
            (
                "server_args=ServerArgs(speculative_accept_threshold_single=0.3, "
                "speculative_accept_threshold_acc=0.9)"
            ),
            "threshold:0.3,0.9",
        ),
        (
            (
                "speculative_accept_threshold_single=1.0, speculative_accept_threshold_acc=1.0, "
                "speculative_use_rejection_sampling=False"
            ),
            "match",
        ),
        ("--speculative-use-rejection-sampling", "rejection"),
        ("adding speculative implementation 'draft-mtp'", None),
        ("{'relax_ratio': 99999999999999}", "relaxed:1"),
    ],
)
def test_arguments_of_servers_name_their_rule(said: str, rule: str | None) -> None:
    found = rule_said(said)
    assert (found.text if found else None) == rule


def test_chances_are_those_of_a_drawn_game() -> None:
    """Each rule played 200,000 times on one drawn pair of distributions."""
    random = np.random.default_rng(3)
    p, q = random.dirichlet(np.ones(6)), random.dirichlet(np.ones(6))
    drafted = random.choice(6, 200_000, p=q)
    luck = random.random(len(drafted))
    chance = AcceptRule.read("rejection").chance(p[drafted], q[drafted])
    assert chance.mean() == pytest.approx(np.minimum(p, q).sum(), abs=5e-3)
    assert (luck * q[drafted] < p[drafted]).mean() == pytest.approx(chance.mean(), abs=5e-3)
    nothing = np.full(len(drafted), np.nan)
    target = random.choice(6, len(drafted), p=p)
    for name in ("match", "threshold", "rejection"):
        chance = AcceptRule.read(name).chance(p[drafted], nothing)
        assert (target == drafted).mean() == pytest.approx(chance.mean(), abs=5e-3)
    chance = AcceptRule.read("threshold:0.25,0.5").chance(p[drafted], nothing)
    played = (p[drafted] >= 0.25) | (luck <= p[drafted] / 0.5)
    assert played.mean() == pytest.approx(chance.mean(), abs=5e-3)


def test_block_verification_accepts_what_is_expected_at_each_place() -> None:
    """The algorithm of the paper played on 100,000 drafts of two chains of tokens."""
    random, n, n_words = np.random.default_rng(5), 4, 5
    of_target, of_draft = (random.dirichlet(np.full(n_words, 0.7), n_words) for _ in "pq")
    drafts, luck = np.zeros((100_000, n + 1), int), random.random((100_000, n))
    w = np.ones(len(drafts))
    n_accepted = np.zeros(len(drafts), int)
    ratios = []
    for i in range(n):
        before, dice = drafts[:, i], random.random((len(drafts), 1))
        drafts[:, i + 1] = (dice > of_draft[before].cumsum(1)).sum(1).clip(max=n_words - 1)
        place = before, drafts[:, i + 1]
        ratios.append((of_target[place], of_draft[place]))
        w = np.minimum(1.0, w * of_target[place] / of_draft[place])
        after = drafts[:, i + 1]
        left = np.maximum(w[:, None] * of_target[after] - of_draft[after], 0).sum(1)
        h = w if i == n - 1 else left / np.maximum(left + 1 - w, 1e-30)
        n_accepted = np.where(luck[:, i] <= h, i + 1, n_accepted)
    rule = AcceptRule.read("block")
    p, q = (np.stack(one, 1) for one in zip(*ratios, strict=True))
    judged = np.arange(n) <= n_accepted[:, None]
    place = np.tile(np.arange(n), (len(drafts), 1))[judged]
    carried = rule.carried(p[judged], q[judged], place)
    before = drafts[:, :n][judged]
    for i in range(n):
        mine = place == i
        pairs = zip(before[mine].tolist(), carried[mine].tolist(), strict=True)
        expected = [rule.expected(of_target[word], of_draft[word], one) for word, one in pairs]
        least, most = np.mean(expected, 0)
        measured = (n_accepted > i)[n_accepted >= i].mean()
        assert least == pytest.approx(most) == pytest.approx(measured, abs=0.012)
        token_by_token = np.minimum(of_target, of_draft).sum(1)[before[mine]].mean()
        assert i == 0 or measured > token_by_token + 0.005


def test_where_less_is_known_the_bounds_hold_it() -> None:
    random = np.random.default_rng(7)
    for _ in range(200):
        p, q = random.dirichlet(np.ones(8)), random.dirichlet(np.ones(8))
        before = float(random.uniform(0.05, 1))
        right = np.minimum(p, q / before).sum()
        assert AcceptRule.expected(p, q, before) == pytest.approx((right, right))
        for known in (before, math.nan):
            least, most = AcceptRule.expected(p[:4], q[:4], known)
            assert least <= right + 1e-9 and right <= most + 1e-9


def test_relaxed_and_synthetic_rules_expect_what_is_played() -> None:
    random = np.random.default_rng(9)
    rates = np.array([0.8, 0.5, 0.1])
    n_accepted = (random.random((100_000, 1)) < rates).sum(1)
    rule = AcceptRule.read("synthetic:0.8,0.5,0.1")
    chance = rule.chance(np.ones(4), np.ones(4), np.arange(4))
    for i in range(3):
        measured = (n_accepted > i)[n_accepted >= i].mean()
        assert measured == pytest.approx(chance[i], abs=0.012)
    assert np.isnan(chance[3])
    p = random.dirichlet(np.ones(6), 1000)
    drafted = random.integers(6, size=1000)
    ratio = p[np.arange(1000), drafted] / p.max(1)
    greedy = np.log(p[np.arange(1000), drafted]) >= np.log(0.5 * p.max(1))
    nothing = np.full(1000, np.nan)
    assert (AcceptRule.read("relaxed:0.5").chance(nothing, nothing, ratio=ratio) == greedy).all()
    options = RunOptions(spec=SpecOptions(types=("ngram-mod",), synth_len=2.0))
    found = rule_of(RunFacts({"options": asdict(options)}))
    assert found is not None and found.name == "synthetic" and len(found.values) == 64


def test_a_trace_may_name_drafters_that_are_not_known() -> None:
    options = asdict(RunOptions(spec=SpecOptions(types=("ngram-mod",), synth_len=2.0)))
    options["spec"]["types"] = ["draft-mtp\x0b"]
    facts = RunFacts({"options": options})
    assert facts.options is not None and facts.options.spec.types == ("draft-mtp\x0b",)
    assert facts.options.spec.longest == 0 and not facts.options.spec.has_model
    rule_of(facts)  # and nothing is raised


def test_lossy_rules_say_so_and_what_they_allow() -> None:
    lossless = {name: AcceptRule.read(name).is_lossless for name in ABOUT}
    assert [name for name, one in lossless.items() if not one] == ["synthetic"]
    relaxed = AcceptRule.read("relaxed:0.5")
    assert not relaxed.is_lossless and relaxed.leeway == pytest.approx(math.log(2))
    assert AcceptRule.read("threshold:0.5").leeway == 0 < AcceptRule.read("synthetic").leeway
    assert np.isnan(relaxed.chance(np.ones(2), np.ones(2))).all()
