"""Acceptance rules of servers: their names, and how likely each accepts."""

from __future__ import annotations

import math

import numpy as np
import pytest

from engine.analysis.acceptance.accept_rules import ABOUT, AcceptRule, rule_of, rule_said
from engine.errors import OptionError
from engine.trace.facts import RunFacts


@pytest.mark.parametrize("text", [*ABOUT, "relaxed:0.5", "threshold:0.3,0.9", "threshold:0.3"])
def test_a_rule_is_read_as_it_is_written(text: str) -> None:
    rule = AcceptRule.read(text)
    assert AcceptRule.read(rule.text) == rule and rule.text.startswith(text)


@pytest.mark.parametrize(
    "text", ["", "strict", "match:1", "relaxed:0", "relaxed:2", "relaxed:x", "threshold:1,1,1"]
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


def test_lossy_rules_say_so_and_what_they_allow() -> None:
    lossless = {name: AcceptRule.read(name).is_lossless for name in ABOUT}
    assert [name for name, one in lossless.items() if not one] == ["synthetic"]
    relaxed = AcceptRule.read("relaxed:0.5")
    assert not relaxed.is_lossless and relaxed.leeway == pytest.approx(math.log(2))
    assert AcceptRule.read("threshold:0.5").leeway == 0 < AcceptRule.read("synthetic").leeway
    assert np.isnan(relaxed.chance(np.ones(2), np.ones(2))).all()
