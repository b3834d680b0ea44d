"""One attention layer with biases against its definition in plain numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.gguf.file import GgufFile
from engine.gguf.reader import TensorReader
from engine.model.families import read_config
from engine.model.layers import RopeTables
from engine.model.memory import RopeAndMemory
from engine.model.mixers.attention import Attention
from engine.model.tensors import block_shapes
from engine.model.weights import Weights
from tests.support.naive_memory import NaiveMemory, ubatch_of

BLOCK = "blk.3."
N_HEAD, N_KV, HD, D = 4, 2, 32, 64


def _add_biases(tensors):
    random = np.random.default_rng(1)
    for x in "qkv":
        rows = tensors[f"{BLOCK}attn_{x}.weight"].shape[0]
        tensors[f"{BLOCK}attn_{x}.bias"] = random.normal(size=rows).astype(np.float32)


def _fuse(tensors):
    _add_biases(tensors)
    for kind in ("weight", "bias"):
        parts = [tensors.pop(f"{BLOCK}attn_{x}.{kind}") for x in "qkv"]
        tensors[f"{BLOCK}attn_qkv.{kind}"] = np.concatenate(parts)


def _only_values(tensors):
    _add_biases(tensors)
    for x in "qk":
        del tensors[f"{BLOCK}attn_{x}.bias"]


def _rms(x, weight, eps):
    return x / np.sqrt((x * x).mean() + eps) * weight


def _rotate(x, position, theta, n_rot):
    out = x.copy()
    for j in range(n_rot // 2):
        angle = position * theta ** (-2 * j / n_rot)
        a, b = x[j], x[j + n_rot // 2]
        out[j] = a * np.cos(angle) - b * np.sin(angle)
        out[j + n_rot // 2] = b * np.cos(angle) + a * np.sin(angle)
    return out


def _definition(file: GgufFile, x: np.ndarray, gated: bool, eps, theta, n_rot) -> np.ndarray:
    """Head by head and token by token, f64."""

    def tensor(name):
        info = file.tensors[BLOCK + name]
        return file.raw(BLOCK + name).view(np.float32).reshape(info.shape).astype(np.float64)

    def projected(name, rows):
        if "blk.3.attn_qkv.weight" in file.tensors:
            at = {"q": 0, "k": N_HEAD * HD * (1 + gated)}
            at["v"] = at["k"] + N_KV * HD
            part = slice(at[name], at[name] + rows)
            return x @ tensor("attn_qkv.weight")[part].T + tensor("attn_qkv.bias")[part]
        y = x @ tensor(f"attn_{name}.weight").T
        has_bias = f"{BLOCK}attn_{name}.bias" in file.tensors
        return y + tensor(f"attn_{name}.bias") if has_bias else y

    n = len(x)
    u = projected("q", N_HEAD * HD * (1 + gated)).reshape(n, N_HEAD, -1)
    k = projected("k", N_KV * HD).reshape(n, N_KV, HD)
    v = projected("v", N_KV * HD).reshape(n, N_KV, HD)
    out = np.zeros((n, N_HEAD, HD))
    for h in range(N_HEAD):
        kv = h // (N_HEAD // N_KV)
        keys = [
            _rotate(_rms(k[t, kv], tensor("attn_k_norm.weight"), eps), t, theta, n_rot)
            for t in range(n)
        ]
        for t in range(n):
            q = _rms(u[t, h, :HD], tensor("attn_q_norm.weight"), eps)
            scores = np.array([_rotate(q, t, theta, n_rot) @ keys[s] for s in range(t + 1)])
            weights = np.exp(scores / np.sqrt(HD))
            out[t, h] = (weights / weights.sum()) @ v[: t + 1, kv]
            if gated:
                out[t, h] /= 1 + np.exp(-u[t, h, HD:])
    return out.reshape(n, -1) @ tensor("attn_output.weight").T


@pytest.mark.parametrize("edit", [_add_biases, _fuse, _only_values])
@pytest.mark.parametrize("name", ["qwen35-a-f32", "qwen3-f-f32"])
def test_against_the_definition(name, edit, variant):
    x = torch.randn(1, 6, D, generator=torch.Generator().manual_seed(2))
    with GgufFile.open(variant(name, edit=edit)) as file:
        config = read_config(file)
        shapes = block_shapes(config, 3, file.tensors)
        (part,) = config.blocks[3].mixers
        weights = Weights(TensorReader(file), shapes, "f32", BLOCK)
        layer = Attention(part, weights, config.rope, config.eps, 3)
        expected = _definition(
            file,
            x[0].double().numpy(),
            part.gated,
            config.eps,
            config.rope.freq_base,
            config.rope.n_rot,
        )
    memory, ubatch = NaiveMemory(), ubatch_of(list(range(6)))
    memory.begin(ubatch)
    tables = RopeTables(config.rope)
    tables.reach(5)
    cos, sin = tables.at(torch.arange(6).unsqueeze(0))
    got = layer(x, RopeAndMemory(cos, sin, memory))
    np.testing.assert_allclose(got[0].numpy(), expected, rtol=0, atol=2e-5)
