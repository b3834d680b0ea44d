"""Models, traces, and copies of what is on show."""

from __future__ import annotations

from PySide6.QtGui import QKeySequence

from app.actions.spec import ActionSpec

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
        "file.report",
        "Re&port…",
        "Write the run on show, with the one over it, or the comparison as one HTML page to share",
        "Ctrl+Shift+E",
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
