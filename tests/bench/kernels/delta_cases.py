"""The cases of the gated delta rule: decoding, verifying, prompts, a ring, the replay log."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial

import torch

from kernels.recurrence.delta_rule import (
    fold,
    gated_delta_log,
    gated_delta_rule,
    gated_delta_slots,
    naive,
)
from tests.bench.kernels import sizes as count
from tests.bench.kernels.measure import KernelCall, KernelCase
from tests.bench.kernels.sizes import Sizes

FEW = 16
Inputs = tuple[torch.Tensor, ...]


def rule(sizes: Sizes, device: torch.device) -> Iterator[KernelCase]:
    """The last state kept, and for few tokens all of them, as verifying with planes does."""
    for n_batch, n_tokens, inputs in _every(sizes, device):
        for kept in sorted({1, n_tokens}) if n_tokens <= FEW else [1]:
            yield KernelCase(
                "delta_rule",
                f"B={n_batch} T={n_tokens} K={kept}",
                partial(gated_delta_rule, *inputs, grouped=False, n_snapshots=kept),
                partial(naive.gated_delta_rule, *inputs, grouped=False, n_snapshots=kept),
                count.delta_bytes(sizes, n_batch, n_tokens, kept),
                count.delta_operations(sizes, n_batch, n_tokens),
                n_batch * n_tokens * sizes.n_v_heads,
                fla=_fla(inputs) if kept == 1 and sizes.n_k_heads == sizes.n_v_heads else None,
            )


def slots(sizes: Sizes, device: torch.device) -> Iterator[KernelCase]:
    """Few tokens from a row of a pool, each state to another row, as verifying with a ring does."""
    for n_batch, n_tokens, inputs in _every(sizes, device):
        if n_tokens <= FEW:
            numbers = torch.arange(n_batch * (n_tokens + 1), device=device).view(n_batch, -1)
            pool = torch.zeros(numbers.numel(), *inputs[5].shape[1:], device=device)
            arguments = *inputs[:5], pool, numbers[:, 0], numbers[:, 1:]
            yield KernelCase(
                "delta_slots",
                f"B={n_batch} T={n_tokens}",
                partial(gated_delta_slots, *arguments, grouped=False),
                partial(naive.gated_delta_slots, *arguments, grouped=False),
                # and 8 bytes for the number of each row
                count.delta_bytes(sizes, n_batch, n_tokens, n_tokens) + 8 * numbers.numel(),
                count.delta_operations(sizes, n_batch, n_tokens),
                n_batch * n_tokens * sizes.n_v_heads,
            )


def log(sizes: Sizes, device: torch.device) -> Iterator[KernelCase]:
    for n_batch, n_tokens, inputs in _every(sizes, device):
        if n_tokens <= FEW:
            yield KernelCase(
                "delta_log",
                f"B={n_batch} T={n_tokens}",
                partial(gated_delta_log, *inputs, grouped=False),
                partial(naive.gated_delta_log, *inputs, grouped=False),
                count.delta_bytes(sizes, n_batch, n_tokens, 0, log=True),
                count.delta_operations(sizes, n_batch, n_tokens),
                2 * n_batch * n_tokens * sizes.n_v_heads,
            )


def fold_log(sizes: Sizes, device: torch.device) -> Iterator[KernelCase]:
    for n_batch, n_tokens, inputs in _every(sizes, device):
        if n_tokens <= FEW:
            _, rows = gated_delta_log(*inputs, grouped=False)
            yield KernelCase(
                "fold",
                f"B={n_batch} T={n_tokens}",
                partial(fold, inputs[5], rows, n_tokens, grouped=False),
                partial(naive.fold, inputs[5], rows, n_tokens, grouped=False),
                count.fold_bytes(sizes, n_batch, n_tokens),
                2 * n_batch * n_tokens * sizes.n_v_heads * sizes.d_state**2,
                n_batch * n_tokens * sizes.n_v_heads,
            )


def _every(sizes: Sizes, device: torch.device) -> Iterator[tuple[int, int, Inputs]]:
    """Batch, tokens, and (q, k, v, g, beta, state)."""
    d, n_k, n_v = sizes.d_state, sizes.n_k_heads, sizes.n_v_heads
    for n_batch in sizes.batches:
        for n_tokens in (n for n in sizes.tokens if n_batch * n <= sizes.most_tokens):
            q, k = (torch.randn(n_batch, n_tokens, n_k, d, device=device) for _ in range(2))
            q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
            v = torch.randn(n_batch, n_tokens, n_v, d, device=device)
            g, beta = -torch.rand(v.shape[:3], device=device), torch.rand(v.shape[:3]).to(device)
            yield n_batch, n_tokens, (q, k, v, g, beta, torch.zeros(n_batch, n_v, d, d).to(device))


def _fla(inputs: Inputs) -> KernelCall | None:
    """fla-core's fused recurrent kernel on the same inputs, where it is installed."""
    if not inputs[0].is_cuda or importlib.util.find_spec("fla") is None:
        return None
    module = importlib.import_module("fla.ops.gated_delta_rule")
    run: Callable[..., object] = module.fused_recurrent_gated_delta_rule
    q, k, v, g, beta, state = inputs
    return lambda: run(
        q,
        k,
        v,
        g=g,
        beta=beta,
        scale=k.shape[3] ** -0.5,
        initial_state=state,
        output_final_state=True,
    )
