"""Which number is compared with p_min shows in where drafts end."""

from __future__ import annotations

import numpy as np
import pytest

from engine.observe.drafter_diff.draft_ends import DraftEnd, ends_words, wrong_ends

_P_MIN = 0.5


def _ends(number: str, n_min: int = 0) -> list[DraftEnd]:
    """Drafts of up to 5 tokens that end by a number."""
    random, found = np.random.default_rng(3), []
    for pos in range(60):
        logits = -np.sort(-random.normal(0, 2, (5, 40)), 1)
        share = np.exp(logits[:, :10] - logits[:, :1])
        share = share[:, 0] / share.sum(1)
        all_of = np.exp(logits - logits[:, :1])
        value = {
            "share": share,
            "product": np.cumprod(share),
            "before": [1, *share[:-1]],
            "later": [1, *share[1:]],
            "last three": [1, 1, *share[2:]],
            "first two": [*share[:2], 1, 1, 1],
            "sent": [share[0], *share[:-1]],
            "of all": all_of[:, 0] / all_of.sum(1),
        }[number]
        n = next((i for i, one in enumerate(value) if one < _P_MIN), 5)
        found.append(DraftEnd(pos, n if n >= n_min else 0, logits, ()))
    return found


@pytest.mark.parametrize(
    ("number", "said"),
    [
        ("product", "the product over the draft"),
        ("before", "that of the previous token"),
        ("sent", "after the token was sent"),
        ("later", "except for the first 1 of a draft"),
        ("last three", "except for the first 2 of a draft"),
        ("first two", "but only for the first 2 of a draft"),
        ("of all", "over the whole vocabulary"),
    ],
)
def test_a_number_that_is_compared_in_place_of_the_share_is_named(number: str, said: str) -> None:
    drafts = _ends(number)
    about, n_left = ends_words(drafts, wrong_ends(drafts, _P_MIN, 0), _P_MIN, 0)
    assert said in about and n_left == 0


def test_bounds_are_named_where_the_number_is_right() -> None:
    for drafts, p_min, said in (
        (_ends("share", 3), _P_MIN, "n_min were 3 instead of 0"),
        (_ends("share"), 0.8, "p_min were about 0.5 instead of 0.8"),
    ):
        assert said in ends_words(drafts, wrong_ends(drafts, p_min, 0), p_min, 0)[0]
    assert not wrong_ends(_ends("share"), _P_MIN, 0)


def test_ends_by_no_known_number_are_said_to_be_so() -> None:
    drafts = [one._replace(length=i % 3) for i, one in enumerate(_ends("share"))]
    wrong = wrong_ends(drafts, _P_MIN, 0)
    about, n_left = ends_words(drafts, wrong, _P_MIN, 0)
    assert "another number" in about and n_left == len(wrong)
