"""The tensors of one part of a model on their way from the file into layers."""

from __future__ import annotations

import torch

from engine.gguf.reader import TensorReader
from engine.model.tensors import Shapes
from kernels.linear import Packed, linear, pack


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

    compute: the mode of large matrices. n_bytes: memory taken by kept and packed tensors.
    """

    def __init__(
        self, reader: TensorReader, shapes: Shapes, compute: str, prefix: str = ""
    ) -> None:
        self.compute = compute
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
        tensor = self.take(name)
        self.n_bytes += tensor.nbytes
        return tensor

    def project(self, *names: str) -> Projection:
        """The matrices under `names`, stacked by rows, in the compute mode."""
        return self.stack([self.take(name) for name in names])

    def stack(
        self,
        parts: list[torch.Tensor],
        biases: list[torch.Tensor] | None = None,
        compute: str | None = None,
    ) -> Projection:
        """Matrices [out, in] (and their biases [out]) stacked by rows, in mode `compute`."""
        bias = torch.cat(biases) if biases else None
        packed = pack(torch.cat(parts) if len(parts) > 1 else parts[0], compute or self.compute)
        self.n_bytes += packed.n_bytes + (bias.nbytes if bias is not None else 0)
        return Projection(packed, bias)
