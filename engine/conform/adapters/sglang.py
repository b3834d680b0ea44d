"""Triton kernels of SGLang: the committed state in a pool, the states of drafted tokens in a buffer
that the commit copies from, or (ReplaySSM) a log of inputs that a later pass folds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from engine.conform.adapters import Engine
from engine.conform.cases import Rows, Shape
from engine.conform.packages import Package
from engine.conform.subject import Kernel, Memory, Prompts, RowByRow

_OPS = "sglang.kernels.ops"
_LINEAR = f"{_OPS}.attention.linear"
_RECURRENT = f"{_OPS}.attention.fla.fused_recurrent"
_SCATTER = f"{_OPS}.mamba.mamba_state_scatter_triton"


class _OnDevice(torch.Tensor):
    """A tensor that says that it is on a GPU, as some functions want it."""

    is_cuda = True


def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unsqueeze(0).as_subclass(_OnDevice)


def _packed_decode(package: Package, rows: Rows, pool: torch.Tensor, slots: Any) -> torch.Tensor:
    """A step without drafts: fused_recurrent_gated_delta_rule_packed_decode, or KDA's."""
    n, heads, d_v = rows.v.shape
    rule = "kda" if rows.a.dim() == 3 else "gated_delta_rule"
    out = torch.empty_like(rows.v).unsqueeze(1)
    getattr(package.module(_RECURRENT), f"fused_recurrent_{rule}_packed_decode")(
        *(rows.mixed, rows.a.flatten(1), rows.b, rows.A_log, rows.dt_bias.flatten()),
        scale=pool.shape[-1] ** -0.5,
        initial_state=pool,
        out=out,
        ssm_state_indices=slots,
        use_qk_l2norm_in_kernel=True,
    )
    return out.view(n, heads, d_v)


class Snapshots:
    """Pool of states (slot 0 is SGLang's null slot) and a buffer [slots, drafts, …]."""

    def __init__(self, shape: Shape, memory: Memory, package: Package) -> None:
        self.shape, self.memory, self.package = shape, memory, package
        heads, d_k, d_v = shape.state
        slots = 1 + shape.n_sequences
        self.pool = memory.empty(slots, heads, d_v, d_k, dtype=shape.dtype)
        self.buffer = memory.empty(slots, shape.n_tokens, heads, d_v, d_k, dtype=shape.dtype)
        for words, kept in (("slot 0", self.pool), ("slot 0 of the drafts", self.buffer)):
            memory.keep("null-slot-written", words, kept[:1])

    def load(self, sequence: int, state: torch.Tensor) -> None:
        self.pool[1 + sequence] = state.transpose(-1, -2).to(self.pool)

    def slots(self, sequences: Sequence[int]) -> torch.Tensor:
        """Slots of these sequences; that of padding is -1."""
        return self.memory.whole([1 + s if s >= 0 else -1 for s in sequences])

    def parents(self, rows: Rows) -> torch.Tensor | None:
        if not rows.parents:
            return None
        flat = [parent for tree in rows.parents for parent in tree]
        return self.memory.whole(flat).view(len(rows.parents), -1)

    def accept(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        slots = self.slots(sequences)
        self.package.module(_SCATTER).fused_mamba_state_scatter_with_mask(
            *map(_on_device, (self.pool, self.buffer)), slots, self.memory.whole(counts) - 1, slots
        )

    def state(self, sequence: int) -> torch.Tensor:
        return self.pool[1 + sequence].float().transpose(-1, -2)

    def run(self, rows: Rows, keep: bool) -> torch.Tensor:
        """One call of the kernel; keep: the committed state stays, as in a verify pass."""
        raise NotImplementedError

    def verify(self, rows: Rows) -> torch.Tensor:
        return self.run(rows, keep=True)

    def decode(self, rows: Rows) -> torch.Tensor:
        return self.run(rows, keep=False)


class _Delta(Snapshots):
    """fused_sigmoid_gating_delta_rule_update, as target_verify calls it."""

    def kept(self, rows: Rows) -> dict[str, Any]:
        """Where a verify pass keeps what its commit needs."""
        return {
            "intermediate_states_buffer": self.buffer,
            "intermediate_state_indices": self.slots(rows.sequences),
            "cache_steps": self.shape.n_tokens,
            "retrieve_parent_token": self.parents(rows),
        }

    def run(self, rows: Rows, keep: bool) -> torch.Tensor:
        if not keep:
            return _packed_decode(self.package, rows, self.pool, self.slots(rows.sequences))
        module = self.package.module(f"{_LINEAR}.fused_sigmoid_gating_recurrent")
        n = sum(rows.lengths)
        o = module.fused_sigmoid_gating_delta_rule_update(
            A_log=rows.A_log,
            dt_bias=rows.dt_bias.reshape(-1),
            q=rows.q.unsqueeze(0),
            k=rows.k.unsqueeze(0),
            v=rows.v.unsqueeze(0),
            a=rows.a.reshape(n, -1),
            b=rows.b,
            initial_state_source=self.pool,
            initial_state_indices=self.slots(rows.sequences),
            cu_seqlens=rows.starts,
            use_qk_l2norm_in_kernel=True,
            softplus_beta=1.0,
            softplus_threshold=20.0,
            is_kda=self.shape.recurrence == "kda",
            disable_state_update=True,
            **self.kept(rows),
        )
        assert isinstance(o, torch.Tensor)
        return o.view(n, self.shape.n_heads, self.shape.d_v)


class _DeltaUpdate(Snapshots):
    """fused_recurrent_gated_delta_rule_update_fwd: gates computed before."""

    def run(self, rows: Rows, keep: bool) -> torch.Tensor:
        module = self.package.module(_RECURRENT)
        slots = self.slots(rows.sequences)
        o = module.fused_recurrent_gated_delta_rule_update_fwd(
            *(t.unsqueeze(0) for t in (rows.q_normed, rows.k_normed, rows.v, rows.g, rows.beta)),
            scale=self.shape.d_k**-0.5,
            initial_state_source=self.pool,
            initial_state_indices=slots,
            cu_seqlens=rows.starts,
            disable_state_update=keep,
            intermediate_states_buffer=self.buffer if keep else None,
            intermediate_state_indices=slots if keep else None,
            cache_steps=self.shape.n_tokens if keep else None,
            retrieve_parent_token=self.parents(rows),
        )
        assert isinstance(o, torch.Tensor)
        return o[0]


class _Replay:
    """gdn_replayssm_spec_decode: a circular log of inputs, cursors, and folds when it is full."""

    ROWS = 16
    raw = True

    def __init__(self, shape: Shape, memory: Memory, package: Package) -> None:
        self.shape, self.memory, self.package = shape, memory, package
        s, slots, n = shape, 1 + shape.n_sequences, self.ROWS
        self.checkpoint = memory.empty(slots, s.n_heads, s.d_v, s.d_k)
        self.d = memory.zeros(slots, s.n_heads, n, s.d_v)
        self.k = memory.zeros(slots, s.n_groups, n, s.d_k)
        self.g = memory.zeros(slots, s.n_heads, n)
        self.raw_v = memory.zeros(slots, s.n_heads, n, s.d_v)
        self.raw_k = memory.zeros(slots, s.n_groups, n, s.d_k)
        self.beta = memory.zeros(slots, s.n_heads, n)
        self.write, self.base = (memory.zeros(slots, dtype=torch.int32) for _ in range(2))
        self.flush = memory.zeros(slots, dtype=torch.int8)

    def load(self, sequence: int, state: torch.Tensor) -> None:
        self.checkpoint[1 + sequence] = state.transpose(-1, -2)
        for cursor in (self.write, self.base, self.flush):
            cursor[1 + sequence] = 0

    def verify(self, rows: Rows) -> torch.Tensor:
        module = self.package.module(f"{_LINEAR}.gdn_replayssm_spec_decode")
        out = torch.zeros_like(rows.v)
        slots = self.memory.whole([1 + s for s in rows.sequences])
        module.gdn_replayssm_spec_decode(
            *(rows.q, rows.k, rows.v, rows.a, rows.b, rows.A_log, rows.dt_bias),
            *(self.checkpoint, self.d, self.k, self.g),
            *((self.raw_v, self.raw_k, self.beta) if self.raw else (None,) * 3),
            *(out, rows.starts, slots, slots, self.write, self.base, self.flush),
            *(self.ROWS, self.shape.n_tokens),
            block_v=16,
            block_v_flush=16,
            launch_mode="both" if self.raw else "verify",
            dot_precision="ieee",
        )
        return out

    def accept(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        module = self.package.module(f"{_LINEAR}.gdn_replayssm_spec_decode")
        module.commit_gdn_replayssm_spec(
            self.write,
            self.base,
            self.flush,
            self.memory.whole(counts),
            self.memory.whole([1 + s for s in sequences]),
            self.ROWS,
            self.shape.n_tokens,
        )

    def decode(self, rows: Rows) -> torch.Tensor:
        out = self.verify(rows)
        self.accept(rows.sequences, [1] * len(rows.sequences))
        return out

    def state(self, sequence: int) -> None:
        return None


class _CompactReplay(_Replay):
    """gdn_replayssm_spec_decode without raw inputs; the log is folded after acceptance."""

    raw = False

    def accept(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        super().accept(sequences, counts)
        module = self.package.module(f"{_LINEAR}.gdn_replayssm_spec_decode")
        slots = self.memory.whole([1 + s for s in sequences])
        module.commit_gdn_replayssm_circular(
            checkpoint_state=self.checkpoint.unsqueeze(0),
            d_cache=self.d.unsqueeze(0),
            k_cache=self.k.unsqueeze(0),
            g_cache=self.g.unsqueeze(0),
            d_residual_cache=None,
            k_residual_cache=None,
            state_batch_indices=slots,
            replay_indices=slots,
            write_pos=self.write,
            cache_base=self.base,
            is_flush=self.flush,
            accept_lens=self.memory.whole(counts),
            null_block_id=0,
        )


class _Fold(_Delta):
    """A verify pass writes its inputs to a log, and the commit folds the accepted ones."""

    def __init__(self, shape: Shape, memory: Memory, package: Package) -> None:
        super().__init__(shape, memory, package)
        s, slots, n = shape, 1 + shape.n_sequences, shape.n_tokens
        gates = (s.d_k,) if s.recurrence == "kda" else ()
        self.log = {
            "rawv": memory.empty(slots, s.n_heads, n, s.d_v),
            "rawk": memory.empty(slots, s.n_groups, n, s.d_k),
            "g": memory.empty(slots, s.n_heads, n, *gates),
            "beta": memory.empty(slots, s.n_heads, n),
        }

    def kept(self, rows: Rows) -> dict[str, Any]:
        return {f"replayssm_{name}": t for name, t in self.log.items()} | {"cache_ring": True}

    def accept(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        if self.shape.recurrence == "kda":
            module = self.package.module(f"{_LINEAR}.kda_replayssm_spec_decode")
            commit = module.commit_kda_replayssm_spec_all_layers
        else:
            module = self.package.module(f"{_LINEAR}.gdn_replayssm_spec_fold")
            commit = module.commit_gdn_replayssm_fold_all_layers
        commit(
            *(layer.unsqueeze(0) for layer in (self.pool, *self.log.values())),
            self.slots(sequences),
            self.memory.whole(counts),
            self.shape.n_tokens,
            self.shape.n_groups,
        )


class _Ring(RowByRow):
    """fused_recurrent_linear_replayssm_decode, a token a call: the state is written when the log
    is full."""

    ROWS = 8

    def __init__(self, shape: Shape, memory: Memory, package: Package) -> None:
        super().__init__(shape, memory, package)
        s, slots, n = shape, 1 + shape.n_sequences, self.ROWS
        gates = (s.d_k,) if s.recurrence == "kda" else ()
        self.pool = memory.empty(slots, s.n_heads, s.d_v, s.d_k)
        self.logs = (
            memory.empty(slots, s.n_heads, n, s.d_v),
            memory.empty(slots, s.n_groups, n, s.d_k),
            memory.empty(slots, s.n_heads, n, *gates),
        )
        self.taken = memory.zeros(slots, dtype=torch.int32)
        self.held = (self.pool, *self.logs, self.taken)

    def load(self, sequence: int, state: torch.Tensor) -> None:
        self.pool[1 + sequence] = state.transpose(-1, -2)
        self.taken[1 + sequence] = 0

    def step(self, rows: Rows) -> torch.Tensor:
        module = self.package.module(f"{_LINEAR}.fused_recurrent_linear_replayssm")
        slots = self.memory.whole([1 + s for s in rows.sequences])
        out = torch.empty_like(rows.v).unsqueeze(1)
        module.fused_recurrent_linear_replayssm_decode(
            *(rows.mixed, rows.a, rows.b, rows.A_log, rows.dt_bias, self.shape.d_k**-0.5),
            *(self.pool, *self.logs, out, slots, self.taken[slots]),
            use_qk_l2norm_in_kernel=True,
            is_kda=self.shape.recurrence == "kda",
        )
        self.taken[slots] = (self.taken[slots] + 1) % self.ROWS
        return out[:, 0]

    def state(self, sequence: int) -> torch.Tensor | None:
        """Known where the log is empty."""
        if self.taken[1 + sequence]:
            return None
        return self.pool[1 + sequence].transpose(-1, -2)


class Mamba2(Snapshots):
    """selective_state_update with a buffer of intermediate states; sequences of one length."""

    dtype = torch.float32

    def run(self, rows: Rows, keep: bool) -> torch.Tensor:
        n, t, heads, d = len(rows.sequences), rows.lengths[0], *rows.x.shape[1:]
        out = torch.empty_like(rows.x, dtype=self.dtype).view(n, t, heads, d)
        slots = self.slots(rows.sequences)
        self.called(
            self.pool,
            rows.x.view(n, t, heads, d).to(self.dtype),
            rows.dt.view(n, t, heads, 1).expand(n, t, heads, d),
            rows.A.view(heads, 1, 1).expand(heads, d, self.shape.d_k),
            rows.B.view(n, t, *rows.B.shape[1:]).to(self.dtype),
            rows.C.view(n, t, *rows.C.shape[1:]).to(self.dtype),
            rows.D.view(heads, 1).expand(heads, d),
            dt_bias=rows.dt_bias.view(heads, 1).expand(heads, d),
            dt_softplus=True,
            state_batch_indices=slots,
            out=out,
            disable_state_update=keep,
            intermediate_states_buffer=self.buffer if keep else None,
            intermediate_state_indices=slots if keep else None,
            cache_steps=self.shape.n_tokens if keep else None,
            retrieve_parent_token=self.parents(rows),
        )
        return out.view(-1, heads, d)

    def called(self, *tensors: torch.Tensor, **options: Any) -> None:
        """Call the kernel."""
        module = self.package.module(f"{_OPS}.mamba.triton_ops.mamba_ssm")
        module.selective_state_update(*tensors, **options)


class _Conv:
    """causal_conv1d_update with a buffer of windows; sequences of one length."""

    def __init__(self, shape: Shape, memory: Memory, package: Package) -> None:
        self.shape, self.memory, self.package = shape, memory, package
        slots, size = 1 + shape.n_sequences, (shape.n_heads, shape.d_k - 1)
        self.windows = memory.empty(slots, *size, dtype=shape.dtype)
        self.buffer = memory.empty(slots, shape.n_tokens, *size, dtype=shape.dtype)
        for words, kept in (("window 0", self.windows), ("window 0 of the drafts", self.buffer)):
            memory.keep("null-slot-written", words, kept[:1])

    def load(self, sequence: int, state: torch.Tensor) -> None:
        self.windows[1 + sequence] = state.to(self.windows)

    def run(self, rows: Rows, keep: bool) -> torch.Tensor:
        module = self.package.module(f"{_OPS}.mamba.causal_conv1d_triton")
        n, t = len(rows.sequences), rows.lengths[0]
        slots = self.memory.whole([1 + s if s >= 0 else -1 for s in rows.sequences])
        tree = _linked(rows.parents) if rows.parents else None
        parents = self.memory.empty(n, t, dtype=torch.int32)
        if tree:
            wanted = self.memory.whole(rows.parents)[:, 1:]
            self.memory.keep("wrong-parent", "the list of parents", parents[:, 1:], wanted)
        out = module.causal_conv1d_update(
            rows.x.view(n, t, -1).transpose(1, 2).contiguous(),
            self.windows,
            rows.weight,
            rows.bias,
            "silu",
            conv_state_indices=slots,
            intermediate_conv_window=self.buffer if keep else None,
            intermediate_state_indices=slots if keep else None,
            retrieve_next_token=self.memory.whole(tree[0]) if tree else None,
            retrieve_next_sibling=self.memory.whole(tree[1]) if tree else None,
            retrieve_parent_token=parents if tree else None,
        )
        assert isinstance(out, torch.Tensor)
        return out.transpose(1, 2).reshape(n * t, -1)

    def verify(self, rows: Rows) -> torch.Tensor:
        return self.run(rows, keep=True)

    def decode(self, rows: Rows) -> torch.Tensor:
        return self.run(rows, keep=False)

    def accept(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        slots = self.memory.whole([1 + s for s in sequences])
        self.package.module(_SCATTER).fused_conv_window_scatter_with_mask(
            *map(_on_device, (self.windows, self.buffer)),
            *(slots, self.memory.whole(counts) - 1, slots),
        )

    def state(self, sequence: int) -> torch.Tensor:
        return self.windows[1 + sequence].float()


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
    """chunk_gated_delta_rule_fwd: a prompt in chunks, the last state in the pool's layout."""

    def run(self, rows: Rows, first: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        n = len(rows.sequences)
        heads, d_k, d_v = self.shape.state
        pool = self.memory.zeros(n, heads, d_v, d_k)
        if first is not None:
            pool.copy_(first.transpose(-1, -2))
        # one of the kernels writes its outputs over v
        rows_of = (rows.q_normed, rows.k_normed, rows.v.clone(), rows.g, rows.beta)
        o = self.called(
            *(t.unsqueeze(0) for t in rows_of),
            scale=self.shape.d_k**-0.5,
            initial_state=pool,
            initial_state_indices=self.memory.whole(range(n)),
            cu_seqlens=rows.starts,
        )
        return o[0], pool.transpose(-1, -2)

    def called(self, *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        """The outputs of the kernel."""
        module = self.package.module(f"{_OPS}.attention.fla.chunk")
        o = module.chunk_gated_delta_rule_fwd(*tensors, **options)[1]
        assert isinstance(o, torch.Tensor)
        return o


class _ChunkedKda(_Chunked):
    """chunk_kda_fwd."""

    def called(self, *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        o = self.package.module(f"{_OPS}.attention.fla.kda").chunk_kda_fwd(*tensors, **options)
        assert isinstance(o, torch.Tensor)
        return o


_CHUNKS = (
    "chunk",
    "chunk_delta_h",
    "chunk_fwd",
    "chunk_intra",
    "chunk_intra_token_parallel",
    "chunk_o",
    "cumsum",
    "index",
    "kda",
    "l2norm",
    "utils",
    "wy_fast",
)
ENGINE = Engine(
    package="sglang",
    versions=("0.5.23",),
    kept=(
        *(f"{_OPS}.attention.fla.{name}" for name in _CHUNKS),
        f"{_LINEAR}.fused_recurrent_linear_replayssm",
        f"{_LINEAR}.fused_sigmoid_gating_recurrent",
        f"{_LINEAR}.gdn_replayssm_spec_decode",
        f"{_LINEAR}.gdn_replayssm_spec_fold",
        f"{_LINEAR}.kda_replayssm_spec_decode",
        _RECURRENT,
        _SCATTER,
        f"{_OPS}.attention.fla.op",
        f"{_OPS}.mamba.triton_ops.mamba_ssm",
        f"{_OPS}.mamba.causal_conv1d_triton",
    ),
    values={
        "sglang.srt.utils.common.torch_release": (9,),
        f"{_OPS}.attention.fla.utils.is_tf32_supported": False,
        f"{_OPS}.attention.fla.utils.is_gather_supported": True,
    },
    traced_ranges=(f"{_LINEAR}.gdn_replayssm_spec_fold", f"{_LINEAR}.kda_replayssm_spec_decode"),
    kernels=(
        Kernel(
            "fused_sigmoid_gating_delta_rule_update",
            ("gdn", "kda"),
            _Delta,
            trees=True,
            padding=True,
        ),
        Kernel(
            "fused_recurrent_gated_delta_rule_update",
            ("gdn",),
            _DeltaUpdate,
            trees=True,
            padding=True,
        ),
        Kernel(
            "gdn_replayssm_spec_decode",
            ("gdn",),
            _Replay,
            ring=_Replay.ROWS,
            least_d=32,
            dtypes=("float32",),
        ),
        Kernel(
            "gdn_replayssm_circular",
            ("gdn",),
            _CompactReplay,
            ring=_Replay.ROWS,
            least_d=32,
            dtypes=("float32",),
        ),
        Kernel("replayssm_fold", ("gdn", "kda"), _Fold, log=True, padding=True),
        Kernel(
            "fused_recurrent_linear_replayssm",
            ("gdn", "kda"),
            _Ring,
            ring=_Ring.ROWS,
            least_d=32,
            dtypes=("float32",),
        ),
        Kernel(
            "selective_state_update",
            ("mamba2",),
            Mamba2,
            equal_lengths=True,
            trees=True,
            padding=True,
        ),
        Kernel(
            "causal_conv1d_update", ("conv",), _Conv, equal_lengths=True, trees=True, padding=True
        ),
        Kernel("chunk_gated_delta_rule", ("gdn",), _Chunked, dtypes=("float32",), chunk=64),
        Kernel(
            "chunk_kda",
            ("kda",),
            _ChunkedKda,
            grouped=False,
            dtypes=("float32",),
            chunk=64,
            bf16_products=True,
        ),
    ),
)
