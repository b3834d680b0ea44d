"""A memory for tests: keeps everything, rolls nothing back, one plain loop per sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from engine.batch import UBatch
from engine.model.config import ModelConfig, SsmConfig
from engine.model.conv_window import ConvInputs
from engine.model.delta_state import DeltaInputs
from engine.model.recurrence import StateKey
from kernels.conv import causal_conv
from kernels.delta_rule import gated_delta_rule


@dataclass
class View:
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor


@dataclass
class NaiveAttention:
    """Per (layer, sequence) the keys and values so far, [H_kv, n, hd] each.

    positions: per sequence, the position of each cell.
    """

    ubatch: UBatch | None = None
    cells: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    positions: dict[int, list[int]] = field(default_factory=dict)

    def update(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> View:
        assert self.ubatch is not None
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
            torch.full((len(rows), k.shape[2], max(lengths), k.shape[3]), 1e9) for _ in range(2)
        )
        for row, (keys, values) in enumerate(rows):
            full_k[row, :, : lengths[row]] = keys
            full_v[row, :, : lengths[row]] = values
        mask = torch.zeros(len(rows), k.shape[1], max(lengths), dtype=torch.bool)
        for row, seq in enumerate(self.ubatch.seq_ids):
            held = torch.tensor(self.positions[seq])
            asking = torch.from_numpy(self.ubatch.positions[row]).unsqueeze(-1)
            mask[row, :, : len(held)] = held <= asking
        return View(full_k, full_v, mask)


@dataclass
class NaiveRecurrent:
    """Per (layer, sequence) the state S [H_v, d, d] and the window [K - 1, C]."""

    ssm: SsmConfig
    ubatch: UBatch | None = None
    states: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    windows: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def advance(self, key: StateKey, inputs: ConvInputs | DeltaInputs) -> torch.Tensor:
        assert self.ubatch is not None
        outputs = []
        for row, seq in enumerate(self.ubatch.seq_ids):
            one, at = inputs.part(slice(row, row + 1), slice(None)), (key.layer, seq)
            if isinstance(one, ConvInputs):
                zeros = torch.zeros(self.ssm.d_conv - 1, self.ssm.conv_dim)
                window = self.windows.get(at, zeros).unsqueeze(0)
                y, history = causal_conv(one.x, one.weight, window)
                self.windows[at] = history[0, one.x.shape[1] :].clone()
            else:
                zeros = torch.zeros(self.ssm.n_v_heads, self.ssm.d_state, self.ssm.d_state)
                state = self.states.get(at, zeros).unsqueeze(0)
                y, snapshots = gated_delta_rule(*one, state, grouped=self.ssm.grouped)
                self.states[at] = snapshots[0, 0]
            outputs.append(y)
        return torch.cat(outputs)


class NaiveMemory:
    """Memory of a trunk, or with `recurrent` left out of an MTP block."""

    batch_invariant = False

    def __init__(self, ssm: SsmConfig | None = None) -> None:
        self.attention = NaiveAttention()
        self.recurrent = NaiveRecurrent(ssm) if ssm else None
        self.n_commits = 0

    @classmethod
    def for_model(cls, config: ModelConfig) -> NaiveMemory:
        return cls(config.ssm)

    def begin(self, ubatch: UBatch) -> None:
        self.attention.ubatch = ubatch
        for row, seq in enumerate(ubatch.seq_ids):
            held = self.attention.positions.setdefault(seq, [])
            held += ubatch.positions[row].tolist()
        if self.recurrent:
            self.recurrent.ubatch = ubatch

    def run(self, key, arguments, compute):
        return compute(*arguments)

    def commit(self) -> None:
        self.n_commits += 1


def ubatch_of(
    tokens: list[int] | torch.Tensor, pos0: int = 0, seq: int = 0, outputs: list[int] | None = None
) -> UBatch:
    """One sequence's tokens from position pos0 on, logits wanted everywhere unless told."""
    row = np.array(tokens, np.int64).reshape(1, -1)
    n = row.shape[1]
    return UBatch(
        tokens=row,
        positions=np.arange(pos0, pos0 + n).reshape(1, -1),
        seq_ids=(seq,),
        outputs=np.array(list(range(n)) if outputs is None else outputs, np.int64),
    )
