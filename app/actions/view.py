"""What is on screen and how it looks; the actions that all plots share; help."""

from __future__ import annotations

from PySide6.QtGui import QKeySequence

from app.actions.spec import ActionSpec

_Key = QKeySequence.StandardKey

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
    ActionSpec("view.zoom_in", "Larger Te&xt", "Write the tokens larger", _Key.ZoomIn),
    ActionSpec("view.zoom_out", "S&maller Text", "Write the tokens smaller", _Key.ZoomOut),
    ActionSpec(
        "view.zoom_reset", "Text at First Si&ze", "Write the tokens as large as the rest", "Ctrl+0"
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
        "view.layout_tune",
        "&Tune",
        "Lay out for settings: estimated speeds and the drafter large, text and options above them",
        "Alt+4",
        checkable=True,
        group="layout",
    ),
    ActionSpec(
        "view.layout_plots",
        "&Plots",
        "Lay out for a whole run: its plots one under the other, over one axis",
        "Alt+5",
        checkable=True,
        group="layout",
    ),
    ActionSpec(
        "view.reset_layout", "&Reset Layout", "Put the panels of this layout in their first places"
    ),
)


PLOT = (
    ActionSpec(
        "plot.x_round",
        "X-Axis: &Rounds",
        "Count rounds on the x-axis of all plots",
        checkable=True,
        group="plot_x",
    ),
    ActionSpec(
        "plot.x_token",
        "X-Axis: &Tokens",
        "Count emitted tokens on the x-axis of all plots",
        checkable=True,
        group="plot_x",
    ),
    ActionSpec(
        "plot.x_time",
        "X-Axis: T&ime",
        "Count seconds without pauses on the x-axis of all plots",
        checkable=True,
        group="plot_x",
    ),
    ActionSpec(
        "plot.show_all", "&Whole Run", "Bring all rounds into sight in the plots (Home in a plot)"
    ),
    ActionSpec(
        "plot.pin",
        "Pin Ran&ge",
        "Keep what is in sight of the plots when another run comes on show",
        checkable=True,
    ),
    ActionSpec(
        "plot.reset", "Reset &Zoom", "Follow the newest rounds at the first zoom (double click)"
    ),
    ActionSpec(
        "plot.overlay",
        "&Overlay a Run",
        "Draw the run chosen in the Runs panel, else the newest other one, over the one on show, "
        "and compare their figures",
        "O",
        "overlay",
        needs="a second run",
    ),
    ActionSpec(
        "plot.no_overlay",
        "&No Overlay",
        "Show one run alone again",
        "Shift+O",
        needs="a run laid over the one on show",
    ),
    ActionSpec(
        "plot.export", "&Export Plot…", "Write the plot in use as PNG, SVG or CSV", icon="export"
    ),
    ActionSpec(
        "plot.copy_image", "&Copy as Image", "Copy a picture of the plot in use", icon="copy"
    ),
)


HELP = (
    ActionSpec("help.pages", "&Help Pages", "Read and search the pages of help", "Shift+F1"),
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


PANELS = (
    ActionSpec(
        "view.panel_model",
        "&Model",
        "Show or hide the model's layers and memory",
        "Ctrl+1",
        checkable=True,
    ),
    ActionSpec(
        "view.panel_run",
        "Run &Settings",
        "Show or hide the prompt and options",
        "Ctrl+2",
        checkable=True,
    ),
    ActionSpec(
        "view.panel_rollback",
        "R&ollback Depth",
        "Show or hide the plot of undone tokens",
        "Ctrl+3",
        checkable=True,
    ),
    ActionSpec(
        "view.panel_memory",
        "M&emory",
        "Show or hide the states of the snapshot slots and the attention cells in use",
        "Ctrl+4",
        checkable=True,
    ),
    ActionSpec(
        "view.panel_divergence",
        "Di&vergence",
        "Show or hide the lanes side by side",
        "Ctrl+5",
        checkable=True,
    ),
    ActionSpec(
        "view.panel_findings",
        "Fi&ndings",
        "Show or hide the failures that were recognised",
        "Ctrl+6",
        checkable=True,
    ),
    ActionSpec(
        "view.panel_inspector",
        "Step Inspe&ctor",
        "Show or hide one round in full",
        "Ctrl+7",
        checkable=True,
    ),
    ActionSpec(
        "view.panel_runs", "Run&s", "Show or hide the list of runs", "Ctrl+8", checkable=True
    ),
    ActionSpec(
        "view.panel_lab",
        "&Lab",
        "Show or hide faults, synthetic rates, scenarios, and break rules",
        "Ctrl+9",
        checkable=True,
    ),
    ActionSpec(
        "view.panel_conversation",
        "Conve&rsation",
        "Show or hide the turns of a conversation and what each took from memory",
        checkable=True,
    ),
    ActionSpec(
        "view.panel_acceptance",
        "&Acceptance",
        "Show or hide how many drafted tokens are accepted",
        checkable=True,
    ),
    ActionSpec(
        "view.panel_time",
        "&Time",
        "Show or hide what each round took and the tokens of each forward pass",
        checkable=True,
    ),
    ActionSpec(
        "view.panel_tuning",
        "T&une",
        "Show or hide what other settings would have reached, the drafter, and results of sweeps",
        checkable=True,
    ),
    ActionSpec(
        "view.panel_checks",
        "Chec&ks",
        "Show or hide checks of llama.cpp builds and of kernels, and how far a bisect is",
        checkable=True,
    ),
)
