"""Triton kernels of SGLang: the committed state in a pool, the states of drafted tokens in a buffer
that the commit copies from, or (ReplaySSM) a log of inputs that a later pass folds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

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
from engine.conform.cases import Rows
from engine.conform.subject import Kernel, Prompts


class _Conv(Snapshots):
    """causal_conv1d_update with a buffer of windows; sequences of one length."""

    scatter = "fused_conv_window_scatter_with_mask"

    def stored(self, state: torch.Tensor) -> torch.Tensor:
        return state

    def run(self, rows: Rows, keep: bool) -> torch.Tensor:
        module = self.package.module(f"{OPS}.mamba.causal_conv1d_triton")
        n, t = len(rows.sequences), rows.lengths[0]
        places = requests(self.memory, rows.sequences, self.shape)
        tree = _linked(rows.parents) if rows.parents else None
        parents = self.memory.empty(n, t, dtype=torch.int32)
        if tree:
            wanted = self.memory.whole(rows.parents)[:, 1:]
            self.memory.keep("wrong-parent", "the list of parents", parents[:, 1:], wanted)
        out: torch.Tensor = module.causal_conv1d_update(
            rows.x.view(n, t, -1).transpose(1, 2).contiguous(),
            self.pool,
            rows.weight,
            rows.bias,
            "silu",
            conv_state_indices=self.slots(rows.sequences),
            intermediate_conv_window=self.buffer if keep else None,
            intermediate_state_indices=places if keep else None,
            retrieve_next_token=self.memory.whole(tree[0]) if tree else None,
            retrieve_next_sibling=self.memory.whole(tree[1]) if tree else None,
            retrieve_parent_token=parents if tree else None,
        )
        return out.transpose(1, 2).reshape(n * t, -1)


def _linked(parents: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Trees as SGLang lists them: the first child and the next sibling of each row, or -1."""
    children, siblings = [], []
    for tree in parents:
        of = [[i for i, p in enumerate(tree) if p == parent] for parent in range(len(tree))]
        after = dict(pair for rows in of for pair in pairwise(rows))
        children.append([rows[0] if rows else -1 for rows in of])
        siblings.append([after.get(i, -1) for i in range(len(tree))])
    return children, siblings


class _Chunked(Prompts):
    """chunk_gated_delta_rule_fwd or chunk_kda_fwd: a prompt in chunks, the last state in the pool's
    layout."""

    def run(self, rows: Rows, first: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        n = len(rows.sequences)
        heads, d_k, d_v = self.shape.state
        pool = self.memory.zeros(n, heads, d_v, d_k)
        if first is not None:
            pool.copy_(first.transpose(-1, -2))
        kda = self.shape.recurrence == "kda"
        module = self.package.module(f"{OPS}.attention.fla.{'kda' if kda else 'chunk'}")
        # one of the kernels writes its outputs over v
        rows_of = (rows.q_normed, rows.k_normed, rows.v.clone(), rows.g, rows.beta)
        made = (module.chunk_kda_fwd if kda else module.chunk_gated_delta_rule_fwd)(
            *(t.unsqueeze(0) for t in rows_of),
            scale=self.shape.d_k**-0.5,
            initial_state=pool,
            initial_state_indices=self.memory.whole(range(n)),
            cu_seqlens=rows.starts,
        )
        return (made if kda else made[1])[0], pool.transpose(-1, -2)


_CHUNKS = (
    *("chunk", "chunk_delta_h", "chunk_fwd", "chunk_intra", "chunk_intra_token_parallel"),
    *("chunk_o", "cumsum", "index", "kda", "l2norm", "utils", "wy_fast"),
)
_F32 = ("float32",)
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
        Kernel(
            "fused_sigmoid_gating_delta_rule_update",
            ("gdn", "kda"),
            Delta,
            trees=True,
            padding=True,
            extras=("layers", "track slots", "lower bound", "far slots"),
        ),
        Kernel(
            "fused_recurrent_gated_delta_rule_update",
            ("gdn",),
            DeltaUpdate,
            trees=True,
            padding=True,
            extras=("layers", "track slots", "far slots"),
        ),
        Kernel(
            "gdn_replayssm_spec_decode",
            ("gdn",),
            Replay,
            ring=Replay.ROWS,
            least_d=32,
            dtypes=_F32,
            extras=("far slots",),
        ),
        Kernel(
            "gdn_replayssm_circular",
            ("gdn",),
            CompactReplay,
            ring=Replay.ROWS,
            least_d=32,
            powers=True,
            dtypes=_F32,
            extras=("layers", "track slots", "far slots"),
        ),
        Kernel(
            "replayssm_fold",
            ("gdn", "kda"),
            Fold,
            log=True,
            padding=True,
            extras=("layers", "track slots", "lower bound", "far slots"),
        ),
        Kernel(
            "fused_recurrent_linear_replayssm",
            ("gdn", "kda"),
            Ring,
            ring=Ring.ROWS,
            least_d=32,
            dtypes=_F32,
            extras=("far slots",),
        ),
        Kernel(
            "selective_state_update",
            ("mamba2",),
            Mamba2,
            equal_lengths=True,
            trees=True,
            padding=True,
            extras=("layers", "track slots", "z", "far slots"),
        ),
        Kernel(
            "causal_conv1d_update",
            ("conv",),
            _Conv,
            equal_lengths=True,
            trees=True,
            padding=True,
            extras=("layers", "far slots"),
        ),
        Kernel("chunk_gated_delta_rule", ("gdn",), _Chunked, dtypes=_F32, chunk=64),
        Kernel(
            "chunk_kda",
            ("kda",),
            _Chunked,
            grouped=False,
            dtypes=_F32,
            chunk=64,
            bf16_products=True,
        ),
    ),
)
