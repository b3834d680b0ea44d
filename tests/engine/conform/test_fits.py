"""Comparisons of what a kernel gave with what a mistake would give."""

from __future__ import annotations

import math

import pytest
import torch

from engine.conform.fits import tapped, wrong_heads


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
    words = tapped(list(known), rows, seen, 1e-6)
    assert words == "tap 1 of row 1 takes input 0 (0: the first row's)"
    assert tapped(list(known), rows, seen + 1, 1e-6) == ""
