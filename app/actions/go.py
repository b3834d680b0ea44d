"""Moving the position that all views share."""

from __future__ import annotations

from PySide6.QtGui import QKeySequence

from app.actions.spec import ActionSpec

_Key = QKeySequence.StandardKey
_DIVERGENCE = "a comparison that has come apart, or two runs whose texts part"
_RUN = "a run on show"

GO = (
    ActionSpec(
        "go.first_divergence",
        "F&irst Divergence",
        "Go to the first position beyond the bound, or at which two runs' texts part",
        "X",
        "go-first",
        needs=_DIVERGENCE,
    ),
    ActionSpec(
        "go.next_divergence",
        "&Next Divergence",
        "Go to the next position beyond the bound",
        "Shift+X",
        "go-next",
        needs=_DIVERGENCE,
    ),
    ActionSpec(
        "go.previous_divergence",
        "Previ&ous Divergence",
        "Go to the position beyond the bound before this one",
        "Ctrl+Shift+X",
        "go-previous",
        needs=_DIVERGENCE,
    ),
    ActionSpec(
        "go.previous_round",
        "Pre&vious Round",
        "Go to the round of this sequence before this one",
        "[",
        "round-previous",
        needs=_RUN,
    ),
    ActionSpec(
        "go.next_round",
        "Next &Round",
        "Go to the next round of this sequence",
        "]",
        "round-next",
        needs=_RUN,
    ),
    ActionSpec(
        "go.next_rejection",
        "Next Re&jection",
        "Go to the next drafted token that was rejected, or to what replaced it",
        "N",
        needs=_RUN,
    ),
    ActionSpec(
        "go.previous_rejection",
        "Previous Rej&ection",
        "Go to the drafted token before this one that was rejected",
        "Shift+N",
        needs=_RUN,
    ),
    ActionSpec(
        "go.inspect",
        "&Inspect Round",
        "Show the round under the cursor in full",
        "I",
        "inspect",
        needs=_RUN,
    ),
    ActionSpec(
        "go.find", "&Find Tokens…", "Find tokens by text or filter", _Key.Find, "find", needs=_RUN
    ),
    ActionSpec("go.find_next", "Find &Next", "Go to the next token found", "F3", needs=_RUN),
    ActionSpec(
        "go.find_previous", "Find &Previous", "Go to the token found before", "Shift+F3", needs=_RUN
    ),
)
