"""What is on screen, and how."""

from __future__ import annotations

from app.actions.spec import ActionSpec

VIEW = (
    ActionSpec(
        "view.tabs",
        "Sequences as Ta&bs",
        "One sequence in sight at a time instead of all as tiles",
        checkable=True,
    ),
    ActionSpec(
        "view.ghosts",
        "&Ghost Tokens",
        "Show rejected and ignored draft tokens in the text",
        "G",
        "ghost",
        checkable=True,
    ),
    ActionSpec(
        "view.follow",
        "&Follow Newest",
        "Keep the newest token in sight",
        "Ctrl+L",
        "follow",
        checkable=True,
    ),
    ActionSpec(
        "view.theme_system",
        "S&ystem",
        "Light or dark as the desktop says",
        checkable=True,
        group="theme",
    ),
    ActionSpec("view.theme_light", "&Light", "Light colours", checkable=True, group="theme"),
    ActionSpec("view.theme_dark", "&Dark", "Dark colours", checkable=True, group="theme"),
    ActionSpec(
        "view.palette",
        "Command &Palette…",
        "Find any action by a few letters of its name",
        "Ctrl+Shift+P",
    ),
    ActionSpec(
        "view.layout_stream",
        "&Stream",
        "Lay out for the text: tokens large, settings and plots around them",
        "Alt+1",
        checkable=True,
        group="layout",
    ),
    ActionSpec(
        "view.layout_rollback",
        "&Rollback",
        "Lay out for rollbacks: depth and slots large, the text above them",
        "Alt+2",
        checkable=True,
        group="layout",
    ),
    ActionSpec(
        "view.layout_divergence",
        "&Divergence",
        "Lay out for comparisons: the lanes large, text and findings above them",
        "Alt+3",
        checkable=True,
        group="layout",
    ),
    ActionSpec(
        "view.reset_layout", "&Reset Layout", "Put the panels of this layout in their first places"
    ),
)
