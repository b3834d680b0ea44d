"""The snapshot policies by the name that `--rollback` gives them."""

from __future__ import annotations

from engine.memory.carry import CarryMemory
from engine.memory.checkpoint import CheckpointMemory
from engine.memory.planes import PlanesMemory
from engine.memory.recurrent import SnapshotPolicy
from engine.memory.replay import ReplayMemory
from engine.memory.ring import RingMemory

POLICIES: dict[str, type[SnapshotPolicy]] = {
    "planes": PlanesMemory,
    "carry": CarryMemory,
    "ring": RingMemory,
    "replay": ReplayMemory,
    "checkpoint": CheckpointMemory,
}
