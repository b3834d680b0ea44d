"""What a user should know of the options of a run, on stderr."""

from __future__ import annotations

from app.cli.output import note
from engine.draft.registry import DRAFTERS
from engine.options import RunOptions
from engine.options.idle_faults import notes_on


def print_notes(options: RunOptions, *, has_cache: bool = False) -> None:
    """A line for each note. has_cache: see notes_on."""
    spec = options.spec
    if spec.synthetic:
        note("acceptance is synthetic, the output is not the model's.")
    for sentence in notes_on(options, has_cache=has_cache):
        note(sentence)
    for drafter in (DRAFTERS[name] for name in spec.types):
        if sentence := drafter.note(drafter.options_of(spec)):
            note(sentence)
