"""State-space duality: the recurrent core of a Mamba-2 layer (Dao & Gu 2024, arXiv 2405.21060)."""

from __future__ import annotations

from torch import Tensor

from kernels.dispatch import pick, pick_whole
from kernels.recurrence.ssd import naive, with_torch
from kernels.recurrence.ssd.naive import SsdInputs, SsdSlotArguments

__all__ = ["SsdInputs", "ssd", "ssd_into", "ssd_log", "ssd_slots"]

_TRITON, _LLVM = "kernels.recurrence.ssd.with_triton", "kernels.recurrence.ssd.with_llvm"

_slots = pick(naive.ssd_slots, with_torch.ssd_slots, _TRITON, _LLVM)

ssd = pick_whole(naive.ssd, with_torch.ssd, _TRITON, _LLVM)
"""Runs T tokens through the recurrence and keeps the newest states.

Per head, with S [P, N]:  S <- e^g S + (dt x) B^T;  o = S C + D x, read after the write.

inputs: x, dt, g, B, C, D, state. x: [B, T, H, P]. dt: step sizes > 0, and g = dt * a: log decay
<= 0, both [B, T, H]. B, C: [B, T, G, N]; head h reads group h // (H / G), H a multiple of G. D:
[H]. state: [B, H, P, N], left unchanged. All f32, T >= 1, any strides.

Returns o [B, T, H, P] and the snapshots [B, min(T, n_snapshots), H, P, N], where index s is
the state s tokens before the last one, so 0 is the state after all T tokens. n_snapshots >= 1.
They share no memory with `state`.
"""


ssd_into = pick_whole(naive.ssd_into, with_torch.ssd_into, _TRITON, _LLVM)
"""ssd with its states written straight into memory of the caller's.

slots: 1 .. T tensors [B, H, P, N], rows of N neighbours, apart from one another and strided
alike; slots[s] receives the state s tokens before the last one. One of them may be `state`
itself. Returns o [B, T, H, P].

invariant: outputs and states have the same bits in whatever portions tokens and sequences
come; so they have with the same argument of the functions below.
"""


def ssd_slots(*inputs: *SsdSlotArguments, raw: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """ssd from and to rows of one pool, whose numbers are on the device.

    inputs: those of ssd, with pool, read and write in place of the state. pool: f32 [n_rows, H, P,
    N], each row strided as a slot of ssd_into, at any distance from the next. read: int64 [B], the
    row whose state sequence b starts from. write: int64 [B, n], n >= 1, any strides; row
    write[b, s] receives the state s tokens before the last one. All other rows of the pool keep
    their bits. Returns o [B, T, H, P].

    The numbers in them are the caller's promise, not looked at, as those of
    kernels.recurrence.delta_rule.gated_delta_slots are. Raises ValueError for n > T.

    raw: dt and a of kernels.pointwise.step_gates, in Triton alone. dt and g are then both a layer's
    projection, and the gates are part of the launch.
    """
    x, *_, write = inputs
    if write.shape[1] > x.shape[1]:
        raise ValueError(f"{x.shape[1]} tokens leave no {write.shape[1]} states to write")
    if raw is not None:
        from kernels.recurrence.ssd import with_triton

        return with_triton.ssd_slots(*inputs, raw=raw)
    return _slots(*inputs)


ssd_log = pick_whole(naive.ssd_log, with_torch.ssd_log, _TRITON, _LLVM)
"""ssd that keeps no state: o [B, T, H, P] and the log of its tokens.

kernels.recurrence.delta_rule.fold, `grouped`, rebuilds the state after any of the tokens from
the log and `state`; a token's entry is H * (P + 1) + G * N numbers, a state's H * P * N.
"""
