"""Triton kernels of vLLM: states of all drafted tokens in a paged pool, a row of the block table
for each sequence, and the number of accepted tokens that says which column is read next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import torch

from engine.conform.adapters import Engine
from engine.conform.cases import Rows, Shape
from engine.conform.packages import NoPlatform, Package
from engine.conform.subject import Kernel, Memory, Prompts, as_a_pass

_FLA = "vllm.third_party.flash_linear_attention.ops"
_MAMBA = "vllm.model_executor.layers.mamba.ops"
_K3 = "vllm.models.kimi_k3.nvidia.ops"
_BUILDER = "vllm.v1.attention.backends.gdn_attn"
_GDN = "vllm.model_executor.layers.mamba.gdn"
_K3_KDA = f"{_K3}.third_party.kda.fused_recurrent"


class Paged:
    """Pool, block table and accepted counts; block 0 is vLLM's null block."""

    def __init__(self, shape: Shape, memory: Memory, package: Package) -> None:
        n, t = shape.n_sequences, shape.n_tokens
        self.shape, self.memory, self.package = shape, memory, package
        self.pool = memory.empty(1 + n * t, *self._block(), dtype=shape.dtype)
        memory.keep("null-slot-written", "block 0", self.pool[:1])
        # the last row is that of sequence -1, padding
        self.table = memory.whole([*range(1, 1 + n * t), *[0] * t]).view(n + 1, t)
        self.accepted = memory.whole([1] * (n + 1))

    def _block(self) -> tuple[int, ...]:
        heads, d_k, d_v = self.shape.state
        return heads, d_v, d_k

    def load(self, sequence: int, state: torch.Tensor) -> None:
        self.pool[self.table[sequence, 0]] = state.transpose(-1, -2).to(self.pool)
        self.accepted[sequence] = 1

    def accept(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        for sequence, count in zip(sequences, counts, strict=True):
            self.accepted[sequence] = count

    def column(self, sequence: int) -> int:
        """The column that the next pass reads."""
        return int(self.accepted[sequence]) - 1

    def state(self, sequence: int) -> torch.Tensor:
        block = self.table[sequence, self.column(sequence)]
        return self.pool[block].float().transpose(-1, -2)

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
    """fused_recurrent_gated_delta_rule_fwd, one gate per head; blocks and counts of a pass are
    those of vLLM's GDNAttentionMetadataBuilder."""

    call = f"{_FLA}.fused_recurrent", "fused_recurrent_gated_delta_rule_fwd"

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
            cache_config=new(mamba_cache_mode="none"),
            use_v2_model_runner=False,
        )
        spec = new(prefill_checkpoint_alignment=None)
        builder = package.module(_BUILDER).GDNAttentionMetadataBuilder
        self.builder = builder(spec, [], config, self.table.device)

    def verify(self, rows: Rows) -> torch.Tensor:
        """A pass as the builder plans it; one row of a sequence that reads its first column may be
        one for which the engine drafts nothing (-1), next to others."""
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
            seq_lens=None,
            seq_lens_cpu_upper_bound=self.memory.whole(rows.lengths).cpu() + 1,
            is_prefilling=None,
            compute_num_computed_tokens=lambda: self.memory.whole([1] * n),
        )
        batch.replace = lambda **_: batch
        plan = self.builder.build(0, batch, accepted, drafts)
        blocks, others = plan.spec_state_indices_tensor, plan.non_spec_state_indices_tensor
        if blocks is None:
            return self.run(rows, others.view(-1, 1), None)
        if others is None:
            return self.run(rows, blocks, plan.num_accepted_tokens)
        o, a, b = torch.empty_like(rows.v), plan.spec_token_indx, plan.non_spec_token_indx
        with_drafts = rows.at(a, plan.spec_query_start_loc)
        o[a] = self.run(with_drafts, blocks, plan.num_accepted_tokens)
        o[b] = self.run(rows.at(b, plan.non_spec_query_start_loc), others.view(-1, 1), None)
        return o

    def decode(self, rows: Rows) -> torch.Tensor:
        o = self.verify(rows)
        self.accept(rows.sequences, [1] * len(rows.sequences))
        return o

    def gates(self, rows: Rows) -> dict[str, torch.Tensor | bool]:
        """The decay and beta of rows, as the kernel takes them."""
        return {"g": rows.g.unsqueeze(0), "beta": rows.beta.unsqueeze(0)}

    def run(self, rows: Rows, table: torch.Tensor, accepted: torch.Tensor | None) -> torch.Tensor:
        module, name = self.call
        o, _ = getattr(self.package.module(module), name)(
            *(t.unsqueeze(0) for t in (rows.q, rows.k, rows.v)),
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

    def run(self, rows: Rows, table: torch.Tensor, accepted: torch.Tensor | None) -> torch.Tensor:
        if accepted is None:
            out = torch.empty_like(rows.v).unsqueeze(1)
            module = self.package.module(f"{_FLA}.fused_recurrent")
            module.fused_recurrent_gated_delta_rule_packed_decode(
                *(rows.mixed, rows.a, rows.b, rows.A_log, rows.dt_bias, self.shape.d_k**-0.5),
                *(self.pool, out, table.flatten()),
                use_qk_l2norm_in_kernel=True,
            )
            return out[:, 0]
        module = self.package.module(f"{_FLA}.fused_sigmoid_gating")
        o, _ = module.fused_sigmoid_gating_delta_rule_update(
            A_log=rows.A_log,
            a=rows.a,
            b=rows.b,
            dt_bias=rows.dt_bias,
            **dict(zip("qkv", (t.unsqueeze(0) for t in rows.beside("q", "k", "v")), strict=True)),
            initial_state=self.pool,
            inplace_final_state=True,
            cu_seqlens=rows.starts,
            ssm_state_indices=table,
            num_accepted_tokens=accepted,
            use_qk_l2norm_in_kernel=True,
        )
        return o[0]


class _ChannelGates(_Delta):
    """fused_recurrent_kda_fwd, one gate per channel."""

    call = f"{_FLA}.kda", "fused_recurrent_kda_fwd"


class _K3Gates(_Delta):
    """Kimi K3's; a step without drafts is fused_recurrent_kda_packed_decode."""

    call = _K3_KDA, "fused_recurrent_kda_fwd"

    def gates(self, rows: Rows) -> dict[str, torch.Tensor | bool]:
        given = {"g": rows.a.unsqueeze(0), "beta": rows.b.unsqueeze(0)}
        weights = {"A_log": rows.A_log, "dt_bias": rows.dt_bias}
        return {**given, **weights, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}

    def run(self, rows: Rows, table: torch.Tensor, accepted: torch.Tensor | None) -> torch.Tensor:
        if accepted is not None:
            return super().run(rows, table, accepted)
        o, _ = self.package.module(_K3_KDA).fused_recurrent_kda_packed_decode(
            *(rows.mixed, rows.a.unsqueeze(0), rows.b.unsqueeze(0), rows.A_log, rows.dt_bias),
            *(None, self.pool, table.flatten()),
        )
        return o[0]


class _Recovered(_K3Gates):
    """kda_recoverssm_verify writes corrections, keys and gates to a log; the commit applies those
    of the accepted rows to the only state of a sequence."""

    verify, decode = Paged.verify, Paged.decode

    def __init__(self, shape: Shape, memory: Memory, package: Package) -> None:
        Paged.__init__(self, replace(shape, n_tokens=1), memory, package)
        self.shape, self.module = shape, package.module(f"{_K3}.recoverssm")
        size = (shape.n_sequences + 2, shape.n_heads, shape.n_tokens)  # two of padding
        self.records = self.module.KDARecoverSSMRecords(
            memory.empty(*size, shape.d_v), memory.empty(*size, 2 * shape.d_k)
        )
        self.windows = memory.zeros(len(self.pool), shape.n_tokens, 1)

    def run(self, rows: Rows, table: torch.Tensor, accepted: torch.Tensor | None) -> torch.Tensor:
        if accepted is None:
            return super().run(rows, table, accepted)
        self.rows = rows
        o = self.module.kda_recoverssm_verify(
            *(t.unsqueeze(0) for t in (*rows.beside("q", "k", "v"), *rows.beside("a", "b"))),
            *(rows.A_log, rows.dt_bias, None, self.pool, self.records, rows.starts),
            *(table.flatten(), self.shape.n_tokens),
        )
        assert isinstance(o, torch.Tensor)
        return o[0]

    def accept(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        rows = self.rows
        layer = SimpleNamespace(
            kv_cache=(self.windows, self.pool),
            recoverssm_records=self.records,
            A_log=rows.A_log,
            dt_bias=rows.dt_bias,
            local_num_heads=self.shape.n_heads,
            head_dim=self.shape.d_k,
            gate_lower_bound=None,
        )
        n = len(rows.sequences)
        context = self.module.KDARecoverSSMCommitContext.create(
            [layer], spec_query_len=self.shape.n_tokens, max_num_reqs=n
        )
        padded = [*counts, *[1] * (n - len(counts))]
        context.commit(self.memory.whole(padded), self.table[rows.sequences, 0], rows.starts)


class _Mamba2(Paged):
    """selective_state_update."""

    def run(self, rows: Rows, table: torch.Tensor, accepted: torch.Tensor | None) -> torch.Tensor:
        module = self.package.module(f"{_MAMBA}.mamba_ssm")
        n, heads, d = rows.x.shape
        out = torch.empty_like(rows.x)
        x, B, C = rows.beside("x", "B", "C")
        module.selective_state_update(
            *(self.pool, x, rows.dt.unsqueeze(-1).expand(n, heads, d)),
            rows.A.view(heads, 1, 1).expand(heads, d, self.shape.d_k),
            *(B, C, rows.D.view(heads, 1).expand(heads, d)),
            rows.dt_bias.view(heads, 1).expand(heads, d),
            dt_softplus=True,
            state_batch_indices=table,
            out=out,
            num_accepted_tokens=accepted,
            cu_seqlens=rows.starts if accepted is not None else None,
        )
        return out


class _Conv:
    """causal_conv1d_update: one window that is longer by the drafts, read from accepted - 1 on."""

    def __init__(self, shape: Shape, memory: Memory, package: Package) -> None:
        self.shape, self.memory, self.package = shape, memory, package
        width = shape.d_k - 1 + shape.n_tokens - 1
        self.windows = memory.empty(1 + shape.n_sequences, shape.n_heads, width, dtype=shape.dtype)
        memory.keep("null-slot-written", "window 0", self.windows[:1])
        self.accepted = memory.whole([1] * (shape.n_sequences + 1))

    def load(self, sequence: int, state: torch.Tensor) -> None:
        self.windows[1 + sequence, :, : self.shape.d_k - 1] = state.to(self.windows)
        self.accepted[sequence] = 1

    def accept(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        for sequence, count in zip(sequences, counts, strict=True):
            self.accepted[sequence] = count

    def verify(self, rows: Rows) -> torch.Tensor:
        module = self.package.module(f"{_MAMBA}.causal_conv1d")
        out: torch.Tensor = module.causal_conv1d_update(
            rows.x.clone(),
            self.windows,
            rows.weight,
            rows.bias,
            "silu",
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
    """chunk_gated_delta_rule_fwd, or chunk_kda_fwd: a prompt in chunks; its states are [heads, d_v,
    d_k]."""

    def run(self, rows: Rows, first: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        kda = self.shape.recurrence == "kda"
        module = self.package.module(f"{_FLA}.{'kda' if kda else 'chunk'}")
        made = getattr(module, "chunk_kda_fwd" if kda else "chunk_gated_delta_rule_fwd")(
            *(t.unsqueeze(0) for t in (rows.q_normed, rows.k_normed)),
            *(t.unsqueeze(0) for t in (rows.v.clone(), rows.g, rows.beta)),
            scale=self.shape.d_k**-0.5,
            initial_state=first if first is None else first.transpose(-1, -2).contiguous(),
            output_final_state=True,
            cu_seqlens=rows.starts,
        )
        o, last = made if kda else made[1:4:2]
        return o[0], last.transpose(-1, -2)


class _Builder:
    """AttentionMetadataBuilder, as far as its subclass needs it."""

    def __class_getitem__(cls, of: object) -> type:
        return cls

    def __init__(self, spec: object, layers: object, config: object, device: object) -> None:
        self.kv_cache_spec, self.vllm_config, self.device = spec, config, device

    def _init_reorder_batch_threshold(self, *_: object) -> None:
        """Batches are not reordered."""


_F32 = ("float32",)
ENGINE = Engine(
    package="vllm",
    versions=("0.33.0",),
    kept=(
        _FLA, _K3_KDA, f"{_K3}.recoverssm", _BUILDER, f"{_MAMBA}.mamba_ssm",
        f"{_MAMBA}.causal_conv1d", f"{_MAMBA}.triton_helpers", "vllm.utils.math_utils",
    ),
    values={
        "vllm.v1.attention.backends.utils.NULL_BLOCK_ID": 0,
        "vllm.v1.attention.backends.utils.PAD_SLOT_ID": -1,
        "vllm.v1.attention.backends.utils.mamba_get_block_table_tensor": lambda table, *_: table,
        "vllm.v1.attention.backends.utils.split_decodes_and_prefills": (
            lambda batch, **_: (batch.num_reqs, 0, batch.num_reqs, 0)
        ),
        "vllm.v1.attention.backends.utils.compute_causal_conv1d_metadata": (
            lambda *_, **__: (None, None, None)
        ),
        "vllm.v1.attention.backend.AttentionMetadataBuilder": _Builder,
        f"{_GDN}.qwen_gdn_linear_attn._resolve_gdn_prefill_backend": lambda _: (None, "flashinfer"),
        "vllm.platforms.current_platform": NoPlatform(),
        "vllm.utils.torch_utils.async_tensor_h2d": torch.Tensor.to,
        "vllm.envs.VLLM_TUNED_CONFIG_FOLDER": None,
    },
    kernels=(
        Kernel("fused_recurrent_gated_delta_rule", ("gdn",), _Delta, padding=True),
        Kernel("fused_sigmoid_gating_delta_rule_update", ("gdn",), _DeltaGates, padding=True),
        Kernel(  # it reads gates without a mask: of a head of 48, those of the next one too
            "fused_recurrent_kda", ("kda",), _ChannelGates, grouped=False, square=True,
            padding=True, powers=True,
        ),
        Kernel(
            "kimi_k3.fused_recurrent_kda", ("kda",), _K3Gates, grouped=False, square=True,
            padding=True,
        ),
        Kernel(
            "kimi_k3.kda_recoverssm", ("kda",), _Recovered, grouped=False, log=True, padding=True
        ),
        Kernel("selective_state_update", ("mamba2",), _Mamba2, padding=True),
        Kernel("causal_conv1d_update", ("conv",), _Conv, padding=True),
        Kernel("chunk_gated_delta_rule", ("gdn",), _Chunked, dtypes=_F32, chunk=64),
        Kernel(
            "chunk_kda", ("kda",), _Chunked, grouped=False, square=True, dtypes=_F32, chunk=64
        ),
    ),
    language="vllm.triton_utils",
    traced_ranges=(f"{_FLA}.chunk_delta_h",),
)  # fmt: skip
