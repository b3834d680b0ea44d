"""Ceilings of noise: more than rounding alone does to logits or states, by compute mode."""

from __future__ import annotations

from collections.abc import Mapping

LOGITS_CEILING: Mapping[str, float] = {
    "f32": 1e-5,
    "blocks": 1e-5,
    "int8x2": 1e-3,
    "bf16": 0.1,
    "q8": 0.1,
    "int8": 0.2,
}
"""NMSE of a row of logits, measured on 23 small models of 15 families in batches of all widths.

Without a router of experts the largest row was 4e-10 in f32, 5e-6 in int8x2, and 0.01 in modes that
round activations to 8 bits. With one, a tie of two experts that is tipped changes a row by up to 1
in any mode: there it takes more than a quarter of the rows (`SHARE`) to be more than rounding.
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
0.7 in modes that round activations to 8 bits. Other content is off by about 1."""

SHARE = 0.25
"""Part of the rows that may be beyond the ceiling where ties of experts can be tipped."""


def logits_ceiling(mode: str) -> float:
    """NMSE that rounding in a compute mode does not pass; the widest for an unknown mode."""
    return LOGITS_CEILING.get(mode, max(LOGITS_CEILING.values()))


def state_ceiling(mode: str) -> float:
    """The relative error of a state that goes with it."""
    return STATE_CEILING.get(mode, max(STATE_CEILING.values()))
