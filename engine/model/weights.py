"""The tensors of one part of a model on their way from the file into layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, tee

import torch

from engine.device import CPU
from engine.gguf.reader import TensorReader
from engine.model.rows import Rows
from engine.model.tensors import Shapes
from kernels.linear import Packed, beside, linear, pack, pack_blocks, stays_in_blocks
from kernels.moe import PackedExperts, pack_experts


class Projection:
    """y = x W^T (+ bias), W possibly made of several stacked matrices that share the input."""

    __slots__ = ("bias", "packed")

    def __init__(self, packed: Packed, bias: torch.Tensor | None = None) -> None:
        self.packed = packed
        self.bias = bias

    def __call__(self, x: torch.Tensor, *, invariant: bool = False) -> torch.Tensor:
        """x [..., in] f32 -> [..., out] f32; invariant: see kernels.linear.linear."""
        y = linear(x, self.packed, invariant=invariant)
        return y if self.bias is None else y + self.bias


class Weights:
    """Takes tensors one at a time, by their name within `prefix`, and counts what is kept.

    compute: the mode of large matrices; those that stay in the blocks of the file are kept as they
    are (kernels.linear.stays_in_blocks), and "blocks" takes others as bf16 on a GPU, f32 on the
    processor. device: where what is kept goes; tensors are read and rearranged on the processor.
    n_bytes: memory taken by kept and packed tensors.
    """

    def __init__(
        self,
        reader: TensorReader,
        shapes: Shapes,
        compute: str,
        prefix: str = "",
        device: torch.device = CPU,
    ) -> None:
        self.compute = compute
        self._device = device
        self.n_bytes = 0
        self._reader = reader
        self._shapes = shapes
        self._prefix = prefix

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._shapes

    def take(self, name: str) -> torch.Tensor:
        """The tensor as f32 in its full shape, for rearranging; not counted."""
        full = self._prefix + name
        return self._reader.take(full, self._shapes[full])

    def keep(self, name: str) -> torch.Tensor:
        """The tensor as f32, to stay as it is."""
        tensor = self.take(name).to(self._device)
        self.n_bytes += tensor.nbytes
        return tensor

    def in_blocks(self, name: str) -> bool:
        """Whether a matrix stays in the blocks of the file."""
        return stays_in_blocks(self._reader.type(self._prefix + name), self.compute, self._device)

    def rows(self, name: str) -> Rows:
        """A matrix or biases for rearranging, in blocks if they stay in them; not counted."""
        full = self._prefix + name
        if self.in_blocks(name):
            return Rows(self._reader.take_blocks(full, self._shapes[full]), self._reader.type(full))
        return Rows(self.take(name))

    def project(self, *names: str) -> Projection:
        """The matrices under `names`, stacked by rows, in the compute mode."""
        return self.stack([self.rows(name) for name in names])

    def stack(
        self,
        parts: Sequence[Rows | torch.Tensor],
        biases: Sequence[Rows] | None = None,
        compute: str | None = None,
    ) -> Projection:
        """Matrices [out, in] (and their biases [out]) stacked by rows; numbers in this mode."""
        rows = [part if isinstance(part, Rows) else Rows(part) for part in parts]
        packed = beside([
            self._pack(_joined(list(group)), compute or self.compute)
            for _, group in groupby(rows, lambda part: part.type)
        ])  # fmt: skip
        bias = _joined(biases).data.to(self._device) if biases else None
        self.n_bytes += packed.n_bytes + (bias.nbytes if bias is not None else 0)
        return Projection(packed, bias)

    def _pack(self, rows: Rows, mode: str) -> Packed:
        if rows.type is not None:
            return pack_blocks(rows.data.to(self._device), rows.type, mode)
        return pack(rows.data, self._without_blocks(mode), self._device)

    def _without_blocks(self, mode: str) -> str:
        """The mode of what cannot stay in blocks."""
        if mode != "blocks":
            return mode
        return "f32" if self._device.type == "cpu" else "bf16"

    def experts(self) -> PackedExperts:
        """The routed experts of this block in the compute mode, read one after the other."""
        gate: Iterable[torch.Tensor]
        up: Iterable[torch.Tensor]
        if "ffn_gate_up_exps.weight" in self:
            first, second = tee(self._each("ffn_gate_up_exps.weight"))
            gate = (both.chunk(2)[0] for both in first)
            up = (both.chunk(2)[1] for both in second)
        else:
            gate, up = self._each("ffn_gate_exps.weight"), self._each("ffn_up_exps.weight")
        down, mode = self._each("ffn_down_exps.weight"), self._without_blocks(self.compute)
        packed = pack_experts(gate, up, down, mode)
        self.n_bytes += packed.n_bytes
        return packed

    def _each(self, name: str) -> Iterable[torch.Tensor]:
        """The slices of a tensor along its first dimension as f32, each read when asked for."""
        full = self._prefix + name
        for slice_ in self._reader.take_each(full, self._shapes[full]):
            yield slice_.to(self._device)


def _joined(parts: Sequence[Rows]) -> Rows:
    """Rows of one type below each other."""
    if len(parts) == 1:
        return parts[0]
    return Rows(torch.cat([part.data for part in parts]), parts[0].type)
