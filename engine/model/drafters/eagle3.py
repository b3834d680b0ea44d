"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): one block over a token and a feature row.

Rows of three target layers are fused to a feature row g. At position p of its own memory the block
takes the token at p + 1 and g of p; its output is the next feature row of a chain, and its logits
predict the token at p + 2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from engine.batch import UBatch
from engine.machine.device import inference_mode
from engine.model.drafters.config import Eagle3Config
from engine.model.feed_forward import Swiglu
from engine.model.layers import OutputHead, RopeTables, StepOutput
from engine.model.memory import ModelMemory, RopeAndMemory
from engine.model.mixers.attention import Attention
from engine.model.parts.feed_forward import DensePart
from engine.model.weights import Embedding, Projection, Weights
from kernels.norm import rms_norm
from kernels.pointwise import add
from kernels.rows import join


class Eagle3:
    """The drafter's block between an embedding and a head, either of which may be the target's. For
    the arguments see engine.model.drafters.dflash.DFlash."""

    def __init__(
        self,
        config: Eagle3Config,
        weights_of: Callable[[str], Weights],
        embedding: Embedding,
        head: Projection,
        ids: Tensor | None,
    ) -> None:
        self.config, self.device = config, embedding.device
        weights, block = weights_of(""), weights_of("blk.0.")
        self._embedding = embedding
        self._rope = RopeTables(config.rope, weights.device)
        self._fuse = weights.project("fc.weight")
        self._fuse_norm = weights.keep("enc.output_norm.weight") if config.norm_before_fc else None
        self._token_norm = block.keep("attn_norm.weight")
        self._feature_norm = block.keep("attn_norm_2.weight")
        self._attention = Attention(config.attention, block, config.rope, config.eps, 0)
        self._ffn_norm = block.keep("ffn_norm.weight")
        self._ffn = Swiglu(DensePart(config.n_ff), block)
        norm = weights.keep("output_norm.weight")
        n_drafted = len(embedding if ids is None else ids)
        self._output = OutputHead(norm, head, n_drafted, config.eps)

    @inference_mode
    def fused(self, rows: Tensor, *, invariant: bool = False) -> Tensor:
        """Feature rows f32 [..., n_embd] of the target's rows side by side [..., 3 * n_target]."""
        if self._fuse_norm is not None:
            rows = rms_norm(rows, self._fuse_norm, self.config.eps)
        return self._fuse(rows, invariant=invariant)

    @inference_mode
    def logits(self, hidden: Tensor, *, invariant: bool) -> Tensor:
        """Logits f32 [n, n_drafted] of hidden rows [n, n_embd] that a pass gave."""
        return self._output.logits(self._output.hidden(hidden), invariant=invariant)

    @inference_mode
    def forward(
        self, ubatch: UBatch, features: Tensor, memory: ModelMemory, tokens: Tensor | None = None
    ) -> StepOutput:
        """Run the block over the pairs of `ubatch`, whose positions are those of the features.

        features: f32 [n_seqs, n_seq_tokens, n_embd]. tokens: int64 [n_seqs, n_seq_tokens] on the
        device, replacing those of `ubatch`. In the result, logits [n_outputs, n_drafted] are rows
        of the head, and hidden rows are the block's before the final norm.
        """
        there = memory.begin(ubatch)
        reach = self._rope.reach(ubatch.last_position)
        if tokens is not None:
            there = there._replace(tokens=tokens)
        compute = partial(self._layers, memory)
        logits, rows = memory.run((self, reach), (*there, features), compute)
        memory.commit()
        return StepOutput(logits, rows)

    def _layers(
        self,
        memory: ModelMemory,
        tokens: Tensor,
        positions: Tensor,
        outputs: Tensor,
        features: Tensor,
    ) -> StepOutput:
        eps = self.config.eps
        around = RopeAndMemory(*self._rope.at(positions), memory)
        token = rms_norm(self._embedding(tokens), self._token_norm, eps)
        normed = rms_norm(features, self._feature_norm, eps)
        residual = normed if self.config.norm_before_residual else features
        x = add(residual, self._attention(join((token, normed)), around))
        x = add(x, self._ffn(rms_norm(x, self._ffn_norm, eps), invariant=around.invariant))
        return StepOutput(self._output(x, outputs, invariant=around.invariant).logits, x)
