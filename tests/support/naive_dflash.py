"""A drafted block from its definition: one sequence, float64, no memory, every row by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import gelu, silu

Tensors = dict[str, torch.Tensor]


def rms(x: torch.Tensor, weight: torch.Tensor | float, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(
    x: torch.Tensor, positions: torch.Tensor, keys: dict[str, Any], t: Tensors
) -> torch.Tensor:
    """x [n, heads, hd]; the first dimensions turn in pairs half of them apart."""
    n_rot = keys["rope.dimension_count"]
    half = n_rot // 2
    angle = keys["rope.freq_base"] ** (-2.0 * torch.arange(half, dtype=torch.float64) / n_rot)
    if "rope_freqs.weight" in t and "rope.dimension_sections" not in keys:
        angle = angle / t["rope_freqs.weight"][:half]
    cos, sin = (f(positions[:, None, None] * angle) for f in (torch.cos, torch.sin))
    a, b = x[..., :half], x[..., half:n_rot]
    return torch.cat((a * cos - b * sin, a * sin + b * cos, x[..., n_rot:]), -1)


def block(
    t: Tensors, keys: dict[str, Any], rows: torch.Tensor, tokens: list[int], table: torch.Tensor
) -> torch.Tensor:
    """Hidden rows [m, d] after the final norm.

    t: tensors of the file, float64. keys: without the architecture. rows: the target's, side by
    side [n, taps * d]. tokens: of the block, at positions n, n + 1, … table: the embedding.
    """
    eps, hd, n = keys["attention.layer_norm_rms_epsilon"], keys["attention.key_length"], len(rows)
    context = rms(rows @ t["fc.weight"].T, t["enc.output_norm.weight"], eps)
    x = table[tokens] * keys.get("embedding_scale", 1.0)
    where = torch.arange(n + len(tokens), dtype=torch.float64)
    windowed = keys.get("attention.sliding_window_pattern", [False] * keys["block_count"])
    for layer in range(keys["block_count"]):
        own = {k.removeprefix(f"blk.{layer}."): v for k, v in t.items() if f"blk.{layer}." in k}
        y = rms(x, own["attn_norm.weight"], eps)

        def keys_and_values(z, at, own=own):
            raw = (z @ own["attn_k.weight"].T).unflatten(-1, (-1, hd))
            k = turned(rms(raw, own["attn_k_norm.weight"], eps), at, keys, t)
            if "attn_v.weight" in own:
                return k, (z @ own["attn_v.weight"].T).unflatten(-1, (-1, hd))
            return k, rms(raw, 1.0, eps)

        pairs = [keys_and_values(context, where[:n]), keys_and_values(y, where[n:])]
        k, v = (torch.cat([pair[i] for pair in pairs]) for i in (0, 1))
        q = (y @ own["attn_q.weight"].T).unflatten(-1, (-1, hd))
        q = turned(rms(q, own["attn_q_norm.weight"], eps), where[n:], keys, t)
        heads = []
        for h in range(q.shape[1]):
            kv = h * k.shape[1] // q.shape[1]
            scores = q[:, h] @ k[:, kv].T * keys.get("attention.scale", hd**-0.5)
            back = where[n:, None] - where[None]
            hidden = torch.zeros_like(back, dtype=torch.bool)
            if windowed[layer]:
                hidden |= back >= keys["attention.sliding_window"]
            if keys.get("attention.causal"):
                hidden |= back < 0
            scores = scores.masked_fill(hidden, -torch.inf)
            if "attn_sinks.weight" in own:
                sink = own["attn_sinks.weight"][h].expand(len(tokens), 1)
                scores = torch.cat((scores, sink), 1)
            heads.append(scores.softmax(-1)[:, : len(where)] @ v[:, kv])
        out = torch.cat(heads, -1) @ own["attn_output.weight"].T
        out = out * keys.get("attention.value_scale", 1.0)
        if "post_attention_norm.weight" in own:
            out = rms(out, own["post_attention_norm.weight"], eps)
        x = x + out
        y = rms(x, own["ffn_norm.weight"], eps)
        gate = y @ own["ffn_gate.weight"].T
        silus = keys.get("hidden_activation", "silu") == "silu"
        gate = silu(gate) if silus else gelu(gate, approximate="tanh")
        out = gate * (y @ own["ffn_up.weight"].T) @ own["ffn_down.weight"].T
        if "post_ffw_norm.weight" in own:
            out = rms(out, own["post_ffw_norm.weight"], eps)
        x = (x + out) * own.get("layer_output_scale.weight", 1.0)
    return rms(x, t["output_norm.weight"], eps)
