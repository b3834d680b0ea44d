"""The demo models as trainable torch modules whose parameters are named like GGUF tensors.

The arithmetic is that of the `qwen35` architecture: Gated-DeltaNet layers with every n-th layer
gated full attention, SwiGLU, tied head, and optionally one multi-token-prediction block.  The
sequence mixers are the program's own kernels, so a demo model is trained through the code that
later runs it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kernels.attention import attend
from kernels.norm import gated_rms_norm, l2_norm, rms_norm
from kernels.recurrence.conv import causal_conv
from kernels.recurrence.delta_rule import gated_delta_rule
from kernels.rope import apply_rope, rope_table

EPS = 1e-6
THETA = 10_000.0
HAS_BF16 = torch.cpu._is_avx512_bf16_supported()


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """Shape of a demo model; every `interval`-th layer is full attention."""

    name: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    n_k_heads: int
    n_v_heads: int
    interval: int
    n_mtp: int = 0
    head_dim: int = 64
    n_rot: int = 16
    d_state: int = 64
    d_conv: int = 4
    n_vocab: int = 4096
    n_ctx: int = 2048

    @property
    def recurrent(self) -> tuple[bool, ...]:
        """True for each Gated-DeltaNet layer of the trunk, then False for each MTP block."""
        trunk = [(i + 1) % self.interval != 0 for i in range(self.n_layer)]
        return (*trunk, *[False] * self.n_mtp)

    @property
    def conv_dim(self) -> int:
        """Channels of the short convolution: queries, keys, values."""
        return (2 * self.n_k_heads + self.n_v_heads) * self.d_state


TARGET = DemoConfig("Draftscope demo target", 8, 256, 768, 4, 2, 2, 4, interval=4, n_mtp=1)
DRAFT = DemoConfig("Draftscope demo draft", 4, 128, 384, 2, 1, 2, 2, interval=4)

Cache = tuple[Tensor, Tensor]


class Weight(nn.Module):
    """A bare weight, named `<tensor>.weight`."""

    def __init__(self, *shape: int, std: float | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape) if std is None else torch.randn(shape) * std)


class Bias(nn.Module):
    """A bare bias, named `<tensor>.bias`."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.bias = nn.Parameter(value)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., n] @ weight [m, n].T; while training in bf16 where the CPU has instructions for it.

    The sums stay f32 inside the product. It halves the time of a training step; decoding keeps
    f32, so that the text a stage sees is the text the engine will write.
    """
    if HAS_BF16 and torch.is_grad_enabled():
        return (x.bfloat16() @ weight.bfloat16().mT).float()
    return x @ weight.mT


class Linear(nn.Linear):
    """A linear map without bias, multiplied by `product`."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__(n_in, n_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight)


def linear(n_in: int, n_out: int, *, zero: bool = False) -> Linear:
    """A linear map as training begins with it. zero: one that adds nothing yet."""
    layer = Linear(n_in, n_out)
    if zero:
        nn.init.zeros_(layer.weight)
    else:
        nn.init.normal_(layer.weight, std=0.6 / math.sqrt(n_in))
    return layer


class DemoBlock(nn.Module):
    """Pre-norm mixer and SwiGLU with residuals; subclasses supply `mix`."""

    def __init__(self, c: DemoConfig) -> None:
        super().__init__()
        self.c = c
        self.attn_norm = Weight(c.n_embd)
        self.post_attention_norm = Weight(c.n_embd)
        self.ffn_gate = linear(c.n_embd, c.n_ff)
        self.ffn_up = linear(c.n_embd, c.n_ff)
        self.ffn_down = linear(c.n_ff, c.n_embd, zero=True)

    def mix(self, y: Tensor, cache: Cache, offset: int) -> tuple[Tensor, Cache]:
        """Mix over time: y [B, T, d] -> ([B, T, d], cache after the last token)."""
        raise NotImplementedError

    def start(self, batch: int) -> Cache:
        """The cache of an empty sequence, for `batch` sequences."""
        raise NotImplementedError

    def forward(self, x: Tensor, cache: Cache, offset: int) -> tuple[Tensor, Cache]:
        """One block on x [B, T, d] at positions offset, offset + 1, …"""
        mixed, cache = self.mix(rms_norm(x, self.attn_norm.weight, EPS), cache, offset)
        x = x + mixed
        y = rms_norm(x, self.post_attention_norm.weight, EPS)
        ffn = nn.functional.silu(self.ffn_gate(y)) * self.ffn_up(y)
        return x + self.ffn_down(ffn), cache


class DeltaBlock(DemoBlock):
    """Gated DeltaNet block; cache = (conv window [B, K-1, C], state [B, H_v, d, d])."""

    def __init__(self, c: DemoConfig) -> None:
        super().__init__(c)
        value_dim = c.n_v_heads * c.d_state
        self.attn_qkv = linear(c.n_embd, c.conv_dim)
        self.attn_gate = linear(c.n_embd, value_dim)
        self.ssm_alpha = linear(c.n_embd, c.n_v_heads)
        self.ssm_beta = linear(c.n_embd, c.n_v_heads)
        self.ssm_conv1d = Weight(c.conv_dim, c.d_conv)
        nn.init.uniform_(self.ssm_conv1d.weight, -0.5, 0.5)
        # time steps spread over 0.001…0.1 and rates over 1…16, as usual for gated linear models
        dt = torch.exp(torch.rand(c.n_v_heads) * math.log(100.0) + math.log(1e-3))
        self.ssm_dt = Bias(dt + torch.log(-torch.expm1(-dt)))
        self.log_decay = nn.Parameter(torch.log(1.0 + 15.0 * torch.rand(c.n_v_heads)))
        self.ssm_norm = Weight(c.d_state)
        self.ssm_out = linear(value_dim, c.n_embd, zero=True)

    def start(self, batch: int) -> Cache:
        c = self.c
        window = torch.zeros(batch, c.d_conv - 1, c.conv_dim)
        return window, torch.zeros(batch, c.n_v_heads, c.d_state, c.d_state)

    def mix(self, y: Tensor, cache: Cache, offset: int) -> tuple[Tensor, Cache]:
        c = self.c
        n_seqs, n_tokens, _ = y.shape
        mixed, history = causal_conv(self.attn_qkv(y), self.ssm_conv1d.weight, cache[0])
        key_dim = c.n_k_heads * c.d_state
        q, k, v = mixed.split([key_dim, key_dim, c.n_v_heads * c.d_state], dim=-1)
        q = l2_norm(q.reshape(n_seqs, n_tokens, c.n_k_heads, c.d_state), EPS)
        k = l2_norm(k.reshape(n_seqs, n_tokens, c.n_k_heads, c.d_state), EPS)
        v = v.reshape(n_seqs, n_tokens, c.n_v_heads, c.d_state)
        step = nn.functional.softplus(self.ssm_alpha(y) + self.ssm_dt.bias)
        g = -torch.exp(self.log_decay) * step
        beta = torch.sigmoid(self.ssm_beta(y))
        o, states = gated_delta_rule(q, k, v, g, beta, cache[1], grouped=False)
        z = self.attn_gate(y).reshape(o.shape)
        o = gated_rms_norm(o, z, self.ssm_norm.weight, EPS)
        window = history[:, n_tokens:]
        return self.ssm_out(o.reshape(n_seqs, n_tokens, -1)), (window, states[:, 0])


class AttentionBlock(DemoBlock):
    """Gated full attention; cache = roped keys and values, each [B, H_kv, N, hd]."""

    def __init__(self, c: DemoConfig) -> None:
        super().__init__(c)
        self.attn_q = linear(c.n_embd, 2 * c.n_head * c.head_dim)
        self.attn_k = linear(c.n_embd, c.n_head_kv * c.head_dim)
        self.attn_v = linear(c.n_embd, c.n_head_kv * c.head_dim)
        self.attn_q_norm = Weight(c.head_dim)
        self.attn_k_norm = Weight(c.head_dim)
        self.attn_output = linear(c.n_head * c.head_dim, c.n_embd, zero=True)

    def start(self, batch: int) -> Cache:
        empty = torch.zeros(batch, self.c.n_head_kv, 0, self.c.head_dim)
        return empty, empty

    def mix(self, y: Tensor, cache: Cache, offset: int) -> tuple[Tensor, Cache]:
        c = self.c
        n_seqs, n_tokens, _ = y.shape
        u = self.attn_q(y).reshape(n_seqs, n_tokens, c.n_head, 2 * c.head_dim)
        q, gate = u.split(c.head_dim, dim=-1)
        k = self.attn_k(y).reshape(n_seqs, n_tokens, c.n_head_kv, c.head_dim)
        v = self.attn_v(y).reshape(n_seqs, n_tokens, c.n_head_kv, c.head_dim)
        positions = torch.arange(offset, offset + n_tokens)
        inv_freq = THETA ** (-torch.arange(0, c.n_rot, 2) / c.n_rot)
        cos, sin = rope_table(positions.expand(n_seqs, -1), c.n_rot, inv_freq, 1.0)
        q = apply_rope(rms_norm(q, self.attn_q_norm.weight, EPS), cos, sin)
        k = apply_rope(rms_norm(k, self.attn_k_norm.weight, EPS), cos, sin)
        keys = torch.cat([cache[0], k.transpose(1, 2)], dim=2)
        values = torch.cat([cache[1], v.transpose(1, 2)], dim=2)
        visible = torch.arange(keys.shape[2])[None, :] <= (
            keys.shape[2] - n_tokens + torch.arange(n_tokens)[:, None]
        )
        o = attend(q, keys, values, visible.expand(n_seqs, -1, -1))
        o = (o * torch.sigmoid(gate)).reshape(n_seqs, n_tokens, -1)
        return self.attn_output(o), (keys, values)


class NextN(nn.Module):
    """The tensors that turn an attention block into an MTP block."""

    def __init__(self, c: DemoConfig) -> None:
        super().__init__()
        self.eh_proj = linear(2 * c.n_embd, c.n_embd)
        self.enorm = Weight(c.n_embd)
        self.hnorm = Weight(c.n_embd)
        self.shared_head_norm = Weight(c.n_embd)


class MtpBlock(AttentionBlock):
    """Predicts token p+1 from token p and the trunk's hidden state of p-1."""

    def __init__(self, c: DemoConfig) -> None:
        super().__init__(c)
        self.nextn = NextN(c)

    def join(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Concatenate (embedding first) and project: two [B, T, d] -> [B, T, d]."""
        e = rms_norm(embedded, self.nextn.enorm.weight, EPS)
        h = rms_norm(hidden, self.nextn.hnorm.weight, EPS)
        return self.nextn.eh_proj(torch.cat([e, h], dim=-1))


def _run(block: nn.Module, x: Tensor, cache: Cache, offset: int) -> tuple[Tensor, Cache]:
    # compiled code exists for the few shapes of training only; decoding has many
    return block(x, cache, offset) if torch.is_grad_enabled() else block.forward(x, cache, offset)


class DemoModel(nn.Module):
    """A hybrid language model with a tied head."""

    def __init__(self, c: DemoConfig) -> None:
        super().__init__()
        self.c = c
        self.token_embd = Weight(c.n_vocab, c.n_embd, std=0.03)
        trunk = [DeltaBlock(c) if r else AttentionBlock(c) for r in c.recurrent[: c.n_layer]]
        self.blk = nn.ModuleList([*trunk, *[MtpBlock(c) for _ in range(c.n_mtp)]])
        self.output_norm = Weight(c.n_embd)

    @property
    def mtp(self) -> MtpBlock:
        """The MTP block; only for a configuration that has one."""
        block = self.blk[self.c.n_layer]
        assert isinstance(block, MtpBlock)
        return block

    def start(self, batch: int) -> list[Cache]:
        """Caches of all blocks (trunk, then MTP) for empty sequences."""
        return [block.start(batch) for block in self.blk if isinstance(block, DemoBlock)]

    def trunk(
        self, ids: Tensor, caches: list[Cache] | None = None, offset: int = 0
    ) -> tuple[Tensor, list[Cache]]:
        """ids [B, T] -> hidden after the output norm [B, T, d] and the caches after it."""
        caches = self.start(ids.shape[0]) if caches is None else list(caches)
        x = self.token_embd.weight[ids]
        for i in range(self.c.n_layer):
            x, caches[i] = _run(self.blk[i], x, caches[i], offset)
        return rms_norm(x, self.output_norm.weight, EPS), caches

    def mtp_step(
        self, ids: Tensor, hidden: Tensor, cache: Cache | None = None, offset: int = 0
    ) -> tuple[Tensor, Cache]:
        """ids [B, T] and the hidden states one position before, [B, T, d] -> its own hidden."""
        block = self.mtp
        x = block.join(self.token_embd.weight[ids], hidden)
        cache = block.start(ids.shape[0]) if cache is None else cache
        x, cache = _run(block, x, cache, offset)
        return rms_norm(x, block.nextn.shared_head_norm.weight, EPS), cache

    def logits(self, hidden: Tensor) -> Tensor:
        """Tied head: [..., d] -> [..., V]."""
        return product(hidden, self.token_embd.weight)
