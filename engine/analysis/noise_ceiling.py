"""Noise ceilings: the largest effect of rounding on logits or states, by compute mode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

LOGITS_CEILING: Mapping[str, float] = {
    "f32": 1e-5,
    "blocks": 1e-5,
    "int8x2": 1e-3,
    "bf16": 0.1,
    "q8": 0.1,
    "int8": 0.2,
}
"""NMSE of a logits row, measured on 20 small models of 14 families, two texts per mode.

For models without a choice by rank (experts, blocks of tokens) the largest row was 5e-10 in f32,
5e-6 in int8x2, and 0.013 in modes that round activations to 8 bits. With one, a flipped tie changes
a row by up to 1 in any mode: there more than a quarter of the rows must exceed the ceiling.
"""

STATE_CEILING: Mapping[str, float] = {
    "f32": 1e-3,
    "blocks": 1e-3,
    "int8x2": 0.03,
    "bf16": 0.7,
    "q8": 0.7,
    "int8": 0.9,
}
"""Relative error of a recurrent state or window; measured 9e-5 in f32, 3e-3 in int8x2, and up to
0.7 in modes that round activations to 8 bits. Different content is off by about 1."""

TIPPED = 0.25
"""Share of rows that may exceed the ceiling where ties can flip."""
_TIPPED_TWICE = 0.5
"""The same where activations are rounded to 8 bits as well."""
FEW_TIPPED = 3
"""Number of rows that may exceed it there in any case."""

_HALF_ULP = {"f32": 0.0, "f16": 2.0**-12, "bf16": 2.0**-9}
_ROUNDINGS = 32
"""Squared roundings that add up in an NMSE of logits; up to 9 were seen, in f16."""


def logits_ceiling(mode: str) -> float:
    """NMSE that rounding in a compute mode does not exceed; the largest for an unknown mode."""
    return LOGITS_CEILING.get(mode, max(LOGITS_CEILING.values()))


def state_ceiling(mode: str) -> float:
    """The corresponding relative error of a state."""
    return STATE_CEILING.get(mode, max(STATE_CEILING.values()))


def least_of_types(types: Mapping[str, Any]) -> float:
    """NMSE of logits caused by states and windows of these types (s, r) if they are rounded at
    other tokens than in the reference lane, as in every policy; 0 for f32."""
    half = max(_HALF_ULP.get(str(types.get(name)), 0.0) for name in ("s", "r"))
    return _ROUNDINGS * half**2


def tipped_share(mode: str, *, ranks: bool, rounds_states: bool = False) -> float:
    """Share of rows that may exceed the ceiling. ranks: whether the model chooses by rank.

    Rounding to 8 bits acts like flipped ties, so only more precise modes have a strict ceiling;
    with both, 5 of 17 rows flipped in kimi-k3, in int8. If states are rounded too, at other tokens
    in a batch than one by one, a model that ranks has no ceiling: half of the rows flipped in
    kimi-k3, in bf16.
    """
    if ranks and rounds_states:
        return 1.0
    is_coarse = logits_ceiling(mode) > LOGITS_CEILING["int8x2"]
    if ranks and is_coarse:
        return _TIPPED_TWICE
    return TIPPED if ranks or is_coarse else 0.0


def rows_beyond(nmse: np.ndarray, ceiling: float, share: float) -> np.ndarray:
    """Indices of rows with an NMSE [n] that rounding does not explain, empty if it explains all.
    share: of rows that may exceed the ceiling. NaN exceeds it."""
    beyond = np.flatnonzero(~(nmse <= ceiling))
    allowed = max(FEW_TIPPED, share * len(nmse)) if share else 0
    return beyond if len(beyond) > allowed else beyond[:0]
