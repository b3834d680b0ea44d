"""Running, comparing, and stopping where a rule holds."""

from __future__ import annotations

from app.actions.spec import ActionSpec

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
    ),
    ActionSpec(
        "run.llama_library",
        "llama.cpp &Library…",
        "Choose the build of llama.cpp that its lanes use",
    ),
    ActionSpec(
        "run.add_break", "&Break Rule…", "Write a condition at which the run pauses", "F9", "break"
    ),
    ActionSpec(
        "run.measure_fidelity",
        "Measure Fi&delity",
        "Measure the compute mode against f32, on the model's own text",
        needs=_IDLE_MODEL,
    ),
)
