"""Comparisons of what a kernel gave with what a mistake would give."""

from __future__ import annotations

import math

import pytest
import torch

from engine.conform.fits import wrong_heads


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_explains_no_head(value):
    seen, made = torch.ones(1, 2, 3), torch.ones(1, 2, 3)
    made[0, 1, 0] = value
    assert wrong_heads(seen, made, 1e-3).tolist() == [False, True]
