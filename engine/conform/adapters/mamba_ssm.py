"""Triton's selective_state_update of mamba-ssm: a token a call, so a pass is played row by row and
keeps a copy of the state after each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.conform.adapters import Engine
from engine.conform.cases import Rows, Shape
from engine.conform.packages import Package
from engine.conform.subject import Kernel, Memory

_MODULE = "mamba_ssm.ops.triton.selective_state_update"


class _RowByRow:
    """Slot 0 belongs to no sequence."""

    def __init__(self, shape: Shape, memory: Memory, package: Package) -> None:
        self.shape, self.memory, self.package = shape, memory, package
        size = (shape.n_heads, shape.d_v, shape.d_k)
        self.slots = memory.empty(1 + shape.n_sequences, *size, dtype=shape.dtype)
        self.kept: dict[int, list[torch.Tensor]] = {}

    def load(self, sequence: int, state: torch.Tensor) -> None:
        self.slots[1 + sequence] = state.transpose(1, 2).to(self.slots)

    def step(self, rows: Rows) -> torch.Tensor:
        """One row of each sequence."""
        heads, d, n = self.shape.n_heads, self.shape.d_v, self.shape.d_k
        out = self.package.module(_MODULE).selective_state_update(
            self.slots,
            rows.x,
            rows.dt.unsqueeze(-1).expand(-1, heads, d),
            rows.A.view(heads, 1, 1).expand(heads, d, n),
            rows.B,
            rows.C,
            rows.D.view(heads, 1).expand(heads, d),
            dt_bias=rows.dt_bias.view(heads, 1).expand(heads, d),
            dt_softplus=True,
            state_batch_indices=self.memory.whole([1 + s for s in rows.sequences]),
        )
        assert isinstance(out, torch.Tensor)
        return out

    def verify(self, rows: Rows) -> torch.Tensor:
        outputs = []
        for i, sequence in enumerate(rows.sequences):
            one, kept = rows.one(i), []
            before = self.slots[1 + sequence].clone()
            for row in range(one.lengths[0]):
                outputs.append(self.step(one.row(row)))
                kept.append(self.slots[1 + sequence].clone())
            self.slots[1 + sequence], self.kept[sequence] = before, kept
        return torch.cat(outputs)

    def accept(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        for sequence, count in zip(sequences, counts, strict=True):
            self.slots[1 + sequence] = self.kept[sequence][count - 1]

    def decode(self, rows: Rows) -> torch.Tensor:
        return self.step(rows)

    def state(self, sequence: int) -> torch.Tensor:
        return self.slots[1 + sequence].transpose(1, 2).float()


ENGINE = Engine(
    package="mamba_ssm",
    versions=("2.3.2.post1",),
    kept=(_MODULE, "mamba_ssm.ops.triton.softplus"),
    values={},
    kernels=(Kernel("selective_state_update", ("mamba2",), _RowByRow),),
)
