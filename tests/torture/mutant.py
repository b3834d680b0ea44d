"""What a plausible bug of the engine is made of, and the places where many of them are."""

from __future__ import annotations

from dataclasses import dataclass

POLICY = "engine.memory.recurrent:SnapshotPolicy"
PLANES = "engine.memory.planes:PlaneMemory"
RING = "engine.memory.ring:RingMemory"
REPLAY = "engine.memory.replay:ReplayMemory"
HYBRID = "engine.memory.hybrid:HybridMemory"
UNDO = "engine.decode.verify_loop:Rollback"
HELD = "engine.decode.held_sequences:HeldSequences"
KEPT = "engine.decode.held_sequences:ContextCheckpoints"
TABLE = "engine.memory.cells:CellTable"
CELLS = "engine.memory.cells:RecurrentCells"
SAMPLER = "engine.sampling.sampler:Sampler"
MATRIX = "engine.model.recurrent_states:MatrixState"
WINDOW = "engine.model.recurrence:InputWindow"


WEAK = ("engine-failed", "batch-differs", "state-wrong")
"""Rules that say that something is wrong, and not what."""
FRESH = (
    "every batch is wrong, also in an empty memory, so the rollback is not the cause; the finding "
    "says which row of which batch differs first"
)


@dataclass(frozen=True)
class Mutant:
    """kind: the part of the engine. place, old, new: as tests.torture.reworded takes them. play: a
    line of tests.torture.mutant_plays. seen: what sees it there: compare, run (with its audit),
    memory or text; "" = nothing, and unseen says why. named: the rule that names it as a first
    cause, "" where none does; weak: why no better one does, of a rule in WEAK."""

    kind: str
    name: str
    place: str
    old: str
    new: str
    play: str
    seen: str
    named: str
    unseen: str = ""
    weak: str = ""
