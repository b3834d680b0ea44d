"""The acceptance rules by their names in the options."""

from __future__ import annotations

from collections.abc import Callable, Collection

from engine.decode.rejection import reject
from engine.decode.verify import Acceptance, match
from engine.draft.drafter import Draft
from engine.sampling.sampler import Rows, Sampler

Rule = Callable[[Draft, Rows, Sampler, Collection[int]], Acceptance]

RULES: dict[str, Rule] = {"match": match, "rejection": reject}
"""The keys are those of engine.options.ACCEPT_RULES."""
