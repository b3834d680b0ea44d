"""What is measured: every public kernel at the sizes a decoding loop calls it with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from kernels import attention, moe, norm, rope
from kernels.attention import attend
from kernels.dispatch import uses_llvm
from kernels.linear import block_linear as blocks_op
from kernels.linear import integer_blocks, linear, pack
from kernels.linear import naive as linear_law
from kernels.linear.block_linear import TYPES, block_linear
from kernels.linear.integers import weight_levels
from kernels.linear.packed import MODES
from kernels.moe import Choice, experts, pack_experts, route
from kernels.norm import gated_rms_norm, l2_norm, rms_norm
from kernels.pointwise import delta_gates, swiglu
from kernels.pointwise import naive as pointwise_law
from kernels.recurrence import conv
from kernels.recurrence.conv import causal_conv
from kernels.rope import apply_rope, rope_table
from tests.bench.kernels import delta_cases, ssd_cases
from tests.bench.kernels import sizes as count
from tests.bench.kernels.measure import KernelCase
from tests.bench.kernels.sizes import Sizes
from tests.support.implementations import Implementation

moe_law = Implementation(moe, "naive")
integer_law = Implementation(integer_blocks, "naive")
block_law = Implementation(blocks_op, "naive")
attention_law = Implementation(attention, "naive")

conv_law = Implementation(conv, "naive")
rope_law = Implementation(rope, "naive")
norm_law = Implementation(norm, "naive")

# numbers in a block of a K-quant
LARGEST_BLOCK = 256


def all_cases(sizes: Sizes, device: torch.device) -> dict[str, Callable[[], Iterator[KernelCase]]]:
    """Kernel names and their cases; tensors are made when a case is reached."""

    def of(
        make: Callable[[Sizes, torch.device], Iterator[KernelCase]],
    ) -> Callable[[], Iterator[KernelCase]]:
        return lambda: make(sizes, device)

    cases = {
        "delta_rule": of(delta_cases.rule),
        "delta_slots": of(delta_cases.slots),
        "delta_log": of(delta_cases.log),
        "fold": of(delta_cases.fold_log),
        "ssd": of(ssd_cases.rule),
        "conv": of(_conv),
        "norm": of(_norm),
        "rope": of(_rope),
        "swiglu": of(_swiglu),
        "gates": of(_gates),
        "linear": of(_linear),
        "attention": of(_attention),
        "route": of(_route),
        "moe": of(_moe),
    }
    if device.type == "cuda" or uses_llvm():
        # torch would expand the whole weight on every call
        cases["block_linear"] = of(_block_linear)
    if device.type == "cpu" and uses_llvm():
        cases["integer_linear"] = of(_integer_linear)
    return cases


def _conv(sizes: Sizes, device: torch.device) -> Iterator[KernelCase]:
    channels, n_taps = sizes.conv_channels, 4
    weight = torch.randn(channels, n_taps, device=device)
    for n_tokens in sizes.tokens:
        x = torch.randn(1, n_tokens, channels, device=device)
        window = torch.randn(1, n_taps - 1, channels, device=device)
        yield KernelCase(
            "conv",
            f"T={n_tokens} C={channels}",
            partial(causal_conv, x, weight, window),
            partial(conv_law.causal_conv, x, weight, window),
            count.conv_bytes(channels, 1, n_tokens, n_taps),
            2 * n_taps * n_tokens * channels,
            n_tokens,
        )


def _norm(sizes: Sizes, device: torch.device) -> Iterator[KernelCase]:
    d = sizes.n_embd
    weight = torch.randn(d, device=device)
    for n in sizes.tokens:
        x, gate = torch.randn(n, d, device=device), torch.randn(n, d, device=device)
        operations = 4 * n * d
        yield KernelCase(
            "norm",
            f"rms {n}x{d}",
            partial(rms_norm, x, weight, 1e-6),
            partial(norm_law.rms_norm, x, weight, 1e-6),
            count.norm_bytes(n, d, 1),
            operations,
        )
        yield KernelCase(
            "norm",
            f"l2 {n}x{d}",
            partial(l2_norm, x, 1e-6),
            partial(norm_law.l2_norm, x, 1e-6),
            count.norm_bytes(n, d, 0),
            operations,
        )
        yield KernelCase(
            "norm",
            f"gated {n}x{d}",
            partial(gated_rms_norm, x, gate, weight, 1e-6),
            partial(norm_law.gated_rms_norm, x, gate, weight, 1e-6),
            count.norm_bytes(n, d, 1, gates=1),
            2 * operations,
        )


def _rope(sizes: Sizes, device: torch.device) -> Iterator[KernelCase]:
    n_heads, head_dim, n_rot = sizes.n_heads, sizes.head_dim, sizes.n_rot
    frequencies = 1e7 ** -(torch.arange(n_rot // 2, device=device) / (n_rot / 2))
    for n in sizes.tokens:
        x = torch.randn(1, n, n_heads, head_dim, device=device)
        cos, sin = rope_table(torch.arange(n, device=device).unsqueeze(0), n_rot, frequencies)
        yield KernelCase(
            "rope",
            f"T={n} H={n_heads} hd={head_dim}",
            partial(apply_rope, x, cos, sin),
            partial(rope_law.apply_rope, x, cos, sin),
            count.rope_bytes(n, n_heads, head_dim, n_rot),
            3 * n * n_heads * n_rot,
            n_rot,
        )


def _swiglu(sizes: Sizes, device: torch.device) -> Iterator[KernelCase]:
    d = sizes.n_ff
    for n in sizes.tokens:
        gate, up = torch.randn(2, n, d, device=device).unbind(0)
        yield KernelCase(
            "swiglu",
            f"{n}x{d}",
            partial(swiglu, gate, up),
            partial(pointwise_law.swiglu, gate, up),
            count.norm_bytes(n, d, 0, gates=1),
            5 * n * d,
        )


def _gates(sizes: Sizes, device: torch.device) -> Iterator[KernelCase]:
    n_heads = sizes.n_v_heads
    dt, a = torch.randn(2, n_heads, device=device).unbind(0)
    for n in sizes.tokens:
        decay, beta = torch.randn(2, n, n_heads, device=device).unbind(0)
        yield KernelCase(
            "gates",
            f"{n}x{n_heads}",
            partial(delta_gates, decay, dt, a, beta),
            partial(pointwise_law.delta_gates, decay, dt, a, beta),
            2 * count.norm_bytes(n, n_heads, 1),
            12 * n * n_heads,
        )


def _linear(sizes: Sizes, device: torch.device) -> Iterator[KernelCase]:
    n_in, n_out = sizes.n_embd, sizes.n_ff
    # the packed modes are for processors
    for mode in MODES if device.type == "cpu" else ("f32",):
        weight = torch.randn(n_out, n_in, device=device)
        packed, law = pack(weight, mode), linear_law.pack(weight, mode, weight_levels())
        for n in sizes.tokens:
            x = torch.randn(n, n_in, device=device)
            yield KernelCase(
                "linear",
                f"{mode} {n}x{n_in}x{n_out}",
                partial(linear, x, packed),
                partial(linear_law.linear, x, law),
                count.linear_bytes(packed.n_bytes, n, n_in, n_out),
                2 * n * n_in * n_out,
                rate="f32" if mode == "f32" else "bf16",
            )


def _block_linear(sizes: Sizes, device: torch.device) -> Iterator[KernelCase]:
    on_cpu = device.type == "cpu"
    n_in, n_out = -(-sizes.n_embd // LARGEST_BLOCK) * LARGEST_BLOCK, sizes.n_ff
    tokens = [n for n in sizes.tokens if on_cpu or n <= 16]
    for name in TYPES:
        elements, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
        # alike blocks take as long as others
        host = torch.full((n_out, n_in // elements * n_bytes), 0x11, dtype=torch.uint8)
        blocks = host.to(device)
        for n, rounded in product(tokens, (False, True) if on_cpu else (False,)):
            x = torch.randn(n, n_in)
            on_device = x.to(device)
            yield KernelCase(
                "block_linear",
                f"{name}{' bf16' * rounded} {n}x{n_in}x{n_out}",
                partial(block_linear, on_device, blocks, name, rounded=rounded),
                partial(block_law.block_linear, x, host, name, rounded=rounded),
                count.linear_bytes(host.numel(), n, n_in, n_out),
                2 * n * n_in * n_out,
                rate="bf16" if rounded else "f32",
            )


def _integer_linear(sizes: Sizes, device: torch.device) -> Iterator[KernelCase]:
    n_in, n_out = -(-sizes.n_embd // LARGEST_BLOCK) * LARGEST_BLOCK, sizes.n_ff
    on_cpu = device.type == "cpu"
    for name in integer_blocks.TYPES if on_cpu else integer_blocks.GPU_TYPES:
        elements, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
        blocks = torch.full((n_out, n_in // elements * n_bytes), 0x11, dtype=torch.uint8)
        for n in sizes.tokens:
            x = torch.randn(n, n_in)
            yield KernelCase(
                "integer_linear",
                f"{name} {n}x{n_in}x{n_out}",
                partial(integer_blocks.integer_linear, x, blocks, name),
                partial(integer_law.integer_linear, x, blocks, name),
                count.linear_bytes(blocks.numel(), n, n_in, n_out),
                2 * n * n_in * n_out,
            )


def _attention(sizes: Sizes, device: torch.device) -> Iterator[KernelCase]:
    n_cells, n_heads, head_dim = sizes.n_cells, sizes.n_heads, sizes.head_dim
    k, v = (torch.randn(1, sizes.n_kv_heads, n_cells, head_dim, device=device) for _ in range(2))
    for n in (n for n in sizes.tokens if n <= 16):
        q = torch.randn(1, n, n_heads, head_dim, device=device)
        mask = torch.ones(1, n, n_cells, dtype=torch.bool, device=device).tril(n_cells - n)
        yield KernelCase(
            "attention",
            f"T={n} N={n_cells} H={n_heads}/{sizes.n_kv_heads} hd={head_dim}",
            partial(attend, q, k, v, mask),
            partial(attention_law.attend, q, k, v, mask, head_dim**-0.5, None),
            count.attention_bytes(sizes, n),
            4 * n * n_heads * n_cells * head_dim,
            n * n_heads,
        )


def _route(sizes: Sizes, device: torch.device) -> Iterator[KernelCase]:
    n_experts, n_used = sizes.n_experts, sizes.n_used
    choice = Choice(n_used, "softmax")
    for n in sizes.tokens:
        logits = torch.randn(n, n_experts, device=device)
        yield KernelCase(
            "route",
            f"{n} rows, {n_used} of {n_experts} experts",
            partial(route, logits, None, choice),
            partial(moe_law.route, logits, None, choice),
            count.route_bytes(sizes, n),
            n * n_experts * (3 + n_used),
            n,
        )


def _moe(sizes: Sizes, device: torch.device) -> Iterator[KernelCase]:
    n_experts, n_used = sizes.n_experts, sizes.n_used
    shape = n_experts, sizes.n_ff_expert, sizes.n_embd
    gate, up, down = (torch.randn(shape, device=device) for _ in range(3))
    down = down.transpose(1, 2).contiguous()
    pairs = [(torch.cat(pair), last) for *pair, last in zip(gate, up, down, strict=True)]
    # on a GPU whole numbers are for matrices in the blocks of their file
    for mode in MODES if device.type == "cpu" else ("f32", "bf16"):
        packed, law = (
            pack_experts(gate, up, down, mode),
            moe_law.pack(gate, pairs, mode, levels=weight_levels()),
        )
        for n in sizes.tokens:
            x = torch.randn(n, sizes.n_embd, device=device)
            weights, ids = route(
                torch.randn(n, n_experts, device=device), None, Choice(n_used, "softmax")
            )
            chosen = packed.n_bytes // n_experts * len(ids.unique())
            yield KernelCase(
                "moe",
                f"{mode} {n} rows, {n_used} of {n_experts} experts",
                partial(experts, x, weights, ids, packed),
                partial(moe_law.experts, x, weights, ids, law),
                count.expert_bytes(sizes, chosen, n),
                6 * n * n_used * sizes.n_ff_expert * sizes.n_embd,
                n * n_used,
                rate="f32" if mode == "f32" else "bf16",
            )
