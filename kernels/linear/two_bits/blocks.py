"""How many numbers and bytes a block of Q2_K has."""

from __future__ import annotations

BLOCK, GROUP = 256, 16
BLOCK_BYTES = 84
MOST, MOST_SCALE = 3, 15
"""The largest integer of a number, and that of the scale of a group."""
