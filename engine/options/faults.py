"""Bugs of the field that can be switched on, to learn what they do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FaultSpec:
    """about: what goes wrong. policies: those that have the step that goes wrong, empty for all.
    shown_by: a comparison's lane on which it shows; the fault itself is added to it. in_sampler:
    it acts where tokens are chosen, and not in lanes that are given theirs. drafter: the one that
    has the step; such a fault spoils drafts alone, and shows in runs. in_cache: it acts where a
    prompt takes up what an earlier one left, as in conversations."""

    about: str
    policies: tuple[str, ...] = ()
    shown_by: str = "planes"
    drafter: str = ""
    in_sampler: bool = False
    in_cache: bool = False


FAULTS = {
    "keep-stale-kv": FaultSpec(
        "a restore leaves attention cells above the checkpoint", shown_by="checkpoint"
    ),
    "stale-logits": FaultSpec("the target's own token comes from the logits after the whole draft"),
    "stale-plane": FaultSpec(
        "rollbacks up to n_rs_seq are accepted, whatever the planes hold",
        ("planes",),
        "planes,ubatch=2",
    ),
    "no-conv-rollback": FaultSpec(
        "the convolution window keeps the rejected tokens",
        ("planes", "carry", "ring", "replay"),
        "ring",
    ),
    "bf16-snapshots": FaultSpec(
        "planes after the newest one, and checkpoints, are kept in bf16 next to a state in f32",
        ("planes", "carry", "checkpoint"),
    ),
    "plane-off-by-one": FaultSpec(
        "a rollback reads the plane next to its own", ("planes", "carry")
    ),
    "sampler-not-restored": FaultSpec(
        "after a rejection the sampler goes on after the whole draft: grammar, penalties and "
        "random numbers",
        shown_by="planes,free",
        in_sampler=True,
    ),
    "eagle3-boundary": FaultSpec(
        "the pair between two batches gets the row of the newer one's end", drafter="draft-eagle3"
    ),
    "eagle3-stale-row": FaultSpec(
        "a rejected token stays in the drafter's memory if another drafts next",
        drafter="draft-eagle3",
    ),
    "checkpoint-boundary": FaultSpec(
        "a context checkpoint is kept for one token more than its state holds", in_cache=True
    ),
    "checkpoint-invalidated": FaultSpec(
        "context checkpoints that fit a prompt are erased before one is used", in_cache=True
    ),
    "rollback-twice": FaultSpec(
        "where a prompt rolls the state back, that is done a second time",
        ("carry", "ring", "replay"),
        in_cache=True,
    ),
    "mtp-carried": FaultSpec(
        "the drafter's memory of a slot stays when another prompt takes it",
        drafter="draft-mtp",
        in_cache=True,
    ),
}

LANE_FAULTS = {
    name: fault for name, fault in FAULTS.items() if not fault.drafter and not fault.in_cache
}
"""Those that show in a comparison."""

MEMORY_FAULTS = {name: fault for name, fault in LANE_FAULTS.items() if not fault.in_sampler}
"""Those of them that act in lanes which are given their tokens, too."""
