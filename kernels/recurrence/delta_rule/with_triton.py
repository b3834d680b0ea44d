"""The gated delta rule on a GPU, and the fold of its log.

Few tokens run one by one, by kernels.recurrence.delta_rule.recurrence_with_triton; prompts run in
chunks, by kernels.recurrence.delta_rule.chunks_with_triton.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl

from kernels.recurrence.delta_rule.chunks_with_triton import Inputs, run_chunks
from kernels.recurrence.delta_rule.naive import DeltaArguments, DeltaLog, DeltaSlotArguments
from kernels.recurrence.delta_rule.recurrence_with_triton import columns_per_program, run_recurrence
from kernels.recurrence.with_triton import FEW_TOKENS, run_into
from kernels.triton_setup import cdiv, jit, power_of_2


def gated_delta_rule(
    *inputs: *DeltaArguments, grouped: bool, n_snapshots: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.recurrence.delta_rule.gated_delta_rule."""
    v, state = inputs[2], inputs[5]
    kept = state.new_empty(min(v.shape[1], n_snapshots), *state.shape)
    o = gated_delta_into(*inputs, grouped=grouped, slots=kept.unbind(0))
    return o, kept.transpose(0, 1)


def gated_delta_into(
    *inputs: *DeltaArguments, grouped: bool, slots: Sequence[torch.Tensor]
) -> torch.Tensor:
    """See kernels.recurrence.delta_rule.gated_delta_into."""

    def chunks(start: int, stop: int, state: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        part = _part(inputs[:5], start, stop)
        return run_chunks(part, state, slot, grouped=grouped, log=False)[0]

    def steps(
        start: int, stop: int, state: torch.Tensor, slots: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        return run_recurrence(_part(inputs[:5], start, stop), state, slots, grouped=grouped)[0]

    return run_into(inputs[2].shape[1], inputs[5], slots, chunks, steps)


def _part(inputs: Inputs, start: int, stop: int) -> Inputs:
    q, k, v, g, beta = (x[:, start:stop] for x in inputs)
    return q, k, v, g, beta


def gated_delta_slots(*inputs: *DeltaSlotArguments, grouped: bool) -> torch.Tensor:
    """See kernels.recurrence.delta_rule.gated_delta_slots. Every token by the recurrence."""
    o, _ = run_recurrence(inputs[:5], inputs[5], (), grouped=grouped, index=inputs[6:])
    return o


def gated_delta_log(*inputs: *DeltaArguments, grouped: bool) -> tuple[torch.Tensor, DeltaLog]:
    """See kernels.recurrence.delta_rule.gated_delta_log. The state is read once and never
    written."""
    _, k, _, g, _, state = inputs
    if g.shape[1] > FEW_TOKENS:
        o, u = run_chunks(inputs[:5], state, None, grouped=grouped, log=True)
    else:
        o, u = run_recurrence(inputs[:5], state, (), grouped=grouped, log=True)
    return o, DeltaLog(k, u, g)


@jit(do_not_specialize_on_alignment=["n_tokens"])
def _fold(
    state, k, u, g, out, counts, n_tokens, n_heads, n_k_heads, d_k, d_v,
    state_b, state_h, state_k, state_v, k_b, k_t, k_h, k_d, u_b, u_t, u_h, u_d, g_b, g_t, g_h, g_d,
    GROUPED: tl.constexpr, CHANNELS: tl.constexpr, COUNTED: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    j = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    i = j // (n_heads // n_k_heads) if GROUPED else j % n_k_heads
    rows, columns = tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
    in_rows, in_columns = rows < d_k, columns < d_v
    inside = in_rows[:, None] & in_columns[None, :]

    tile = state + b * state_b + j * state_h
    S = tl.load(tile + rows[:, None] * state_k + columns[None, :] * state_v, inside, 0.0)
    k += b * k_b + i * k_h + rows * k_d
    u += b * u_b + j * u_h + columns * u_d
    g += b * g_b + j * g_h
    last = tl.load(counts + b) if COUNTED else n_tokens
    for _ in range(last):
        if CHANNELS:
            S *= tl.exp(tl.load(g + rows * g_d, in_rows, 0.0))[:, None]
        else:
            S *= tl.exp(tl.load(g))
        S += tl.load(k, in_rows, 0.0)[:, None] * tl.load(u, in_columns, 0.0)[None, :]
        k += k_t
        u += u_t
        g += g_t
    whole = out + (b * n_heads + j) * d_k * d_v
    tl.store(whole + rows[:, None] * d_v + columns[None, :], S, inside)


def fold(
    state: torch.Tensor,
    log: DeltaLog,
    n_tokens: int | torch.Tensor,
    *,
    grouped: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See kernels.recurrence.delta_rule.fold. The recurrence with u known, so each column runs by
    itself."""
    k, u, g = log
    if out is None:
        out = state.new_empty(state.shape)
    n_batch, n_heads, d_k, d_v = state.shape
    counted, channels = isinstance(n_tokens, torch.Tensor), g.dim() == 4
    width = columns_per_program(n_batch * n_heads, d_v)
    _fold[(cdiv(d_v, width), n_heads, n_batch)](
        state, k, u, g, out, n_tokens if counted else out, 0 if counted else n_tokens,
        n_heads, k.shape[2], d_k, d_v,
        *state.stride(), *k.stride(), *u.stride(), *g.stride(), *(() if channels else (0,)),
        GROUPED=grouped, CHANNELS=channels, COUNTED=counted,
        BK=power_of_2(d_k), BV=width, num_warps=1,
    )  # fmt: skip
    return out
