"""What running a model would cost in memory, from its files and the options alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.draft.registry import DRAFTERS
from engine.memory.policies import POLICIES, PolicySpec, memory_sizes
from engine.options import RunOptions

if TYPE_CHECKING:
    from engine.model.drafters.config import DrafterInfo
    from engine.model.info import ModelInfo

LONGEST_CONTEXT = 4096
"""Cells that RunOptions.n_ctx = 0 gives at most."""


@dataclass(frozen=True, slots=True)
class PolicyCost:
    """What a policy keeps to undo tokens: n_units of unit_bytes for each of n_seqs sequences."""

    policy: str
    unit_bytes: int
    n_units: int
    n_seqs: int

    @property
    def total(self) -> int:
        return self.unit_bytes * self.n_units * self.n_seqs


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes by purpose for the policy in use, and the cost of every policy.

    policies: empty where nothing is drafted, as nothing is undone then. n_rs_seq: snapshots
    of the policy in use.
    """

    n_seqs: int
    n_ctx: int
    n_rs_seq: int
    sizes: dict[str, int]
    policies: tuple[PolicyCost, ...]


def estimate(
    info: ModelInfo,
    drafts: Mapping[str, ModelInfo | DrafterInfo],
    options: RunOptions,
    n_seqs: int,
    compute: str = "",
) -> MemoryEstimate:
    """Estimate for n_seqs sequences side by side. drafts: figures of the files that draft, by the
    drafter that uses each (they count where it is in use). compute: the mode in which the weights
    are loaded, empty for their size in the file."""
    n_ctx = options.n_ctx or min(info.n_ctx_train, LONGEST_CONTEXT)
    types, n_rs_seq = options.spec.types, options.snapshots
    parts = memory_sizes(info, n_seqs, n_rs_seq, n_ctx, options.rollback, compute)
    sizes = {"weights": parts["weights"], "KV": parts["kv"], "state": parts["state"]}
    policies: tuple[PolicyCost, ...] = ()
    if types:
        policies = tuple(policy_cost(info, options, n_seqs, policy) for policy in POLICIES.values())
        mine = next(cost for cost in policies if cost.policy == options.rollback)
        sizes[options.rollback if n_rs_seq else "checkpoint"] = mine.total
    for drafter in (DRAFTERS[name] for name in types):
        if drafter.needs and drafter.n_bytes and drafter.name in drafts:
            own, figures = drafter.options_of(options.spec), drafts[drafter.name]
            sizes[drafter.needs.name] = drafter.n_bytes(own, figures, n_seqs, n_ctx, compute)
    if tapped := _tap_bytes([drafts[name] for name in types if name in drafts]):
        sizes["layer rows"] = tapped * min(options.n_batch, n_seqs * n_ctx)
    return MemoryEstimate(n_seqs, n_ctx, n_rs_seq, sizes, policies)


def _tap_bytes(drafts: Sequence[ModelInfo | DrafterInfo]) -> int:
    """Bytes of a token's rows that the target hands to these, each row once."""
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
    """What these options would cost under a policy. Without snapshots, checkpoints are taken."""
    n_snapshots = replace(options, rollback=policy.name).snapshots
    if not n_snapshots:
        return PolicyCost(policy.name, info.state_bytes, 1, n_seqs)
    return PolicyCost(policy.name, *policy.kept(info, n_snapshots), n_seqs)
