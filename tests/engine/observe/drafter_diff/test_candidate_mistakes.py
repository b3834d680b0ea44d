"""Choices among right candidates, each against what it is to draft."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.audit.deviations import CLEAN
from engine.audit.recorded_drafts import RecordedDraft
from engine.observe.drafter_diff.candidate_mistakes import (
    OfText,
    observed,
    of_choice,
    of_map,
    of_shards,
)
from engine.observe.drafter_diff.guesses import Guess
from engine.observe.drafter_diff.records import one_for_one
from engine.observe.drafter_diff.redraft import Redrafter
from engine.observe.drafter_diff.wrong_drafts import EXACT_TIE

_ROW = {7: 4.0, 3: 3.0, 5: 2.9, 9: -1.0}


def _best(about: str, text: list[int]) -> int:
    (change,) = (change for words, change in of_choice() if about in words)
    return next(iter(change(_ROW, text)))


def test_ranks_and_penalties() -> None:
    assert [_best(f"rank {n}", []) for n in (2, 3, 4)] == [3, 5, 9]
    assert _best("of the last 1 is", [7]) == 3 and _best("of the last 1 is", [7, 1]) == 7
    assert _best("no token of the last 64 is", [7, 3, 1]) == 5
    assert _best("no token of the last 2 is", [7, 3, 1]) == 7
    assert _best("less than about 1.5", []) == 3 and _best("less than about 0.5", []) == 7
    assert _best("last 16 tokens are penalised, by about 1.5", [7, *[1] * 15]) == 3
    weaker = "last {} tokens are penalised, by about {}"
    assert _best(weaker.format(64, 1.1), [7]) == 7
    assert _best(weaker.format(64, 1.35), [7]) == 3 and _best(weaker.format(64, 1.35), [3]) == 7
    assert _best(weaker.format(64, 1.5), [7, *[1] * 30]) == 3
    assert _best(weaker.format(24, 1.5), [7, *[1] * 30]) == 7
    (change,) = (change for words, change in of_choice() if weaker.format(64, 1.35) in words)
    assert list(change(_ROW, [3, 9])) == [7, 5, 3, 9]
    assert change(_ROW, [9])[9] == -1.35
    lower = "last 64 tokens are lowered by about {} (presence"
    assert _best(lower.format(0.5), [7]) == 7 and _best(lower.format(1.5), [7]) == 3
    for_each = "last 64 tokens are lowered by about 0.5 each time (frequency"
    assert _best(for_each, [7, 7]) == 7 and _best(for_each, [7, 1, 7, 7]) == 3


def test_what_is_drafted_may_not_be_shown_to_the_sampler() -> None:
    """Penalties and tokens left out go by the text alone; Redrafter._apart gives them that."""
    of_text = {about: change for about, change in of_choice() if isinstance(change, OfText)}
    assert [*of_text["no token of the last 1 of the text alone is drafted"](_ROW, [3, 7])] == [
        3,
        5,
        9,
    ]
    weaker = of_text[
        "candidates in the last 8 tokens of the text alone are penalised, by about 1.5"
    ]
    assert next(iter(weaker(_ROW, [7]))) == 3
    made: Any = Redrafter.__new__(Redrafter)
    made._side, made._tree = SimpleNamespace(text=[1, 7, 2]), ()
    made._stood_in, made._tie = set(), EXACT_TIE
    draft = RecordedDraft(1, 1, [3, 7], [], 0, 0, 0.0, 2)
    right = Guess("", "", CLEAN, made._side, None)
    for change, n_left in (
        (of_text["no token of the last 1 of the text alone is drafted"], 1.0),
        (None, 1.0),
    ):
        apart = made._apart(replace(right, change=change))
        assert apart(draft, [_ROW, _ROW]) == n_left
    newest = replace(right, change=OfText(_seen_tokens, [3, 7]))
    assert made._apart(newest)(draft, [_ROW, _ROW]) == 2.0


def _seen_tokens(known: list[int], row: Any, text: Any) -> Any:
    assert [*text] == [1, 7], "no drafted token is among them"
    return {9: 1.0, 5: -9.0}


def test_wrong_maps_of_ids() -> None:
    ids = [0, 2, 5, 9]
    found = {about: [*change({5: 1.0}, [])] for about, change in of_map(ids, 12)}
    whole = [row for about, row in found.items() if "about row" not in about]
    assert whole[:5] == [[2], [3], [7], [6], [4]]
    assert whole[5:] == [[9], [2], [9], [0], [9], [0], [9], [0]]
    # token 5 is row 2 of 4
    for about, row in found.items():
        what, _, where = about.partition(", ")
        inside = where in ("", "from about row 1 on", "from about row 2 on", "up to about row 3")
        assert row == found[what] if inside else row[0] == 5


def test_ids_that_are_rounded_to_the_type_of_weights() -> None:
    ids = [0, 257, 303, 2051]
    ways = dict(of_map(ids, 2053))

    def read(what: str, kind: str) -> list[int]:
        change = ways[f"the map of draft ids (d2t) has {what} that are rounded to {kind}"]
        return [next(iter(change({token: 1.0}, []))) for token in ids]

    assert read("ids", "bfloat16") == [0, 256, 304, 2048]
    assert read("offsets", "bfloat16") == [0, 257, 302, 2051]
    assert read("ids", "float16") == [0, 257, 303, 2052]
    assert not any("offsets that are rounded to float16" in about for about in ways)
    short = "the map of draft ids (d2t) has {} that are read as 8-bit numbers"
    for what, tokens in (("ids", [0, 1, 47, 3]), ("offsets", [0, 1, 47, 3])):
        change = ways[short.format(what)]
        assert [next(iter(change({token: 1.0}, []))) for token in ids] == tokens


def _drafted(tokens: np.ndarray) -> list[RecordedDraft]:
    return [RecordedDraft(i, i, row, [], 0, 0, 0.0, 3) for i, row in enumerate(tokens.tolist())]


def test_what_drafts_show_of_ids() -> None:
    right = np.random.default_rng(3).integers(10, 60, (12, 3))
    best = dict(enumerate(right.tolist()))

    def said(tokens: np.ndarray) -> list[str]:
        drafts = _drafted(tokens)
        above = Counter((0, token) for token in right[right != tokens].tolist())
        return [words for words, _ in observed(drafts, (drafts, best, above), str)]

    assert said(right) == []
    assert any("5 too high" in words for words in said(right + 5))
    assert any("2 too low" in words for words in said(right - 2))
    assert any("up to 30" in words for words in said(right.clip(max=30)))
    cut = np.where((right >= 20) & (right < 40), 5, right)
    assert any("the head lacks them" in words for words in said(cut))
    favoured = np.where(np.arange(36).reshape(12, 3) % 4, right, 61)
    assert sum("token 61 is favoured" in words for words in said(favoured)) > 3
    frequent = np.bincount(right.flat).argmax()
    missing = np.where(right == frequent, 9, right)
    assert any(f"token {frequent} " in words for words in said(missing))


_RENAMED = {1: 11, 2: 12, 3: 13, 4: 4}


@pytest.mark.parametrize(
    ("pairs", "names"),
    [
        ([*_RENAMED.items()] * 3, _RENAMED),
        ([*_RENAMED.items()] * 2, {}),  # seen too seldom
        ([*[*_RENAMED.items()] * 3, (1, 12)], {}),
        ([(1, 11), (2, 12), (3, 3), (4, 4)] * 3, {}),  # too few others
        ([], {}),
    ],
)
def test_ids_are_renamed_where_each_is_always_the_same_other(
    pairs: list[tuple[int, int]], names: dict[int, int]
) -> None:
    assert one_for_one(pairs) == names


def test_a_head_may_be_cut_in_later_tokens_alone() -> None:
    drafts = [RecordedDraft(i, i, [90 + i, 1 + i % 4], [], 0, 0, 0.0, 2) for i in range(9)]
    above = {(1, 50 + i): 2 for i in range(5)}
    best = {number: [90, 50] for number in range(9)}
    for first in (0, 1):
        seen = [about for about, _ in observed(drafts, (drafts, best, above), str, first)]
        assert any("only ids up to 4 are ever" in about for about in seen) == first


def test_logits_may_be_rounded_and_heads_put_together_in_another_order() -> None:
    row = {7: 3.1, 2: 2.9, 5: 0.2}
    about = "logits are rounded to steps of 1, and ties go to the lowest id"
    rounded = dict(of_choice())[about]
    assert [*rounded(row, [])] == [2, 7, 5]
    first, second, *_ = rounded(row, []).values()
    assert first > second  # else either would be right
    turned = dict(of_shards(8))
    about = "{} parts of the output head are in the wrong order ({}): ids differ"
    assert [*turned[about.format(2, "reverse")](row, [])] == [3, 6, 1]
    assert [*turned[about.format(4, "moved round")](row, [])] == [1, 4, 7]
    assert not [*of_shards(7)]
