"""The scripted drafter: k right tokens, then wrong ones, sequence by sequence."""

from __future__ import annotations

import pytest
import torch

from engine.draft.drafter import DraftRequest
from engine.draft.scripted import ScriptedDrafter
from engine.errors import OptionError


def test_right_tokens_in_turn() -> None:
    asked = []

    def continuation(tokens):
        asked.append(list(tokens))
        return iter(range(50, 60))

    drafter = ScriptedDrafter([2, 0], 55, continuation)
    for seq in (0, 3):
        drafter.observe(seq, 0, [7, 8, 9], torch.empty(3, 4))
    assert asked == [[7, 8, 9]] * 2
    # position 3 holds 50, the newest token
    first, other = drafter.draft([DraftRequest(0, 3, 50, 4), DraftRequest(3, 3, 50, 1)])
    assert first.tokens == [51, 52, 54, 0]
    assert (other.tokens, other.drafter) == ([51], "scripted")
    drafter.observe(0, 3, [50, 51, 52], torch.empty(3, 4))
    (second,) = drafter.draft([DraftRequest(0, 6, 53, 2)])
    assert second.tokens == [0, 1]
    drafter.forget(0)
    drafter.observe(0, 0, [1], torch.empty(1, 4))
    assert drafter.draft([DraftRequest(0, 1, 50, 2)])[0].tokens == [51, 52]


def test_nothing_behind_the_end() -> None:
    drafter = ScriptedDrafter([4], 99, lambda tokens: iter([5, 6]))
    drafter.observe(0, 0, [1], torch.empty(1, 4))
    assert drafter.draft([DraftRequest(0, 1, 5, 4)])[0].tokens == [6]


@pytest.mark.parametrize("n_right", [[], [1, -1]])
def test_no_lengths(n_right: list[int]) -> None:
    with pytest.raises(OptionError):
        ScriptedDrafter(n_right, 9, lambda tokens: iter(()))
