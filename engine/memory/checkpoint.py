"""No snapshots: one live state per sequence; whoever may have to go back saves it first."""

from __future__ import annotations

from collections.abc import Collection

import torch

from engine.memory.planes import PlanesMemory
from engine.model.recurrence import RecurrentLayout


class CheckpointMemory(PlanesMemory):
    """A single plane whatever depth is asked for (n_rs_seq is 0): no partial rollback at all."""

    def __init__(
        self,
        layout: RecurrentLayout,
        n_seqs: int,
        n_rs_seq: int,
        device: torch.device,
        faults: Collection[str] = (),
    ) -> None:
        del n_rs_seq  # the same constructor for every policy
        super().__init__(layout, n_seqs, 0, device, faults)
