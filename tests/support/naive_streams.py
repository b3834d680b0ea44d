"""A block that layers of DeepSeek-V4 draft, from its definition: one sequence, float64, row by
row; attention to a window of context rows and to the whole block."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.naive_dflash import Tensors, rms


def turned(x: torch.Tensor, at: int, n_rot: int, theta: float, *, back: bool = False):
    """x [..., hd]: neighbours among the last n_rot numbers turn."""
    angle = at * theta ** (-2.0 * torch.arange(n_rot // 2, dtype=torch.float64) / n_rot)
    cos, sin = angle.cos(), -angle.sin() if back else angle.sin()
    y = x.clone()
    a, b = x[..., -n_rot::2], x[..., -n_rot + 1 :: 2]
    y[..., -n_rot::2], y[..., -n_rot + 1 :: 2] = a * cos - b * sin, a * sin + b * cos
    return y


def gates(X: torch.Tensor, t: Tensors, name: str, keys: dict[str, Any]):
    """Of one token's streams X [4, d]: what reads, what writes, and the matrix between them."""
    scale, base = t[f"{name}_scale.weight"], t[f"{name}_base.weight"]
    m = t[f"{name}_fn.weight"] @ rms(X.flatten(), 1.0, keys["attention.layer_norm_rms_epsilon"])
    e, n = keys["hyper_connection.epsilon"], keys["hyper_connection.sinkhorn_iterations"]
    if len(m) == 4:
        return torch.sigmoid(m * scale + base) + e
    reads = torch.sigmoid(m[:4] * scale[0] + base[:4]) + e
    writes = 2 * torch.sigmoid(m[4:8] * scale[1] + base[4:8])
    C = (m[8:] * scale[2] + base[8:]).view(4, 4).softmax(1) + e
    C = C / (C.sum(0, keepdim=True) + e)
    for _ in range(n - 1):
        C = C / (C.sum(1, keepdim=True) + e)
        C = C / (C.sum(0, keepdim=True) + e)
    return reads, writes, C


def experts(y: torch.Tensor, t: Tensors, keys: dict[str, Any]) -> torch.Tensor:
    def glu(gate, up, down, limit):
        gate, up = (gate @ y).clamp(max=limit), (up @ y).clamp(-limit, limit)
        return down @ (gate * torch.sigmoid(gate) * up)

    p = torch.nn.functional.softplus(t["ffn_gate_inp.weight"] @ y).sqrt()
    ids = (p + t["exp_probs_b.bias"]).topk(keys["expert_used_count"]).indices
    weights = p[ids] / p[ids].sum() * keys["expert_weights_scale"]
    limit = float(keys["swiglu_clamp_exp"][0])
    names = [f"ffn_{one}_exps.weight" for one in ("gate", "up", "down")]
    out = glu(*(t[name.replace("_exps", "_shexp")] for name in names), limit)
    for i, weight in zip(ids.tolist(), weights, strict=True):
        out = out + weight * glu(*(t[name][i] for name in names), limit)
    return out


def block(
    t: Tensors, keys: dict[str, Any], rows: torch.Tensor, tokens: list[int], table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [m, d] that are read out of the streams, and these after the final norm. Arguments as
    naive_dflash.block takes them."""
    eps, hd, n = keys["attention.layer_norm_rms_epsilon"], keys["attention.key_length"], len(rows)
    n_rot, theta = keys["rope.dimension_count"], keys["rope.freq_base"]
    context = rms(rows @ t["fc.weight"].T, t["enc.output_norm.weight"], eps)
    X = [table[token].expand(4, -1) for token in tokens]
    for layer in range(keys["block_count"]):
        own = {k.removeprefix(f"blk.{layer}."): v for k, v in t.items() if f"blk.{layer}." in k}

        def key(z, at, own=own):
            return turned(
                rms(own["attn_kv.weight"] @ z, own["attn_kv_a_norm.weight"], eps), at, n_rot, theta
            )

        opened = [gates(x, own, "hc_attn", keys) for x in X]
        read = [rms(g[0] @ x, own["attn_norm.weight"], eps) for x, g in zip(X, opened, strict=True)]
        cells = [key(z, at) for at, z in enumerate(context)]
        cells += [key(z, n + at) for at, z in enumerate(read)]
        made = []
        for i, y in enumerate(read):
            low = rms(own["attn_q_a.weight"] @ y, own["attn_q_a_norm.weight"], eps)
            q = (own["attn_q_b.weight"] @ low).view(-1, hd)
            q = turned(rms(q, 1.0, eps), n + i, n_rot, theta)
            seen = [
                c for at, c in enumerate(cells) if n + i - at < keys["attention.sliding_window"]
            ]
            k = torch.stack(seen)
            scores = torch.cat((q @ k.T * hd**-0.5, own["attn_sinks.weight"][:, None]), 1)
            out = scores.softmax(1)[:, :-1] @ k
            out = turned(out, n + i, n_rot, theta, back=True)
            n_groups = keys["attention.output_group_count"]
            wide = out.reshape(n_groups, -1)
            low = own["attn_output_a.weight"].view(n_groups, -1, wide.shape[1]) @ wide[..., None]
            made.append(own["attn_output_b.weight"] @ low.flatten())
        X = [g[1][:, None] * o + g[2].T @ x for x, g, o in zip(X, opened, made, strict=True)]
        opened = [gates(x, own, "hc_ffn", keys) for x in X]
        read = [rms(g[0] @ x, own["ffn_norm.weight"], eps) for x, g in zip(X, opened, strict=True)]
        X = [
            g[1][:, None] * experts(y, own, keys) + g[2].T @ x
            for x, g, y in zip(X, opened, read, strict=True)
        ]
    last = torch.stack([gates(x, t, "output_hc", keys) @ x for x in X])
    return last, rms(last, t["output_norm.weight"], eps)
