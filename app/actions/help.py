"""About the program."""

from __future__ import annotations

from app.actions.spec import ActionSpec

HELP = (
    ActionSpec("help.shortcuts", "Keyboard &Shortcuts", "List all actions and their keys", "F1"),
    ActionSpec(
        "help.copy_report",
        "&Copy Report",
        "Copy versions, model and the last log lines, for a bug report",
    ),
    ActionSpec(
        "help.copy_environment", "Copy &Environment", "Copy versions and machine as Markdown"
    ),
    ActionSpec("help.about", "&About Draftscope", "Version and licence", icon="info"),
)
