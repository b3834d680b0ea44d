"""The gated delta rule: the recurrent core of a Gated DeltaNet layer."""

from __future__ import annotations

from torch import Tensor

from kernels.dispatch import pick, pick_whole
from kernels.recurrence.channel_gates import RawGates
from kernels.recurrence.delta_rule import naive, with_torch
from kernels.recurrence.delta_rule.naive import DeltaSlotArguments

__all__ = ["fold", "gated_delta_into", "gated_delta_log", "gated_delta_rule", "gated_delta_slots"]

_TRITON, _LLVM = (
    "kernels.recurrence.delta_rule.with_triton",
    "kernels.recurrence.delta_rule.with_llvm",
)

_slots = pick(naive.gated_delta_slots, with_torch.gated_delta_slots, _TRITON, _LLVM)

gated_delta_rule = pick_whole(naive.gated_delta_rule, with_torch.gated_delta_rule, _TRITON, _LLVM)
"""Runs T tokens through the recurrence and keeps the newest states.

Per value head, with S [d_k, d_v]:  S <- e^g S;  u = beta (v - S^T k);  S <- S + k u^T;
o = S^T q / sqrt(d_k), read after the write (Yang et al. 2024, arXiv 2412.06464).

inputs: q, k, v, g, beta, state. q, k: [B, T, H_k, d_k], both already l2-normalised. v:
[B, T, H_v, d_v], H_v a multiple of H_k. g: log decay <= 0, [B, T, H_v], or [B, T, H_v, d_k] for
one gate per key channel (KDA). beta: [B, T, H_v]. state: [B, H_v, d_k, d_v], left unchanged.
All f32, T >= 1, any strides.
Value head j reads key head j // (H_v / H_k) if `grouped`, else j mod H_k ("tiled").

Returns o [B, T, H_v, d_v] and the snapshots [B, min(T, n_snapshots), H_v, d_k, d_v], where
index s is the state s tokens before the last one, so 0 is the state after all T tokens.
n_snapshots >= 1. They share no memory with `state`. Differentiable for n_snapshots = 1; more
than one cannot be had of tensors that need gradients.
"""

gated_delta_into = pick_whole(naive.gated_delta_into, with_torch.gated_delta_into, _TRITON, _LLVM)
"""gated_delta_rule with its states written straight into memory of the caller's.

slots: 1 .. T tensors [B, H_v, d_k, d_v] with heads and batch in one stride and rows of d_v
neighbours (contiguous will do), apart from one another and strided alike; slots[s] receives
the state s tokens before the last one. One of them may be `state` itself. Returns o
[B, T, H_v, d_v].

invariant: outputs and states have the same bits in whatever portions tokens and sequences
come; so they have with the same argument of the two functions below.
"""


def gated_delta_slots(
    *inputs: *DeltaSlotArguments, grouped: bool, raw: RawGates | None = None
) -> Tensor:
    """gated_delta_rule from and to rows of one pool, whose numbers are on the device.

    The host learns nothing of `read` and `write` and waits for nothing, so that a call can be
    recorded (engine.machine.graphs) and repeated with other numbers in them. For few tokens: in
    Triton and in LLVM all run through the recurrence, with the bits that gated_delta_into gives
    them there.

    inputs: q, k, v, g, beta as for gated_delta_rule, T >= n; pool, read, write. pool: f32 [n_rows,
    H_v, d_k, d_v], each row strided as a slot of gated_delta_into, at any distance from the next:
    such as planes of cells, flattened. read: int64 [B], the row whose state row b of the batch
    starts from. write: int64 [B, n], n >= 1, any strides; row write[b, s] receives the state s
    tokens before the last one. All other rows of the pool keep their bits. Returns o
    [B, T, H_v, d_v].

    The numbers in them are the caller's promise, not looked at: 0 .. n_rows - 1; write[b] names n
    rows, of which one may be read[b]; what b writes no other b' reads or writes. Raises ValueError
    for n > T.

    raw: in Triton alone. q and k are both [B, T, 2 H_k, d_k], queries and keys, g and beta a
    layer's projections, and normed_and_gated of kernels.recurrence.channel_gates is part of the
    launch.
    """
    q, k, v, g, beta, pool, read, write = inputs
    if write.shape[1] > v.shape[1]:
        raise ValueError(f"{v.shape[1]} tokens leave no {write.shape[1]} states to write")
    if raw is not None:
        from kernels.recurrence.delta_rule import with_triton

        q, k = q.chunk(2, 2)
        return with_triton.gated_delta_slots(
            q, k, v, g, beta, pool, read, write, grouped=grouped, raw=raw
        )
    return _slots(*inputs, grouped=grouped)


gated_delta_log = pick_whole(naive.gated_delta_log, with_torch.gated_delta_log, _TRITON, _LLVM)
"""gated_delta_rule that keeps no state: o [B, T, H_v, d_v] and the log of its tokens.

Arguments as there. `fold` rebuilds the state after any of the tokens from the log and `state`;
the log is d_k + d_v + 1 numbers per token and head, 2 d_k + d_v with one gate per key channel,
where a state is d_k * d_v.
"""

fold = pick_whole(naive.fold, with_torch.fold, _TRITON, _LLVM)
"""The state after the first n_tokens tokens of a log, this rule's or kernels.recurrence.ssd's.

S_n = e^(c_n) S_0 + sum over i <= n of e^(c_n - c_i) left_i right_i^T with c the running sum of
g, a number per head or per row of S: the deferred commit of ReplaySSM, the prefix form of the
chunked delta rule. Heads may share what is on the left as `grouped` says, and what is on the
right in groups of neighbours, as those of ssd do.

inputs: state, log, n_tokens. state: [B, H, d_k, d_v], from before the log. n_tokens: 0 .. T,
one for all rows or an int64 tensor [B]; nothing beyond it in the log is looked at. out:
contiguous, filled and returned instead of new memory; may be `state` itself. Equal to the
recurrence up to rounding.
"""
