"""Triton kernels of mamba-ssm: selective_state_update, one token per call, and the chunked ones for
a prompt."""

from __future__ import annotations

import torch

from engine.conform.adapters import Engine
from engine.conform.cases import Rows, Shape
from engine.conform.packages import Package
from engine.conform.subject import Kernel, Memory, Prompts, RowByRow

_CHUNK = 64
_SSD = "mamba_ssm.ops.triton.ssd_"
_MODULE = "mamba_ssm.ops.triton.selective_state_update"


class _Update(RowByRow):
    """selective_state_update."""

    def __init__(self, shape: Shape, memory: Memory, package: Package) -> None:
        super().__init__(shape, memory, package)
        size = (shape.n_heads, shape.d_v, shape.d_k)
        self.slots = memory.pool(1, 1 + shape.n_sequences, *size, dtype=shape.dtype)[0]
        self.held = (self.slots,)

    def load(self, sequence: int, state: torch.Tensor) -> None:
        self.slots[1 + sequence] = state.transpose(1, 2).to(self.slots)

    def step(self, rows: Rows) -> torch.Tensor:
        dt, A, D, options = rows.wide()
        out: torch.Tensor = self.package.module(_MODULE).selective_state_update(
            *(self.slots, rows.x, dt, A, rows.B, rows.C, D),
            **options,
            state_batch_indices=self.memory.whole([1 + s for s in rows.sequences]),
        )
        return out

    def state(self, sequence: int) -> torch.Tensor:
        return self.slots[1 + sequence].transpose(1, 2).float()


class _Chunked(Prompts):
    """The kernels of mamba_chunk_scan_combined in their order, one sequence at a time."""

    def one(self, rows: Rows, first: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        state, passing, product, scan = (
            self.package.module(f"{_SSD}{x}")
            for x in ("chunk_state", "state_passing", "bmm", "chunk_scan")
        )
        x, B, C, dt = (t.unsqueeze(0) for t in (rows.x, rows.B, rows.C, rows.dt))
        decays, dt = state._chunk_cumsum_fwd(
            dt, rows.A, _CHUNK, dt_bias=rows.dt_bias, dt_softplus=True
        )
        states = state._chunk_state_fwd(B, x, dt, decays, states_in_fp32=True)
        before = None if first is None else first.mT.flatten(1).unsqueeze(0)
        states, last = passing._state_passing_fwd(
            states.flatten(-2), decays[..., -1], initial_states=before, chunk_size=_CHUNK
        )
        d_k, d_v = self.shape.state[1:]
        states, last = (t.unflatten(-1, (d_v, d_k)) for t in (states, last))
        products = product._bmm_chunk_fwd(C, B, _CHUNK, output_dtype=torch.float32)
        out = scan._chunk_scan_fwd(products, x, dt, decays, C, states, D=rows.D)[0]
        return out[0], last[0].transpose(1, 2)


ENGINE = Engine(
    package="mamba_ssm",
    versions=("2.3.2.post1",),
    kept=("mamba_ssm.ops.triton", "mamba_ssm.utils.determinism"),
    values={},
    kernels=(
        Kernel("selective_state_update", ("mamba2",), _Update, extras=("z", "far slots")),
        Kernel(
            "mamba_chunk_scan_combined", ("mamba2",), _Chunked, dtypes=("float32",), chunk=_CHUNK
        ),
    ),
)
