"""Running, comparing, and stopping where a rule holds."""

from __future__ import annotations

from app.actions.spec import SEPARATOR, ActionSpec

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
        not_at_servers="A server's arithmetic cannot be measured; open its model for that",
    ),
)

RUN_MENU = (
    "run.start",
    "run.pause",
    "run.step",
    "run.stop",
    "run.watch",
    "run.add_break",
    SEPARATOR,
    "run.compare",
    "run.measure_fidelity",
    "run.rescore",
    "run.llama_library",
    "menu.scenarios",
    SEPARATOR,
    "go.first_divergence",
    "go.next_divergence",
    "go.previous_divergence",
)
