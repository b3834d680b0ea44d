"""SGLang's ReplaySSM: a log of inputs that a later pass folds into the committed state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine.conform.adapters.sglang_snapshots import LINEAR, Delta, Tracks, log_sizes, requests
from engine.conform.cases import Rows, Shape
from engine.conform.packages import Package
from engine.conform.subject import Layers, Memory, RowByRow, as_a_pass


class Replay:
    """gdn_replayssm_spec_decode: a circular log of inputs, cursors, and folds when it is full."""

    ROWS = 16
    raw = True

    def __init__(self, shape: Shape, memory: Memory, package: Package) -> None:
        self.shape, self.memory, self.package = shape, memory, package
        s, slots, n = shape, 1 + shape.n_sequences, self.ROWS
        self.layers, self.tracks = Layers(shape, memory), Tracks(shape, memory)
        m = self.layers.n
        self.checkpoints = memory.pool(m, slots + self.tracks.slots, s.n_heads, s.d_v, s.d_k)
        # the fold of CompactReplay reads rows that were never written
        new = memory.empty if self.raw else memory.zeros
        v, k, gate, beta = log_sizes(s, n)
        sizes = zip("dkg", (v, k, gate), strict=True)
        self.logs = {name: new(m, slots, *size) for name, size in sizes}
        self.raws = [new(slots, *size) for size in (v, k, beta)]
        self.write, self.base = (memory.zeros(slots, dtype=torch.int32) for _ in range(2))
        self.flush = memory.zeros(slots, dtype=torch.int8)

    def load(self, sequence: int, state: torch.Tensor) -> None:
        self.checkpoints[-1, 1 + sequence] = state.transpose(-1, -2)
        for cursor in (self.write, self.base, self.flush):
            cursor[requests(self.memory, [sequence], self.shape)] = 0

    def verify(self, rows: Rows) -> torch.Tensor:
        module = self.package.module(f"{LINEAR}.gdn_replayssm_spec_decode")
        out = torch.zeros_like(rows.v)
        slots = self.memory.whole([1 + s for s in rows.sequences])
        places = requests(self.memory, rows.sequences, self.shape)
        module.gdn_replayssm_spec_decode(
            *(*rows.beside("q", "k", "v"), *rows.beside("a", "b"), rows.A_log, rows.dt_bias),
            *(self.checkpoints[-1], *(layers[-1] for layers in self.logs.values())),
            *(self.raws if self.raw else (None,) * 3),
            *(out, rows.starts, slots, places, self.write, self.base, self.flush),
            *(self.ROWS, self.shape.n_tokens),
            block_v=16,
            block_v_flush=16,
            launch_mode="both" if self.raw else "verify",
            dot_precision="ieee",
        )
        return out

    def accept(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        module = self.package.module(f"{LINEAR}.gdn_replayssm_spec_decode")
        module.commit_gdn_replayssm_spec(
            *(self.write, self.base, self.flush, self.memory.whole(counts)),
            *(requests(self.memory, sequences, self.shape), self.ROWS, self.shape.n_tokens),
        )

    decode = as_a_pass

    def state(self, sequence: int) -> None:
        return None


class CompactReplay(Replay):
    """gdn_replayssm_spec_decode without raw inputs; the log is folded after acceptance."""

    raw = False

    def accept(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        super().accept(sequences, counts)
        module = self.package.module(f"{LINEAR}.gdn_replayssm_spec_decode")
        for layers in (self.checkpoints, *self.logs.values()):
            self.layers.fill(layers, 2)
        places, steps = self.tracks.of(sequences, counts, self.checkpoints[-1])
        module.commit_gdn_replayssm_circular(
            checkpoint_state=self.checkpoints,
            **{f"{name}_cache": layers for name, layers in self.logs.items()},
            d_residual_cache=None,
            k_residual_cache=None,
            state_batch_indices=self.memory.whole([1 + s for s in sequences]),
            replay_indices=requests(self.memory, sequences, self.shape),
            write_pos=self.write,
            cache_base=self.base,
            is_flush=self.flush,
            accept_lens=self.memory.whole(counts),
            mamba_track_indices=places,
            mamba_steps_to_track=steps,
            null_block_id=0,
        )
        self.layers.check(self.checkpoints, 2)

    def tracked(self, sequence: int) -> tuple[int, torch.Tensor] | None:
        return self.tracks.state(sequence, self.checkpoints[-1])


class Fold(Delta):
    """A verify pass writes its inputs to a log, and the commit folds the accepted ones."""

    def __init__(self, shape: Shape, memory: Memory, package: Package) -> None:
        super().__init__(shape, memory, package)
        sizes = zip(("rawv", "rawk", "g", "beta"), log_sizes(shape, shape.n_tokens), strict=True)
        slots = self.layers.n, 1 + shape.n_sequences
        self.logs = {name: memory.empty(*slots, *size) for name, size in sizes}

    def kept(self, rows: Rows) -> dict[str, Any]:
        log = {f"replayssm_{name}": layers[-1] for name, layers in self.logs.items()}
        return log | {"cache_ring": True}

    def commit(
        self, sequences: Sequence[int], counts: torch.Tensor, tracked: Sequence[torch.Tensor | None]
    ) -> None:
        if self.shape.recurrence == "kda":
            module = self.package.module(f"{LINEAR}.kda_replayssm_spec_decode")
            commit = module.commit_kda_replayssm_spec_all_layers
        else:
            module = self.package.module(f"{LINEAR}.gdn_replayssm_spec_fold")
            commit = module.commit_gdn_replayssm_fold_all_layers
        for layers in self.logs.values():
            self.layers.fill(layers, 2)
        sizes = self.shape.n_tokens, self.shape.n_groups
        held = self.pools, *self.logs.values()
        commit(*held, self.slots(sequences), counts, *sizes, *tracked)


class Ring(RowByRow):
    """fused_recurrent_linear_replayssm_decode, a token a call: the state is written when the log
    is full."""

    ROWS = 8

    def __init__(self, shape: Shape, memory: Memory, package: Package) -> None:
        super().__init__(shape, memory, package)
        s, slots, n = shape, 1 + shape.n_sequences, self.ROWS
        self.pool = memory.pool(1, slots, s.n_heads, s.d_v, s.d_k)[0]
        self.logs = [memory.empty(slots, *size) for size in log_sizes(s, n)[:3]]
        self.taken = memory.zeros(slots, dtype=torch.int32)
        self.held = (self.pool, *self.logs, self.taken)

    def load(self, sequence: int, state: torch.Tensor) -> None:
        self.pool[1 + sequence] = state.transpose(-1, -2)
        self.taken[1 + sequence] = 0

    def step(self, rows: Rows) -> torch.Tensor:
        module = self.package.module(f"{LINEAR}.fused_recurrent_linear_replayssm")
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
