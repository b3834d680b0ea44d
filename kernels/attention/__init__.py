"""Softmax attention over the cells of a key/value cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kernels.dispatch import pick, runs_triton
from kernels.linear import operation_rows
from kernels.linear.block_parts import Rows
from kernels.linear.packed import PackedWeight
from kernels.pointwise import output_gate

AttendArguments = tuple[Tensor, Tensor, Tensor, Tensor, float, Tensor | None]
"""q, k, v, mask, scale and sinks, as attend describes them; the scale is given."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    *,
    scale: float | None = None,
    sinks: Tensor | None = None,
    invariant: bool = False,
) -> Tensor:
    """softmax(scale q k^T) v over the visible cells, softmax in f32.

    q: f32 [B, T, H, hd]; k: f32 [B, H_kv, N, hd], v: f32 [B, H_kv, N, hd_v], H a multiple of
    H_kv, query head h reads key/value head h // (H / H_kv); mask: bool [B, T, N], True = visible.
    T, N >= 1, any strides; v may be columns of k, as in latent attention. scale: 1 / sqrt(hd)
    unless given. sinks: f32 [H], the score of one more cell of each query head, which has no value
    and which every query sees (Xiao et al. 2023, arXiv 2309.17453, with learnt scores). Returns f32
    [B, T, H, hd_v].

    Every query must see at least one cell. Cells that are not visible are weighed with zero, not
    skipped: the owner of the cache has to keep freed and unused cells finite, because a NaN
    there would reach the output.

    invariant: a query's output has the same bits whatever other queries and hidden cells there
    are, as long as its visible cells come in the same order. Hidden cells are then skipped.
    """
    scale = q.shape[3] ** -0.5 if scale is None else scale
    return (_run_invariant if invariant else _run)(q, k, v, mask, scale, sinks)


def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    gate: Tensor | None,
    reads: Sequence[PackedWeight],
    *,
    invariant: bool = False,
) -> Rows:
    """attend with the heads of a token side by side, f32 [B, T, H * hd_v], through
    kernels.pointwise.output_gate if there is a gate of that shape, as rows for `reads`
    (kernels.norm.rms_norm_rows): on a GPU in the launch that adds up the parts."""
    if runs_triton(q):
        from kernels.attention import with_triton

        found = with_triton.attend_rows(q, k, v, mask, gate, reads, invariant=invariant)
        if found is not None:
            return found
    out = attend(q, k, v, mask, invariant=invariant).flatten(2)
    if gate is None:
        return out
    return operation_rows(output_gate, (out, gate), reads, invariant=invariant)


def attend_naive(*inputs: *AttendArguments) -> Tensor:
    """Attention one query and one head at a time, over gathered visible cells only: unlike the
    fast versions it never reads a hidden cell."""
    q, k, v, mask, scale, sinks = inputs
    n_batch, n_tokens, n_heads, _ = q.shape
    repeat = n_heads // k.shape[1]
    rows = []
    for b in range(n_batch):
        for t in range(n_tokens):
            cells = mask[b, t].nonzero().squeeze(1)
            for h in range(n_heads):
                keys, values = k[b, h // repeat, cells], v[b, h // repeat, cells]
                scores = keys @ q[b, t, h] * scale
                most = scores.max() if sinks is None else torch.maximum(scores.max(), sinks[h])
                weights = torch.exp(scores - most)
                sink = 0.0 if sinks is None else torch.exp(sinks[h] - most)
                rows.append((weights / (weights.sum() + sink)) @ values)
    return torch.stack(rows).reshape(n_batch, n_tokens, n_heads, v.shape[3])


# The fused kernel reads the cells once per query head. With few queries over many cells that
# reading is the whole cost, so there the heads of one group share a matrix product.
FEW_TOKENS = 16
MANY_VALUES = 1 << 17


def attend_with_torch(*inputs: *AttendArguments) -> Tensor:
    """Attention through PyTorch's fused kernel, or two matrix products where those read less."""
    q, k, v, mask, scale, sinks = inputs
    n_cells, head_dim = k.shape[2:]
    few = q.shape[1] <= FEW_TOKENS and n_cells * head_dim >= MANY_VALUES
    if sinks is not None or few:
        return attend_grouped(*inputs)
    o = functional.scaled_dot_product_attention(
        q.transpose(1, 2), k, v, attn_mask=mask.unsqueeze(1), scale=scale, enable_gqa=True
    )
    return o.transpose(1, 2)


def attend_invariant_with_torch(*inputs: *AttendArguments) -> Tensor:
    """attend one query at a time, over as many cells as it sees."""
    q, k, v, mask, scale, sinks = inputs
    n_batch, n_tokens = q.shape[:2]
    n_visible = mask.sum(-1)
    # as a rule these are the first ones, which need no copy
    first = torch.arange(mask.shape[2], device=mask.device) < n_visible.unsqueeze(-1)
    in_front = (mask == first).all(-1).tolist()
    outputs = []
    for b, counts in enumerate(n_visible.tolist()):
        for t, n in enumerate(counts):
            cells = slice(0, n) if in_front[b][t] else mask[b, t].nonzero().squeeze(1)
            # in memory of its own: sums may depend on alignment
            one = q[b : b + 1, t : t + 1].clone(memory_format=torch.contiguous_format)
            outputs.append(_one(one, k[b : b + 1, :, cells], v[b : b + 1, :, cells], scale, sinks))
    return torch.cat(outputs, 1).view(n_batch, n_tokens, q.shape[2], v.shape[3])


def _one(q: Tensor, k: Tensor, v: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
    if sinks is not None or k.shape[2] * k.shape[3] >= MANY_VALUES:
        return attend_grouped(q, k, v, None, scale, sinks)
    o = functional.scaled_dot_product_attention(
        q.transpose(1, 2), k, v, scale=scale, enable_gqa=True
    )
    return o.transpose(1, 2)


def attend_grouped(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Attention in two matrix products over the heads of a group together; mask None: all visible.
    Keeps its scores, f32 [B, H, T, N]."""
    n_batch, n_tokens, n_heads, head_dim = q.shape
    n_kv_heads, n_cells = k.shape[1:3]
    repeat = n_heads // n_kv_heads
    # rows of one group: its query heads, each with all tokens
    rows = (q * scale).unflatten(2, (n_kv_heads, repeat)).permute(0, 2, 3, 1, 4)
    rows = rows.reshape(n_batch, n_kv_heads, repeat * n_tokens, head_dim)
    scores = torch.matmul(rows, k.transpose(2, 3)).unflatten(2, (repeat, n_tokens))
    if mask is not None:
        scores = torch.where(mask[:, None, None], scores, -torch.inf)
    if sinks is not None:
        one_more = sinks.view(1, n_kv_heads, repeat, 1).expand(n_batch, -1, -1, n_tokens)
        one_more = one_more.reshape(*scores.shape[:-1], 1)
        weights = torch.cat((scores, one_more), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    o = torch.matmul(weights.reshape(n_batch, n_kv_heads, repeat * n_tokens, n_cells), v)
    o = o.view(n_batch, n_kv_heads, repeat, n_tokens, v.shape[3]).permute(0, 3, 1, 2, 4)
    return o.reshape(n_batch, n_tokens, n_heads, v.shape[3])


_TRITON, _LLVM = "kernels.attention.with_triton", "kernels.attention.with_llvm"
_run = pick(attend_naive, attend_with_torch, _TRITON, _LLVM)
# the reference promises no bits
_run_invariant = pick(attend_invariant_with_torch, attend_invariant_with_torch, _TRITON, _LLVM)
