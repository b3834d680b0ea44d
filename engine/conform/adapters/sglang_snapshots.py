"""SGLang's verification with the states of draft tokens in a buffer that the commit copies from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine.conform.cases import Rows, Shape
from engine.conform.packages import Package
from engine.conform.subject import Layers, Memory

OPS = "sglang.kernels.ops"
LINEAR = f"{OPS}.attention.linear"
RECURRENT = f"{OPS}.attention.fla.fused_recurrent"
SCATTER = f"{OPS}.mamba.mamba_state_scatter_triton"


class _OnDevice(torch.Tensor):
    """A tensor that claims to be on a GPU, as some functions require."""

    is_cuda = True
    device = torch.device("cuda")


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(_OnDevice)


def requests(memory: Memory, sequences: Sequence[int], shape: Shape) -> torch.Tensor:
    """Indices of these requests in the buffers, in another order than their slots; -1 for
    padding."""
    return memory.whole([shape.n_sequences - s if s >= 0 else -1 for s in sequences])


def log_sizes(shape: Shape, rows: int) -> tuple[tuple[int, ...], ...]:
    """Sizes of a log's values, keys, gates and betas for a sequence's rows."""
    n, d_k, gates = shape.n_heads, shape.d_k, () if shape.recurrence == "gdn" else (shape.d_k,)
    return (n, rows, shape.d_v), (shape.n_groups, rows, d_k), (n, rows, *gates), (n, rows)


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
        **({"lower_bound": rows.bound} if rule == "kda" else {}),
    )
    return out.view(n, heads, d_v)


class Tracks:
    """Track slots, the last of a pool: one per sequence, where a commit keeps the state after fewer
    rows than were accepted, as at a boundary between cached blocks."""

    def __init__(self, shape: Shape, memory: Memory) -> None:
        self.memory, self.kept, self.passes = memory, dict[int, int](), 0
        self.slots = shape.n_sequences if "track slots" in shape.extras else 0

    def of(
        self, sequences: Sequence[int], counts: Sequence[int], pool: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Track slots of these sequences and the step after which each keeps its state, -1: none;
        slots without one must not change."""
        if not self.slots:
            return None, None
        places = [s - self.slots for s in range(self.slots)]
        self.passes += 1
        each = zip(sequences, counts, strict=True)
        self.kept = {s: (s + self.passes) % (n + 1) for s, n in each if s >= 0}
        for s in range(self.slots):
            slot = pool[places[s]]
            if self.kept.get(s):
                self.memory.forget(slot)
            else:
                self.memory.keep("null-slot-written", "a track slot without a step", slot)
        at = [len(pool) + places[s] if s >= 0 else 0 for s in sequences]
        steps = [self.kept.get(s, 0) - 1 for s in sequences]
        return self.memory.whole(at), self.memory.whole(steps)

    def state(self, sequence: int, pool: torch.Tensor) -> tuple[int, torch.Tensor] | None:
        """The number of rows of the last pass whose state a track slot has, and the state."""
        rows = self.kept.get(sequence, 0)
        held = pool[sequence - self.slots].float().transpose(-1, -2)
        return (rows, held) if self.slots and rows else None


class Snapshots:
    """Pools of states, [layers, slots, …] (slot 0 is SGLang's null slot; track slots come last),
    and buffers [layers, slots, drafts, …]; passes use the last layer. `scatter`: the commit
    function."""

    scatter, padding = "fused_mamba_state_scatter_with_mask", 0

    def __init__(self, shape: Shape, memory: Memory, package: Package) -> None:
        self.shape, self.memory, self.package = shape, memory, package
        slots, n = 1 + shape.n_sequences, Layers(shape, memory).n
        state = self.stored(torch.empty(shape.state, device="meta")).shape
        self.layers, self.tracks = Layers(shape, memory), Tracks(shape, memory)
        self.pools = memory.pool(n, slots + self.tracks.slots, *state, dtype=shape.dtype)
        self.buffers = memory.empty(n, slots, shape.n_tokens, *state, dtype=shape.dtype)
        self.pool, self.buffer = self.pools[-1], self.buffers[-1]
        for words, kept in (("slot 0", self.pool), ("slot 0 of the drafts", self.buffer)):
            memory.keep("null-slot-written", words, kept[:1])

    def stored(self, state: torch.Tensor) -> torch.Tensor:
        """A state in the kernel's layout, and back."""
        return state.mT

    def load(self, sequence: int, state: torch.Tensor) -> None:
        self.pool[1 + sequence] = self.stored(state).to(self.pool)

    def slots(self, sequences: Sequence[int]) -> torch.Tensor:
        """Slots of these sequences; -1 for padding."""
        return self.memory.whole([1 + s if s >= 0 else -1 for s in sequences])

    def parents(self, rows: Rows) -> torch.Tensor | None:
        if not rows.parents:
            return None
        flat = [parent for tree in rows.parents for parent in tree]
        return self.memory.whole(flat).view(len(rows.parents), -1)

    def accept(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        sequences, counts = [*sequences, *[-1] * self.padding], [*counts, *[1] * self.padding]
        self.layers.fill(self.pools, 2)
        tracked = self.tracks.of(sequences, counts, self.pool)
        self.commit(sequences, self.memory.whole(counts), tracked)
        self.layers.check(self.pools, 2)

    def commit(
        self, sequences: Sequence[int], counts: torch.Tensor, tracked: Sequence[torch.Tensor | None]
    ) -> None:
        """Keep the first rows of each sequence, including padding; tracked: those of track
        slots."""
        self.layers.fill(self.buffers, 3)
        scatter = getattr(self.package.module(SCATTER), self.scatter)
        both = [on_device(x) for x in (self.pools, self.buffers)]
        places = requests(self.memory, sequences, self.shape)
        scatter(*both, self.slots(sequences), counts - 1, places)
        if self.tracks.slots:
            scatter(*both, *tracked, places)

    def state(self, sequence: int) -> torch.Tensor:
        return self.stored(self.pool[1 + sequence]).float()

    def tracked(self, sequence: int) -> tuple[int, torch.Tensor] | None:
        return self.tracks.state(sequence, self.pool)

    def kept(self, rows: Rows) -> dict[str, Any]:
        """The buffers in which a verify pass stores what its commit needs."""
        return {
            "intermediate_states_buffer": self.buffer,
            "intermediate_state_indices": requests(self.memory, rows.sequences, self.shape),
            "cache_steps": self.shape.n_tokens,
            "retrieve_parent_token": self.parents(rows),
        }

    def run(self, rows: Rows, keep: bool) -> torch.Tensor:
        """One call of the kernel; keep: the committed state stays, as in a verify pass."""
        raise NotImplementedError

    def verify(self, rows: Rows) -> torch.Tensor:
        self.padding = rows.sequences.count(-1)
        return self.run(rows, keep=True)

    def decode(self, rows: Rows) -> torch.Tensor:
        return self.run(rows, keep=False)


class Delta(Snapshots):
    """fused_sigmoid_gating_delta_rule_update, as target_verify calls it, alternating between its
    grids for a GPU and for other devices."""

    calls = 0

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
            q=on_device(q) if self.calls % 2 else q,
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
            lower_bound=rows.bound,
            is_kda=self.shape.recurrence == "kda",
            disable_state_update=True,
            **self.kept(rows),
        )
        return o.as_subclass(torch.Tensor).view(n, self.shape.n_heads, self.shape.d_v)


class DeltaUpdate(Snapshots):
    """fused_recurrent_gated_delta_rule_update, which copies a pool with far slots: for these the
    function that it calls, with any strides; gates computed before."""

    def run(self, rows: Rows, keep: bool) -> torch.Tensor:
        module = self.package.module(RECURRENT)
        update, inputs = module.fused_recurrent_gated_delta_rule_update, rows.beside("q", "k", "v")
        inputs += rows.beside("g", "beta")
        if self.memory.far:
            update = module.fused_recurrent_gated_delta_rule_update_fwd
            inputs = [x.contiguous() for x in inputs]
        o: torch.Tensor = update(
            *(x.unsqueeze(0) for x in inputs),
            scale=self.shape.d_k**-0.5,
            initial_state_source=self.pool,
            initial_state_indices=self.slots(rows.sequences),
            cu_seqlens=rows.starts,
            disable_state_update=keep,
            **(self.kept(rows) if keep else {}),
            use_qk_l2norm_in_kernel=True,
        )
        return o[0]


class Mamba2(Snapshots):
    """selective_state_update with a buffer of intermediate states; sequences of equal length."""

    dtype = torch.float32

    def run(self, rows: Rows, keep: bool) -> torch.Tensor:
        n, t, heads, d = len(rows.sequences), rows.lengths[0], *rows.x.shape[1:]
        out = torch.empty_like(rows.x, dtype=self.dtype).view(n, t, heads, d)
        x, B, C = (m.view(n, t, *m.shape[1:]) for m in rows.beside("x", "B", "C"))
        dt, A, D, options = rows.wide()
        B, C = B.to(self.dtype), C.to(self.dtype)
        z = rows.z.view(n, t, heads, d).to(self.dtype) if "z" in self.shape.extras else None
        self.called(
            *(self.pool, x.to(self.dtype), dt.unflatten(0, (n, t)), A, B, C, D),
            **(options | {"z": z}),
            state_batch_indices=self.slots(rows.sequences),
            out=out,
            disable_state_update=keep,
            **(self.kept(rows) if keep else {}),
        )
        return out.view(-1, heads, d)

    def called(self, *tensors: torch.Tensor, **options: Any) -> None:
        """Call the kernel."""
        module = self.package.module(f"{OPS}.mamba.triton_ops.mamba_ssm")
        module.selective_state_update(*tensors, **options)
