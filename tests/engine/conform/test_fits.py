"""Comparisons of what a kernel gave with what a mistake would give."""

from __future__ import annotations

import math

import pytest
import torch

from engine.conform.fits import summed, tapped, wrong_heads


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_explains_no_head(value):
    seen, made = torch.ones(1, 2, 3), torch.ones(1, 2, 3)
    made[0, 1, 0] = value
    assert wrong_heads(seen, made, 1e-3).tolist() == [False, True]


def test_a_tap_that_takes_another_input_is_named():
    torch.manual_seed(2)
    known, weight, bias = torch.randn(5, 6), torch.randn(6, 4), torch.randn(6)
    rows = [{"x": x, "weight": weight, "bias": bias} for x in known[3:]]
    of = torch.tensor([[0, 1, 2, 3], [1, 3, 3, 4]])  # inputs of each row's taps
    y = bias + torch.einsum("rtc,ct->rc", known[of], weight)
    seen = torch.nn.functional.silu(y)
    found = tapped(list(known), rows, seen, 1e-6)
    assert found == ("other-row", "tap 1 of row 1 takes input 0 (0: the first row's)")
    assert tapped(list(known), rows, seen + 1, 1e-6) is None


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda own, bias: own + bias, ("wrong-term", "the bias is taken 2 times")),
        (
            lambda own, bias: torch.stack([own[0], own[0] + own[1] - bias]),
            ("other-row", "the bias is taken 0 times, in rows 1; the sum of row r - 1 is taken 1"),
        ),
        (lambda own, bias: own * own, None),
    ],
)
def test_a_convolutions_sums_in_other_shares_are_named(made, said):
    torch.manual_seed(3)
    known, weight, bias = (torch.randn(*n).double() for n in ((5, 40), (40, 4), (40,)))
    rows = [{"x": x, "weight": weight, "bias": bias} for x in known[3:]]
    own = torch.stack([(known[i : i + 4].T * weight).sum(1) + bias for i in range(2)])
    seen = torch.nn.functional.silu(made(own, bias))
    found = summed(list(known), rows, seen, 1e-6)
    assert (found and (found[0], found[1].replace(" of 2", "")[: len(said[1])])) == said
