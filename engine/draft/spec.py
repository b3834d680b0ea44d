"""Drafter specifications: facts about a drafter without making one, and options of model drafters.
Does not import torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from engine.option_fields import FormRow, NumberRange, option, options_in

if TYPE_CHECKING:
    from engine.draft.drafter import Drafter
    from engine.memory.hybrid import HybridMemory, LentMemories
    from engine.model.hybrid import HybridModel
    from engine.sampling.distribution import TokenDraws

DRAFT_HEADS = {
    "auto": "a 2-bit copy selects the candidates where that is faster",
    "full": "the logits of the whole vocabulary",
}


@dataclass(frozen=True, kw_only=True)
class ModelDraftOptions:
    """Limits on drafts: p_min is a floor on each drafted token's own confidence, not on their
    product; a draft shorter than n_min is discarded. draft_head: one of DRAFT_HEADS
    (engine.model.mtp)."""

    GROUP: ClassVar[str] = "speculation"
    n_max: int = option(
        3,
        "--spec-draft-n-max  longest draft of draft-* drafters, in tokens",
        NumberRange(1, 64, "Choose a length from 1 to 64."),
        FormRow("n_max", 1, 64),
    )
    n_min: int = option(
        0, "--spec-draft-n-min  shorter drafts are discarded", FormRow("n_min", 0, 64)
    )
    p_min: float = option(
        0.0,
        "--spec-draft-p-min P  a draft ends before the first token with a lower probability",
        NumberRange(0.0, 1.0, "Use 0 to switch it off."),
        FormRow("p_min", 0.0, 1.0),
    )
    draft_head: str = option(
        "auto",
        "--spec-draft-head HEAD  how draft-mtp finds its tokens if it drafts greedily and "
        "without p_min: {either}. auto selects candidates with a 2-bit copy of the output head, "
        "and computes exact logits only for these",
        choices=DRAFT_HEADS,
    )


ModelNeed = tuple[str, str]
"""What a drafter needs from model files, and the message if it is missing. Except for MTP_HEAD it
is always a file of its own."""
DRAFT_MODEL = ("draft model", "Open a draft model first")
MTP_HEAD = (
    "MTP head",
    "The model file has no MTP head: open a file with its MTP block as draft model",
)
DFLASH_FILE = ("DFlash drafter", "Open a DFlash drafter as draft model first")
DSPARK_FILE = ("DSpark drafter", "Open a DSpark drafter as draft model first")
EAGLE3_FILE = ("EAGLE-3 drafter", "Open an EAGLE-3 drafter as draft model first")


@dataclass(frozen=True, slots=True)
class DrafterInputs:
    """What a drafter is made from. draft: the contents of its own file, a HybridModel or a
    LoadedDrafter; None without one. options: its part of SpecOptions. n_ctx: cells per sequence.
    draws: how tokens are sampled, None for the most probable one. memories: where stateful drafters
    get their memory. faults: those of the run. tree: most children of a token at each level of a
    draft, empty for chains (engine.draft.drafter)."""

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
    tree: tuple[int, ...] = ()

    def memory(self, drafter: str, make: Callable[..., HybridMemory]) -> HybridMemory:
        """A memory made by make(n_slots, n_ctx, device, batch_invariant=...), or one of an earlier
        run with equal name and options."""
        sizes = self.n_slots * math.prod(self.tree), self.n_ctx
        key = drafter, self.options, *sizes, self.batch_invariant

        def made() -> HybridMemory:
            return make(*sizes, self.target.device, batch_invariant=self.batch_invariant)

        return self.memories.take(key, made)


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """One drafter, for the command line, the forms, runs and readers of a trace.

    about: what it drafts. make: raises OptionError if the models lack what it needs,
    LookupCacheError for a file. options: dataclass of its options. field: their field in
    SpecOptions, empty if they are a base of SpecOptions itself. longest: length of its longest
    draft, from its options. needs: None for lookup drafters. branches: whether it drafts trees.
    reasons: why a draft of it is empty or short, in addition to COMMON_REASONS. n_bytes: its own
    memory, from its options, the figures of its file, sequences, cells of each, and the compute
    mode. note: a sentence about its options, or empty.
    """

    name: str
    about: str
    make: Callable[[DrafterInputs], Drafter]
    options: type
    longest: Callable[[Any], int]
    field: str = ""
    needs: ModelNeed | None = None
    branches: bool = False
    reasons: Mapping[str, str] = dataclasses.field(default_factory=dict)
    n_bytes: Callable[[Any, Any, int, int, str], int] | None = None
    note: Callable[[Any], str] = lambda options: ""

    @property
    def has_file(self) -> bool:
        """Whether it always needs a file of its own."""
        return self.needs not in (None, MTP_HEAD)

    def options_of(self, spec_options: Any) -> Any:
        """The drafter's own part of SpecOptions."""
        return getattr(spec_options, self.field) if self.field else spec_options

    def paths(self) -> set[tuple[str, ...]]:
        """Paths of its options within SpecOptions."""
        where = (self.field,) if self.field else ()
        return {(*where, *one.path) for one in options_in(self.options)}


AHEAD, BEHIND = OUT_OF_STEP = "state-ahead", "state-behind"
"""Reasons of a drafter whose state does not match the text."""
ADAPT = "adapt"
COMMON_REASONS = {
    ADAPT: "the rule of adaptive depth allows no more tokens",
    AHEAD: "the drafter's state is that of a longer text",
    BEHIND: "the drafter's state is that of a shorter text",
    "too-short-history": "fewer tokens than the n-gram and its continuation need",
    "no-match": "the n-gram has not occurred before",
    "p_min": "the next token was less probable than p_min",
    "n_min": "shorter than n_min, discarded",
    "non-finite": "the drafter's logits are not finite",
    "grammar": "the grammar does not allow the next token",
    "n_max": "drafts of 0 tokens were requested",
    "limit": "context or token limit reached",
}
"""Reasons that any drafter may give for an empty or short draft."""
