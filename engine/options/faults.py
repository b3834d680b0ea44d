"""Bugs of the field that can be switched on, to learn what they do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FaultSpec:
    """about: what goes wrong. policies: those that have the step that goes wrong, empty for all.
    shown_by: a comparison's lane on which it shows; the fault itself is added to it. drafter: the
    one that has the step; such a fault spoils drafts alone, and shows in runs."""

    about: str
    policies: tuple[str, ...] = ()
    shown_by: str = "planes"
    drafter: str = ""


FAULTS = {
    "keep-stale-kv": FaultSpec(
        "a restore leaves attention cells above the checkpoint", shown_by="checkpoint"
    ),
    "stale-logits": FaultSpec(
        "the target's own token comes from the logits behind the whole draft"
    ),
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
    "plane-off-by-one": FaultSpec("a rollback reads the plane beside its own", ("planes", "carry")),
    "eagle3-boundary": FaultSpec(
        "the pair between two batches gets the row of the newer one's end", drafter="draft-eagle3"
    ),
    "eagle3-stale-row": FaultSpec(
        "a rejected token stays in the drafter's memory if another drafts next",
        drafter="draft-eagle3",
    ),
}

MEMORY_FAULTS = {name: fault for name, fault in FAULTS.items() if not fault.drafter}
"""Those that spoil the target's memory or what is chosen from it."""
