"""Triton kernels of SGLang: the committed state in a pool, the states of draft tokens in a buffer
that the commit copies from, or (ReplaySSM) a log of inputs that a later pass folds."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch

from engine.conform.adapters import Engine
from engine.conform.adapters.sglang_replay import CompactReplay, Fold, Replay, Ring
from engine.conform.adapters.sglang_snapshots import (
    LINEAR,
    OPS,
    RECURRENT,
    SCATTER,
    Delta,
    DeltaUpdate,
    Mamba2,
    Snapshots,
    requests,
)
from engine.conform.cases import Recurrence, Rows, Shape
from engine.conform.packages import Package
from engine.conform.subject import Kernel, Memory, Prompts


class _Conv(Snapshots):
    """causal_conv1d_update with a buffer of windows, which overlap as in SGLang unless there are
    trees; sequences of equal length."""

    scatter = "fused_conv_window_scatter_with_mask"

    def __init__(self, shape: Shape, memory: Memory, package: Package) -> None:
        super().__init__(shape, memory, package)
        layers, slots, rows, channels, held = self.buffers.shape
        shared = memory.empty(layers, slots, channels, rows + held - 1, dtype=shape.dtype)
        memory.keep("null-slot-written", "slot 0 of the drafts", shared[-1, :1])
        self.windows = self.buffers, shared.unfold(3, held, 1).movedim(3, 2)

    def stored(self, state: torch.Tensor) -> torch.Tensor:
        return state

    def run(self, rows: Rows, keep: bool) -> torch.Tensor:
        module = self.package.module(f"{OPS}.mamba.causal_conv1d_triton")
        self.buffers = self.windows[not rows.parents]
        self.buffer = self.buffers[-1]
        n, t = len(rows.sequences), rows.lengths[0]
        places = requests(self.memory, rows.sequences, self.shape)
        tree = _linked(rows.parents) if rows.parents else None
        parents = self.memory.empty(n, t, dtype=torch.int32)
        if tree:
            wanted = self.memory.whole(rows.parents)[:, 1:]
            self.memory.keep("wrong-parent", "the list of parents", parents[:, 1:], wanted)
        out: torch.Tensor = module.causal_conv1d_update(
            rows.x.view(n, t, -1).transpose(1, 2).contiguous(),
            *(self.pool, rows.weight, rows.bias, "silu"),
            conv_state_indices=self.slots(rows.sequences),
            intermediate_conv_window=self.buffer if keep else None,
            intermediate_state_indices=places if keep else None,
            retrieve_next_token=self.memory.whole(tree[0]) if tree else None,
            retrieve_next_sibling=self.memory.whole(tree[1]) if tree else None,
            retrieve_parent_token=parents if tree else None,
        )
        return out.transpose(1, 2).reshape(n * t, -1)


def _linked(parents: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Trees in SGLang's form: the first child and the next sibling of each row, or -1."""
    children, siblings = [], []
    for tree in parents:
        of = [[i for i, p in enumerate(tree) if p == parent] for parent in range(len(tree))]
        after = dict(pair for rows in of for pair in pairwise(rows))
        children.append([rows[0] if rows else -1 for rows in of])
        siblings.append([after.get(i, -1) for i in range(len(tree))])
    return children, siblings


class _Chunked(Prompts):
    """chunk_gated_delta_rule_fwd or chunk_kda_fwd: a prompt in chunks, the last state in the pool's
    layout. KDA's gates are given or (with a lower bound always) made inside, alternating between
    its kernels for few chunks and for many."""

    calls = 0

    def run(self, rows: Rows, first: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        n = len(rows.sequences)
        heads, d_k, d_v = self.shape.state
        pool = self.memory.zeros(n, heads, d_v, d_k)
        if first is not None:
            pool.copy_(first.transpose(-1, -2))
        kda = self.shape.recurrence == "kda"
        module = self.package.module(f"{OPS}.attention.fla.{'kda' if kda else 'chunk'}")
        many, self.calls = self.calls % 2, self.calls + 1
        raw = kda and (many or rows.bound is not None)
        gates = {"A_log": rows.A_log, "dt_bias": rows.dt_bias, "lower_bound": rows.bound}
        g = rows.a if raw else rows.g
        # one of the kernels overwrites v with its outputs
        rows_of = (rows.q_normed, rows.k_normed, rows.v.clone(), g, rows.beta)
        with _of_many_chunks(module) if kda and many else nullcontext():
            made = (module.chunk_kda_fwd if kda else module.chunk_gated_delta_rule_fwd)(
                *(t.unsqueeze(0) for t in rows_of),
                scale=self.shape.d_k**-0.5,
                initial_state=pool,
                initial_state_indices=self.memory.whole(range(n)),
                cu_seqlens=rows.starts,
                **(gates if raw else {}),
            )
        return (made if kda else made[1])[0], pool.transpose(-1, -2)


def _of_many_chunks(module: Any) -> Any:
    """A context in which chunk_kda_fwd uses its kernels for many chunks."""
    own, one = module.chunk_kda_fwd_intra, {"fuse_diagonal": False, "fuse_recompute": False}
    return patch.object(module, "chunk_kda_fwd_intra", lambda **given: own(**(given | one)))


_CHUNKS = (
    *("chunk", "chunk_delta_h", "chunk_fwd", "chunk_intra", "chunk_intra_token_parallel"),
    *("chunk_o", "cumsum", "index", "kda", "l2norm", "utils", "wy_fast"),
)
_BOTH: tuple[Recurrence, ...] = ("gdn", "kda")
_EXTRAS = ("layers", "track slots", "lower bound", "z", "far slots")  # each where it applies
_TREES: dict[str, Any] = {"trees": True, "padding": True, "extras": _EXTRAS}
_RING: dict[str, Any] = {"ring": Replay.ROWS, "least_d": 32, "dtypes": ("float32",)}
_PROMPTS: dict[str, Any] = {"dtypes": ("float32",), "chunk": 64}
ENGINE = Engine(
    package="sglang",
    versions=("0.5.23",),
    kept=(
        *(f"{OPS}.attention.fla.{name}" for name in _CHUNKS),
        f"{LINEAR}.fused_recurrent_linear_replayssm",
        f"{LINEAR}.fused_sigmoid_gating_recurrent",
        f"{LINEAR}.gdn_replayssm_spec_decode",
        f"{LINEAR}.gdn_replayssm_spec_fold",
        f"{LINEAR}.kda_replayssm_spec_decode",
        RECURRENT,
        SCATTER,
        f"{OPS}.attention.fla.op",
        f"{OPS}.mamba.triton_ops.mamba_ssm",
        f"{OPS}.mamba.causal_conv1d_triton",
    ),
    values={
        "sglang.srt.utils.common.torch_release": (9,),
        f"{OPS}.attention.fla.utils.is_tf32_supported": False,
        f"{OPS}.attention.fla.utils.is_gather_supported": True,
    },
    traced_ranges=(f"{LINEAR}.gdn_replayssm_spec_fold", f"{LINEAR}.kda_replayssm_spec_decode"),
    kernels=(
        Kernel("fused_sigmoid_gating_delta_rule_update", _BOTH, Delta, **_TREES),
        Kernel("fused_recurrent_gated_delta_rule_update", ("gdn",), DeltaUpdate, **_TREES),
        Kernel("gdn_replayssm_spec_decode", ("gdn",), Replay, **_RING, extras=("far slots",)),
        Kernel(
            "gdn_replayssm_circular", ("gdn",), CompactReplay, **_RING, powers=True, extras=_EXTRAS
        ),
        Kernel("replayssm_fold", _BOTH, Fold, log=True, padding=True, extras=_EXTRAS),
        Kernel(
            "fused_recurrent_linear_replayssm", _BOTH, Ring, **(_RING | {"ring": Ring.ROWS}),
            extras=("far slots",),
        ),
        Kernel("selective_state_update", ("mamba2",), Mamba2, **_TREES, equal_lengths=True),
        Kernel(
            "causal_conv1d_update", ("conv",), _Conv, equal_lengths=True,
            **(_TREES | {"extras": ("layers", "far slots")}),
        ),
        Kernel("chunk_gated_delta_rule", ("gdn",), _Chunked, **_PROMPTS),
        Kernel(
            "chunk_kda", ("kda",), _Chunked, **_PROMPTS, grouped=False, bf16_products=True,
            extras=("lower bound",),
        ),
    ),
)  # fmt: skip
