"""Folders of `shared/cases`, next to the checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

_CASES = Path(__file__).resolve().parents[3] / "shared" / "cases"


def case(name: str) -> Path:
    """The folder of a case; skips the test where there is none."""
    folder = _CASES / name
    if not folder.exists():
        pytest.skip(f"the case {name} is not here")
    return folder
