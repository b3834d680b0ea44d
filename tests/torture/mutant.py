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
    line of tests.torture.mutant_plays. named: the rule that names it as a first cause, "" where
    none does; unseen: why nothing sees it, where nothing does; weak: why no better rule names it,
    of one in WEAK."""

    kind: str
    name: str
    place: str
    old: str
    new: str
    play: str
    named: str
    unseen: str = ""
    weak: str = ""

    @property
    def seen(self) -> str:
        """What sees it: compare, run (with its audit) or memory, as it is played; "" = nothing."""
        return "" if self.unseen else played_by(self.play)


def played_by(line: str) -> str:
    """What judges a play: compare, run or memory."""
    kind = line.split()[0]
    return "compare" if kind in ("lane", "lane3", "slots") else kind if kind == "memory" else "run"
