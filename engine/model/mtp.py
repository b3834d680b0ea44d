"""The MTP (nextn) head: one block that predicts the token after next from the trunk's hidden."""

from __future__ import annotations

from functools import partial

import torch

from engine.batch import UBatch
from engine.model.layers import OutputHead, ResidualBlock, StepOutput
from engine.model.memory import ModelMemory
from engine.model.mixers.mixer import RopeAndMemory
from engine.model.rope_tables import RopeTables
from engine.model.weights import Embedding, Weights
from kernels.norm import rms_norm
from kernels.rows import join


class MtpHead:
    """Embedding of x_p beside the hidden state of p-1, through one block, to logits of x_{p+1}."""

    def __init__(
        self,
        weights: Weights,
        embedding: Embedding,
        block: ResidualBlock,
        output: OutputHead,
        rope: RopeTables,
        eps: float,
    ) -> None:
        self._embedding = embedding
        self._block = block
        self._output = output
        self._rope = rope
        self._eps = eps
        self._enorm = weights.keep("nextn.enorm.weight")
        self._hnorm = weights.keep("nextn.hnorm.weight")
        self._join = weights.project("nextn.eh_proj.weight")

    @torch.inference_mode()
    def forward(
        self,
        ubatch: UBatch,
        hidden: torch.Tensor,
        memory: ModelMemory,
        tokens: torch.Tensor | None = None,
    ) -> StepOutput:
        """Run the head over `ubatch`; its attention is layer 0 of `memory`.

        hidden: f32 [n_seqs, n_seq_tokens, n_embd], at each position p the hidden state of p - 1
        (zeros for p = 0): the trunk's after its final norm, or this head's own while drafting.
        tokens: int64 [n_seqs, n_seq_tokens] on the device, in place of those of `ubatch`.
        """
        memory.begin(ubatch)
        reach = self._rope.reach(int(ubatch.positions.max()))
        there = ubatch.on(self._embedding.device)
        if tokens is not None:
            there = there._replace(tokens=tokens)
        logits, own = memory.run((self, reach), (*there, hidden), partial(self._layers, memory))
        memory.commit()
        return StepOutput(logits, own)

    def _layers(
        self,
        memory: ModelMemory,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        outputs: torch.Tensor,
        hidden: torch.Tensor,
    ) -> StepOutput:
        embedded = rms_norm(self._embedding(tokens), self._enorm, self._eps)
        carried = rms_norm(hidden, self._hnorm, self._eps)
        around = RopeAndMemory(*self._rope.at(positions), memory)
        x = self._join(join((embedded, carried)), invariant=around.invariant)
        return self._output(self._block(x, around), outputs, invariant=around.invariant)
