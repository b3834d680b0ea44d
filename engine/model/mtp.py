"""The MTP (nextn) head: one block that predicts the token after next from the trunk's hidden."""

from __future__ import annotations

import torch

from engine.memory.batch import UBatch
from engine.model.embedding import Embedding
from engine.model.layers import Block, OutputHead, RopeTables, StepOutput, Surroundings
from engine.model.memory import Memory
from engine.model.weights import Weights
from kernels.norm import rms_norm


class MtpHead:
    """Embedding of x_p beside the hidden state of p-1, through one block, to logits of x_{p+1}."""

    def __init__(
        self,
        weights: Weights,
        embedding: Embedding,
        block: Block,
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
    def forward(self, ubatch: UBatch, hidden: torch.Tensor, memory: Memory) -> StepOutput:
        """Run the head over `ubatch`; its attention is layer 0 of `memory`.

        hidden: f32 [n_seqs, n_seq_tokens, n_embd], at each position p the hidden state of p - 1
        (zeros for p = 0): the trunk's after its final norm, or this head's own while drafting.
        """
        memory.begin(ubatch)
        there = ubatch.on(self._embedding.device)
        cos, sin = self._rope.at(there.positions, int(ubatch.positions.max()))
        embedded = rms_norm(self._embedding(there.tokens), self._enorm, self._eps)
        carried = rms_norm(hidden, self._hnorm, self._eps)
        around = Surroundings(cos, sin, memory)
        x = self._join(torch.cat((embedded, carried), -1), invariant=around.invariant)
        result = self._output(self._block(x, around), there.outputs, invariant=around.invariant)
        memory.commit()
        return result
