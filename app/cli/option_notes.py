"""What a user should know of the options of a run, on stderr."""

from __future__ import annotations

import sys

from engine.draft.registry import DRAFTERS
from engine.options import RunOptions
from engine.options.idle_faults import notes_on


def print_notes(options: RunOptions, *, has_cache: bool = False) -> None:
    """A line for each note. has_cache: see notes_on."""
    spec = options.spec
    if spec.synthetic:
        print(
            "draftscope: note: acceptance is synthetic, the output is not the model's.",
            file=sys.stderr,
        )
    for note in notes_on(options, has_cache=has_cache):
        print(f"draftscope: note: {note}", file=sys.stderr)
    for drafter in (DRAFTERS[name] for name in spec.types):
        if note := drafter.note(drafter.options_of(spec)):
            print(f"draftscope: note: {note}", file=sys.stderr)
