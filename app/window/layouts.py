"""The docks by name, what shares one, and the named layouts that place them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

TITLES = {
    "model": "Model",
    "run": "Run",
    "rollback": "Rollback depth",
    "memory": "Memory",
    "divergence": "Divergence",
    "findings": "Findings",
    "inspector": "Step inspector",
    "runs": "Runs",
    "lab": "Lab",
    "conversation": "Conversation",
    "speed": "Acceptance and time",
    "tuning": "Tune",
}
PAGES = {
    "memory": {"ring": "Ring occupancy", "kv": "KV cells"},
    "lab": {
        "faults": "Faults and rates",
        "breaks": "Break rules",
        "gate": "Gate",
        "conform": "Kernels",
    },
    "speed": {"acceptance": "Acceptance", "timing": "Time per round", "verify": "Verify width"},
    "tuning": {
        "tune": "Draft lengths",
        "what_if": "What if",
        "drafter": "Drafter",
        "results": "Results",
    },
}
"""Names and titles of the views that share a dock; every other dock holds the view of its name."""
DOCK_OF = {page: dock for dock, pages in PAGES.items() for page in pages}
PLOTS = ("speed",)
"""Docks of further plots, tabs of the last bottom one."""


@dataclass(frozen=True, slots=True)
class DockLayout:
    """First places of the docks, and which of them are open.

    left and bottom: docks one under the other; the further plots are tabs of the last of them,
    every other dock is a tab at the right. Of the bottom ones with the part of the window's height
    that each takes when open; right_share: of the width. wide: the bottom docks reach from edge to
    edge; where the window is low, many of them stand in two columns and the left docks are tabs.
    stack: the pages of a bottom dock are one below the other.
    """

    title: str
    left: tuple[str, ...]
    bottom: Mapping[str, float]
    shown: tuple[str, ...]
    right_share: float = 0.5
    wide: bool = False
    stack: bool = False


LAYOUTS = {
    "stream": DockLayout(
        "Stream",
        ("model", "run"),
        {"rollback": 0.16, "memory": 0.2},
        ("model", "run", "rollback", "memory", *PLOTS),
    ),
    "rollback": DockLayout(
        "Rollback",
        ("run", "model"),
        {"rollback": 0.32, "memory": 0.34},
        ("run", "rollback", "memory", *PLOTS),
    ),
    "divergence": DockLayout(
        "Divergence", ("run", "model"), {"divergence": 0.68}, ("divergence", "findings"), wide=True
    ),
    "tune": DockLayout("Tune", ("run", "model"), {"tuning": 0.62}, ("run", "tuning"), wide=True),
    "plots": DockLayout(
        "Plots",
        ("run", "model"),
        {"rollback": 0.105, "memory": 0.215, "speed": 0.35},
        ("run", "rollback", "memory", "speed"),
        wide=True,
        stack=True,
    ),
}
"""The text keeps the centre in all of them; what a layout is named after gets the room."""


def known_layout(name: str) -> str:
    """The layout of this name, the first one if there is none."""
    return name if name in LAYOUTS else next(iter(LAYOUTS))
