"""SGLang's verification with the states of drafted tokens in a buffer that the commit copies
from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine.conform.cases import Rows, Shape
from engine.conform.packages import Package
from engine.conform.subject import Memory

OPS = "sglang.kernels.ops"
LINEAR = f"{OPS}.attention.linear"
RECURRENT = f"{OPS}.attention.fla.fused_recurrent"
SCATTER = f"{OPS}.mamba.mamba_state_scatter_triton"


class _OnDevice(torch.Tensor):
    """A tensor that says that it is on a GPU, as some functions want it."""

    is_cuda = True
    device = torch.device("cuda")


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unsqueeze(0).as_subclass(_OnDevice)


def packed_decode(package: Package, rows: Rows, pool: torch.Tensor, slots: Any) -> torch.Tensor:
    """A step without drafts: fused_recurrent_gated_delta_rule_packed_decode, or KDA's."""
    n, heads, d_v = rows.v.shape
    rule = "kda" if rows.a.dim() == 3 else "gated_delta_rule"
    out = torch.empty_like(rows.v).unsqueeze(1)
    getattr(package.module(RECURRENT), f"fused_recurrent_{rule}_packed_decode")(
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
        self.package.module(SCATTER).fused_mamba_state_scatter_with_mask(
            *map(on_device, (self.pool, self.buffer)), slots, self.memory.whole(counts) - 1, slots
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


class Delta(Snapshots):
    """fused_sigmoid_gating_delta_rule_update, as target_verify calls it; its grids for a GPU and
    for other devices in turn."""

    calls = 0

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
            return packed_decode(self.package, rows, self.pool, self.slots(rows.sequences))
        module = self.package.module(f"{LINEAR}.fused_sigmoid_gating_recurrent")
        n = sum(rows.lengths)
        q, k, v = (t.unsqueeze(0) for t in rows.beside("q", "k", "v"))
        a, b = rows.beside("a", "b")
        self.calls += 1
        o: torch.Tensor = module.fused_sigmoid_gating_delta_rule_update(
            A_log=rows.A_log,
            dt_bias=rows.dt_bias.reshape(-1),
            q=q.as_subclass(_OnDevice) if self.calls % 2 else q,
            k=k,
            v=v,
            a=a.view(n, -1),
            b=b,
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
        return o.as_subclass(torch.Tensor).view(n, self.shape.n_heads, self.shape.d_v)


class DeltaUpdate(Snapshots):
    """fused_recurrent_gated_delta_rule_update_fwd: gates computed before."""

    def run(self, rows: Rows, keep: bool) -> torch.Tensor:
        module = self.package.module(RECURRENT)
        slots = self.slots(rows.sequences)
        o: torch.Tensor = module.fused_recurrent_gated_delta_rule_update_fwd(
            *(t.unsqueeze(0) for t in (rows.q, rows.k, rows.v, rows.g, rows.beta)),
            scale=self.shape.d_k**-0.5,
            initial_state_source=self.pool,
            initial_state_indices=slots,
            cu_seqlens=rows.starts,
            disable_state_update=keep,
            intermediate_states_buffer=self.buffer if keep else None,
            intermediate_state_indices=slots if keep else None,
            cache_steps=self.shape.n_tokens if keep else None,
            retrieve_parent_token=self.parents(rows),
            use_qk_l2norm_in_kernel=True,
        )
        return o[0]


class Mamba2(Snapshots):
    """selective_state_update with a buffer of intermediate states; sequences of one length."""

    dtype = torch.float32

    def run(self, rows: Rows, keep: bool) -> torch.Tensor:
        n, t, heads, d = len(rows.sequences), rows.lengths[0], *rows.x.shape[1:]
        out = torch.empty_like(rows.x, dtype=self.dtype).view(n, t, heads, d)
        x, B, C = (m.view(n, t, *m.shape[1:]) for m in rows.beside("x", "B", "C"))
        slots = self.slots(rows.sequences)
        self.called(
            *(self.pool, x.to(self.dtype), rows.dt.view(n, t, heads, 1).expand(n, t, heads, d)),
            rows.A.view(heads, 1, 1).expand(heads, d, self.shape.d_k),
            *(B.to(self.dtype), C.to(self.dtype)),
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
        module = self.package.module(f"{OPS}.mamba.triton_ops.mamba_ssm")
        module.selective_state_update(*tensors, **options)
