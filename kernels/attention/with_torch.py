"""Attention through PyTorch's fused kernel, or two matrix products where those read less."""

from __future__ import annotations

import torch
from torch.nn import functional

# The fused kernel reads the cells once per query head. With few queries over many cells that
# reading is the whole cost, so there the heads of one group share a matrix product.
FEW_TOKENS = 16
MANY_VALUES = 1 << 17


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """See kernels.attention.attend."""
    n_cells, head_dim = k.shape[2:]
    if q.shape[1] <= FEW_TOKENS and n_cells * head_dim >= MANY_VALUES:
        return _grouped(q, k, v, mask)
    o = functional.scaled_dot_product_attention(
        q.transpose(1, 2), k, v, attn_mask=mask.unsqueeze(1), enable_gqa=True
    )
    return o.transpose(1, 2)


def _grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    n_batch, n_tokens, n_heads, head_dim = q.shape
    n_kv_heads, n_cells = k.shape[1:3]
    repeat = n_heads // n_kv_heads
    # rows of one group: its query heads, each with all tokens
    rows = (q * head_dim**-0.5).unflatten(2, (n_kv_heads, repeat)).permute(0, 2, 3, 1, 4)
    rows = rows.reshape(n_batch, n_kv_heads, repeat * n_tokens, head_dim)
    scores = torch.matmul(rows, k.transpose(2, 3)).unflatten(2, (repeat, n_tokens))
    weights = torch.where(mask[:, None, None], scores, -torch.inf).softmax(-1)
    o = torch.matmul(weights.view(n_batch, n_kv_heads, repeat * n_tokens, n_cells), v)
    o = o.view(n_batch, n_kv_heads, repeat, n_tokens, head_dim).permute(0, 3, 1, 2, 4)
    return o.reshape(n_batch, n_tokens, n_heads, head_dim)
