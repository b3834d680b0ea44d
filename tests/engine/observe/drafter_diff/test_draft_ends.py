"""Which number is compared with p_min shows in where drafts end."""

from __future__ import annotations

import numpy as np
import pytest

from engine.observe.drafter_diff.draft_ends import DraftEnd, ends_words

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
            "of all": all_of[:, 0] / all_of.sum(1),
        }[number]
        n = next((i for i, one in enumerate(value) if one < _P_MIN), 5)
        found.append(DraftEnd(pos, n if n >= n_min else 0, logits, ()))
    return found


@pytest.mark.parametrize(
    ("number", "said"),
    [
        ("product", "the product of all of a draft"),
        ("before", "that of the token before"),
        ("of all", "over the whole vocabulary"),
    ],
)
def test_a_number_that_is_compared_in_place_of_the_share_is_named(number: str, said: str) -> None:
    found = ends_words(_ends(number), _P_MIN, 0)
    assert found is not None and said in found[0] and found[2] == 0


def test_bounds_are_named_where_the_number_is_right() -> None:
    for drafts, p_min, said in (
        (_ends("share", 3), _P_MIN, "n_min of 3, not 0"),
        (_ends("share"), 0.8, "p_min of about 0.5, not 0.8"),
    ):
        found = ends_words(drafts, p_min, 0)
        assert found is not None and said in found[0]
    assert ends_words(_ends("share"), _P_MIN, 0) is None
