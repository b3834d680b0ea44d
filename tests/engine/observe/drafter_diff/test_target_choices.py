"""A rule that accepts by the most probable token at a temperature is named, and one that draws is
not."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.audit.draft_models import candidates
from engine.audit.recorded_drafts import RecordedDraft
from engine.decode import acceptance
from engine.decode.acceptance import Judge
from engine.decode.round import Round
from engine.observe.drafter_diff.diff import drafter_diff
from engine.observe.drafter_diff.target_choices import TargetChoices, lossy_words, parted
from engine.observe.drafter_diff.wrong_drafts import TIE, gap
from engine.options import SamplerOptions
from engine.trace.run_ref import RunRef
from tests.support.drafter_diff_campaign import opened
from tests.support.golden_runs import decode, options_of


def _greedily(draft: Any, rows: Any, sampler: Any, end_tokens: Any) -> list[int]:
    accepted: list[int] = []
    for i, drafted in enumerate(draft.tokens):
        row = rows(i)
        accepted.append(int(row.ids[int(row.probs.argmax())]))
        sampler.accept(accepted[-1])
        if accepted[-1] != drafted:
            return accepted
    return acceptance.with_bonus(accepted, rows, sampler)


def _run(seed: int, **more: float) -> RunRef:
    target = opened("mtp")
    sampler = SamplerOptions(**({"temp": 0.9, "seed": seed} | more))
    options = replace(options_of(96, "draft-mtp"), sampler=sampler)
    run = decode(target, [target.prompt("There was a small dog who lived in a")], options)
    return RunRef(run.trace, run.run_id)


def test_greedy_acceptance_at_a_temperature_is_named() -> None:
    right = _run(11)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(acceptance.RULES, "match", _greedily)
        wrong = _run(11)
    first = drafter_diff(right, wrong, opened("mtp")).first
    assert first is not None and (first.stage, first.side) == ("acceptance rule", "B")
    assert (
        "Although there is a temperature" in first.about and "a chance of one in e^" in first.size
    )
    first = drafter_diff(right, _run(12), opened("mtp")).first
    assert first is not None and (first.side, "seed 11 in A, 12 in B" in first.about) == ("", True)


def test_a_token_that_is_nearly_the_choice_is_none_where_both_round_alike() -> None:
    runs, logits, own = [_run(2, temp=0.0)], list[torch.Tensor](), Judge._rows

    def rows(self: Judge, round_: Round) -> Any:
        logits[:] = [*round_.logits]
        return own(self, round_)

    def near(draft: Any, rows: Any, sampler: Any, end_tokens: Any) -> list[int]:
        n = 0
        for row, token in zip(logits, draft.tokens, strict=False):
            if token in end_tokens or gap(candidates(row[None])[0], token, TIE)[1]:
                break
            n += 1
        return acceptance.keep(draft, n, rows, sampler)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Judge, "_rows", rows)
        patch.setitem(acceptance.RULES, "match", near)
        runs.append(_run(2, temp=0.0))
    first = drafter_diff(*runs, opened("mtp")).first
    assert first is not None and "a lossy rule" in first.about


def test_penalties_at_temperature_0_are_no_other_rule() -> None:
    runs = [_run(seed, temp=0.0, repeat_penalty=1.4) for seed in (1, 2)]
    assert drafter_diff(*runs, opened("mtp")).first is None


def test_acceptance_by_a_bound_or_too_often_is_told_from_draws() -> None:
    random = np.random.default_rng(5)
    probs = random.uniform(0, 1, 60).tolist()
    assert "a threshold, no sampling" in lossy_words([(p, p > 0.1) for p in probs])
    often = [(p, bool(random.random() < p**0.3)) for p in probs]
    assert "more often" in lossy_words(often)
    for _ in range(20):
        assert not lossy_words([(p, bool(random.random() < p)) for p in probs])


def _without_top_k(draft: Any, rows: Any, sampler: Any, end_tokens: Any) -> list[int]:
    own = sampler._options
    sampler._options = replace(own, top_k=0) if draft.tokens else own
    try:
        return acceptance.match(draft, rows, sampler, end_tokens)
    finally:
        sampler._options = own


def test_a_part_of_the_sampler_that_verification_leaves_out_is_named() -> None:
    more = {"temp": 1.2, "top_k": 2, "repeat_penalty": 1.1}
    right = _run(4, **more)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(acceptance.RULES, "match", _without_top_k)
        wrong = _run(4, **more)
    first = drafter_diff(right, wrong, opened("mtp")).first
    assert first is not None and (first.stage, first.side) == ("acceptance rule", "B")
    assert "without top_k" in first.about, first.about


@pytest.mark.parametrize(
    ("is_near", "words"), [(True, "or a temperature"), (False, "of another row")]
)
def test_tokens_after_a_rejection_are_drawn_where_they_are_among_the_best(
    is_near: bool, words: str
) -> None:
    drafts = [RecordedDraft(i, 3 * i, [5, 6], [], 1, 0, 0.0, 2) for i in range(20)]
    choices: Any = object.__new__(TargetChoices)
    choices._find(SimpleNamespace(name="B", n_prompt=1, drafts=drafts))
    choices._share, choices._is_near = 0.05, True
    after = [3 * i + 1 for i in range(12)]
    choices._chosen = [place not in after for place in range(60)]
    choices._near = [is_near or place not in after for place in range(60)]
    cause = choices.stale_choice()
    assert cause is not None and words in cause.about


@pytest.mark.parametrize(
    ("kept", "left", "words"),
    [
        ([-2, -2, -1, -2, -1, -2, -2], [-3, -9, -4, -3, -8, -3], "among the target's 2 best"),
        ([-9, -9, -2, -9, -9, -9, -9], [-3, -4, -3, -3, -3, -3], ""),
        ([-9, -9, -7, -9, -9, -9, -9], [-3, -4, -3, -3, -3, -3], "not among the target's 4 best"),
        ([-1, -1], [-3, -4], ""),
    ],
)
def test_the_number_that_parts_accepted_tokens_is_named(
    kept: list[int], left: list[int], words: str
) -> None:
    ranks = [(rank, True) for rank in kept] + [(rank, False) for rank in left]
    tokens = [({"rank": float(rank), "blank": 1.0}, is_kept) for rank, is_kept in ranks]
    assert parted(tokens) == [words] * bool(words)
    apart = [({"blank": float(not is_kept)}, is_kept) for _, is_kept in ranks]
    assert parted(apart) == ["not that are only white space"] * (len(ranks) > 4)


def test_one_token_that_is_clearly_not_the_choice_shows_a_lossy_rule() -> None:
    drafts = [RecordedDraft(i, 2 * i, [5], [], 1, 0, 0.0, 1) for i in range(20)]
    choices: Any = object.__new__(TargetChoices)
    choices._find(SimpleNamespace(name="B", n_prompt=1, drafts=drafts, counts=(20, 20)))
    choices._side.text, choices._is_exact = [5] * 42, True
    choices._chosen = [place != 4 for place in range(40)]
    for ratio, words in ((0.7, "among the target's 2 best"), (0.98, "")):
        choices._facts = {4: {"rank": -2.0, "ratio": ratio}}
        cause = choices.lossy_rule()
        assert words in cause.about if cause else not words, ratio
