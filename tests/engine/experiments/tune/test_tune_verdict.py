"""Choosing and judging, with figures made up by the test."""

from __future__ import annotations

from dataclasses import replace
from math import comb

import pytest

from engine.analysis.run_cost import sign_test
from engine.experiments.bench.request import PLAIN
from engine.experiments.tune.advice import (
    Estimate,
    best_of_rules,
    engine_flags,
    to_confirm,
    verdict,
)
from engine.experiments.tune.confirm import Confirmed
from engine.experiments.tune.lengths import DraftSetting, drafting, has_length
from engine.options import RunOptions


def confirmed(name: str, *speeds: float) -> Confirmed:
    return Confirmed(name, speeds, 1, 1, ())


def estimate(drafter: str, n_max: int, p_min: float, speed: float, rule: str = "fixed") -> Estimate:
    setting = {"n_max": n_max, "p_min": p_min}
    return Estimate(drafter, rule, setting, speed, 0.5, rule == "fixed")


def test_the_sign_test_is_exact() -> None:
    for n in range(1, 9):
        for wins in range(n + 1):
            least = min(wins, n - wins)
            both = sum(comb(n, i) for i in range(n + 1) if min(i, n - i) <= least)
            assert sign_test(wins, n) == pytest.approx(both / 2**n)
    assert sign_test(0, 0) == 1.0
    assert sign_test(6, 6) < 0.05 < sign_test(5, 5)


def test_six_of_six_is_faster_and_five_of_six_is_not_shown() -> None:
    plain = confirmed(PLAIN, *[10.0] * 6)
    clear = verdict([plain, confirmed("x", *[12.0] * 6), confirmed("y", *[11.0] * 5, 13.0)])
    assert (clear.chosen, clear.fastest) == ("x", "x")
    assert "1.20 times" in clear.lines[0]
    assert "no significant difference between x and y" in clear.lines[1]
    unclear = verdict([plain, confirmed("x", *[12.0] * 5, 9.0)])
    assert (unclear.chosen, unclear.fastest) == (PLAIN, "x")
    assert "no significant difference" in unclear.lines[0]
    assert "do not use drafts" in unclear.lines[-1]
    slower = verdict([plain, confirmed("x", *[9.0] * 6)])
    assert slower.chosen == PLAIN
    assert "x is slower than plain" in slower.lines[0]


def test_each_length_is_confirmed_once_with_its_lowest_good_floor() -> None:
    found = [
        estimate("draft-mtp", 3, 0.0, 99.8),
        estimate("draft-mtp", 3, 0.4, 100.0),
        estimate("draft-mtp", 3, 0.9, 50.0),
        estimate("draft-mtp", 2, 0.0, 80.0),
        estimate("draft-mtp", 2, 0.5, 95.0),
        estimate("suffix", 8, 0.0, 90.0),
        estimate("suffix", 7, 0.0, 10.0),
        estimate("draft-mtp", 16, 0.0, 999.0, rule="survival"),
    ]
    assert [one.draft.name for one in to_confirm(found)] == [
        "draft-mtp, n_max 3",
        "draft-mtp, n_max 2, p_min 0.5",
        "suffix, n_max 8",
    ]
    alone = [one for one in found if one.drafter == "draft-mtp"]
    more = [*alone, estimate("draft-mtp", 4, 0.0, 94.0), estimate("suffix", 8, 0.0, 9.0)]
    assert [one.draft.n_max for one in to_confirm(more)] == [3, 2, 8]
    assert to_confirm(more)[-1].drafter == "suffix"
    assert len(to_confirm(alone)) == 2
    best = best_of_rules(found)
    assert [one.rule for one in best] == ["survival", "fixed", "fixed"]


@pytest.mark.parametrize(
    "drafter", ["draft-mtp", "ngram-mod", "suffix", "ngram-simple", "ngram-map-k"]
)
def test_a_length_reaches_the_drafter(drafter: str) -> None:
    assert has_length(drafter)
    options = drafting(RunOptions(), DraftSetting(drafter, 5), rates=(0.9, 0.8, 0.7, 0.6, 0.5, 0.4))
    assert options.spec.types == (drafter,)
    assert options.spec.longest == len(options.spec.synth_rates) == 5


def test_flags_say_what_an_engine_has_not() -> None:
    llama, vllm, sglang = engine_flags(DraftSetting("draft-mtp", 2, 0.6))
    assert llama[1] == "--spec-type draft-mtp --spec-draft-n-max 2 --spec-draft-p-min 0.6"
    assert not llama[2]
    assert '{"method": "mtp", "num_speculative_tokens": 2}' in vllm[1]
    assert "--speculative-num-steps 2" in sglang[1]
    assert "--speculative-num-draft-tokens 3" in sglang[1]
    assert all("p_min 0.6" in one[2][0] for one in (vllm, sglang))
    assert [one[1] for one in engine_flags(DraftSetting("suffix", 4))][::2] == ["", ""]
    (named, *_) = engine_flags(DraftSetting("draft-simple", 4), {"draft-simple": "small.gguf"})
    assert named[1].endswith("-md small.gguf")
    (hostile, *_) = engine_flags(DraftSetting("draft-simple", 4), {"draft-simple": "a;rm b"})
    assert hostile[1].endswith("-md 'a;rm b'")
    assert engine_flags(None)[0][1] == "--spec-type none"


def test_the_fastest_is_so_in_pairs_whatever_their_texts() -> None:
    """Pairs have different prompts; a median over them would be of another text for each."""
    plain = Confirmed(PLAIN, (10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0), 0, 0, ())
    steady = replace(plain, name="steady", speeds=tuple(1.2 * s for s in plain.speeds))
    ratios = (1.1, 1.1, 1.1, 1.3, 1.1, 1.1, 1.1)
    lucky = [s * r for s, r in zip(plain.speeds, ratios, strict=True)]
    once = replace(plain, name="once", speeds=tuple(lucky))
    assert once.median > steady.median
    assert verdict([plain, once, steady]).fastest == "steady"
