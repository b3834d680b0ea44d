"""What the plots share."""

from __future__ import annotations

from app.actions.spec import ActionSpec

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
        "plot.reset", "Reset &Zoom", "Follow the newest rounds at the first zoom (double click)"
    ),
    ActionSpec(
        "plot.overlay",
        "&Overlay a Run",
        "Draw the run chosen in the Runs panel, else the newest other one, over the one on show",
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
