"""Weights of one part of a model: tensors from the file, packed for its layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise, tee
from operator import attrgetter

import torch
from torch import Tensor

from engine.gguf.reader import StoredRows, TensorReader
from engine.machine.device import CPU
from engine.model.parts import Shapes
from kernels.linear import gated_linear, linear, linear_each, pack, panels_of
from kernels.linear.block_parts import Residual, Rows, as_llama_cpp
from kernels.linear.blocks import pack_blocks, stack_weights, stays_in_blocks, stays_in_halves
from kernels.linear.decode_with_llvm import HALVES
from kernels.linear.dequant import dequantise
from kernels.linear.packed import BlockData, PackedWeight
from kernels.moe import pack_expert_blocks, pack_experts
from kernels.moe.packed import SWIGLU, Activation, PackedExperts, put_together
from kernels.pointwise import add
from kernels.rows import take_columns, take_rows


@dataclass(frozen=True, slots=True)
class MatrixRows:
    """Matrix rows f32 [out, in], bf16 in mode bf16, or biases f32 [out]; with a `type` each row's
    GGUF blocks of that type, uint8 [out, bytes], as stored. rounding: the GGML type whose products
    round their other operand as llama.cpp does, or None. name: the tensor that blocks are part of.
    scale: factor still to be applied to blocks.

    Rows of blocks and rows of numbers can be rearranged alike.
    """

    data: Tensor
    type: str | None = None
    rounding: str | None = None
    name: str = ""
    scale: float | None = None

    def rearranged(self, rearrange: Callable[[Tensor], Iterable[Tensor]]) -> list[MatrixRows]:
        """The parts that `rearrange` makes of the data; it may move rows but not look inside."""
        return [replace(self, data=part) for part in rearrange(self.data)]


class Embedding:
    """Rows of a table, f32 or in the file's blocks; look-ups give the same bits either way."""

    __slots__ = ("_width", "rows")

    def __init__(self, rows: MatrixRows, width: int) -> None:
        """width: elements of a row. The data may also be panels (kernels.linear.panels_of)."""
        self.rows = rows
        self._width = width

    def __len__(self) -> int:
        """How many rows there are."""
        n, *_, width = self.rows.data.shape
        return n if self.rows.data.dim() == 2 else n * width

    @property
    def device(self) -> torch.device:
        return self.rows.data.device

    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens int64 [B, T] -> f32 [B, T, width]."""
        table, type = self.rows.data, self.rows.type
        if type is None:
            return take_rows(table, tokens)
        take = take_rows if table.dim() == 2 else take_columns
        blocks = take(table, tokens.flatten()).view(torch.uint8)
        n_elements = tokens.numel() * self._width
        return dequantise(blocks.view(-1), type, n_elements).view(*tokens.shape, self._width)


class Projection:
    """y = x W^T (+ bias), W possibly stacked from several matrices that share the input."""

    __slots__ = ("bias", "packed")

    def __init__(self, packed: PackedWeight, bias: Tensor | None = None) -> None:
        self.packed = packed
        self.bias = bias

    def __call__(
        self, x: Rows, *, invariant: bool = False, residual: Residual | None = None
    ) -> Tensor:
        """x [..., in] f32 -> [..., out] f32; invariant, residual: see kernels.linear.linear."""
        if self.bias is None:
            return linear(x, self.packed, invariant=invariant, residual=residual)
        y = add(linear(x, self.packed, invariant=invariant), self.bias)
        return y if residual is None else add(residual.x, y)

    def gated(
        self,
        x: Rows,
        operation: Callable[..., Tensor],
        constants: tuple[float, ...],
        reads: Projection,
        *,
        invariant: bool,
    ) -> Rows:
        """Combine the two halves of the results with a gating operation, as input of another
        projection: see kernels.linear.gated_linear."""
        if self.bias is None:
            return gated_linear(
                x, self.packed, operation, constants, reads=(reads.packed,), invariant=invariant
            )
        gate, up = self(x, invariant=invariant).chunk(2, -1)
        return operation(gate, up, *constants, invariant=invariant)


def project_each(x: Rows, projections: Sequence[Projection], *, invariant: bool) -> list[Tensor]:
    """Projections of the same rows, without biases: see kernels.linear.linear_each."""
    return linear_each(x, [each.packed for each in projections], invariant=invariant)


class Weights:
    """Takes tensors one at a time, by their name within `prefix`, and counts the memory kept.

    compute: the mode of large matrices; those that can stay in the file's blocks are kept as they
    are (kernels.linear.blocks), and "blocks" and "q8" convert others to f32, "blocks" on a GPU to
    bf16. device: where weights are kept; they are read and rearranged on the CPU. as_llama_cpp:
    products of matrices that do not stay in blocks round the other operand as llama.cpp does for
    the type in the file (kernels.linear.block_parts), as q8 does anyway; on the CPU, in modes f32
    and q8. n_bytes: memory of kept and packed tensors.
    """

    def __init__(
        self,
        reader: TensorReader,
        shapes: Shapes,
        compute: str,
        prefix: str = "",
        device: torch.device = CPU,
        *,
        as_llama_cpp: bool = False,
    ) -> None:
        self.compute = compute
        self.device = device
        self._as_llama_cpp = as_llama_cpp
        self.n_bytes = 0
        self._reader = reader
        self._shapes = shapes
        self._prefix = prefix

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._shapes

    def take(self, name: str) -> Tensor:
        """The tensor as f32 in its full shape, for rearranging; not counted."""
        full = self._prefix + name
        return self._reader.take(full, self._shapes[full])

    def numbers(self, name: str) -> MatrixRows:
        """A matrix as f32, for rearranging; not counted."""
        return MatrixRows(self.take(name), rounding=self._rounding(name))

    def keep(self, name: str) -> Tensor:
        """The tensor as f32, unchanged."""
        tensor = self.take(name).to(self.device)
        self.n_bytes += tensor.nbytes
        return tensor

    def keep_ids(self, name: str, n: int) -> Tensor:
        """A table of integers below n, int64."""
        full = self._prefix + name
        ids = self._reader.take_ids(full, self._shapes[full], n).to(self.device)
        self.n_bytes += ids.nbytes
        return ids

    def in_blocks(self, name: str) -> bool:
        """Whether a matrix stays in the blocks of the file."""
        return self._stays(self._prefix + name, self.compute)

    def _stays(self, full: str, mode: str) -> bool:
        """Whether a matrix stays in blocks. If the blocks have a scale, only integer products on
        the CPU apply it, after the product like llama.cpp; elsewhere it is multiplied into
        numbers."""
        type, shape = self._reader.type(full), self._shapes[full]
        stays = stays_in_blocks(type, mode, self.device)
        if self._reader.is_scaled(full):
            return stays and mode == "q8" and self.device.type == "cpu"
        if len(shape) == 2:  # experts and biases become numbers
            stays |= stays_in_halves(type, shape[1], mode, self.device)
        return stays

    def rows(self, name: str) -> MatrixRows:
        """A matrix or biases for rearranging, in blocks if possible; not counted."""
        return self._rows(name, self.compute)

    def _rows(self, name: str, mode: str) -> MatrixRows:
        full = self._prefix + name
        shape, type = self._shapes[full], self._reader.type(full)
        is_half = type in HALVES
        if self._stays(full, mode):
            blocks = self._reader.take_blocks(full, shape)
            scale = self._reader.scale(full)
            return MatrixRows(
                blocks,
                type,
                self._rounding(name) if is_half else None,
                full,
                None if scale is None or len(scale) > 1 else float(scale),
            )
        if is_half and mode == "bf16" and not self._reader.is_scaled(full):
            return MatrixRows(self._reader.take_halves(full, shape))
        return self.numbers(name)

    def _rounding(self, name: str) -> str | None:
        return self._reader.type(self._prefix + name) if self._as_llama_cpp else None

    def table(self, name: str) -> Embedding:
        """An embedding table: the exact values of the file in every mode.

        It stays in blocks if possible, except in f32, where the head may be the same matrix.
        """
        is_other = self.compute not in ("f32", "q8") or self._reader.is_scaled(self._prefix + name)
        rows = self._rows(name, "blocks" if is_other else self.compute)
        rows = replace(rows, data=rows.data.to(self.device))
        self.n_bytes += rows.data.nbytes
        return Embedding(rows, self._shapes[self._prefix + name][1])

    def head(self, embedding: Embedding) -> Projection:
        """The matrix of a head: its own, or else this table, in shared memory if both are as stored
        or if rows can be read from the packed matrix."""
        name = "token_embd.weight"
        if "output.weight" in self:
            return self.project("output.weight")
        rows, before = embedding.rows, self.n_bytes
        # a packed copy of F16 would be a second matrix, less exact than the table
        as_stored = self.in_blocks(name) or (rows.type == "F16" and self.compute == "bf16")
        if rows.type is None or as_stored:
            projection = self.stack([rows])
            if projection.packed.mode == "f32" or rows.type is not None:
                self.n_bytes = before
            return projection
        projection = self.project(name)
        panels = panels_of(projection.packed, rows.data) if rows.type == "BF16" else None
        if panels is not None:
            embedding.rows = replace(rows, data=panels)
            self._reader.release([rows.name])
            self.n_bytes -= rows.data.nbytes
        return projection

    def stored_rows(self, name: str) -> StoredRows:
        """A table for row look-ups as stored; not counted on the CPU, where it may be the mapped
        file."""
        full = self._prefix + name
        rows = self._reader.rows(full, self._shapes[full])
        if self.device.type == "cpu":
            return rows
        there = rows.to(self.device)
        self.n_bytes += there.n_bytes
        return there

    def project(self, *names: str) -> Projection:
        """The matrices under `names`, stacked by rows, in the compute mode."""
        return self.stack([self.rows(name) for name in names])

    def biased(self, *names: str) -> Projection:
        """The matrices `name.weight`, stacked by rows, with the biases `name.bias` that exist."""
        rows = [self.rows(f"{name}.weight") for name in names]
        if not any(f"{name}.bias" in self for name in names):
            return self.stack(rows)
        biases = [
            self.rows(f"{name}.bias")
            if f"{name}.bias" in self
            else MatrixRows(torch.zeros(self._shapes[f"{self._prefix}{name}.weight"][0]))
            for name in names
        ]
        return self.stack(rows, biases)

    def stack(
        self,
        parts: Sequence[MatrixRows],
        biases: Sequence[MatrixRows] | None = None,
        compute: str | None = None,
    ) -> Projection:
        """Matrices [out, in] (and their biases [out]) stacked by rows; numbers in this mode."""
        packed = self._beside(parts, compute or self.compute)
        bias = self._joined(biases).data.to(self.device) if biases else None
        self.n_bytes += packed.n_bytes + (bias.nbytes if bias is not None else 0)
        return Projection(packed, bias)

    def _beside(self, rows: Sequence[MatrixRows], mode: str) -> PackedWeight:
        """Stacked rows; neighbours of one type become one matrix."""
        joined, copied = [], Counter[str]()
        for _, group in groupby(rows, attrgetter("type", "rounding", "scale")):
            parts = list(group)
            joined.append(self._joined(parts))
            if not _in_one_piece([part.data for part in parts]):
                for part in parts:
                    copied[part.name] += len(part.data)
        # also those whose rows went to matrices of different types
        whole = [name for name, n in copied.items() if name and n == self._shapes[name][0]]
        self._reader.release(whole)
        return stack_weights([self._pack(one, mode) for one in joined])

    def _joined(self, parts: Sequence[MatrixRows]) -> MatrixRows:
        """Stacked rows of one type: in place if they are adjacent, else copied once."""
        tensors = [part.data for part in parts]
        if _in_one_piece(tensors):
            first = tensors[0]
            whole = (sum(map(len, tensors)), *first.shape[1:])
            return replace(parts[0], data=first.as_strided(whole, first.stride()))
        joined, names = torch.cat(tensors), {part.name for part in parts}
        if all(names) and len(joined) == sum(self._shapes[name][0] for name in names):
            joined = self._reader.settle(names, joined)
        return replace(parts[0], data=joined)

    def _pack(self, rows: MatrixRows, mode: str) -> PackedWeight:
        if rows.type is not None:
            packed = pack_blocks(rows.data.to(self.device), rows.type, mode, rows.scale)
        else:
            packed = pack(rows.data, self._without_blocks(mode), self.device)
        return as_llama_cpp(packed, rows.rounding) if rows.rounding else packed

    def _without_blocks(self, mode: str) -> str:
        """The mode of matrices that cannot stay in blocks."""
        if mode not in ("blocks", "q8"):
            return mode
        return "f32" if self.device.type == "cpu" else "bf16"

    def experts(self, activation: Activation = SWIGLU) -> PackedExperts:
        """The routed experts of this block in the compute mode, read one after the other."""
        names = ["ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight"]
        fused = "ffn_gate_up_exps.weight" in self
        if fused:
            names[:2] = ["ffn_gate_up_exps.weight"]
        elif not activation.gated:
            del names[0]
        in_blocks = all(self.in_blocks(name) for name in names)
        if self.device.type != "cpu" and in_blocks:
            rows = [self.rows(name) for name in names]
            parts = [BlockData(part.data.to(self.device), part.type or "") for part in rows]
            packed = pack_expert_blocks(parts, self.compute, activation)
        elif self.device.type == "cpu" and (self._as_llama_cpp or in_blocks):
            packed = put_together(self._experts_apart(names), self.compute, activation)
        else:
            *first, down = (self._each(name) for name in names)
            gate, up = _halves(first[0]) if fused else (first[0], first[-1])
            mode = self._without_blocks(self.compute)
            packed = pack_experts(gate if activation.gated else None, up, down, mode, activation)
        self.n_bytes += packed.n_bytes
        return packed

    def _experts_apart(self, names: Sequence[str]) -> Iterator[tuple[PackedWeight, PackedWeight]]:
        """For every expert, gate above up, or up alone, and down; in blocks if possible.

        Gate and up stay two matrices: joining would copy most of the file.
        """
        for *first, down in zip(*map(self._rows_each, names), strict=True):
            gate_up = stack_weights([self._pack(rows, self.compute) for rows in first])
            yield gate_up, self._pack(down, self.compute)

    def _rows_each(self, name: str) -> Iterator[MatrixRows]:
        if self.in_blocks(name):
            each = self.rows(name).rearranged(Tensor.unbind)
            scale = self._reader.scale(self._prefix + name)
            scales = [None] * len(each) if scale is None else scale.expand(len(each)).tolist()
            for rows, one in zip(each, scales, strict=True):
                yield replace(rows, scale=one)
        else:
            for data in self._each(name):
                yield MatrixRows(data, rounding=self._rounding(name))

    def _each(self, name: str) -> Iterator[Tensor]:
        """The slices of a tensor along its first dimension as f32, read on demand."""
        full = self._prefix + name
        for slice_ in self._reader.take_each(full, self._shapes[full]):
            yield slice_.to(self.device)


def _halves(both: Iterator[Tensor]) -> list[Iterator[Tensor]]:
    """The upper and the lower halves of stacked matrices."""
    first, second = tee(both)
    return [(pair.chunk(2)[0] for pair in first), (pair.chunk(2)[1] for pair in second)]


def _in_one_piece(tensors: Sequence[Tensor]) -> bool:
    """Whether the tensors are adjacent in memory, in order."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        return False
    return all(
        second.data_ptr() == first.data_ptr() + first.nbytes
        and second.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        for first, second in pairwise(tensors)
    )
