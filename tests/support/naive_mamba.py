"""Logits of mamba, jamba and plamo2 models from their definition: one sequence, numpy, float64,
token by token, every state a plain array."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Tensors = Mapping[str, np.ndarray]


def rms(x: np.ndarray, weight: np.ndarray | float, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def mamba(t: Tensors, keys: Mapping[str, Any], x: np.ndarray, normed: bool) -> np.ndarray:
    """x [T, d], normed -> the same shape."""
    eps, n, rank = (
        keys[k]
        for k in ("attention.layer_norm_rms_epsilon", "ssm.state_size", "ssm.time_step_rank")
    )
    inner, taps = t["ssm_conv1d.weight"].shape
    history, S, out = [np.zeros(inner)] * (taps - 1), np.zeros((inner, n)), []
    for row in x:
        u, z = np.split(t["ssm_in.weight"] @ row, 2)
        history.append(u)
        newest = np.stack(history[-taps:], 1)
        v = silu((newest * t["ssm_conv1d.weight"]).sum(1) + t["ssm_conv1d.bias"])
        dt, B, C = np.split(t["ssm_x.weight"] @ v, [rank, rank + n])
        if normed:
            dt, B, C = (
                rms(y, t.get(f"ssm_{name}_norm.weight", 1.0), eps)
                for y, name in ((dt, "dt"), (B, "b"), (C, "c"))
            )
        dt = np.log1p(np.exp(t["ssm_dt.weight"] @ dt + t["ssm_dt.bias"]))
        S = np.exp(dt[:, None] * t["ssm_a"]) * S + np.outer(dt * v, B)
        out.append(t["ssm_out.weight"] @ (silu(z) * (S @ C + t["ssm_d"] * v)))
    return np.stack(out)


def plamo2(t: Tensors, keys: Mapping[str, Any], x: np.ndarray) -> np.ndarray:
    """Mamba-2 of PLaMo 2: x [T, d], normed -> the same shape."""
    eps, n = keys["attention.layer_norm_rms_epsilon"], keys["ssm.state_size"]
    inner, taps = t["ssm_conv1d.weight"].shape
    heads = len(t["ssm_a"])
    history, S, out = [np.zeros(inner)] * (taps - 1), np.zeros((heads, inner // heads, n)), []
    for row in x:
        z, u = (t["ssm_in.weight"] @ row).reshape(heads, 2, -1).swapaxes(0, 1)
        history.append(u.flatten())
        v = silu((np.stack(history[-taps:], 1) * t["ssm_conv1d.weight"]).sum(1))
        low = np.split(t["ssm_x.weight"] @ v, [n, 2 * n])
        B, C, dt = (
            rms(y, t[f"ssm_{k}_norm"], eps) for y, k in zip(low, ["b", "c", "dt"], strict=True)
        )
        dt = np.log1p(np.exp(t["ssm_dt.weight"] @ dt + t["ssm_dt.bias"]))
        v = v.reshape(heads, -1)
        S = np.exp(dt * t["ssm_a"])[:, None, None] * S + np.multiply.outer(dt[:, None] * v, B)
        y = S @ C + t["ssm_d"][:, None] * v
        out.append(t["ssm_out.weight"] @ (silu(z) * y).flatten())
    return np.stack(out)


def turned(x: np.ndarray, base: float) -> np.ndarray:
    """Rope over whole heads, x [T, H, d]: number j turns with j + d / 2."""
    half = x.shape[-1] // 2
    angles = np.multiply.outer(np.arange(len(x)), base ** (-np.arange(half) / half))[:, None]
    a, b = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def attention(t: Tensors, keys: Mapping[str, Any], x: np.ndarray) -> np.ndarray:
    hd = keys["attention.key_length"]
    if "attn_qkv.weight" in t:
        qkv = (x @ t["attn_qkv.weight"].T).reshape(len(x), -1, hd)
        norms = [t[f"attn_{one}_norm.weight"] for one in "qk"]
        q, k, v = np.split(qkv, np.cumsum([len(norm) for norm in norms]), 1)
        eps, base = keys["attention.layer_norm_rms_epsilon"], keys["rope.freq_base"]
        q, k = (turned(rms(y, norm, eps), base) for y, norm in zip((q, k), norms, strict=True))
    else:
        q, k, v = ((x @ t[f"attn_{one}.weight"].T).reshape(len(x), -1, hd) for one in "qkv")
    out = np.zeros_like(q)
    for head in range(q.shape[1]):
        kv = head * k.shape[1] // q.shape[1]
        for at in range(len(x)):
            scores = k[: at + 1, kv] @ q[at, head] / np.sqrt(hd)
            p = np.exp(scores - scores.max())
            out[at, head] = p / p.sum() @ v[: at + 1, kv]
    return out.reshape(len(x), -1) @ t["attn_output.weight"].T


def feed_forward(t: Tensors, keys: Mapping[str, Any], x: np.ndarray) -> np.ndarray:
    def swiglu(row, gate, up, down):
        return down @ (silu(gate @ row) * (up @ row))

    if "ffn_gate.weight" not in t and "ffn_up.weight" in t:
        half = len(t["ffn_up.weight"]) // 2
        t = {
            **t,
            "ffn_gate.weight": t["ffn_up.weight"][:half],
            "ffn_up.weight": t["ffn_up.weight"][half:],
        }
    names = [f"ffn_{one}" for one in ("gate", "up", "down")]
    if "ffn_gate_inp.weight" not in t:
        return np.stack([swiglu(row, *(t[f"{name}.weight"] for name in names)) for row in x])
    out = []
    for row in x:
        p = np.exp(t["ffn_gate_inp.weight"] @ row)
        p /= p.sum()
        chosen = np.argsort(-p)[: keys["expert_used_count"]]
        matrices = [[t[f"{name}_exps.weight"][i] for name in names] for i in chosen]
        out.append(sum(p[i] * swiglu(row, *m) for i, m in zip(chosen, matrices, strict=True)))
    return np.stack(out)


def added(t: Tensors, name: str, y: np.ndarray, eps: float) -> np.ndarray:
    return rms(y, t[name], eps) if name in t else y


def logits(t: Tensors, keys: Mapping[str, Any], tokens: list[int], normed: bool) -> np.ndarray:
    """[T, vocabulary]. keys: without the architecture. normed: whether steps, B and C are."""
    eps, x = keys["attention.layer_norm_rms_epsilon"], t["token_embd.weight"][tokens]
    for layer in range(keys["block_count"]):
        own = {k.removeprefix(f"blk.{layer}."): v for k, v in t.items() if f"blk.{layer}." in k}
        y = rms(x, own["attn_norm.weight"], eps)
        if "attn_output.weight" in own:
            y = attention(own, keys, y)
        else:
            y = plamo2(own, keys, y) if "ssm_b_norm" in own else mamba(own, keys, y, normed)
        x = x + added(own, "post_attention_norm", y, eps)
        if "ffn_norm.weight" in own:
            y = feed_forward(own, keys, rms(x, own["ffn_norm.weight"], eps))
            x = x + added(own, "post_ffw_norm", y, eps)
    head = t.get("output.weight", t["token_embd.weight"])
    return rms(x, t["output_norm.weight"], eps) @ head.T
