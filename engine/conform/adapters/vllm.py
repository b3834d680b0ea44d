"""Triton kernels of vLLM: states of all draft tokens in a paged pool, a block table row per
sequence, and the number of accepted tokens, which gives the next column to read."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from engine.conform.adapters import Engine
from engine.conform.cases import Rows, Shape
from engine.conform.packages import NoPlatform, Package, PlanBuilder
from engine.conform.subject import Kernel, Layers, Memory, Prompts, as_a_pass

_FLA = "vllm.third_party.flash_linear_attention.ops"
_MAMBA = "vllm.model_executor.layers.mamba.ops"
_K3 = "vllm.models.kimi_k3.nvidia.ops"
_UTILS = "vllm.v1.attention.backends.utils"
_BUILDER = "vllm.v1.attention.backends.gdn_attn"
_GDN = "vllm.model_executor.layers.mamba.gdn"
_WINDOW = 3  # inputs in a convolution's window
_K3_KDA = f"{_K3}.third_party.kda.fused_recurrent"


class Paged:
    """Pool, block table and accepted counts; block 0 is vLLM's null block. With aligned blocks of
    `size` tokens, a pass starts at the column of its last token (`begin`), and `kept` states of its
    rows follow there."""

    kept = 0  # 0: of all

    def __init__(self, shape: Shape, memory: Memory, package: Package) -> None:
        self.shape, self.memory, self.package = shape, memory, package
        self.aligned, self.size = "aligned blocks" in shape.extras, shape.n_tokens + 1
        n, t = shape.n_sequences, (self.kept or shape.n_tokens) + self.aligned
        self.layers = Layers(shape, memory)
        size = self.stored(torch.empty(shape.state, device="meta")).shape
        self.pools = memory.pool(self.layers.n, 1 + n * t, *size, dtype=shape.dtype)
        self.pool = self.pools[-1]
        memory.keep("null-slot-written", "block 0", self.pool[:1])
        # the last row is that of sequence -1, padding
        self.table = memory.whole([*range(1, 1 + n * t), *[0] * t]).view(n + 1, t)
        self.accepted = memory.whole([1] * (n + 1))
        self.begin, self.computed = [0] * (n + 1), [1] * (n + 1)

    def stored(self, states: torch.Tensor) -> torch.Tensor:
        """States [..., d_k, d_v] in their stored layout, and back."""
        return states.mT

    def load(self, sequence: int, state: torch.Tensor) -> None:
        self.pool[self.table[sequence, 0]] = self.stored(state).to(self.pool)
        self.accepted[sequence] = 1
        self.begin[sequence], self.computed[sequence] = 0, 1 + sequence % self.size

    def aligned_to(self, rows: Rows) -> None:
        """Move the states of sequences to the columns where a pass of these rows starts, as the
        engine does before it; finished columns are renewed."""
        for s, m in zip(rows.sequences, rows.lengths, strict=True):
            if s < 0 or not self.aligned:
                continue
            old = min(self.begin[s], self.computed[s] // self.size)
            self.table[s] = self.table[s].roll(-old)
            self.begin[s] -= old
            self.computed[s] -= old * self.size
            column = (self.computed[s] + m - 1) // self.size
            if column != self.begin[s]:
                self.pool[self.table[s, column]] = self.pool[self.table[s, self.column(s)]].clone()
                self.begin[s], self.accepted[s] = column, 1

    def accept(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        for sequence, count in zip(sequences, counts, strict=True):
            self.accepted[sequence] = count
            self.computed[sequence] += count

    def column(self, sequence: int) -> int:
        """The column read by the next pass."""
        return self.begin[sequence] + int(self.accepted[sequence]) - 1

    def state(self, sequence: int) -> torch.Tensor:
        return self.stored(self.pool[self.table[sequence, self.column(sequence)]]).float()

    def without_drafts(self, rows: Rows) -> torch.Tensor:
        """Blocks [sequences, 1] for a step without drafts: read and written in place."""
        return torch.stack([self.table[s, self.column(s)] for s in rows.sequences]).view(-1, 1)

    def run(self, rows: Rows, table: torch.Tensor, accepted: torch.Tensor | None) -> torch.Tensor:
        """One call of the kernel; accepted: None for a step without drafts."""
        raise NotImplementedError

    def verify(self, rows: Rows) -> torch.Tensor:
        return self.run(rows, self.table[rows.sequences], self.accepted[rows.sequences])

    def decode(self, rows: Rows) -> torch.Tensor:
        return self.run(rows, self.without_drafts(rows), None)


class _Delta(Paged):
    """fused_recurrent_gated_delta_rule, one gate per head; blocks and counts of a pass come from
    vLLM's GDNAttentionMetadataBuilder."""

    call, split = (f"{_FLA}.fused_recurrent", "fused_recurrent_gated_delta_rule"), True

    def __init__(self, shape: Shape, memory: Memory, package: Package) -> None:
        super().__init__(shape, memory, package)
        new = SimpleNamespace
        config = new(
            compilation_config=new(
                cudagraph_mode=new(has_full_cudagraphs=lambda: True),
                max_cudagraph_capture_size=None,
            ),
            speculative_config=new(num_speculative_tokens=shape.n_tokens - 1),
            scheduler_config=new(max_num_seqs=shape.n_sequences + 2),
            cache_config=new(mamba_cache_mode="align" if self.aligned else "none"),
            use_v2_model_runner=False,
        )
        spec = new(
            prefill_checkpoint_alignment=None,
            block_size=self.size,
            num_speculative_blocks=shape.n_tokens - 1,
        )
        builder = package.module(_BUILDER).GDNAttentionMetadataBuilder
        self.builder = builder(spec, [], config, self.table.device)

    def verify(self, rows: Rows) -> torch.Tensor:
        """A pass as the builder plans it; a single row of a sequence that reads its first column
        may be one without drafts (-1), next to others."""
        self.aligned_to(rows)
        accepted = self.accepted[rows.sequences]
        each = zip(rows.lengths, accepted.tolist(), strict=True)
        drafts = torch.tensor([m - 1 if m > 1 or count > 1 else -1 for m, count in each])
        n = len(rows.sequences)
        batch = SimpleNamespace(
            query_start_loc=rows.starts,
            query_start_loc_cpu=rows.starts.cpu(),
            num_reqs=n,
            block_table_tensor=self.table[rows.sequences],
            num_actual_tokens=sum(rows.lengths),
            seq_lens=self.memory.whole([self.computed[s] for s in rows.sequences])
            + rows.starts.diff(),
            seq_lens_cpu_upper_bound=self.memory.whole(rows.lengths).cpu() + 1,
            is_prefilling=None,
            compute_num_computed_tokens=lambda: self.memory.whole([1] * n),
        )
        batch.replace = lambda **_: batch
        plan = self.builder.build(0, batch, accepted, drafts)
        o = torch.empty_like(rows.v)
        parts = "token_indx", "query_start_loc", "state_indices_tensor"
        for name, counts in (("spec", plan.num_accepted_tokens), ("non_spec", None)):
            at, starts, blocks = (getattr(plan, f"{name}_{part}") for part in parts)
            if blocks is not None:  # those that pad a graph's batch have no rows
                tokens = slice(None) if at is None else at
                blocks = blocks.view(-1, 1) if counts is None else blocks
                o[tokens] = self.run(rows.at(tokens, starts), blocks, counts)
        return o

    decode = as_a_pass

    def gates(self, rows: Rows) -> dict[str, Any]:
        """The decay and beta of rows in the kernel's form."""
        return dict(zip(("g", "beta"), self.views(rows, "g", "beta"), strict=True))

    def views(self, rows: Rows, *names: str) -> list[torch.Tensor]:
        """Inputs [1, tokens, …], as views of one tensor if the call takes them so."""
        each = rows.beside(*names) if self.split else (rows.tensors[name] for name in names)
        return [t.unsqueeze(0) for t in each]

    def run(self, rows: Rows, table: torch.Tensor, accepted: torch.Tensor | None) -> torch.Tensor:
        module, name = self.call
        o, _ = getattr(self.package.module(module), name)(
            **dict(zip("qkv", self.views(rows, "q", "k", "v"), strict=True)),
            **self.gates(rows),
            scale=self.shape.d_k**-0.5,
            initial_state=self.pool,
            inplace_final_state=True,
            cu_seqlens=rows.starts,
            ssm_state_indices=table,
            num_accepted_tokens=accepted,
            use_qk_l2norm_in_kernel=True,
        )
        return o[0]


class _DeltaGates(_Delta):
    """fused_sigmoid_gating_delta_rule_update: gates and norms inside; a step without drafts is
    fused_recurrent_gated_delta_rule_packed_decode."""

    call = f"{_FLA}.fused_sigmoid_gating", "fused_sigmoid_gating_delta_rule_update"

    def gates(self, rows: Rows) -> dict[str, Any]:
        a, b = rows.beside("a", "b")
        return {"A_log": rows.A_log, "a": a, "b": b, "dt_bias": rows.dt_bias}

    def run(self, rows: Rows, table: torch.Tensor, accepted: torch.Tensor | None) -> torch.Tensor:
        if accepted is not None:
            return super().run(rows, table, accepted)
        out = torch.empty_like(rows.v).unsqueeze(1)
        module = self.package.module(f"{_FLA}.fused_recurrent")
        module.fused_recurrent_gated_delta_rule_packed_decode(
            *(rows.mixed, rows.a, rows.b, rows.A_log, rows.dt_bias, self.shape.d_k**-0.5),
            *(self.pool, out, table.flatten()),
            use_qk_l2norm_in_kernel=True,
        )
        return out[:, 0]


class _ChannelGates(_Delta):
    """fused_recurrent_kda_fwd, one gate per channel: its wrapper takes no counts."""

    call, split = (f"{_FLA}.kda", "fused_recurrent_kda_fwd"), False


class _K3Gates(_Delta):
    """Kimi K3's; a step without drafts is fused_recurrent_kda_packed_decode."""

    call = _K3_KDA, "fused_recurrent_kda_fwd"

    def gates(self, rows: Rows) -> dict[str, Any]:
        given = dict(zip(("g", "beta"), self.views(rows, "a", "b"), strict=True))
        weights = {"A_log": rows.A_log, "dt_bias": rows.dt_bias, "lower_bound": rows.bound}
        return {**given, **weights, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}

    def run(self, rows: Rows, table: torch.Tensor, accepted: torch.Tensor | None) -> torch.Tensor:
        if accepted is not None:
            return super().run(rows, table, accepted)
        o, _ = self.package.module(_K3_KDA).fused_recurrent_kda_packed_decode(
            *(rows.mixed, rows.a.unsqueeze(0), rows.b.unsqueeze(0), rows.A_log, rows.dt_bias),
            *(rows.bound, self.pool, table.flatten()),
        )
        return o[0]


class _Recovered(_K3Gates):
    """kda_recoverssm_verify writes corrections, keys and gates to a log; the commit applies those
    of the accepted rows to the single state of a sequence."""

    kept = 1

    def __init__(self, shape: Shape, memory: Memory, package: Package) -> None:
        Paged.__init__(self, shape, memory, package)
        self.module = package.module(f"{_K3}.recoverssm")
        n, size = self.layers.n, (shape.n_heads, shape.n_tokens)
        logs = n, shape.n_sequences + 2, *size  # two for padding
        self.logs = memory.empty(*logs, shape.d_v), memory.empty(*logs, 2 * shape.d_k)
        self.windows = memory.zeros(n, self.pool.shape[0], _WINDOW + size[1] - 1, size[0])
        self.crossed: dict[int, tuple[int, int]] = {}

    def verify(self, rows: Rows) -> torch.Tensor:
        self.aligned_to(rows)
        return self.run(rows, self.blocks(rows.sequences), self.accepted)

    def decode(self, rows: Rows) -> torch.Tensor:
        self.aligned_to(rows)
        o = self.run(rows, self.blocks(rows.sequences), None)
        Paged.accept(self, rows.sequences, [1] * len(rows.sequences))
        return o

    def blocks(self, sequences: Sequence[int]) -> torch.Tensor:
        """The block of each sequence's state."""
        return torch.stack([self.table[s, self.begin[s]] for s in sequences])

    def run(self, rows: Rows, table: torch.Tensor, accepted: torch.Tensor | None) -> torch.Tensor:
        if accepted is None:
            return super().run(rows, table, accepted)
        self.rows = rows
        records = self.module.KDARecoverSSMRecords(*(log[-1] for log in self.logs))
        o = self.module.kda_recoverssm_verify(
            *(*self.views(rows, "q", "k", "v"), *self.views(rows, "a", "b")),
            *(rows.A_log, rows.dt_bias, rows.bound, self.pool, records, rows.starts),
            *(table, self.shape.n_tokens),
        )
        assert isinstance(o, torch.Tensor)
        return o[0]

    def accept(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        rows, layers = self.rows, []
        self.windows[-1] = torch.arange(self.windows[-1].numel()).view(self.windows[-1].shape)
        for tensor, heads in ((self.pools, 2), *((log, 2) for log in self.logs), (self.windows, 3)):
            self.layers.fill(tensor, heads)
        weights = [rows.A_log, rows.dt_bias]
        for i in range(self.layers.n):
            own = i == self.layers.n - 1
            A_log, dt_bias = weights if own else (self.layers.turned(x, 0) for x in weights)
            layer = SimpleNamespace(
                kv_cache=(self.windows[i], self.pools[i]),
                recoverssm_records=self.module.KDARecoverSSMRecords(*(log[i] for log in self.logs)),
                A_log=A_log,
                dt_bias=dt_bias,
                local_num_heads=self.shape.n_heads,
                head_dim=self.shape.d_k,
                gate_lower_bound=rows.bound,
            )
            layers.append(layer)
        context = self.module.KDARecoverSSMCommitContext.create(
            layers, spec_query_len=self.shape.n_tokens, max_num_reqs=len(rows.sequences)
        )
        # next to requests without drafts, those of a pass are numbered
        ids = [s % len(self.computed) for s in rows.sequences]
        taken = dict(zip(sequences, counts, strict=True))
        mixed = len(taken) < self.shape.n_sequences
        batch = [*range(len(self.computed))] if mixed else ids
        sampled = self.memory.whole([taken.get(s, 1) for s in batch])
        numbers = self.memory.whole(ids) if mixed else None
        aligned = {
            "block_table": self.table[batch],
            "num_computed_tokens": self.memory.whole([self.computed[s] for s in batch]),
            "mamba_block_size": self.size,
        }
        blocks, before = self.blocks(rows.sequences), self.windows[-1].clone()
        context.commit(sampled, blocks, rows.starts, numbers, **(aligned if self.aligned else {}))
        moves = []
        for s, count, block in zip(sequences, counts, blocks.tolist(), strict=False):
            first, end = self.computed[s], self.computed[s] + count
            boundary = (first // self.size + 1) * self.size
            self.crossed.pop(s, None)
            if self.aligned and end >= boundary:
                self.crossed[s] = boundary - first, int(self.table[s, boundary // self.size - 1])
                moves.append((block, self.crossed[s][1], self.crossed[s][0]))
            self.begin[s] = (end - 1) // self.size if self.aligned else 0
            moves.append((block, int(self.table[s, self.begin[s]]), count))
            self.computed[s] = end
        self._check_windows(before, moves)
        self.layers.check(self.pools, 2)
        self.layers.check(self.windows, 3)

    def _check_windows(self, before: torch.Tensor, moves: Sequence[tuple[int, int, int]]) -> None:
        """Record what the commit must make of windows: of a block, for another one, after a number
        of rows."""
        of = {target: (source, rows) for source, target, rows in moves}
        for block, window in enumerate(self.windows[-1]):
            source, rows = of.get(block, (block, 1))  # or unchanged

            def moved(more: int, source: int = source, rows: int = rows) -> torch.Tensor:
                first = max(0, rows - 1 + more)
                part = before[source, first : first + _WINDOW]
                return torch.cat([part, before[block, len(part) :]])  # noqa: B023

            others = {f"inputs {i:+d} from the right ones": moved(i) for i in (-2, -1, 1, 2)}
            where = "window-not-rolled-back", f"the window after row {rows - 1} of the pass"
            if block not in of:
                where = "null-slot-written", f"the window of block {block}, which no row is for,"
            self.memory.keep(*where, window, moved(0), others)

    def tracked(self, sequence: int) -> tuple[int, torch.Tensor] | None:
        """The state at the block boundary that the last pass crossed, and the row it follows."""
        rows, block = self.crossed.get(sequence, (0, 0))
        return (rows, self.pool[block].float().transpose(-1, -2)) if rows else None


class _Mamba2(Paged):
    """selective_state_update."""

    def run(self, rows: Rows, table: torch.Tensor, accepted: torch.Tensor | None) -> torch.Tensor:
        module = self.package.module(f"{_MAMBA}.mamba_ssm")
        out = torch.empty_like(rows.x)
        x, B, C = rows.beside("x", "B", "C")
        dt, A, D, options = rows.wide()
        module.selective_state_update(
            *(self.pool, x, dt, A, B, C, D),
            **options,
            state_batch_indices=table,
            out=out,
            num_accepted_tokens=accepted,
            cu_seqlens=rows.starts if accepted is not None else None,
        )
        return out


class _Conv:
    """causal_conv1d_update: one window, longer by the drafts, read from accepted - 1 on."""

    def __init__(self, shape: Shape, memory: Memory, package: Package) -> None:
        self.shape, self.memory, self.package = shape, memory, package
        width = shape.d_k - 1 + shape.n_tokens - 1
        sizes = 1 + shape.n_sequences, shape.n_heads, width
        self.windows = memory.pool(1, *sizes, dtype=shape.dtype)[0]
        memory.keep("null-slot-written", "window 0", self.windows[:1])
        self.accepted = memory.whole([1] * (shape.n_sequences + 1))

    def load(self, sequence: int, state: torch.Tensor) -> None:
        self.windows[1 + sequence, :, : self.shape.d_k - 1] = state.to(self.windows)
        self.accepted[sequence] = 1

    def accept(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        self.accepted[list(sequences)] = self.memory.whole(counts)

    def verify(self, rows: Rows) -> torch.Tensor:
        module = self.package.module(f"{_MAMBA}.causal_conv1d")
        out: torch.Tensor = module.causal_conv1d_update(
            *(rows.x.clone(), self.windows, rows.weight, rows.bias, "silu"),
            conv_state_indices=self.memory.whole([1 + s for s in rows.sequences]),
            num_accepted_tokens=self.accepted[rows.sequences],
            query_start_loc=rows.starts,
            max_query_len=self.shape.n_tokens,
        )
        return out

    decode = as_a_pass

    def state(self, sequence: int) -> torch.Tensor:
        first = int(self.accepted[sequence]) - 1
        return self.windows[1 + sequence, :, first : first + self.shape.d_k - 1].float()


class _Chunked(Prompts):
    """chunk_gated_delta_rule_fwd, or alternating chunk_kda_fwd and the one that makes its gates
    inside (with a lower bound only the latter): a prompt in chunks; its states are [heads, d_v,
    d_k]."""

    calls = 0

    def run(self, rows: Rows, first: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        kda = self.shape.recurrence == "kda"
        module = self.package.module(f"{_FLA}.{'kda' if kda else 'chunk'}")
        name = "chunk_kda_fwd" if kda else "chunk_gated_delta_rule_fwd"
        gates: dict[str, Any] = {"g": rows.g.unsqueeze(0)}
        self.calls += kda
        if kda and (rows.bound is not None or self.calls % 2 == 0):
            name, gates = "chunk_kda_with_fused_gate_fwd", {"raw_g": rows.a.unsqueeze(0)}
            gates |= {"A_log": rows.A_log, "g_bias": rows.dt_bias, "lower_bound": rows.bound}
        made = getattr(module, name)(
            *(t.unsqueeze(0) for t in (rows.q_normed, rows.k_normed, rows.v.clone())),
            beta=rows.beta.unsqueeze(0),
            **gates,
            scale=self.shape.d_k**-0.5,
            initial_state=first if first is None else first.transpose(-1, -2).contiguous(),
            output_final_state=True,
            cu_seqlens=rows.starts,
        )
        o, last = made if kda else made[1:4:2]
        return o[0], last.transpose(-1, -2)


_F32, _FAR = ("float32",), "far slots"
ENGINE = Engine(
    package="vllm",
    versions=("0.33.0",),
    kept=(
        _FLA, _K3_KDA, f"{_K3}.recoverssm", _BUILDER, _UTILS, f"{_MAMBA}.mamba_ssm",
        f"{_MAMBA}.causal_conv1d", f"{_MAMBA}.triton_helpers", "vllm.utils.math_utils",
    ),
    values={
        f"{_BUILDER}.split_decodes_and_prefills": lambda m, **_: (m.num_reqs, 0, m.num_reqs, 0),
        f"{_BUILDER}.compute_causal_conv1d_metadata": lambda *_, **__: (None, None, None),
        "vllm.v1.attention.backend.AttentionMetadataBuilder": PlanBuilder,
        "vllm.v1.kv_cache_interface.MambaSpec": SimpleNamespace,
        f"{_GDN}.qwen_gdn_linear_attn._resolve_gdn_prefill_backend": lambda _: (None, "flashinfer"),
        "vllm.platforms.current_platform": NoPlatform(),
        "vllm.utils.torch_utils.async_tensor_h2d": torch.Tensor.to,
        "vllm.envs.VLLM_TUNED_CONFIG_FOLDER": None,
    },
    kernels=(
        Kernel(
            "fused_recurrent_gated_delta_rule", ("gdn",), _Delta, padding=True,
            extras=("aligned blocks", _FAR),
        ),
        Kernel(
            "fused_sigmoid_gating_delta_rule_update", ("gdn",), _DeltaGates, padding=True,
            extras=("aligned blocks", _FAR),
        ),
        Kernel(  # it reads gates unmasked: for a head of 48, those of the next one, too
            "fused_recurrent_kda", ("kda",), _ChannelGates, grouped=False, square=True,
            padding=True, powers=True, extras=(_FAR,),
        ),
        Kernel(
            "kimi_k3.fused_recurrent_kda", ("kda",), _K3Gates, grouped=False, square=True,
            padding=True, extras=("aligned blocks", "lower bound", _FAR),
        ),
        Kernel(
            "kimi_k3.kda_recoverssm", ("kda",), _Recovered, grouped=False, log=True, padding=True,
            extras=("aligned blocks", "layers", "lower bound", _FAR),
        ),
        Kernel("selective_state_update", ("mamba2",), _Mamba2, padding=True, extras=("z", _FAR)),
        Kernel("causal_conv1d_update", ("conv",), _Conv, padding=True, extras=(_FAR,)),
        Kernel("chunk_gated_delta_rule", ("gdn",), _Chunked, dtypes=_F32, chunk=64),
        Kernel(
            "chunk_kda", ("kda",), _Chunked, grouped=False, square=True, dtypes=_F32, chunk=64,
            extras=("lower bound",),
        ),
    ),
    language="vllm.triton_utils",
    traced_ranges=(f"{_FLA}.chunk_delta_h",),
)  # fmt: skip
