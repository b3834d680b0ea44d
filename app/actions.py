"""Every action of the window, registered once; menus, toolbar and help are made of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from PySide6.QtCore import QObject
from PySide6.QtGui import QAction, QActionGroup, QKeySequence

from app.theme import Theme, icon

SEPARATOR = ""


@dataclass(frozen=True, slots=True)
class ActionSpec:
    """What a user sees of an action. `keys` is a portable key text or a standard key.

    `group`: of the checkable actions of a group exactly one is on. `needs`: what is missing
    while it is disabled, in words that follow "needs".
    """

    id: str
    text: str
    tip: str
    keys: str | QKeySequence.StandardKey = ""
    icon: str = ""
    checkable: bool = False
    group: str = ""
    needs: str = ""


_Key = QKeySequence.StandardKey
_IDLE_MODEL = "a model that is loaded and idle"
_DIVERGENCE = "a comparison that has come apart"

SPECS = (
    ActionSpec("file.open", "&Open Model…", "Open a GGUF model", _Key.Open, "open"),
    ActionSpec(
        "file.open_draft",
        "Open &Draft Model…",
        "Open a smaller GGUF model that drafts for the one in use",
        "Ctrl+Shift+O",
        needs="a target model",
    ),
    ActionSpec("file.open_demo", "Open De&mo", "Open the bundled models", "Ctrl+D", "demo"),
    ActionSpec(
        "file.open_trace",
        "Open &Trace…",
        "Open an exported trace; it takes no model",
        "Ctrl+Shift+T",
    ),
    ActionSpec(
        "file.close_trace",
        "C&lose Trace",
        "Go back from the opened trace to the runs of this session",
        "Ctrl+W",
        needs="an opened trace",
    ),
    ActionSpec("file.clear_recent", "&Clear List", "Forget the models and traces opened lately"),
    ActionSpec(
        "file.export",
        "&Export Trace…",
        "Write everything recorded as CSV files",
        "Ctrl+E",
        "export",
        needs="a recorded run",
    ),
    ActionSpec(
        "file.copy_text",
        "&Copy Text",
        "Copy the generated text",
        _Key.Copy,
        "copy",
        needs="a run on show",
    ),
    ActionSpec(
        "file.copy_step",
        "Copy Round as Mar&kdown",
        "Copy the round under the cursor, or the newest, as Markdown",
        "Ctrl+Alt+C",
        "copy-step",
        needs="a run on show",
    ),
    ActionSpec(
        "file.copy_issue",
        "Copy as &Issue",
        "Copy environment, model, options and the round in question as Markdown",
        "Ctrl+Shift+C",
        needs="a run on show",
    ),
    ActionSpec("file.quit", "&Quit", "Close the window", "Ctrl+Q"),
    ActionSpec(
        "run.start",
        "&Run",
        "Start a new run, or go on with the paused one",
        "F5",
        "run",
        needs=_IDLE_MODEL,
    ),
    ActionSpec(
        "run.pause",
        "&Pause",
        "Pause before the next round",
        "F6",
        "pause",
        needs="a run in progress",
    ),
    ActionSpec(
        "run.step",
        "One Ro&und",
        "Draft, verify and roll back once, then pause",
        "F10",
        "step",
        needs=_IDLE_MODEL,
    ),
    ActionSpec(
        "run.stop",
        "&Stop",
        "End the run; what it recorded stays",
        "Shift+F5",
        "stop",
        needs="a run in progress or paused",
    ),
    ActionSpec(
        "run.compare",
        "&Compare",
        "Decode the prompt in several lanes and show where they come apart",
        "Ctrl+F5",
        "compare",
        needs=_IDLE_MODEL,
    ),
    ActionSpec(
        "run.add_break",
        "&Break Rule…",
        "Write a condition at which the run pauses",
        "F9",
        "break",
    ),
    ActionSpec(
        "run.measure_fidelity",
        "Measure Fi&delity",
        "Measure the compute mode against f32, on the model's own text",
        needs=_IDLE_MODEL,
    ),
    ActionSpec(
        "go.first_divergence",
        "F&irst Divergence",
        "Go to the first position beyond the bound",
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
        needs="a run on show",
    ),
    ActionSpec(
        "go.next_round",
        "Next &Round",
        "Go to the next round of this sequence",
        "]",
        "round-next",
        needs="a run on show",
    ),
    ActionSpec(
        "go.inspect",
        "&Inspect Round",
        "Show the round under the cursor in full",
        "I",
        "inspect",
        needs="a run on show",
    ),
    ActionSpec(
        "go.find",
        "&Find Tokens…",
        "Find tokens by text or filter",
        _Key.Find,
        "find",
        needs="a run on show",
    ),
    ActionSpec(
        "go.find_next", "Find &Next", "Go to the next token found", "F3", needs="a run on show"
    ),
    ActionSpec(
        "go.find_previous",
        "Find &Previous",
        "Go to the token found before",
        "Shift+F3",
        needs="a run on show",
    ),
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
        "view.panel_ring",
        "R&ing Occupancy",
        "Show or hide the states of the snapshot slots",
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
        "view.panel_runs",
        "R&uns",
        "Show or hide the list of runs",
        "Ctrl+8",
        checkable=True,
    ),
    ActionSpec(
        "view.panel_breaks",
        "&Break Rules",
        "Show or hide the conditions at which the run pauses",
        "Ctrl+9",
        checkable=True,
    ),
    ActionSpec(
        "view.panel_acceptance",
        "&Acceptance",
        "Show or hide how many drafted tokens are accepted",
        checkable=True,
    ),
    ActionSpec(
        "view.panel_timing",
        "Tim&e per Round",
        "Show or hide what the time of each round was spent on",
        checkable=True,
    ),
    ActionSpec(
        "view.panel_verify",
        "Verify Wi&dth",
        "Show or hide the tokens of each forward pass",
        checkable=True,
    ),
    ActionSpec(
        "view.panel_kv",
        "&KV Cells",
        "Show or hide the attention cells in use",
        checkable=True,
    ),
    ActionSpec(
        "view.panel_what_if",
        "&What If",
        "Show or hide estimates for shorter drafts",
        checkable=True,
    ),
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
        "plot.export",
        "&Export Plot…",
        "Write the plot in use as PNG, SVG or CSV",
        icon="export",
    ),
    ActionSpec(
        "plot.copy_image", "&Copy as Image", "Copy a picture of the plot in use", icon="copy"
    ),
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

PANELS = tuple(spec.id for spec in SPECS if spec.id.startswith("view.panel_"))

MENUS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "&File",
        (
            "file.open", "file.open_draft", "file.open_demo", "menu.recent", SEPARATOR,
            "file.open_trace", "file.close_trace", "file.export", SEPARATOR, "file.copy_text",
            "file.copy_step", "file.copy_issue", SEPARATOR, "file.quit",
        ),
    ),
    (
        "&Run",
        (
            "run.start", "run.pause", "run.step", "run.stop", "run.add_break", SEPARATOR,
            "run.compare", "run.measure_fidelity", "menu.scenarios", SEPARATOR,
            "go.first_divergence", "go.next_divergence", "go.previous_divergence",
        ),
    ),
    (
        "&Go",
        (
            "go.previous_round", "go.next_round", "go.inspect", SEPARATOR, "go.find",
            "go.find_next", "go.find_previous",
        ),
    ),
    (
        "&View",
        (
            "view.palette", SEPARATOR, "view.ghosts", "view.follow", "view.tabs", SEPARATOR,
            "menu.panels", "menu.plots",
            "menu.layout", "view.reset_layout", SEPARATOR,
            "menu.theme",
        ),
    ),
    ("&Help", ("help.shortcuts", "help.copy_environment", "help.copy_report", "help.about")),
)  # fmt: skip
"""Menu titles and their entries; "menu.…" stands for a submenu that the window fills."""

TOOLBAR = (
    "file.open", SEPARATOR, "run.start", "run.pause", "run.step", "run.stop", "run.compare",
    SEPARATOR, "view.ghosts", "view.follow",
)  # fmt: skip


class Actions:
    """The QActions of SPECS by id. `given` holds those that Qt made, such as a dock's own."""

    def __init__(self, parent: QObject, given: Mapping[str, QAction]) -> None:
        self._actions: dict[str, QAction] = {}
        self._groups: dict[str, QActionGroup] = {}
        for spec in SPECS:
            action = given[spec.id] if spec.id in given else QAction(parent)
            self._actions[spec.id] = self._set_up(action, spec, parent)

    def __getitem__(self, action_id: str) -> QAction:
        return self._actions[action_id]

    def __iter__(self) -> Iterator[QAction]:
        return iter(self._actions.values())

    def retheme(self, theme: Theme) -> None:
        """Draw the icons in the theme's colour."""
        for spec in SPECS:
            if spec.icon:
                self._actions[spec.id].setIcon(icon(spec.icon, theme))

    def _set_up(self, action: QAction, spec: ActionSpec, parent: QObject) -> QAction:
        action.setText(spec.text)
        action.setObjectName(spec.id)
        action.setShortcut(QKeySequence(spec.keys))
        action.setCheckable(spec.checkable)
        keys = action.shortcut().toString(QKeySequence.SequenceFormat.NativeText)
        action.setToolTip(f"{spec.tip} ({keys})" if keys else spec.tip)
        if spec.group:
            if spec.group not in self._groups:
                self._groups[spec.group] = QActionGroup(parent)
            self._groups[spec.group].addAction(action)
        return action
