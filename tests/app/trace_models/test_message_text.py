"""Messages of the engine name the fields of the Run panel, not flags."""

from __future__ import annotations

import pytest

from app.trace_models.shown_text import in_window


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ("Raise -c or shorten the prompt.", "Raise “context” or shorten the prompt."),
        (
            "Raise --n-rs-seq, or try --rollback carry.",
            "Raise “n_rs_seq”, or try “rollback” carry.",
        ),
        (
            "See `draftscope help observe`, or name its format with --as NAME.",
            "See Help (Shift+F1).",
        ),
        ("Compare with --compute f32; a re-run, 3 - c, x-c.", None),
    ],
)
def test_flags_become_fields(told: str, shown: str | None) -> None:
    assert in_window(told) == (shown or told)
