"""Both parts of a hybrid model's memory, moved together."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.memory.batch import Span, UBatch, make_ubatch, split_equal, split_seq
from engine.memory.kv import AttentionKV
from engine.memory.planes import PlanesMemory
from engine.memory.recurrent import RecurrentCheckpoint, RecurrentMemory, RecurrentShape
from engine.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a restore needs: the recurrent part copied, the attention part by its length."""

    pos_max: int
    recurrent: RecurrentCheckpoint | None

    @property
    def n_bytes(self) -> int:
        return self.recurrent.n_bytes if self.recurrent else 0


class HybridMemory:
    """Attention cells and recurrent states of n_seqs sequences. recurrent is None if dense."""

    def __init__(self, attention: AttentionKV, recurrent: RecurrentMemory | None) -> None:
        self.attention = attention
        self.recurrent = recurrent

    @classmethod
    def for_model(
        cls, config: ModelConfig, n_seqs: int, n_ctx: int, n_rs_seq: int, device: torch.device
    ) -> HybridMemory:
        """Memory for a model's trunk."""
        kinds = config.recurrent_layers
        attention = AttentionKV(
            [i for i, recurrent in enumerate(kinds) if not recurrent],
            n_seqs, config.n_head_kv, config.head_dim, n_ctx, device,
        )  # fmt: skip
        ssm = config.ssm
        if ssm is None or not any(kinds):
            return cls(attention, None)
        shape = RecurrentShape(
            tuple(i for i, recurrent in enumerate(kinds) if recurrent),
            ssm.n_v_heads, ssm.d_state, ssm.d_conv, ssm.conv_dim, ssm.grouped,
        )  # fmt: skip
        return cls(attention, PlanesMemory(shape, n_seqs, n_rs_seq, device))

    @classmethod
    def for_head(
        cls, config: ModelConfig, n_seqs: int, n_ctx: int, device: torch.device
    ) -> HybridMemory:
        """Memory for the MTP block: one attention layer of its own."""
        return cls(AttentionKV([0], n_seqs, config.n_head_kv, config.head_dim, n_ctx, device), None)

    def split(self, spans: list[Span], n_ubatch: int, mode: str) -> list[UBatch]:
        """The ubatches of a batch; the equal split keeps as many tokens together as planes need."""
        if mode == "seq":
            pieces = split_seq(spans, n_ubatch)
        else:
            keep = self.recurrent.n_rs_seq + 1 if self.recurrent else 0
            pieces = split_equal(spans, n_ubatch, keep=keep)
        return [make_ubatch(spans, piece, self.attention.device) for piece in pieces]

    def begin(self, ubatch: UBatch) -> None:
        """Prepare one forward pass. ContextFullError leaves everything as it was."""
        self.attention.begin(ubatch)
        if self.recurrent:
            self.recurrent.begin(ubatch)

    def commit(self) -> None:
        """Finish the forward pass that `begin` prepared."""
        if self.recurrent:
            self.recurrent.commit()

    def seq_rm(self, seq: int, p0: int, p1: int = -1) -> bool:
        """Remove the tail from p0 on; the recurrent part is asked first and may refuse."""
        if self.recurrent and not self.recurrent.seq_rm(seq, p0, p1):
            return False
        return self.attention.seq_rm(seq, p0, p1)

    def clear(self, seq: int) -> None:
        """Forget a sequence."""
        self.seq_rm(seq, 0)

    def seq_pos_max(self, seq: int) -> int:
        """Last position that both parts hold."""
        pos = self.attention.seq_pos_max(seq)
        return min(pos, self.recurrent.seq_pos_max(seq)) if self.recurrent else pos

    def save(self, seq: int) -> Checkpoint:
        """Copy the part that cannot be rewound."""
        recurrent = self.recurrent.save(seq) if self.recurrent else None
        return Checkpoint(self.seq_pos_max(seq), recurrent)

    def restore(self, seq: int, checkpoint: Checkpoint) -> None:
        """Back to a checkpoint, and remove the attention cells above it (llama.cpp #19493)."""
        if self.recurrent and checkpoint.recurrent:
            self.recurrent.restore(seq, checkpoint.recurrent)
        self.attention.seq_rm(seq, checkpoint.pos_max + 1)

    def n_bytes(self) -> int:
        """Bytes of storage held."""
        return self.attention.n_bytes() + (self.recurrent.n_bytes() if self.recurrent else 0)
