"""Kernels of FlashInfer: KDA's recurrence in Triton, and those that CuTe DSL or nvcc compiles for a
GPU at their first call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from engine.conform.adapters import Engine
from engine.conform.adapters.fla import LastState
from engine.conform.adapters.sglang_snapshots import Mamba2, Snapshots, log_sizes, requests
from engine.conform.adapters.vllm import Paged
from engine.conform.cases import Rows, Shape
from engine.conform.packages import Package
from engine.conform.subject import Kernel, Memory, Prompts

_PAGED = "flashinfer.experimental.b12x.sequence.gdn_decode._kernels"
_TAIL = "flashinfer.kda_kernels.ptx.recurrent_kernel"
_LEAST_GATE = -64.0
_D = 128


def _bounded_gates(rows: Rows) -> torch.Tensor:
    """The input that gives g as `_LEAST_GATE` * sigmoid(exp(A_log) * (it + dt_bias))."""
    share = torch.logit(rows.g.double() / _LEAST_GATE)
    return (share / rows.A_log.double().exp()[:, None] - rows.dt_bias.double()).float()


class _PagedGates(Paged):
    """_packed_sequential_kda_decode_kernel: q, k and v in one row."""

    def run(self, rows: Rows, table: torch.Tensor, accepted: torch.Tensor | None) -> torch.Tensor:
        kernel = self.package.module(_PAGED)._packed_sequential_kda_decode_kernel
        n, columns = table.shape
        heads, block = self.shape.n_heads, 32
        mixed, gates, table = rows.mixed, _bounded_gates(rows), table.contiguous()
        out = torch.empty_like(rows.v)
        kernel[(_D // block, n * heads)](
            *(mixed, gates, rows.b, rows.A_log, rows.dt_bias, self.pool, rows.starts),
            self.memory.whole([1] * n) if accepted is None else accepted,
            *(table, self.memory.whole([n]), out, _D**-0.5, _LEAST_GATE, n, columns),
            *(mixed.stride(0), *gates.stride()[:2], *rows.b.stride(), rows.dt_bias.stride(0)),
            *(*self.pool.stride()[:3], *table.stride(), *out.stride()[:2]),
            *(n, heads, heads, _D, _D, columns, block, True, True, 0),
        )
        return out


class _Tail(LastState):
    """launch_recurrent, which handles sequences without a full chunk."""

    def run(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.states[rows.sequences].transpose(-1, -2).contiguous()
        out, last = torch.empty_like(rows.v), torch.empty_like(first)
        self.package.module(_TAIL).launch_recurrent(
            q=rows.q,
            k=rows.k,
            v=rows.v,
            g=_bounded_gates(rows),
            beta=rows.b,
            a_log=rows.A_log,
            dt_bias=rows.dt_bias,
            out=out,
            initial_state=first,
            final_state=last,
            cu_seqlens=rows.starts.long(),
            scale=_D**-0.5,
            lower_bound=_LEAST_GATE,
        )
        return out, last.transpose(-1, -2)


def _batched(rows: Rows) -> dict[str, torch.Tensor]:
    """q, k, v, a and b as [sequences, rows of each, …] in bfloat16, and the weights."""
    n, t = len(rows.sequences), rows.lengths[0]
    drawn = {x: getattr(rows, x).unflatten(0, (n, t)).bfloat16() for x in ("q", "k", "v", "a", "b")}
    return drawn | {"A_log": rows.A_log, "dt_bias": rows.dt_bias}


def _gdn(of: Snapshots | Paged, rows: Rows, slots: torch.Tensor, **options: Any) -> torch.Tensor:
    """Outputs of a verify pass with these options, or (none) of a step without drafts."""
    module = of.package.module("flashinfer.gdn_decode")
    known = _batched(rows) | {"initial_state": of.pool, "initial_state_indices": slots}
    if options and of.shape.dtype == torch.float32:
        out = module.gated_delta_rule_mtp(**known, **options)[0]
    else:
        out = module.gated_delta_rule_decode_pretranspose(state=None, **known, **options)[0]
    return out.flatten(0, 1)


class _Verify(Snapshots):
    """gated_delta_rule_mtp (float32) or gated_delta_rule_decode_pretranspose (bfloat16) with the
    states of all rows in a buffer, a row of it per sequence of the pass."""

    def __init__(self, shape: Shape, memory: Memory, package: Package) -> None:
        super().__init__(shape, memory, package)
        self.at: dict[int, int] = {}

    def options(self) -> dict[str, Any]:
        """Arguments of a verify pass in addition to its rows."""
        return {"intermediate_states_buffer": self.buffer[1:]}

    def run(self, rows: Rows, keep: bool) -> torch.Tensor:
        self.at = {sequence: i for i, sequence in enumerate(rows.sequences)}
        options = self.options() | {"disable_state_update": True} if keep else {}
        return _gdn(self, rows, self.slots(rows.sequences), **options)

    def accept(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        for sequence, count in zip(sequences, counts, strict=True):
            self.pool[1 + sequence] = self.buffer[1 + self.at[sequence], count - 1]


class _Window(_Verify):
    """gated_delta_rule_mtp that keeps the rows, and gated_delta_rule_replayssm_commit."""

    def __init__(self, shape: Shape, memory: Memory, package: Package) -> None:
        super().__init__(shape, memory, package)
        names = {"rawv": torch.bfloat16, "rawk": torch.bfloat16, "g": None, "beta": None}
        sizes = zip(names.items(), log_sizes(shape, shape.n_tokens), strict=True)
        self.window = {
            name: memory.empty(1 + shape.n_sequences, *size, dtype=dtype or torch.float32)
            for (name, dtype), size in sizes
        }

    def options(self) -> dict[str, Any]:
        window = {f"replayssm_{name}": tensor for name, tensor in self.window.items()}
        return window | {"cache_replayssm": True}

    def accept(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        self.package.module("flashinfer.gdn_decode").gated_delta_rule_replayssm_commit(
            *(layer.unsqueeze(0) for layer in (self.pool, *self.window.values())),
            self.slots(sequences),
            self.memory.whole(counts),
        )


class _Scattered(Paged):
    """gated_delta_rule_mtp that writes the state after each row to a block of the pool; a pass
    reads one half of a sequence's blocks and writes the other half."""

    def __init__(self, shape: Shape, memory: Memory, package: Package) -> None:
        super().__init__(replace(shape, n_tokens=2 * shape.n_tokens), memory, package)
        self.shape = shape

    def run(self, rows: Rows, table: torch.Tensor, accepted: torch.Tensor | None) -> torch.Tensor:
        before, t = self.without_drafts(rows).flatten(), self.shape.n_tokens
        if accepted is None:
            return _gdn(self, rows, before)
        halves = [self.table[s, self._half(s) :][:t] for s in rows.sequences]
        blocks = {"ssm_state_indices": torch.stack(halves)}
        return _gdn(self, rows, before, **blocks, disable_state_update=False)

    def _half(self, sequence: int) -> int:
        """First column of the half without the sequence's state."""
        return self.shape.n_tokens * (self.column(sequence) < self.shape.n_tokens)

    def accept(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        for sequence, count in zip(sequences, counts, strict=True):
            self.accepted[sequence] = self._half(sequence) + count


class _Gates(Paged):
    """recurrent_kda: all sequences of a pass have 1 + num_spec_tokens rows."""

    def run(self, rows: Rows, table: torch.Tensor, accepted: torch.Tensor | None) -> torch.Tensor:
        module = self.package.module("flashinfer.kda")
        known = _batched(rows)
        known["g"], known["beta"] = known.pop("a"), known.pop("b")
        drafts: dict[str, Any] = {"ssm_state_indices": table.flatten()}
        if accepted is not None:
            known |= {x: known[x].flatten(0, 1).unsqueeze(0) for x in ("q", "k", "v", "g", "beta")}
            drafts = {
                "ssm_state_indices": table,
                "num_accepted_tokens": accepted,
                "num_spec_tokens": table.shape[1] - 1,
                "cu_seqlens": rows.starts,
            }
        out, _ = module.recurrent_kda(
            **known, **drafts, initial_state=self.pool, use_gate_in_kernel=True, beta_is_logit=True
        )
        return out.flatten(0, 1)


class _Mamba2(Mamba2):
    """selective_state_update."""

    dtype = torch.bfloat16

    def called(self, *tensors: torch.Tensor, **options: Any) -> None:
        options.pop("retrieve_parent_token", None)
        module = self.package.module("flashinfer.mamba.selective_state_update")
        options["cache_steps"] = tensors[1].shape[1]
        module.selective_state_update(*tensors, **options)

    def accept(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        places = requests(self.memory, sequences, self.shape), self.memory.whole(counts) - 1
        self.pool[self.slots(sequences)] = self.buffer[places]


class _Chunked(Prompts):
    """chunk_gated_delta_rule; its gate is exp(g), its states are [heads, d_v, d_k]."""

    def run(self, rows: Rows, first: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        module = self.package.module("flashinfer.gdn_prefill")
        out, last = module.chunk_gated_delta_rule(
            *(t.bfloat16() for t in (rows.q, rows.k, rows.v)),
            g=rows.g.exp(),
            beta=rows.beta,
            initial_state=None if first is None else first.transpose(-1, -2).contiguous(),
            output_final_state=True,
            cu_seqlens=rows.starts,
            use_qk_l2norm_in_kernel=True,
        )
        return out, last.transpose(-1, -2)


def _compiled(name: str, recurrence: Any, make: Any, by: str, least: int, **rest: Any) -> Kernel:
    equal = {"equal_lengths": True, "full_lengths": True}
    options: dict[str, Any] = {"dtypes": ("float32",)} | equal | rest
    return Kernel(
        name, (recurrence,), make, compiled=by, capability=least, d=_D, rows_dtype="bfloat16",
        **options,
    )  # fmt: skip


_DSL, _NVCC = "CuTe DSL compiles it at its first call", "nvcc compiles it at its first call"
ENGINE = Engine(
    package="flashinfer",
    versions=("0.7.2.post1",),
    kept=(_PAGED, _TAIL),
    values={},
    kernels=(
        Kernel(
            "packed_sequential_kda_decode", ("kda",), _PagedGates, grouped=False, d=_D, padding=True
        ),
        Kernel("launch_recurrent", ("kda",), _Tail, grouped=False, d=_D, dtypes=("float32",)),
        _compiled("gated_delta_rule_mtp", "gdn", _Verify, _DSL, 9),
        _compiled("gated_delta_rule_mtp_pool", "gdn", _Scattered, _DSL, 9),
        _compiled("gated_delta_rule_mtp_replayssm", "gdn", _Window, _DSL, 10, log=True),
        _compiled(
            "gated_delta_rule_decode_pretranspose", "gdn", _Verify, _DSL, 9, dtypes=("bfloat16",)
        ),
        _compiled("recurrent_kda", "kda", _Gates, _DSL, 10, dtypes=("bfloat16",), grouped=False),
        _compiled(
            "selective_state_update", "mamba2", _Mamba2, _NVCC, 8, dtypes=("float32", "bfloat16")
        ),
        _compiled(
            "chunk_gated_delta_rule", "gdn", _Chunked, _DSL, 9, chunk=64, equal_lengths=False
        ),
    ),
)
