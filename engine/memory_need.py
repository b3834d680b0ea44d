"""The memory that running a model will need, by its files and options: here, and in llama-server
with the same flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from engine.draft.registry import DRAFTERS
from engine.memory.options import CacheOptions
from engine.memory.policies import POLICIES, PolicySpec, memory_sizes
from engine.options import RunOptions
from engine.options.llama_cpp import CACHE_TYPES
from engine.plain_text import size_text

if TYPE_CHECKING:
    from engine.model.drafters.config import DrafterInfo
    from engine.model.info import ModelInfo

LONGEST_CONTEXT = 4096
"""Most cells that RunOptions.n_ctx = 0 gives."""
PROMPT_CACHE = 8192 << 20
"""Default of llama-server's --cache-ram, bytes of host memory."""
_MTP_IN_TRUNK = ("bailingmoe3",)
"""Architectures for which llama.cpp gives the trunk's cells a layer for the MTP block, which stays
empty."""
_CELLS = 256
"""llama.cpp's contexts are multiples of it."""


@dataclass(frozen=True, slots=True)
class PolicyCost:
    """The cost of a policy's rollback: n_units of unit_bytes for each of n_seqs sequences."""

    policy: str
    unit_bytes: int
    n_units: int
    n_seqs: int

    @property
    def total(self) -> int:
        return self.unit_bytes * self.n_units * self.n_seqs


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes by purpose once every context is full. n_ctx: cells per sequence, and per branch of a
    tree. n_rs_seq: snapshots of the policy in use.

    later: most bytes of host memory that conversations add over time. policies: the cost of every
    policy; empty for llama-server, and without drafting, since nothing is rolled back then.
    Activations of a pass are not counted: tens to hundreds of MiB.
    """

    n_seqs: int
    n_ctx: int
    n_rs_seq: int
    sizes: dict[str, int]
    later: dict[str, int] = field(default_factory=dict)
    policies: tuple[PolicyCost, ...] = ()

    @property
    def total(self) -> int:
        """Sum of `sizes`."""
        return sum(self.sizes.values())


def estimate(
    info: ModelInfo,
    drafts: Mapping[str, ModelInfo | DrafterInfo],
    options: RunOptions,
    n_seqs: int,
    compute: str = "",
    cache: CacheOptions | None = None,
) -> MemoryEstimate:
    """Estimate for n_seqs parallel sequences in this engine. drafts: figures of draft files by the
    drafter that uses each (they count if it is in use). compute: the mode in which the weights are
    loaded, empty for their size in the file."""
    n_ctx = options.n_ctx or min(info.n_ctx_train, LONGEST_CONTEXT)
    types, n_rs_seq = options.spec.types, options.snapshots
    n_held = n_seqs * options.spec.n_branches
    parts = memory_sizes(info, n_held, n_rs_seq, n_ctx, options.rollback, compute)
    cells = n_held * n_ctx
    sizes = {"weights": parts["weights"], "KV": cells * info.kv_bytes_per_token}
    if "draft-mtp" in types and info.mtp_kv_bytes_per_token:
        sizes["MTP KV"] = cells * info.mtp_kv_bytes_per_token
        sizes["MTP rows"] = n_seqs * n_ctx * info.mtp_row_bytes
        if compute == "q8" and info.draft_head_bytes and options.spec.draft_head == "auto":
            sizes["draft head"] = info.draft_head_bytes
    sizes["state"] = parts["state"]
    policies: tuple[PolicyCost, ...] = ()
    if types:
        policies = tuple(policy_cost(info, options, n_held, policy) for policy in POLICIES.values())
        mine = next(cost for cost in policies if cost.policy == options.rollback)
        sizes[options.rollback if n_rs_seq else "checkpoint"] = mine.total
    for drafter in (DRAFTERS[name] for name in types):
        if drafter.needs and drafter.n_bytes and drafter.name in drafts:
            own, figures = drafter.options_of(options.spec), drafts[drafter.name]
            sizes[drafter.needs[0]] = drafter.n_bytes(own, figures, n_held, n_ctx, compute)
    if tapped := _tap_bytes([drafts[name] for name in types if name in drafts]):
        sizes["layer rows"] = tapped * min(options.n_batch, n_seqs * n_ctx)
    later = {"context checkpoints": _checkpoints(info, n_seqs, cache)}
    return MemoryEstimate(n_seqs, n_ctx, n_rs_seq, sizes, later, policies)


def server_estimate(
    info: ModelInfo,
    drafts: Mapping[str, ModelInfo | DrafterInfo],
    options: RunOptions,
    cell_types: tuple[str, str] = ("f16", "f16"),
    cache: CacheOptions | None = None,
) -> MemoryEstimate:
    """Estimate for llama-server with these flags (llama.cpp of October 2026): -c is shared by all
    -np slots, and a full model's MTP block is loaded with it if draft-mtp is in use.

    cell_types: --cache-type-k and -v, of CACHE_TYPES; those of drafters stay f16.
    """
    n_seqs, types = max(1, options.parallel), options.spec.types
    n_ctx = options.n_ctx or info.n_ctx_train
    n_ctx = n_cells = _whole(n_ctx)
    if options.kv != "unified":
        n_ctx = _whole(n_cells // n_seqs)
        n_cells = n_ctx * n_seqs
    drafts_itself = "draft-mtp" in types
    mtp = sum(layer.n_bytes for layer in info.layers if layer.kind.endswith("mtp"))
    cells = [info.cell, info.mtp_cell] if info.architecture in _MTP_IN_TRUNK else [info.cell]
    sizes = {
        "weights": info.weight_bytes - (0 if drafts_itself else mtp),
        "KV": n_cells * sum(_cell_bytes(cell, cell_types) for cell in cells),
    }
    if info.window:  # each sequence has its own cells, with -kvu or without
        n_window = _whole(min(n_ctx, info.window + options.n_ubatch))
        of_tokens = info.cell[0] - sum(numbers for _, numbers in info.block_rows)
        rows = [(n_window, of_tokens)]
        rows += [(_whole(-(-n_ctx // ratio)), numbers) for ratio, numbers in info.block_rows]
        sizes["KV"] = n_seqs * sum(n * _cell_bytes((row, 0), cell_types) for n, row in rows)
        n_cells = n_seqs * n_window
    if drafts_itself and info.mtp_kv_bytes_per_token:
        sizes["MTP KV"] = n_cells * _cell_bytes(info.mtp_cell, ("f16", "f16"))
    sizes["state"] = n_seqs * info.state_bytes
    n_rs_seq = replace(options, rollback="planes").snapshots if info.has_llama_cpp_planes else 0
    if types and info.state_bytes:
        name, n_units = ("planes", n_rs_seq) if n_rs_seq else ("checkpoint", 1)
        sizes[name] = n_units * n_seqs * info.state_bytes
    for name in types:
        need, figures = DRAFTERS[name].needs, drafts.get(name)
        if need and figures:
            kept = figures.weight_bytes + n_cells * _drafter_cell(figures)
            sizes[need[0]] = kept + n_seqs * getattr(figures, "state_bytes", 0)
    later = {"context checkpoints": _checkpoints(info, n_seqs, cache), "prompt cache": PROMPT_CACHE}
    return MemoryEstimate(n_seqs, n_ctx, n_rs_seq, sizes, later)


def _checkpoints(info: ModelInfo, n_seqs: int, cache: CacheOptions | None) -> int:
    return (cache or CacheOptions()).ctx_checkpoints * n_seqs * info.state_bytes


def _whole(n: int) -> int:
    """The number of cells after llama.cpp's padding."""
    return -(-n // _CELLS) * _CELLS


def _cell_bytes(cell: tuple[int, int], types: tuple[str, str]) -> int:
    """Bytes of one token's keys and values; `cell` has the number of elements of each."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    kinds = [GGMLQuantizationType(CACHE_TYPES[name]) for name in types]
    sizes = ((n, *GGML_QUANT_SIZES[kind]) for n, kind in zip(cell, kinds, strict=True))
    return sum(-(-n // block) * n_bytes for n, block, n_bytes in sizes)


def _drafter_cell(figures: ModelInfo | DrafterInfo) -> int:
    """Bytes of a drafter's cell in f16; in this engine it is float32."""
    whole = getattr(figures, "cell_bytes", 0) or getattr(figures, "kv_bytes_per_token", 0)
    return int(whole) // 2


def _tap_bytes(drafts: Sequence[ModelInfo | DrafterInfo]) -> int:
    """Bytes of one token's target rows that these drafters read, each row once."""
    from engine.model.drafters.config import DrafterInfo  # the window starts without gguf

    rows = {
        (i, draft.n_target)
        for draft in drafts
        if isinstance(draft, DrafterInfo)
        for i in draft.taps
    }
    return sum(4 * width for _, width in rows)


def policy_cost(
    info: ModelInfo, options: RunOptions, n_seqs: int, policy: PolicySpec
) -> PolicyCost:
    """The cost of these options under a policy. Without snapshots, checkpoints are taken."""
    n_snapshots = replace(options, rollback=policy.name).snapshots
    if not n_snapshots:
        return PolicyCost(policy.name, info.state_bytes, 1, n_seqs)
    return PolicyCost(policy.name, *policy.kept(info, n_snapshots), n_seqs)


def fits_text(estimates: Mapping[str, MemoryEstimate], available: int) -> str:
    """Whether each of these estimates, by what it is for, fits into this many bytes."""
    if not available:
        return "the available memory is not known"
    words = []
    for name, one in estimates.items():
        left = available - one.total
        fit = f"fits {name}" if left >= 0 else f"does not fit {name}"
        words.append(f"{fit}, {size_text(abs(left))} {'left' if left >= 0 else 'missing'}")
    return f"of {size_text(available)} available: {'; '.join(words)}"
