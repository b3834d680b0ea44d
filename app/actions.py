"""The actions of the window, registered once: what a user sees of each, their menus, and as Qt has
them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from PySide6.QtCore import QObject
from PySide6.QtGui import QAction, QActionGroup, QKeySequence

from app.looks import Theme, icon

SEPARATOR = ""
"""Stands for a line between the entries of a menu."""


@dataclass(frozen=True, slots=True)
class ActionSpec:
    """What a user sees of an action. `keys` is a portable key text or a standard key.

    `group`: of the checkable actions of a group exactly one is on. `needs`: what is missing
    while it is disabled, in words that follow "needs". `not_at_servers`: why it is disabled while
    a server is in use.
    """

    id: str
    text: str
    tip: str
    keys: str | QKeySequence.StandardKey = ""
    icon: str = ""
    checkable: bool = False
    group: str = ""
    needs: str = ""
    not_at_servers: str = ""


_GROUPS = {"view.theme_": "theme", "view.layout_": "layout", "plot.x_": "plot_x"}

_ACTIONS = """\
file.open &Open Model… | @Open | open
    Open a GGUF model
file.open_draft Open &Draft Model… | Ctrl+Shift+O
    Open a smaller GGUF model that drafts for the one in use
    needs a target model
file.open_demo Open De&mo | Ctrl+D | demo
    Open the bundled models
file.open_trace Open &Trace… | Ctrl+Shift+T
    Open an exported trace, or a capture, log or record of another engine; it takes no model
file.open_results Open Res&ults…
    Open the results of draftscope sweep or draftscope tune, or of checks of kernels
file.paste P&aste | @Paste
    Open what was copied: files, or the text of a log, a reply or a record of another engine
file.connect Connect to &Server… | Ctrl+Shift+K | connect
    Observe a llama-server: its drafts, what it accepts and how it rolls back
file.disconnect Disco&nnect
    Let go of the server; what was observed stays
    needs a server in use
file.close_trace C&lose Trace | Ctrl+W
    Go back from the opened trace to the runs of this session
    needs an opened trace
file.clear_recent &Clear List
    Forget the models, traces and servers opened lately
file.export &Export Trace… | Ctrl+E | export
    Write all runs of the trace on show as CSV files
    needs a recorded run
file.export_run E&xport Run…
    Write the run on show, or its comparison, as CSV files
    needs a run on show
file.perfetto Per&fetto Trace…
    Write phases, counters and drafts of the run on show over time, for ui.perfetto.dev
    needs a run on show
file.report Re&port… | Ctrl+Shift+E
    Write the run on show, with the one over it, or the comparison as one HTML page to share
    needs a run on show
file.share S&hare | Ctrl+Shift+S
    Write the runs of the trace on show, with text, plots and every round, as one HTML page that
    any browser opens, next to the last one
    needs a run on show
file.copy_text &Copy Text | @Copy | copy
    Copy the generated text, what is selected of it, or the table in use
    needs a run on show
file.copy_step Copy Round as Mar&kdown | Ctrl+Alt+C | copy-step
    Copy the round under the cursor, or the newest, as Markdown
    needs a run on show
file.copy_issue Copy as &Issue | Ctrl+Shift+C
    Copy environment, model, options and the round in question as Markdown
    needs a run on show
file.quit &Quit | Ctrl+Q
    Close the window
run.start &Run | F5 | run
    Start a new run, or go on with the paused one
    needs a model that is loaded and idle (File, Open Model)
run.pause &Pause | F6 | pause
    Pause before the next round
    needs a run in progress
    at servers: A server cannot be paused; Stop (Shift+F5) ends its requests
run.step One Ro&und | F10 | step
    Draft, verify and roll back once, then pause
    needs a model that is loaded and idle (File, Open Model)
    at servers: A server does not stop between two rounds
run.stop &Stop | Shift+F5 | stop
    End the run; what it recorded stays
    needs a run in progress or paused
run.again Run A&gain with These Settings
    Begin the run or comparison on show anew, with the prompts and options that it had
    needs a run on show of this program while a model is loaded and idle
run.measure_plain Me&asure Plain
    Run what the run on show was asked for with its drafters and without, in alternation
    needs a run on show that this session started from its prompts, while nothing runs
run.watch &Watch Clients
    Let other programs talk to the server through a port of this window, and record them
    needs a server that is in use and idle
run.rescore Re-score with &Model…
    Let a model of this window judge every token of the run on show
    needs a run on show while nothing runs
run.compare &Compare | Ctrl+F5 | compare
    Decode the prompt in several lanes and show where they come apart
    needs a model that is loaded and idle (File, Open Model)
    at servers: A server shows no logits to compare lanes by; open its model for that
run.check_rollback Check llama.cpp Rollbac&k
    Play every scenario of rollback on a build of llama.cpp, and show the verdicts in Gate
    needs a model that is loaded and idle (File, Open Model)
    at servers: A server shows no logits to compare lanes by; open its model for that
run.llama_library llama.cpp &Library…
    Choose the build of llama.cpp that its lanes use
run.fork Continue &from Here… | Ctrl+Shift+F5
    Go on from the round or token under the cursor with other options or another token, as a run
    of its own
    needs a run of the model in use while nothing runs
    at servers: A server's memory cannot be rebuilt; open its model for that
run.add_break &Break Rule… | F9 | break
    Write a condition at which the run pauses
run.scenarios Sc&enarios…
    Provoke a known failure, or a sequence of memory operations, chosen by what is seen of it
run.measure_fidelity Measure Fi&delity
    Measure the compute mode against f32, on the model's own text
    needs a model that is loaded and idle (File, Open Model)
    at servers: A server's arithmetic cannot be measured; open its model for that
go.first_divergence F&irst Divergence | X | go-first
    Go to the first position beyond the bound, or at which two runs' texts part
    needs a comparison that has come apart, or two runs whose texts part
go.next_divergence &Next Divergence | Shift+X | go-next
    Go to the next position beyond the bound
    needs a comparison that has come apart, or two runs whose texts part
go.previous_divergence Previ&ous Divergence | Ctrl+Shift+X | go-previous
    Go to the position beyond the bound before this one
    needs a comparison that has come apart, or two runs whose texts part
go.previous_round Pre&vious Round | [ | round-previous
    Go to the round of this sequence before this one
    needs a run on show
go.next_round Next &Round | ] | round-next
    Go to the next round of this sequence
    needs a run on show
go.next_rejection Next Re&jection | N
    Go to the next drafted token that was rejected, or to what replaced it
    needs a run on show
go.previous_rejection Previous Rej&ection | Shift+N
    Go to the drafted token before this one that was rejected
    needs a run on show
go.inspect &Inspect Round | I | inspect
    Show the round under the cursor in full
    needs a run on show
go.find &Find Tokens… | @Find | find
    Find tokens by text or filter
    needs a run on show
go.find_next Find &Next | F3
    Go to the next token found
    needs a run on show
go.find_previous Find &Previous | Shift+F3
    Go to the token found before
    needs a run on show
view.tabs ✓ Sequences as Ta&bs
    One sequence in sight at a time instead of all as tiles
view.ghosts ✓ &Ghost Tokens | G | ghost
    Show rejected and ignored draft tokens in the text
view.follow ✓ &Follow Newest | Ctrl+L | follow
    Keep the newest token in sight
view.zoom_in Larger Te&xt | @ZoomIn
    Write the tokens larger, also by Ctrl and the wheel
view.zoom_out S&maller Text | @ZoomOut
    Write the tokens smaller, also by Ctrl and the wheel
view.zoom_reset Text at First Si&ze | Ctrl+0
    Write the tokens as large as the rest
view.theme_system ✓ S&ystem
    Light or dark as the desktop says
view.theme_light ✓ &Light
    Light colours
view.theme_dark ✓ &Dark
    Dark colours
view.palette Command &Palette… | Ctrl+Shift+P
    Find any action by a few letters of its name
view.layout_stream ✓ &Stream | Alt+1
    Lay out for the text: tokens large, settings and plots around them
view.layout_rollback ✓ &Rollback | Alt+2
    Lay out for rollbacks: depth and slots large, the text above them
view.layout_divergence ✓ &Divergence | Alt+3
    Lay out for comparisons: the lanes large, text and findings above them
view.layout_tune ✓ &Tune | Alt+4
    Lay out for settings: estimated speeds and the drafter large, text and options above them
view.layout_plots ✓ &Plots | Alt+5
    Lay out for a whole run: its plots one under the other, over one axis
view.reset_layout &Reset Layout
    Put the panels of this layout in their first places
view.panel_model ✓ &Model | Ctrl+1
    Show or hide the model's layers and memory
view.panel_run ✓ Run &Settings | Ctrl+2
    Show or hide the prompt and options
view.panel_rollback ✓ R&ollback Depth | Ctrl+3
    Show or hide the plot of undone tokens
view.panel_memory ✓ M&emory | Ctrl+4
    Show or hide the states of the snapshot slots and the attention cells in use
view.panel_divergence ✓ Di&vergence | Ctrl+5
    Show or hide the lanes side by side
view.panel_findings ✓ Fi&ndings | Ctrl+6
    Show or hide the failures that were recognised
view.panel_inspector ✓ Step Inspe&ctor | Ctrl+7
    Show or hide one round in full
view.panel_runs ✓ Run&s | Ctrl+8
    Show or hide the list of runs
view.panel_lab ✓ &Lab | Ctrl+9
    Show or hide faults, synthetic rates, scenarios, break rules, checks of llama.cpp builds and of
    kernels, and how far a bisect is
view.panel_conversation ✓ Conve&rsation
    Show or hide the turns of a conversation and what each took from memory
view.panel_speed ✓ &Acceptance and Time
    Show or hide how many drafted tokens are accepted, what each round took, and the tokens of each
    forward pass
view.panel_tuning ✓ T&une
    Show or hide what other settings would have reached, the drafter, and results of sweeps
plot.x_round ✓ X-Axis: &Rounds
    Count rounds on the x-axis of all plots
plot.x_token ✓ X-Axis: &Tokens
    Count emitted tokens on the x-axis of all plots
plot.x_time ✓ X-Axis: T&ime
    Count seconds without pauses on the x-axis of all plots
plot.show_all &Whole Run
    Bring all rounds into sight in the plots (Home in a plot)
plot.pin ✓ Pin Ran&ge
    Keep what is in sight of the plots when another run comes on show
plot.reset Reset &Zoom
    Follow the newest rounds at the first zoom (double click)
plot.overlay &Overlay a Run | O | overlay
    Draw the run chosen in the Runs panel, else the newest other one, over the one on show, and
    compare their figures
    needs a second run
plot.no_overlay &No Overlay | Shift+O
    Show one run alone again
    needs a run laid over the one on show
plot.export &Export Plot… | | export
    Write the plot in use as PNG, SVG or CSV
plot.copy_image &Copy as Image | | copy
    Copy a picture of the plot in use
help.pages &Help Pages | Shift+F1
    Read and search the pages of help
help.shortcuts Keyboard &Shortcuts | F1
    List all actions and their keys
help.copy_report &Copy Report
    Copy versions, model and the last log lines, for a bug report
help.copy_environment Copy &Environment
    Copy versions and machine as Markdown
help.about &About Draftscope | | info
    Version and licence
"""
"""An id, a tick for what is checkable, the text, keys (@ for a standard key), icon; then the tip,
what it needs, and why it is disabled while a server is in use."""

_MENUS = """\
&File
    file.open file.open_draft file.open_demo menu.recent | file.connect file.disconnect |
    file.open_trace file.open_results file.paste file.close_trace file.export file.export_run
    file.perfetto file.report file.share | file.copy_text file.copy_step file.copy_issue | file.quit
&Run
    run.start run.pause run.step run.stop run.again run.fork run.watch run.add_break |
    run.compare run.measure_plain run.measure_fidelity run.rescore run.check_rollback
    run.llama_library run.scenarios | go.first_divergence go.next_divergence
    go.previous_divergence
&Go
    go.previous_round go.next_round go.previous_rejection go.next_rejection go.inspect | go.find
    go.find_next go.find_previous
&View
    view.palette | view.ghosts view.follow view.tabs | view.zoom_in view.zoom_out
    view.zoom_reset | menu.panels menu.plots menu.layout view.reset_layout | menu.theme
&Help
    help.pages help.shortcuts help.copy_environment help.copy_report help.about
"""
_TOOLBAR = "file.open | run.start run.pause run.step run.stop run.compare |"


def _specs() -> Iterator[ActionSpec]:
    for head, lines in _sections(_ACTIONS):
        name, keys, icon = (*(part.strip() for part in head.split("|")), "", "")[:3]
        action_id, _, text = name.partition(" ")
        needs = "".join(line[6:] for line in lines if line.startswith("needs "))
        at_servers = "".join(line[12:] for line in lines if line.startswith("at servers: "))
        tip = " ".join(line for line in lines if not line.startswith(("needs ", "at servers: ")))
        yield ActionSpec(
            action_id,
            text.removeprefix("✓ "),
            tip,
            QKeySequence.StandardKey[keys[1:]] if keys.startswith("@") else keys,
            icon,
            text.startswith("✓ "),
            next((group for start, group in _GROUPS.items() if action_id.startswith(start)), ""),
            needs,
            at_servers,
        )


def _sections(text: str) -> Iterator[tuple[str, list[str]]]:
    """Lines that are not indented, each with the indented ones below it."""
    lines = text.splitlines()
    heads = [at for at, line in enumerate(lines) if not line.startswith(" ")]
    for at, end in zip(heads, [*heads[1:], len(lines)], strict=True):
        yield lines[at], [line.strip() for line in lines[at + 1 : end]]


def _entries(text: str) -> tuple[str, ...]:
    return tuple(SEPARATOR if word == "|" else word for word in text.split())


SPECS = tuple(_specs())
PANELS = tuple(spec for spec in SPECS if spec.id.startswith("view.panel_"))
MENUS = tuple((title, _entries(" ".join(lines))) for title, lines in _sections(_MENUS))
"""Menu titles and their entries; "menu.…" is a submenu that the window fills."""
TOOLBAR = _entries(_TOOLBAR)

SUBMENUS = {
    "plot.": "Plots",
    "view.panel_": "Panels",
    "view.theme_": "Theme",
    "view.layout_": "Layout",
}
"""What the ids of the actions in a submenu begin with, and its title."""


def submenu_of(action_id: str) -> str:
    """The title of the submenu that an action is in; empty for one in a menu itself."""
    titles = (title for prefix, title in SUBMENUS.items() if action_id.startswith(prefix))
    return next(titles, "")


class Actions:
    """The QActions of SPECS by id."""

    def __init__(self, parent: QObject) -> None:
        self._actions: dict[str, QAction] = {}
        self._groups: dict[str, QActionGroup] = {}
        self._at_server = False
        for spec in SPECS:
            self._actions[spec.id] = self._make(spec, parent)

    def __getitem__(self, action_id: str) -> QAction:
        return self._actions[action_id]

    def __iter__(self) -> Iterator[QAction]:
        return iter(self._actions.values())

    def explain(self, *, at_server: bool) -> None:
        """Say which actions a server in use disables, and why, in place of their tips. Others say
        what they need while they are disabled."""
        if at_server == self._at_server:
            return
        self._at_server = at_server
        for spec in SPECS:
            if spec.not_at_servers:
                self._tell(spec)

    def reason(self, spec: ActionSpec) -> str:
        """Why the server in use disables an action, else empty."""
        return spec.not_at_servers if self._at_server else ""

    def draw_icons(self, theme: Theme) -> None:
        for spec in SPECS:
            if spec.icon:
                self._actions[spec.id].setIcon(icon(spec.icon, theme))

    def _tell(self, spec: ActionSpec) -> None:
        action = self._actions[spec.id]
        action.setToolTip(self.reason(spec) or _tip(spec, action))

    def _make(self, spec: ActionSpec, parent: QObject) -> QAction:
        action = QAction(parent)
        action.setText(spec.text)
        action.setObjectName(spec.id)
        action.setShortcut(QKeySequence(spec.keys))
        action.setCheckable(spec.checkable)
        action.setToolTip(_tip(spec, action))
        if spec.needs:
            action.enabledChanged.connect(lambda _: self._tell(spec))
        if spec.group:
            if spec.group not in self._groups:
                self._groups[spec.group] = QActionGroup(parent)
            self._groups[spec.group].addAction(action)
        return action


def _tip(spec: ActionSpec, action: QAction) -> str:
    keys = action.shortcut().toString(QKeySequence.SequenceFormat.NativeText)
    tip = f"{spec.tip} ({keys})" if keys else spec.tip
    return tip if action.isEnabled() or not spec.needs else f"{tip}: needs {spec.needs}"
