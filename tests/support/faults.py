"""Faults by how they show."""

from __future__ import annotations

from engine.options import MEMORY_FAULTS

ROUNDING = "bf16-snapshots"
"""Off by a rounding at first, and by more with every rollback (test_drift)."""

LARGE_FAULTS = set(MEMORY_FAULTS) - {ROUNDING}
"""Those that are off by the content of a token at once."""
