"""What there is to know of a drafter without making one; torch is not needed for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.option_fields import options_in

if TYPE_CHECKING:
    from engine.draft.drafter import Drafter
    from engine.draft.with_model import TokenDraws
    from engine.memory.hybrid import HybridMemory
    from engine.memory.reuse import LentMemories
    from engine.model.hybrid import HybridModel


@dataclass(frozen=True, slots=True)
class ModelNeed:
    """What a drafter takes from the model files. missing: what to say where they lack it. has_file:
    it is a file of its own."""

    name: str
    missing: str
    has_file: bool = True


DRAFT_MODEL = ModelNeed("draft model", "Open a draft model first")
MTP_HEAD = ModelNeed("MTP head", "The model file has no MTP head", has_file=False)
DFLASH_FILE = ModelNeed("DFlash drafter", "Open a DFlash drafter as draft model first")
DSPARK_FILE = ModelNeed("DSpark drafter", "Open a DSpark drafter as draft model first")
EAGLE3_FILE = ModelNeed("EAGLE-3 drafter", "Open an EAGLE-3 drafter as draft model first")


@dataclass(frozen=True, slots=True)
class DrafterInputs:
    """What a drafter is made from. draft: what its own file holds, a HybridModel or a
    LoadedDrafter; None without one. options: its part of SpecOptions. n_ctx: cells per sequence.
    draws: how tokens are drawn, None for the most probable one. memories: where those that take
    memory get it. faults: those of the run."""

    target: HybridModel
    draft: Any
    options: Any
    n_slots: int
    n_ctx: int
    n_ubatch: int
    batch_invariant: bool
    draws: TokenDraws | None
    memories: LentMemories
    faults: Collection[str] = ()

    def memory(self, drafter: str, make: Callable[..., HybridMemory]) -> HybridMemory:
        """What make(n_slots, n_ctx, device, batch_invariant=...) makes for a drafter, which may
        have served an earlier run; for equal names and options it makes the same."""
        sizes = self.n_slots, self.n_ctx
        key = drafter, self.options, *sizes, self.batch_invariant

        def made() -> HybridMemory:
            return make(*sizes, self.target.device, batch_invariant=self.batch_invariant)

        return self.memories.take(key, made)


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """One drafter, as the command line, the forms, runs and readers of a trace know it.

    about: what it drafts. make: raises OptionError where the models lack what it needs,
    LookupCacheError for a file. options: dataclass of what it is set by. field: where SpecOptions
    holds that, empty where it is a part of SpecOptions itself. longest: tokens of its longest
    draft, from its options. needs: None for drafters that look tokens up. reasons: why a draft of
    it is empty or short, beside COMMON_REASONS. n_bytes: what it takes beside the target's own
    memory, from its options, the figures of its file, sequences, cells of each, and the compute
    mode. note: what deserves to be said about its options, or empty.
    """

    name: str
    about: str
    make: Callable[[DrafterInputs], Drafter]
    options: type
    longest: Callable[[Any], int]
    field: str = ""
    needs: ModelNeed | None = None
    reasons: Mapping[str, str] = dataclasses.field(default_factory=dict)
    n_bytes: Callable[[Any, Any, int, int, str], int] | None = None
    note: Callable[[Any], str] = lambda options: ""

    def options_of(self, spec_options: Any) -> Any:
        """The drafter's own part of SpecOptions."""
        return getattr(spec_options, self.field) if self.field else spec_options

    def paths(self) -> set[tuple[str, ...]]:
        """Paths of the drafter's options within SpecOptions."""
        where = (self.field,) if self.field else ()
        return {(*where, *one.path) for one in options_in(self.options)}


AHEAD, BEHIND = OUT_OF_STEP = "state-ahead", "state-behind"
"""Reasons of a drafter that cannot draft because its state is not that of the text."""
COMMON_REASONS = {
    AHEAD: "the drafter's state is that of a longer text",
    BEHIND: "the drafter's state is that of a shorter text",
    "too-short-history": "fewer tokens than the n-gram and its continuation take",
    "no-match": "the n-gram has not occurred before",
    "p_min": "the next token was less probable than p_min",
    "n_min": "shorter than n_min, thrown away",
    "non-finite": "the drafter's logits are not finite",
    "grammar": "the grammar does not allow the next token",
    "n_max": "drafts of no token were asked for",
    "limit": "context or token limit leave no more room",
}
"""Why a draft is empty or shorter than its drafter's longest, whichever drafter it is."""
