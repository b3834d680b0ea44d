"""Snapshot policies by their `--rollback` name. A new one is a module plus an entry here; torch is
imported when a memory is made."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from engine.memory.recurrent import SnapshotPolicy
    from engine.model.info import ModelInfo
    from engine.model.recurrence import RecurrentLayout


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """One way of undoing tokens in recurrent memory.

    keeps: what is in memory. limits: what it cannot do, or what it costs. where: its class, by
    module of this package. keeps_snapshots: whether n_rs_seq has an effect; a policy without
    snapshots always takes checkpoints. is_log: it keeps log entries instead of states, one more
    than the tokens that can be undone.
    """

    name: str
    keeps: str
    limits: str
    where: str
    keeps_snapshots: bool = True
    is_log: bool = False

    @property
    def about(self) -> str:
        """`keeps` and `limits` as one line of text."""
        return f"{self.keeps}; {self.limits}"

    def __call__(
        self,
        layout: RecurrentLayout,
        n_seqs: int,
        n_rs_seq: int,
        device: torch.device,
        faults: Collection[str] = (),
    ) -> SnapshotPolicy:
        """A memory of this kind."""
        n_kept = n_rs_seq if self.keeps_snapshots else 0
        module, _, name = self.where.partition(":")
        policy: type[SnapshotPolicy] = getattr(import_module(f"engine.memory.{module}"), name)
        return policy(layout, n_seqs, n_kept, device, faults)

    def kept(self, info: ModelInfo, n_rs_seq: int) -> tuple[int, int]:
        """Bytes of a snapshot or log entry, and how many are kept per sequence beyond its live
        state to undo n_rs_seq tokens."""
        if self.is_log:
            return info.log_bytes_per_token, n_rs_seq + 1
        return info.state_bytes, n_rs_seq if self.keeps_snapshots else 0


_POLICIES = (
    PolicySpec(
        "planes",
        "the last n_rs_seq + 1 states of the last batch",
        "only states of the last batch are valid; one rollback per batch",
        "planes:PlanesMemory",
    ),
    PolicySpec(
        "carry", "the same, older planes carried along", "rollbacks add up", "planes:CarryMemory"
    ),
    PolicySpec(
        "ring",
        "one state per token in a cyclic buffer",
        "no state is ever copied",
        "ring:RingMemory",
    ),
    PolicySpec(
        "replay",
        "one state and a log of inputs and window columns per token",
        "memory per token without d_k x d_v",
        "replay:ReplayMemory",
        is_log=True,
    ),
    PolicySpec(
        "checkpoint",
        "a copy taken before each draft",
        "costs a forward pass",
        "planes:PlanesMemory",  # the live one alone
        keeps_snapshots=False,
    ),
)
POLICIES: dict[str, PolicySpec] = {policy.name: policy for policy in _POLICIES}


def memory_sizes(
    info: ModelInfo, n_seqs: int, n_rs_seq: int, n_ctx: int, policy: str, compute: str = ""
) -> dict[str, int]:
    """Bytes needed for `n_seqs` sequences of `n_ctx` cells under a policy.

    weights: as loaded in the mode `compute`, or without one as stored in the file. kv: attention
    cells, trunk and MTP block. state: live recurrent states. snapshots: what the policy keeps
    beyond them to undo `n_rs_seq` tokens. checkpoint: one saved recurrent state per sequence,
    which only a policy without snapshots always takes. total: the sum.
    """
    cell = info.kv_bytes_per_token + info.mtp_kv_bytes_per_token
    n_bytes, n_kept = POLICIES[policy].kept(info, n_rs_seq)
    state = n_seqs * info.state_bytes
    parts = {
        "weights": info.loaded_bytes[compute] if compute else info.weight_bytes,
        "kv": n_seqs * n_ctx * cell,
        "state": state,
        "snapshots": n_seqs * n_bytes * n_kept,
        "checkpoint": 0 if POLICIES[policy].keeps_snapshots else state,
    }
    return {**parts, "total": sum(parts.values())}
