"""A memory for tests: keeps everything, rolls nothing back, one plain loop per sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from engine.batch import UBatch, UBatchTensors
from engine.model.config import ModelConfig
from engine.model.mixers import layout_of
from engine.model.parts import CellKey
from engine.model.recurrence import RecurrenceInputs, RecurrentLayout, StateKey


@dataclass
class View:
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor
    positions: torch.Tensor
    seen: torch.Tensor


@dataclass
class NaiveAttention:
    """Per (layer, sequence) the keys and values so far, [H_kv, n, hd] each.

    windows: of layers that have one. positions: per sequence, the position of each cell.
    """

    windows: dict[CellKey, int] = field(default_factory=dict)
    ubatch: UBatch | None = None
    cells: dict[tuple[CellKey, int], tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict
    )
    positions: dict[int, list[int]] = field(default_factory=dict)

    def places(self, layer: CellKey) -> None:
        """None: the cells of a sequence are a list."""

    def update(self, layer: CellKey, k: torch.Tensor, v: torch.Tensor | None = None) -> View:
        assert self.ubatch is not None
        v = k if v is None else v
        rows = []
        for row, seq in enumerate(self.ubatch.seq_ids):
            new_k, new_v = k[row].transpose(0, 1), v[row].transpose(0, 1)
            if (layer, seq) in self.cells:
                old_k, old_v = self.cells[layer, seq]
                new_k, new_v = torch.cat((old_k, new_k), 1), torch.cat((old_v, new_v), 1)
            self.cells[layer, seq] = new_k, new_v
            rows.append((new_k, new_v))
        lengths = [keys.shape[1] for keys, _ in rows]
        # cells that no query may look at hold huge numbers: a wrong mask shows
        full_k, full_v = (
            torch.full((len(rows), x.shape[2], max(lengths), x.shape[3]), 1e9) for x in (k, v)
        )
        for row, (keys, values) in enumerate(rows):
            full_k[row, :, : lengths[row]] = keys
            full_v[row, :, : lengths[row]] = values
        mask = torch.zeros(len(rows), k.shape[1], max(lengths), dtype=torch.bool)
        positions = torch.full((len(rows), max(lengths)), 1 << 40)
        for row, seq in enumerate(self.ubatch.seq_ids):
            held = torch.tensor(self.positions[seq])
            asking = torch.from_numpy(self.ubatch.positions[row]).unsqueeze(-1)
            mask[row, :, : len(held)] = held <= asking
            positions[row, : len(held)] = held
        near = mask
        if layer in self.windows:
            asked = torch.from_numpy(self.ubatch.positions)[..., None]
            near = mask & (positions[:, None] > asked - self.windows[layer])
        return View(full_k, full_v, near, positions, mask)


@dataclass
class NaiveRecurrent:
    """Every state of every sequence, by (state, sequence)."""

    layout: RecurrentLayout
    ubatch: UBatch | None = None
    states: dict[tuple[StateKey, int], torch.Tensor] = field(default_factory=dict)

    def advance(self, key: StateKey, inputs: RecurrenceInputs) -> torch.Tensor:
        assert self.ubatch is not None
        recurrence, outputs = self.layout.states[key], []
        for row, seq in enumerate(self.ubatch.seq_ids):
            one = inputs.part(slice(row, row + 1), slice(None))
            start = self.states.get((key, seq), torch.zeros(1, *recurrence.shape))
            after = torch.full_like(start, torch.nan)
            outputs.append(recurrence.into(one, start, [after]))
            self.states[key, seq] = after
        return torch.cat(outputs)


class NaiveMemory:
    """Memory of a trunk, or without a layout of an MTP block."""

    batch_invariant = False

    def __init__(
        self, layout: RecurrentLayout | None = None, windows: dict[CellKey, int] | None = None
    ) -> None:
        self.attention = NaiveAttention(windows or {})
        self.recurrent = NaiveRecurrent(layout) if layout else None
        self.n_commits = 0

    @classmethod
    def for_model(cls, config: ModelConfig) -> NaiveMemory:
        windows = {i: size.window for i, size in config.cells().items() if size.window}
        return cls(layout_of(config), windows)

    @classmethod
    def for_head(cls, config: ModelConfig) -> NaiveMemory:
        """Of the MTP block, which has layer 0."""
        size = config.mtp.block.cells() if config.mtp else None
        return cls(windows={0: size.window} if size and size.window else {})

    def begin(self, ubatch: UBatch) -> UBatchTensors:
        self.attention.ubatch = ubatch
        for row, seq in enumerate(ubatch.seq_ids):
            held = self.attention.positions.setdefault(seq, [])
            held += ubatch.positions[row].tolist()
        if self.recurrent:
            self.recurrent.ubatch = ubatch
        return ubatch.on(torch.device("cpu"))

    def run(self, key, arguments, compute, ahead=None):
        return compute(*arguments)

    def commit(self) -> None:
        self.n_commits += 1


def ubatch_of(
    tokens: list[int] | torch.Tensor, pos0: int = 0, seq: int = 0, outputs: list[int] | None = None
) -> UBatch:
    """One sequence's tokens from position pos0 on, logits wanted everywhere unless given."""
    row = np.array(tokens, np.int64).reshape(1, -1)
    n = row.shape[1]
    return UBatch(
        tokens=row,
        positions=np.arange(pos0, pos0 + n).reshape(1, -1),
        seq_ids=(seq,),
        outputs=np.array(list(range(n)) if outputs is None else outputs, np.int64),
    )
