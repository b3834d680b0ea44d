"""Convolutions of causal-conv1d: the compiled ones, their torch references, and the Triton kernel
that takes windows out of sequences packed in one row."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.conform.adapters import Engine
from engine.conform.cases import Rows, Shape
from engine.conform.packages import Package
from engine.conform.subject import Kernel, Memory, Prompts, as_a_pass

_FN = "causal_conv1d.causal_conv1d_interface"
_VARLEN = "causal_conv1d.causal_conv1d_varlen"


class _Update:
    """causal_conv1d_update over circular windows: cache_seqlens says where a pass continues, so
    that rejected rows are overwritten."""

    def __init__(self, shape: Shape, memory: Memory, package: Package) -> None:
        self.shape, self.memory, self.package = shape, memory, package
        self.width = shape.d_k - 1
        size = (shape.n_heads, self.width + shape.n_tokens)
        self.windows = memory.empty(1 + shape.n_sequences, *size)
        self.taken = memory.whole([self.width] * (1 + shape.n_sequences))

    def load(self, sequence: int, state: torch.Tensor) -> None:
        self.windows[1 + sequence, :, : self.width] = state
        self.taken[1 + sequence] = self.width

    def verify(self, rows: Rows) -> torch.Tensor:
        slots = self.memory.whole([1 + s for s in rows.sequences])
        x = rows.x.unflatten(0, (len(rows.sequences), -1)).transpose(1, 2).contiguous()
        return self.called(rows, x, slots).transpose(1, 2).flatten(0, 1)

    def called(self, rows: Rows, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """The kernel's outputs [sequences, channels, rows of each]."""
        out: torch.Tensor = self.package.module(_FN).causal_conv1d_update(
            *(x, self.windows, rows.weight, rows.bias, "silu"),
            cache_seqlens=self.taken[slots],
            conv_state_indices=slots,
        )
        return out

    def accept(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        self.taken[[1 + s for s in sequences]] += self.memory.whole(counts)

    decode = as_a_pass

    def state(self, sequence: int) -> torch.Tensor:
        first = int(self.taken[1 + sequence]) - self.width
        at = torch.arange(first, first + self.width) % self.windows.shape[2]
        return self.windows[1 + sequence][:, at]


class _UpdateRef(_Update):
    """causal_conv1d_update_ref, which takes no window indices."""

    def called(self, rows: Rows, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        windows = self.windows[slots]
        out: torch.Tensor = self.package.module(_FN).causal_conv1d_update_ref(
            x, windows, rows.weight, rows.bias, "silu", cache_seqlens=self.taken[slots]
        )
        self.windows[slots] = windows
        return out


class _Sequences(Prompts):
    """causal_conv1d_fn, one sequence per call, channels last."""

    name = "causal_conv1d_fn"

    def one(self, rows: Rows, first: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        out, last = getattr(self.package.module(_FN), self.name)(
            *(self.aligned(rows.x).T.unsqueeze(0), rows.weight, rows.bias),
            initial_states=None if first is None else first.T.contiguous().T.unsqueeze(0),
            return_final_states=True,
            activation="silu",
        )
        return out[0].T, last[0]

    def aligned(self, x: torch.Tensor) -> torch.Tensor:
        """Rows whose stride is a multiple of 8, as the kernel requires."""
        wide = self.memory.empty(len(x), -(-x.shape[1] // 8) * 8)
        wide[:, : x.shape[1]] = x
        return wide[:, : x.shape[1]]


class _SequencesRef(_Sequences):
    """causal_conv1d_ref."""

    name = "causal_conv1d_ref"


class _Windows(_SequencesRef):
    """causal_conv1d_varlen_states, with the outputs of causal_conv1d_ref. It takes no initial
    windows: they are prepended as rows."""

    def run(self, rows: Rows, first: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = super().run(rows, first)[0]
        parts = [rows.x[part] for part in rows.slices()]
        if first is not None:
            parts = [torch.cat((window.T, x)) for window, x in zip(first, parts, strict=True)]
        ends = self.memory.whole([0, *(len(x) for x in parts)]).cumsum(0, dtype=torch.int32)
        states = self.package.module(_VARLEN).causal_conv1d_varlen_states(
            torch.cat(parts), ends, self.shape.d_k - 1
        )
        return outputs, states


_F32, _NVCC = ("float32",), "compiled with the package (causal_conv1d_cuda)"
ENGINE = Engine(
    package="causal_conv1d",
    versions=("1.7.0",),
    kept=(_FN, _VARLEN),
    values={},
    kernels=(
        Kernel(
            "causal_conv1d_update", ("conv",), _Update, dtypes=_F32, equal_lengths=True,
            compiled=_NVCC,
        ),
        Kernel("causal_conv1d_fn", ("conv",), _Sequences, dtypes=_F32, chunk=64, compiled=_NVCC),
        Kernel(
            "causal_conv1d_update_ref", ("conv",), _UpdateRef, dtypes=_F32, equal_lengths=True
        ),
        Kernel("causal_conv1d_ref", ("conv",), _SequencesRef, dtypes=_F32, chunk=64),
        Kernel("causal_conv1d_varlen_states", ("conv",), _Windows, dtypes=_F32, chunk=64),
    ),
)  # fmt: skip
