"""Token columns of many rounds at once: the same as those of one round after another."""

from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.decode.round import Round, TokenColumns
from engine.draft.drafter import Draft

_TOKENS = st.integers(0, 3)  # few, so that a rejected token is often chosen again


@st.composite
def _rounds(draw):
    made = []
    for number in range(draw(st.integers(1, 30))):
        drafted = draw(st.none() | st.lists(_TOKENS, max_size=4))
        n = len(drafted or ())
        draft = None
        if drafted is not None:
            some = [i / 8 for i in range(n)]
            has_probs, has_conf = draw(st.booleans()), draw(st.booleans())
            draft = Draft(drafted, drafter=draw(st.sampled_from(["draft-mtp", "suffix"])))
            if has_probs:
                draft.probs, draft.top_ids = some, [[token, 5] for token in drafted]
                draft.top_probs = [[p, 0.0] for p in some]
            draft.sure, draft.n_max = some if has_conf else [], draw(st.none() | st.just(n))
        n_right, n_own = draw(st.integers(0, n)), draw(st.sampled_from([0, 1, 1, 1, 2]))
        accepted = [*(drafted or ())[:n_right], *draw(st.lists(_TOKENS, min_size=2, max_size=2))]
        round_ = Round(number, number % 2, 0, 7 + number, [1, *(drafted or ())], draft=draft)
        round_.accepted, round_.n_own = accepted[: n_right + n_own], n_own
        round_.n_emitted = draw(st.none() | st.integers(0, len(round_.accepted)))
        n_examined = round_.n_judged + n_own
        if draw(st.booleans()):
            round_.rule_p = [0.5 + i / 16 for i in range(n_examined)]
            round_.rule_q = [1.0] * draw(st.sampled_from([0, n_examined]))
        made.append(round_)
    return made


def _columns(rounds, at_least):
    with patch("engine.decode.round._MANY", at_least):
        n = sum(round_.n_judged + round_.n_own for round_ in rounds)
        facts = [np.arange(n, dtype=float), np.arange(n), np.arange(n) / 2]
        columns = TokenColumns(facts)
        spent = columns.add(rounds)
        filled = {name: [*map(_known, values)] for name, values in columns.filled().items()}
        return spent, {name: x for name, x in filled.items() if any(v is not None for v in x)}


def _known(value):
    return None if isinstance(value, float) and np.isnan(value) else value


@given(_rounds())
def test_many_rounds_at_once_have_the_columns_of_single_ones(rounds):
    assert _columns(rounds, 1) == _columns(rounds, 1000)
