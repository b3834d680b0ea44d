"""The cases of state-space duality: decoding, verifying, prompts, as heads of 64 rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kernels.recurrence.ssd import naive, ssd
from tests.bench.kernels.measure import KernelCase
from tests.bench.kernels.sizes import F32, Sizes

FEW, ROWS = 16, 64


def rule(sizes: Sizes, device: torch.device) -> Iterator[KernelCase]:
    """The last state kept, and for few tokens all of them, as verifying with planes does."""
    n_heads, n = sizes.n_v_heads, sizes.d_state
    D, a = torch.randn(n_heads, device=device), -torch.rand(n_heads, device=device)
    for n_tokens in sizes.tokens:
        dt = torch.rand(1, n_tokens, n_heads, device=device)
        x = torch.randn(1, n_tokens, n_heads, ROWS, device=device)
        B, C = torch.randn(2, 1, n_tokens, 1, n, device=device).unbind(0)
        inputs = x, dt, dt * a, B, C, D, torch.zeros(1, n_heads, ROWS, n, device=device)
        in_state = n_heads * ROWS * n
        for kept in sorted({1, n_tokens}) if n_tokens <= FEW else [1]:
            # x and o, both gates, B and C of the one group; the state read, and those written
            numbers = n_tokens * (2 * n_heads * (ROWS + 1) + 2 * n) + (1 + kept) * in_state
            yield KernelCase(
                "ssd",
                f"T={n_tokens} K={kept}",
                partial(ssd, *inputs, n_snapshots=kept),
                partial(naive.ssd, *inputs, n_snapshots=kept),
                F32 * numbers,
                5 * n_tokens * in_state,
                n_tokens * n_heads,
            )
