"""What wrong drafts have in common, and the stage that it points to."""

from __future__ import annotations

import numpy as np
import pytest

from engine.audit.recorded_drafts import DraftedText, RecordedDraft
from engine.observe.drafter_diff.wrong_drafts import (
    Ranks,
    _in_rounds,
    as_drawn,
    gap,
    in_passes,
    is_clear,
    logits_scale,
    ranked,
    same_logits,
    scopes_of,
    shape_of,
    stage_of,
)

_NEWEST = "only in the newest row"
_ROW = {7: 4.0, 3: 3.9, 5: 1.0, 9: 0.0}
_TIE = (0.05, 0.5)


def _drafts(accepted: list[int]) -> list[RecordedDraft]:
    return [RecordedDraft(i, 10 * i, [1, 2, 3], [], n, 0, 0.0, 3) for i, n in enumerate(accepted)]


def test_a_token_is_wrong_where_a_better_one_is_clear_of_it() -> None:
    assert gap(_ROW, 7, _TIE) == (7, 0.0)
    assert gap(_ROW, 3, _TIE) == (7, 0.0)
    assert gap(_ROW, 5, _TIE) == (7, 1.0)
    assert gap(_ROW, 8, _TIE) == (7, 1.0)
    assert gap(dict.fromkeys(range(12), 1.0), 3, _TIE) == (0, 1.0)  # of equal ones none is right
    assert not is_clear(_ROW, _TIE) and is_clear({1: 2.0}, _TIE)
    assert ranked(_ROW, 3, _TIE)[0] == 0
    # of so few candidates none but the best is near
    assert ranked(_ROW, 5, _TIE) == ranked(_ROW, 8, _TIE) == (10, pytest.approx(0.1 / 4))
    many = _ROW | {i: -1.0 * i for i in range(20, 30)}
    assert [ranked(many, token, _TIE)[0] for token in (3, 5, 8)] == [0, 2, 14]


def test_tokens_are_drawn_where_their_ranks_are_as_likely_as_their_probabilities_say() -> None:
    random = np.random.default_rng(4)
    rows = [dict(enumerate(np.sort(random.normal(0, 3, 10))[::-1].tolist())) for _ in range(60)]
    probs = [np.exp([*row.values()]) / np.exp([*row.values()]).sum() for row in rows]
    drawn = [int(random.choice(10, p=one)) for one in probs]
    found = as_drawn(list(zip(rows, drawn, strict=True)))
    assert f"{drawn.count(0)} of 60 are the best ones" in found
    for rank in (0, 1):
        assert not as_drawn([(row, rank) for row in rows])
    anyhow = random.integers(0, 10, 60).tolist()
    assert not as_drawn(list(zip(rows, anyhow, strict=True)))


@pytest.mark.parametrize(
    ("accepted", "wrong", "shape"),
    [
        ([3, 3, 0, 3, 0, 3, 3, 1, 3, 3], [3, 5], "only after a draft without"),
        ([3, 3, 0, 3, 1, 3, 3, 1, 3, 3], [3, 5, 8], "only after a rejection"),
        ([1, 1, 3, 1, 1, 3, 1, 1, 1, 1], [3, 6], "only after a fully accepted draft"),
        ([1, 3, 1, 3, 1, 3, 1, 3, 1, 3], [6, 7, 8, 9], "only from position 60 on"),
        ([3, 0, 3, 3, 3, 3, 0, 0, 0, 0, 0], [7, 8, 9, 10], "only from position 70 on"),
        ([1, 3, 1, 3, 1, 3, 1, 3, 1, 3], [0, 1, 5, 8], ""),
        ([1, 3, 1, 3, 1, 3, 1, 3, 1, 3, 1, 3], [6, 8, 11], ""),  # of 12, three may be by chance
    ],
)
def test_rounds_that_drafts_are_wrong_after(
    accepted: list[int], wrong: list[int], shape: str
) -> None:
    drafts = _drafts(accepted)
    ranks: Ranks = {d.round: [(2 * (d.round in wrong), 0.5)] * 3 for d in drafts}
    found = shape_of(drafts, [drafts[i] for i in wrong], ranks)
    assert shape in found and bool(shape) == bool(found)


@pytest.mark.parametrize(
    ("lead", "rank", "first", "kind", "stage"),
    [
        (0.5, 2, 0, (True, False), "candidates"),
        (0.05, 2, 0, (True, False), "target rows"),
        (0.5, 30, 0, (False, False), "drafter state"),
        (0.05, 2, 1, (True, False), "drafter state"),
        (0.05, 2, 1, (True, True), "block"),
        (0.05, 2, 0, (True, True), "block"),
    ],
)
def test_the_stage_that_wrong_drafts_point_to(
    lead: float, rank: int, first: int, kind: tuple[bool, bool], stage: str
) -> None:
    drafts = _drafts([1, 3] * 5)
    ranks: Ranks = {d.round: [(0, 0.5)] * 3 for d in drafts}
    wrong = drafts[::2]
    for draft in wrong:
        ranks[draft.round][first] = rank, lead
    shape = shape_of(drafts, wrong, ranks)
    assert (f"drafted token {first}" in shape) == bool(first)
    named, about = stage_of(wrong, ranks, shape, *kind)
    assert named == stage and shape in about
    few = wrong[:3]
    shape = shape_of(drafts, few, ranks)
    assert (not shape) == (stage_of(few, ranks, shape, *kind)[0] == "unexplained")
    assert "drafted token" not in shape or first == 1


def test_recorded_shares_tell_whether_logits_are_right_and_by_what_they_are_scaled() -> None:
    random, drafts, rows = np.random.default_rng(7), list[RecordedDraft](), {}
    for i in range(8):
        logits = np.sort(random.normal(0, 2, 12))[::-1]
        rows[i] = [dict(enumerate(logits.tolist()))]
        shares = np.exp(logits[:5]) / np.exp(logits[:5]).sum()
        drafts.append(RecordedDraft(i, i, [3], [dict(enumerate(shares.tolist()))], 0, 0, 0.0, 1))
    ranks: Ranks = {i: [(3, 0.5)] for i in rows}
    assert same_logits(drafts, rows, ranks, 0.003)
    assert logits_scale(drafts, rows, 0.003) is None
    cold = {i: [{t: 0.5 * x for t, x in row.items()} for row in own] for i, own in rows.items()}
    assert same_logits(drafts, cold, ranks, 0.003) is False
    assert logits_scale(drafts, cold, 0.003) == pytest.approx(2)
    assert same_logits(drafts[:2], rows, ranks, 0.003) is None
    assert stage_of(drafts, ranks, "", True, True, True)[0] == "candidates"


def test_scopes_are_of_the_rounds_and_tokens_that_are_wrong() -> None:
    drafts = _drafts([3, 3, 0, 3, 0, 3, 3, 1, 3, 3])
    ranks: Ranks = {d.round: [(0, 0.5)] * 3 for d in drafts}
    wrong = [drafts[3], drafts[5]]
    assert scopes_of(drafts, wrong, ranks)[0] == ("", None, None)
    for draft in wrong:
        ranks[draft.round][1] = 2, 0.5
    found = scopes_of(drafts, wrong, ranks)
    words, places, steps = next(one for one in found if one[2] and _NEWEST in one[0])
    assert "without accepted tokens" in words and "drafted token 1" in words
    # after rounds 2 and 4, which begin after 20 and 40 tokens
    assert (
        places == {30, 50}
        and steps is not None
        and [i in steps for i in range(3)] == [False, True, True]
    )
    # what goes on to be wrong may have started after the outcome before it
    later = [drafts[8], drafts[9]]
    said = [one[0] for one in scopes_of(drafts, later, ranks)]
    assert any("partly accepted" in one for one in said)


def test_a_mistake_may_be_made_in_rounds_that_counts_alone_do_not_show() -> None:
    drafts = _drafts([3, 1, 2, 0, 3, 2, 2, 0, 0, 3, 1, 1, 2, 3, 0, 2])
    ranks: Ranks = {d.round: [(0, 0.5)] * 3 for d in drafts}
    wrong = [drafts[i] for i in (3, 7, 11, 15)]
    for draft in wrong:
        ranks[draft.round][2] = 2, 0.5
    found = {words: (places, steps) for words, places, steps in scopes_of(drafts, wrong, ranks)}
    (fourth,) = (own for own in found if own.endswith(f"{_NEWEST}, only in every fourth round"))
    assert found[fourth][0] == {30, 70, 110, 150}
    assert not any("every third" in words for words in found)
    (two,) = (
        own
        for own in found
        if own.endswith(f"{_NEWEST}, only after a draft of which 2 tokens were accepted")
    )
    assert found[two][0] == {30, 60, 70, 130}
    # the first wrong token may be later than the first that is made otherwise
    assert any(steps is not None and 1 in steps and 0 not in steps for _, steps in found.values())


def test_the_first_draft_may_be_one_of_every_second() -> None:
    drafts = _drafts([3, 3, 3, 3])
    (_, rows, _), (_, newest, _) = _in_rounds(drafts, ", so", {0, 2})
    assert newest == {0, 20}
    assert rows == {0, *range(11, 21)}, "the rows since the round before, too"


def test_entries_at_the_ends_of_passes_of_a_prompt() -> None:
    text = DraftedText(0, [*range(20)], [9, 12], None, [])
    found = {what: [*places] for what, places in in_passes(text, 0).items()}
    assert found["the first of every 4 tokens of the prompt"] == [0, 4, 8]
    assert found["the last of every 4 tokens of the prompt"] == [3, 7]
    assert found["the last of every 8 tokens of the prompt"] == [7]
    assert not any("each 10" in what for what in found)
    later = in_passes(text, 1)  # of pairs whose token is that of the next position
    assert [*later["the last of every 4 tokens of the prompt"]] == [4, 8]
