"""The match test: equal texts pass, planted differences fail, near ties are distinguished."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.errors import OptionError
from engine.experiments.bench.match import (
    CONTROL,
    SPECULATION,
    MatchTest,
    WidthControl,
    _gap,
    first_difference,
    width_control,
)
from engine.options import Prompt, RunOptions
from tests.support.golden_runs import decode, options_of, prompt_of, session

NAME = "qwen35-c-v2x-mtp-f32"
OPTIONS = options_of(24, "draft-mtp", ignore_eos=True, parallel=4)


def prompts() -> list[tuple[str, Prompt]]:
    whole = prompt_of(NAME).tokens
    return [("a", Prompt(whole)), ("b", Prompt(whole[:9])), ("c", Prompt(whole[5:30]))]


def run(options: RunOptions, *kinds: str) -> MatchTest:
    test = MatchTest(session(NAME), prompts(), options, kinds)
    assert list(test.steps()) == test.done
    return test


def test_speculation_that_is_right_matches_in_every_step() -> None:
    test = run(OPTIONS, "seq", "seq", "par")
    assert test.passed and not test.differing
    assert [(step.lane, step.kind, step.is_baseline) for step in test.done] == [
        (CONTROL, "seq", True),
        (SPECULATION, "seq", False),
        (CONTROL, "seq", False),
        (SPECULATION, "seq", False),
        (CONTROL, "par", False),
        (SPECULATION, "par", False),
    ]
    plain = decode(session(NAME), [p for _, p in prompts()], options_of(24, ignore_eos=True))
    lengths = [len(result.text) for result in plain.results()]
    for step in test.done:
        assert [result.prompt for result in step.results] == ["a", "b", "c"]
        assert [result.n_tokens for result in step.results] == [24] * 3
        assert [result.n_characters for result in step.results] == lengths


@pytest.mark.parametrize("kind", ["seq", "par"])
@pytest.mark.thinned(4)
def test_a_fault_that_repeats_itself_is_found(kind: str) -> None:
    options = replace(OPTIONS, faults=("stale-logits",))
    test = run(options, kind)
    assert not test.passed
    assert {result.lane for result in test.differing} == {SPECULATION}
    for result in test.differing:
        index = [name for name, _ in prompts()].index(result.prompt)
        prompt = prompts()[index][1]
        good = decode(session(NAME), [prompt], options_of(24, ignore_eos=True)).results()[0].tokens
        bad = decode(session(NAME), [prompt], replace(options, parallel=1)).results()[0].tokens
        first = next(i for i in range(24) if good[i] != bad[i])
        difference = result.difference
        assert difference is not None
        assert (difference.index, difference.expected, difference.got) == (
            first,
            good[first],
            bad[first],
        )
        logits = session(NAME).logits([*prompt.tokens, *good[:first]])[-1]
        top = np.sort(logits)[-2:]
        assert difference.top2_gap == pytest.approx(top[1] - top[0], abs=1e-4)
        assert result.width is not None
        apart = logits[good[first]] - logits[bad[first]]
        assert result.width.gap == pytest.approx(apart, abs=1e-4)
        assert result.width.noise < 1e-3
        assert not result.is_explained


def test_without_a_drafter_the_control_is_judged() -> None:
    test = run(options_of(12, ignore_eos=True, parallel=4), "seq", "par")
    assert test.lanes == (CONTROL,)
    assert test.passed and not test.differing


def test_a_near_tie_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def tie(*args: object) -> WidthControl:
        return WidthControl(gap=0.01, noise=0.02)

    monkeypatch.setattr("engine.experiments.bench.match.width_control", tie)
    test = run(replace(OPTIONS, faults=("stale-logits",)), "seq")
    assert test.differing and test.passed


def test_nothing_is_explained_when_batches_cannot_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    def tie(*args: object) -> WidthControl:
        return WidthControl(gap=0.01, noise=0.02)

    monkeypatch.setattr("engine.experiments.bench.match.width_control", tie)
    options = replace(OPTIONS, batch_invariant=True)
    assert not run(replace(options, faults=("stale-logits",)), "seq").passed
    test = run(options, "seq", "par")
    assert test.passed and not test.differing


def test_a_difference_that_the_control_has_too_is_explained() -> None:
    test = MatchTest(session(NAME), prompts(), OPTIONS, ["seq"])
    other = ([1, 2, 3], "xyz", [0.5, 0.5, 0.5])
    test._baseline = [([1, 9, 3], "xyz", [0.5, 0.4, 0.5])] * 3
    test._widths[0, 1, 2] = WidthControl(gap=3.0, noise=0.1)
    test._control[0, "a"] = False
    assert not test._judge(SPECULATION, 0, 0, other).is_explained
    control = test._judge(CONTROL, 0, 0, other)
    assert control.in_control
    speculation = test._judge(SPECULATION, 0, 0, other)
    assert speculation.is_explained
    assert speculation.difference is not None
    assert speculation.difference.top2_gap == 0.4


@pytest.mark.parametrize(
    ("expected", "got", "found"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([], [], None),
        ([1, 2, 3], [1, 5, 3], (1, 2, 5, 0.2)),
        ([1, 2, 3], [1, 2], (2, 3, None, 0.3)),
        ([1, 2], [1, 2, 3], (2, None, 3, None)),
    ],
)
def test_the_first_difference(
    expected: list[int], got: list[int], found: tuple[object, ...] | None
) -> None:
    gaps = [0.1, 0.2, 0.3][: len(expected)]
    difference = first_difference((expected, "", gaps), (got, "", gaps))
    if found is None:
        assert difference is None
    else:
        assert difference is not None
        facts = (difference.index, difference.expected, difference.got, difference.top2_gap)
        assert facts == found


def test_the_gap_of_probabilities_is_that_of_the_logits() -> None:
    logits = np.array([3.5, 1.25, -2.0])
    shares = np.exp(logits) / np.exp(logits).sum()
    assert _gap(shares.astype(np.float32)) == pytest.approx(2.25, abs=1e-5)
    assert np.isfinite(_gap(np.array([1.0, 0.0], np.float32)))


def test_the_width_control_measures_gap_and_noise() -> None:
    name, n = "qwen35-h-v2x-mtp-q8_0", 30
    opened, prompt, options = session(name), prompt_of(name), options_of(n)
    tokens = decode(opened, [prompt], options).results()[0].tokens
    other = tokens[-1] + 1
    control = width_control(opened, prompt, tokens, n - 1, other, 12, options)
    logits = opened.logits([*prompt.tokens, *tokens[:-1]])[-1]
    assert control.gap == pytest.approx(logits[tokens[-1]] - logits[other], abs=1e-3)
    assert 0 < control.noise < 1e-3
    assert not control.is_tie
    assert width_control(opened, prompt, tokens, n - 1, other, 1, options).noise == 0


@pytest.mark.parametrize("kinds", [[], ["par", "both"]])
def test_steps_are_seq_and_par(kinds: list[str]) -> None:
    with pytest.raises(OptionError, match="are not a list of seq and par"):
        MatchTest(session(NAME), prompts(), OPTIONS, kinds)
