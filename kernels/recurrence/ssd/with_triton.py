"""State-space duality on a GPU, and the fold of its log.

Few tokens run one by one, by kernels.recurrence.ssd.recurrence_with_triton; prompts run in chunks,
by kernels.recurrence.ssd.chunks_with_triton.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl

from kernels.recurrence.ssd.chunks_with_triton import run_chunks
from kernels.recurrence.ssd.naive import SsdArguments, SsdInputs, SsdLog, SsdSlotArguments
from kernels.recurrence.ssd.recurrence_with_triton import ROWS, run_recurrence
from kernels.recurrence.with_triton import FEW_TOKENS, run_into
from kernels.triton_setup import cdiv, jit, power_of_2


def ssd(*inputs: *SsdArguments, n_snapshots: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.recurrence.ssd.ssd."""
    x, *_, state = inputs
    kept = state.new_empty(min(x.shape[1], n_snapshots), *state.shape)
    return ssd_into(*inputs, slots=kept.unbind(0)), kept.transpose(0, 1)


def ssd_into(*inputs: *SsdArguments, slots: Sequence[torch.Tensor]) -> torch.Tensor:
    """See kernels.recurrence.ssd.ssd_into."""

    def chunks(start: int, stop: int, state: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        return run_chunks(_part(inputs[:6], start, stop), state, slot, log=False)[0]

    def steps(
        start: int, stop: int, state: torch.Tensor, slots: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        return run_recurrence(_part(inputs[:6], start, stop), state, slots)[0]

    return run_into(inputs[0].shape[1], inputs[6], slots, chunks, steps)


def _part(inputs: SsdInputs, start: int, stop: int) -> SsdInputs:
    x, dt, g, B, C = (part[:, start:stop] for part in inputs[:5])
    return x, dt, g, B, C, inputs[5]


def ssd_slots(*inputs: *SsdSlotArguments) -> torch.Tensor:
    """See kernels.recurrence.ssd.ssd_slots. Every token by the recurrence."""
    o, _ = run_recurrence(inputs[:6], inputs[6], (), index=inputs[7:])
    return o


def ssd_log(*inputs: *SsdArguments) -> tuple[torch.Tensor, SsdLog]:
    """See kernels.recurrence.ssd.ssd_log. The state is read once and never written."""
    x, _, g, B, *_, state = inputs
    if x.shape[1] > FEW_TOKENS:
        o, u = run_chunks(inputs[:6], state, None, log=True)
    else:
        o, u = run_recurrence(inputs[:6], state, (), log=True)
    return o, SsdLog(u, B, g)


@jit(do_not_specialize_on_alignment=["n_tokens"])
def _fold(
    state, u, B, g, out, counts, n_tokens, n_heads, n_groups, p_size, n_size,
    state_b, state_h, state_p, state_n, u_b, u_t, u_h, u_p, B_b, B_t, B_g, B_n, g_b, g_t, g_h,
    COUNTED: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    group = h // (n_heads // n_groups)
    p, n = tl.program_id(0) * BP + tl.arange(0, BP), tl.arange(0, BN)
    in_rows, in_columns = p < p_size, n < n_size
    inside = in_rows[:, None] & in_columns[None, :]

    tile = state + b * state_b + h * state_h
    S = tl.load(tile + p[:, None] * state_p + n[None, :] * state_n, inside, 0.0)
    u += b * u_b + h * u_h + p * u_p
    B += b * B_b + group * B_g + n * B_n
    g += b * g_b + h * g_h
    last = tl.load(counts + b) if COUNTED else n_tokens
    for _ in range(last):
        written = tl.load(u, in_rows, 0.0)[:, None] * tl.load(B, in_columns, 0.0)[None, :]
        S = S * tl.exp(tl.load(g)) + written
        u += u_t
        B += B_t
        g += g_t
    whole = out + (b * n_heads + h) * p_size * n_size
    tl.store(whole + p[:, None] * n_size + n[None, :], S, inside)


def fold(
    state: torch.Tensor,
    log: SsdLog,
    n_tokens: int | torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See kernels.recurrence.ssd.fold. The recurrence without its outputs."""
    u, B, g = log
    if out is None:
        out = state.new_empty(state.shape)
    n_batch, n_heads, p, n = state.shape
    counted = isinstance(n_tokens, torch.Tensor)
    _fold[(cdiv(p, ROWS), n_heads, n_batch)](
        state, u, B, g, out, n_tokens if counted else out, 0 if counted else n_tokens,
        n_heads, B.shape[2], p, n,
        *state.stride(), *u.stride(), *B.stride(), *g.stride(),
        COUNTED=counted, BP=ROWS, BN=power_of_2(n), num_warps=1,
    )  # fmt: skip
    return out
