"""Short convolutions, channel gates and the selective scan on a GPU, and how recurrences there
choose between chunks and steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton.language as tl
from torch import Tensor

from kernels.pointwise import multiply
from kernels.pointwise.with_triton import softplus
from kernels.recurrence.conv import ConvSlotArguments
from kernels.recurrence.selective_scan import ScanArguments, ScanSlotArguments
from kernels.triton_setup import as_rows, cdiv, jit, power_of_2

TOKENS, CHANNELS = 8, 128
FEW_TOKENS = 16
"""Tokens that the recurrences take one by one. With more of them chunks should pay (not yet
measured): a step waits for its token's sums, a chunk for a few products of tiles."""
MAX_SLOTS = 32
"""Slots of one call: they are arguments of their own, so each number of them is a kernel."""
GATES = 1024
"""Gates of one program."""
SCANNED = 2048
"""Numbers of a state in one program of the scan."""


@jit
def _gated(x, gate, at, inside):
    rows = tl.load(x + at, inside, 0.0)
    if gate is not None:
        rows *= tl.load(gate + at, inside, 0.0)
    return rows


@jit(do_not_specialize_on_alignment=["n_tokens"])
def _conv(
    x, gate, weight, window, bias, y, history, index, n_tokens, n_channels,
    x_b, x_t, x_c, weight_c, weight_k, window_b, window_t, window_c, bias_c,
    INDEXED: tl.constexpr, BIASED: tl.constexpr, ACTIVATE: tl.constexpr,
    TAPS: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """BT tokens of BC channels, times a gate strided like them if there is one. INDEXED: all
    tokens; `window` is the pool, into whose rows the windows after the last tokens go, once all of
    the program's own has been read."""
    b = tl.program_id(2).to(tl.int64)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    t = (tl.program_id(1) * BT + tl.arange(0, BT))[:, None]
    in_channels = (c < n_channels)[None, :]
    inside = (t < n_tokens) & in_channels
    x += b * x_b + c[None, :] * x_c
    if gate is not None:
        gate += b * x_b + c[None, :] * x_c
    start = b
    if INDEXED:
        read, write, n_kept, read_b, write_b, write_s = index
        start = tl.load(read + b * read_b)
        kept_in = window + c[None, :] * window_c
    window += start * window_b + c[None, :] * window_c

    total = tl.zeros((BT, BC), tl.float32)
    row = tl.zeros((BT, BC), tl.float32)
    for tap in tl.static_range(TAPS):
        at = t + tap - (TAPS - 1)
        row = _gated(x, gate, at * x_t, inside & (at >= 0))
        if tap < TAPS - 1:
            row += tl.load(window + (at + TAPS - 1) * window_t, inside & (at < 0), 0.0)
        total += row * tl.load(weight + c * weight_c + tap * weight_k, c < n_channels, 0.0)[None, :]
    if BIASED:
        total += tl.load(bias + c * bias_c, c < n_channels, 0.0)[None, :]
    if ACTIVATE:
        total *= tl.sigmoid(total)
    tl.store(y + (b * n_tokens + t) * n_channels + c[None, :], total, inside)
    if INDEXED:
        # window and rows joined; where the window is read from may be where one is written
        place = tl.arange(0, BW)[:, None]
        at = place - (TAPS - 1)
        known = (at >= 0) & (at < n_tokens) & in_channels
        rows = _gated(x, gate, at * x_t, known)
        rows += tl.load(window + place * window_t, (at < 0) & in_channels, 0.0)
        tl.debug_barrier()
        for i in range(n_kept):
            first = n_tokens - (n_kept - 1 - i)
            to = kept_in + tl.load(write + b * write_b + i * write_s) * window_b
            mine = (place >= first) & (place < first + TAPS - 1) & in_channels
            tl.store(to + (place - first) * window_t, rows, mine)
    else:
        history += b * (TAPS - 1 + n_tokens) * n_channels + c[None, :]
        tl.store(history + (t + TAPS - 1) * n_channels, row, inside)
        if TAPS > 1 and tl.program_id(1) == 0:
            old = tl.arange(0, BW)[:, None]
            kept = (old < TAPS - 1) & in_channels
            tl.store(history + old * n_channels, tl.load(window + old * window_t, kept, 0.0), kept)


def causal_conv(
    x: Tensor, weight: Tensor, window: Tensor, bias: Tensor | None = None, *, activate: bool = True
) -> tuple[Tensor, Tensor]:
    n_batch, n_tokens, n_channels = x.shape
    history = x.new_empty(n_batch, weight.shape[1] - 1 + n_tokens, n_channels)
    return _convolved(x, weight, window, bias, activate, history=history), history


def causal_conv_slots(
    *inputs: *ConvSlotArguments, activate: bool = True, gate: Tensor | None = None
) -> Tensor:
    """See kernels.recurrence.conv. The tokens of a prompt go through windows of their own."""
    x, weight, pool, read, write, bias = inputs
    if gate is not None and (x.shape[1] > FEW_TOKENS or gate.stride() != x.stride()):
        x, gate = multiply(gate, x), None
    if x.shape[1] <= FEW_TOKENS:
        return _convolved(x, weight, pool, bias, activate, index=(read, write), gate=gate)
    y, history = causal_conv(x, weight, pool[read], bias, activate=activate)
    after_each = history.unfold(1, pool.shape[1], 1).transpose(2, 3)
    pool[write] = after_each[:, -write.shape[1] :]
    return y


def _convolved(
    x: Tensor,
    weight: Tensor,
    window: Tensor,
    bias: Tensor | None,
    activate: bool,
    *,
    history: Tensor | None = None,
    index: tuple[Tensor, Tensor] | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """history: filled with window and rows. index: `read` and `write` of causal_conv_slots, in
    place of it; then `window` is the pool."""
    n_batch, n_tokens, n_channels = x.shape
    n_taps, y = weight.shape[1], x.new_empty(x.shape)
    side, wide = min(power_of_2(n_tokens), TOKENS), power_of_2(n_taps)
    if index is not None:
        side, wide = power_of_2(n_tokens), power_of_2(n_taps - 1 + n_tokens)
    _conv[(cdiv(n_channels, CHANNELS), cdiv(n_tokens, side), n_batch)](
        x, gate, weight, window, weight if bias is None else bias, y,
        y if history is None else history, numbers_of(index), n_tokens, n_channels,
        *x.stride(), *weight.stride(), *window.stride(), 0 if bias is None else bias.stride(0),
        INDEXED=index is not None, BIASED=bias is not None, ACTIVATE=activate,
        TAPS=n_taps, BT=side, BC=CHANNELS, BW=wide, num_warps=4,
    )  # fmt: skip
    return y


@jit
def opened_gate(x, scale, bound):
    """The log decay of a channel; bound: None for none."""
    if bound is None:
        kept = softplus(x) * scale
    else:
        kept = tl.sigmoid(-x * scale) * bound
    return kept


@jit
def _normed_and_gated(
    qk, normed, decay, dt, a, beta, g, opened,
    n_heads, d, qk_t, qk_h, eps, n_channels, n_betas, decay_row, beta_row, bound, n_tiles,
    BR: tl.constexpr, BD: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    """Of one token BR heads of queries and keys divided by their lengths, or BG gates."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if part < n_tiles:
        head = part * BR + tl.arange(0, BR)[:, None]
        column = tl.arange(0, BD)[None, :]
        inside = (head < n_heads) & (column < d)
        values = tl.load(qk + token * qk_t + head * qk_h + column, inside, 0.0)
        square = tl.sum(values * values, 1, keep_dims=True)
        values = values / tl.sqrt(square + eps)
        tl.store(normed + (token * n_heads + head) * d + column, values, inside)
    else:
        channel = (part - n_tiles) * BG + tl.arange(0, BG)
        known = channel < n_channels
        x = tl.load(decay + token * decay_row + channel, known, 0.0)
        x += tl.load(dt + channel, known, 0.0)
        scale = tl.load(a + channel, known, 0.0)
        tl.store(g + token * n_channels + channel, opened_gate(x, scale, bound), known)
        in_betas = channel < n_betas
        written = tl.sigmoid(tl.load(beta + token * beta_row + channel, in_betas, 0.0))
        tl.store(opened + token * n_betas + channel, written, in_betas)


def channel_gates(
    decay: Tensor, dt: Tensor, a: Tensor, beta: Tensor, bound: float | None = None
) -> tuple[Tensor, Tensor]:
    _, g, opened = normed_and_gated(None, 0.0, decay, dt, a, beta, bound)
    return g, opened


def normed_and_gated(
    qk: Tensor | None,
    eps: float,
    decay: Tensor,
    dt: Tensor,
    a: Tensor,
    beta: Tensor,
    bound: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """l2_norm(qk, eps), qk [B, T, H, d] if there is one, and `channel_gates`, whose formula without
    bound is that of delta_gates."""
    n_channels, n_betas = decay.shape[-1], beta.shape[-1]
    g, opened = decay.new_empty(decay.shape), beta.new_empty(beta.shape)
    decays, betas = as_rows(decay), as_rows(beta)
    heads = decays.unsqueeze(1) if qk is None else qk.flatten(0, 1)
    if heads.stride(2) != 1:
        heads = heads.contiguous()
    normed = decay if qk is None else qk.new_empty(qk.shape)
    n_heads, d = heads.shape[1:]
    wide = power_of_2(d)
    together = max(1, min(GATES // wide, power_of_2(n_heads)))
    n_tiles = 0 if qk is None else cdiv(n_heads, together)
    side = min(GATES, power_of_2(max(n_channels, n_betas)))
    _normed_and_gated[(len(decays), n_tiles + cdiv(max(n_channels, n_betas), side))](
        heads, normed, decays, dt.contiguous(), a.contiguous(), betas, g, opened,
        n_heads, d, heads.stride(0), heads.stride(1), eps,
        n_channels, n_betas, decays.stride(0), betas.stride(0), bound, n_tiles,
        BR=together, BD=wide, BG=side, num_warps=4,
    )  # fmt: skip
    return normed, g, opened


def numbers_of(index: tuple[Tensor, Tensor] | None) -> tuple[Tensor | int, ...]:
    """The numbers of rows to read and to write as kernels take them; () where there are none."""
    if index is None:
        return ()
    read, write = index
    return read, write, write.shape[1], *read.stride(), *write.stride()


def run_into(
    inputs: Sequence[Tensor],
    state: Tensor,
    slots: Sequence[Tensor],
    run_chunks: Callable[..., tuple[Tensor, ...]] | None,
    run_recurrence: Callable[..., tuple[Tensor, ...]],
    fixed: Sequence[int] = (),
) -> Tensor:
    """The outputs of all tokens; slots[s] receives the state s tokens before the last one.

    inputs: [B, T, …], but those with the numbers `fixed`. Both functions take those of some tokens,
    the state to start from, and run_chunks the slot for the last state, run_recurrence up to
    MAX_SLOTS slots, newest first; outputs are the first result. Raises ValueError for slots of
    unlike strides.
    """
    if any(slot.stride() != slots[0].stride() for slot in slots):
        raise ValueError("the slots of one call differ in their strides")

    def part(start: int, stop: int) -> list[Tensor]:
        return [x if i in fixed else x[:, start:stop] for i, x in enumerate(inputs)]

    outputs, start, n_tokens = [], 0, inputs[0].shape[1]
    # one state leaves the chunks, the oldest that is kept: the recurrence leads on from it
    n_before = n_tokens - len(slots) + 1
    if run_chunks and n_before > FEW_TOKENS:
        outputs.append(run_chunks(part(0, n_before), state, slots[-1])[0])
        start, state, slots = n_before, slots[-1], slots[:-1]
    while start < n_tokens:
        # of more slots than one kernel takes, the oldest first; then on from the newest of those
        n_later = (len(slots) - 1) // MAX_SLOTS * MAX_SLOTS
        mine, slots = slots[n_later:], slots[:n_later]
        outputs.append(run_recurrence(part(start, n_tokens - n_later), state, mine)[0])
        start, state = n_tokens - n_later, mine[0]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


@jit(do_not_specialize_on_alignment=["n_tokens"])
def _scan(
    x, dt, A, B, C, D, state, o, slots, index, n_tokens, n_channels, n_state,
    x_b, x_t, x_c, dt_b, dt_t, dt_c, A_n, A_c, B_b, B_t, B_n, C_b, C_t, C_n, D_c,
    state_b, state_n, state_c, slot_b, slot_n, slot_c,
    N_SLOTS: tl.constexpr, INDEXED: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """BC channels of one sequence through all tokens; their state [BN, BC] stays in registers."""
    b = tl.program_id(1).to(tl.int64)
    c, n = tl.program_id(0) * BC + tl.arange(0, BC), tl.arange(0, BN)
    in_channels, in_state = c < n_channels, n < n_state
    inside = in_state[:, None] & in_channels[None, :]

    start, n_kept = b, N_SLOTS
    if INDEXED:
        read, write, n_kept, read_b, write_b, write_s = index
        start = tl.load(read + b * read_b)
        write += b * write_b
    S = tl.load(state + start * state_b + n[:, None] * state_n + c[None, :] * state_c, inside, 0.0)
    slot_tile = n[:, None] * slot_n + c[None, :] * slot_c
    rates = tl.load(A + n[:, None] * A_n + c[None, :] * A_c, inside, 0.0)
    skip = tl.load(D + c * D_c, in_channels, 0.0)
    x += b * x_b + c * x_c
    dt += b * dt_b + c * dt_c
    B += b * B_b + n * B_n
    C += b * C_b + n * C_n
    o += b * n_tokens * n_channels + c
    for t in range(n_tokens):
        value, step = tl.load(x, in_channels, 0.0), tl.load(dt, in_channels, 0.0)
        written = (step * value)[None, :] * tl.load(B, in_state, 0.0)[:, None]
        S = tl.exp(step[None, :] * rates) * S + written
        total = tl.sum(S * tl.load(C, in_state, 0.0)[:, None], 0)
        tl.store(o, total + skip * value, in_channels)
        back = n_tokens - 1 - t
        if back < n_kept:
            if INDEXED:
                slot, row = state, tl.load(write + back * write_s)
            else:
                slot, row = slots[0], b
                for s in tl.static_range(1, N_SLOTS):
                    slot = tl.where(back == s, slots[s], slot)
            tl.store(slot + row * slot_b + slot_tile, S, inside)
        x += x_t
        dt += dt_t
        B += B_t
        C += C_t
        o += n_channels


def _run_scan(
    inputs: Sequence[Tensor],
    state: Tensor,
    slots: Sequence[Tensor],
    index: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor]:
    """All tokens of x, dt, A, B, C and D. index: `read` and `write` of scan_slots; then `state` is
    the pool and `slots` is empty."""
    x, dt, A, B, C, D = inputs
    n_batch, n_tokens, n_channels = x.shape
    o = x.new_empty(x.shape)
    deep = power_of_2(len(A))
    wide = min(max(SCANNED // deep, 16), power_of_2(n_channels))
    _scan[(cdiv(n_channels, wide), n_batch)](
        x, dt, A, B, C, D, state, o, tuple(slots), numbers_of(index), n_tokens, n_channels, len(A),
        *x.stride(), *dt.stride(), *A.stride(), *B.stride(), *C.stride(), *D.stride(),
        *state.stride(), *(slots[0] if slots else state).stride(),
        N_SLOTS=len(slots), INDEXED=index is not None, BN=deep, BC=wide, num_warps=4,
    )  # fmt: skip
    return (o,)


def scan_into(*inputs: *ScanArguments, slots: Sequence[Tensor]) -> Tensor:
    """See kernels.recurrence.selective_scan.scan_into. Every token by the recurrence."""
    return run_into(inputs[:6], inputs[6], slots, None, _run_scan, (2, 5))


def scan_slots(*inputs: *ScanSlotArguments) -> Tensor:
    return _run_scan(inputs[:6], inputs[6], (), inputs[7:])[0]
