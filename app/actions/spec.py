"""Actions of the menus File, Run and Go, and what specifies an action."""

from __future__ import annotations

from dataclasses import dataclass

from PySide6.QtGui import QKeySequence

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


_Key = QKeySequence.StandardKey
_RUN = "a run on show"

FILE = (
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
        "Open an exported trace, or a capture, log or record of another engine; it takes no model",
        "Ctrl+Shift+T",
    ),
    ActionSpec(
        "file.open_results",
        "Open Res&ults…",
        "Open the results of draftscope sweep or draftscope tune",
    ),
    ActionSpec(
        "file.connect",
        "Connect to &Server…",
        "Observe a llama-server: its drafts, what it accepts and how it rolls back",
        "Ctrl+Shift+K",
        "connect",
    ),
    ActionSpec(
        "file.disconnect",
        "Disco&nnect",
        "Let go of the server; what was observed stays",
        needs="a server in use",
    ),
    ActionSpec(
        "file.close_trace",
        "C&lose Trace",
        "Go back from the opened trace to the runs of this session",
        "Ctrl+W",
        needs="an opened trace",
    ),
    ActionSpec(
        "file.clear_recent", "&Clear List", "Forget the models, traces and servers opened lately"
    ),
    ActionSpec(
        "file.export",
        "&Export Trace…",
        "Write all runs of the trace on show as CSV files",
        "Ctrl+E",
        "export",
        needs="a recorded run",
    ),
    ActionSpec(
        "file.export_run",
        "E&xport Run…",
        "Write the run on show, or its comparison, as CSV files",
        needs=_RUN,
    ),
    ActionSpec(
        "file.perfetto",
        "Per&fetto Trace…",
        "Write phases, counters and drafts of the run on show over time, for ui.perfetto.dev",
        needs=_RUN,
    ),
    ActionSpec(
        "file.report",
        "Re&port…",
        "Write the run on show, with the one over it, or the comparison as one HTML page to share",
        "Ctrl+Shift+E",
        needs=_RUN,
    ),
    ActionSpec(
        "file.share",
        "S&hare",
        "Write the runs of the trace on show, with text, plots and every round, as one HTML page "
        "that any browser opens, next to the last one",
        "Ctrl+Shift+S",
        needs=_RUN,
    ),
    ActionSpec(
        "file.copy_text", "&Copy Text", "Copy the generated text", _Key.Copy, "copy", needs=_RUN
    ),
    ActionSpec(
        "file.copy_step",
        "Copy Round as Mar&kdown",
        "Copy the round under the cursor, or the newest, as Markdown",
        "Ctrl+Alt+C",
        "copy-step",
        needs=_RUN,
    ),
    ActionSpec(
        "file.copy_issue",
        "Copy as &Issue",
        "Copy environment, model, options and the round in question as Markdown",
        "Ctrl+Shift+C",
        needs=_RUN,
    ),
    ActionSpec("file.quit", "&Quit", "Close the window", "Ctrl+Q"),
)


_IDLE_MODEL = "a model that is loaded and idle"

RUN = (
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
        not_at_servers="A server cannot be paused; Stop (Shift+F5) ends its requests",
    ),
    ActionSpec(
        "run.step",
        "One Ro&und",
        "Draft, verify and roll back once, then pause",
        "F10",
        "step",
        needs=_IDLE_MODEL,
        not_at_servers="A server does not stop between two rounds",
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
        "run.again",
        "Run A&gain with These Settings",
        "Begin the run or comparison on show anew, with the prompts and options that it had",
        needs="a run on show of this program while a model is loaded and idle",
    ),
    ActionSpec(
        "run.measure_plain",
        "Me&asure Plain",
        "Run what the run on show was asked for with its drafters and without, in alternation",
        needs="a run on show that this session started from its prompts, while nothing runs",
    ),
    ActionSpec(
        "run.watch",
        "&Watch Clients",
        "Let other programs talk to the server through a port of this window, and record them",
        needs="a server that is in use and idle",
    ),
    ActionSpec(
        "run.rescore",
        "Re-score with &Model…",
        "Let a model of this window judge every token of the run on show",
        needs="a run on show while nothing runs",
    ),
    ActionSpec(
        "run.compare",
        "&Compare",
        "Decode the prompt in several lanes and show where they come apart",
        "Ctrl+F5",
        "compare",
        needs=_IDLE_MODEL,
        not_at_servers="A server shows no logits to compare lanes by; open its model for that",
    ),
    ActionSpec(
        "run.check_rollback",
        "Check llama.cpp Rollbac&k",
        "Play every scenario of rollback on a build of llama.cpp, and show the verdicts in Gate",
        needs=_IDLE_MODEL,
        not_at_servers="A server shows no logits to compare lanes by; open its model for that",
    ),
    ActionSpec(
        "run.llama_library",
        "llama.cpp &Library…",
        "Choose the build of llama.cpp that its lanes use",
    ),
    ActionSpec(
        "run.fork",
        "Continue &from Here…",
        "Go on from the round or token under the cursor with other options or another token, as a "
        "run of its own",
        "Ctrl+Shift+F5",
        needs="a run of the model in use while nothing runs",
        not_at_servers="A server's memory cannot be rebuilt; open its model for that",
    ),
    ActionSpec(
        "run.add_break", "&Break Rule…", "Write a condition at which the run pauses", "F9", "break"
    ),
    ActionSpec(
        "run.scenarios",
        "Sc&enarios…",
        "Provoke a known failure, or a sequence of memory operations, chosen by what is seen of it",
    ),
    ActionSpec(
        "run.measure_fidelity",
        "Measure Fi&delity",
        "Measure the compute mode against f32, on the model's own text",
        needs=_IDLE_MODEL,
        not_at_servers="A server's arithmetic cannot be measured; open its model for that",
    ),
)

RUN_MENU = (
    "run.start",
    "run.pause",
    "run.step",
    "run.stop",
    "run.again",
    "run.fork",
    "run.watch",
    "run.add_break",
    SEPARATOR,
    "run.compare",
    "run.measure_plain",
    "run.measure_fidelity",
    "run.rescore",
    "run.check_rollback",
    "run.llama_library",
    "run.scenarios",
    SEPARATOR,
    "go.first_divergence",
    "go.next_divergence",
    "go.previous_divergence",
)


_DIVERGENCE = "a comparison that has come apart, or two runs whose texts part"

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
