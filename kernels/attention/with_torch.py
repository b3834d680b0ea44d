"""Attention through PyTorch's fused kernel, or two matrix products where those read less."""

from __future__ import annotations

import torch
from torch.nn import functional

# The fused kernel reads the cells once per query head. With few queries over many cells that
# reading is the whole cost, so there the heads of one group share a matrix product.
FEW_TOKENS = 16
MANY_VALUES = 1 << 17


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See kernels.attention.attend."""
    scale = q.shape[3] ** -0.5 if scale is None else scale
    n_cells, head_dim = k.shape[2:]
    if sinks is not None:
        return _grouped(q, k, v, mask, scale, sinks)
    if q.shape[1] <= FEW_TOKENS and n_cells * head_dim >= MANY_VALUES:
        return _grouped(q, k, v, mask, scale)
    o = functional.scaled_dot_product_attention(
        q.transpose(1, 2), k, v, attn_mask=mask.unsqueeze(1), scale=scale, enable_gqa=True
    )
    return o.transpose(1, 2)


def attend_invariant(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """attend one query at a time, over as many cells as it sees."""
    scale = q.shape[3] ** -0.5 if scale is None else scale
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


def _one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, sinks: torch.Tensor | None
) -> torch.Tensor:
    if sinks is not None or k.shape[2] * k.shape[3] >= MANY_VALUES:
        return _grouped(q, k, v, None, scale, sinks)
    o = functional.scaled_dot_product_attention(
        q.transpose(1, 2), k, v, scale=scale, enable_gqa=True
    )
    return o.transpose(1, 2)


def _grouped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
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
