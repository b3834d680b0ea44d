"""A loaded model: trunk of recurrent and attention blocks, output head, optional MTP head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from engine.batch import GreedyTokens, UBatch
from engine.gguf.part_file import PartFile
from engine.machine.device import inference_mode
from engine.model.config import ModelConfig
from engine.model.layers import OutputHead, RopeTables, TapCollector, TargetRows
from engine.model.memory import ModelMemory, RopeAndMemory
from engine.model.mtp import MtpHead
from engine.model.trunks import Trunk
from engine.model.weights import Embedding, Projection
from kernels.pointwise import multiply
from kernels.rows.record import row_record, tokens_after


class TrunkOutput(NamedTuple):
    """Result of one forward pass over a ubatch. logits: f32 [n_outputs, n_vocab]. rows: of all
    tokens, [n_seqs, n_seq_tokens, n_handed]. record: of the logits rows (kernels.rows.record), with
    the token after each as the one looked up; None if not requested."""

    logits: Tensor
    rows: TargetRows
    record: Tensor | None = None

    @property
    def hidden(self) -> Tensor:
        """f32 [n_seqs, n_seq_tokens, n_handed]: see engine.model.layers.StepOutput."""
        return self.rows.hidden


class HybridModel:
    """The trunk; attention-only models are the case without recurrent layers.

    compute: resolved mode of large matrices. device: of weights and memory. embedding: its table,
    unscaled. head: the MTP head, if the file has one. weight_bytes: memory of the weights in this
    mode. recurrent_layers: indices of trunk layers with states. files: the model's files; mapped
    ones are checked for truncation before every pass.
    """

    def __init__(
        self,
        config: ModelConfig,
        compute: str,
        embedding: Embedding,
        trunk: Trunk,
        output: OutputHead,
        rope: RopeTables,
        head: MtpHead | None,
        weight_bytes: int,
        files: Sequence[PartFile] = (),
    ) -> None:
        self.config = config
        self.compute = compute
        self.device = embedding.device
        self.head = head
        self.weight_bytes = weight_bytes
        kinds = enumerate(config.recurrent_layers)
        self.recurrent_layers = tuple(i for i, recurrent in kinds if recurrent)
        self.embedding = embedding
        self._embedding: Callable[[Tensor], Tensor] = embedding
        self._embedding_factors = None
        if config.embedding_scale != 1.0:
            self._embedding_factors = torch.full(
                (config.n_embd,), config.embedding_scale, device=self.device
            )
        self._trunk = trunk
        self._output = output
        self._rope = rope
        block_rope = config.block_rope
        self._block_rope = RopeTables(block_rope, self.device) if block_rope else None
        self.files = tuple(files)

    @property
    def projection(self) -> Projection:
        """The matrix from hidden rows to logits."""
        return self._output.projection

    @property
    def final_norm(self) -> tuple[Tensor | None, float]:
        """Weight f32 [n_embd] and epsilon of the norm before the output; None without a weight."""
        return self._output.norm, self._output.eps

    @inference_mode
    def logits_of(self, hidden: Tensor) -> Tensor:
        """Logits [n, n_vocab] of hidden rows f32 [n, n_handed], as returned by passes."""
        return self._output.logits(hidden, invariant=False)

    @inference_mode
    def forward(
        self,
        ubatch: UBatch,
        memory: ModelMemory,
        tokens: Tensor | None = None,
        taps: Sequence[int] = (),
        n_top: int = 0,
        ahead: GreedyTokens | None = None,
    ) -> TrunkOutput:
        """Decode the tokens of `ubatch` and store them in `memory`.

        tokens: int64 [n_seqs, n_seq_tokens] on the device, replacing those of `ubatch`. taps:
        layers whose rows are requested (see engine.model.drafters.config.check_taps). n_top: number
        of largest logits in the record, 0: no record. ahead: for a single token with its record:
        passes that may be decoded at once (memory.is_ahead). Raises ModelFileError if a mapped file
        was truncated or could not be read.
        """
        for file in self.files:
            file.check_whole()
        there, last = memory.begin(ubatch), ubatch.last_position
        if ahead is not None:
            last += ahead[0] - 1
        # the head may have made one of them longer
        reach = self._rope.reach(last), self._block_rope and self._block_rope.reach(last)
        if tokens is not None:
            there = there._replace(tokens=tokens)
        n_layer = self.config.n_layer
        streams = self.config.trunk.n_handed > 1
        inside = tuple(i for i in taps if i < n_layer or streams)
        n_top = min(n_top, self.config.n_vocab) if len(ubatch.outputs) else 0
        compute = partial(self._layers, memory, inside, n_top)
        logits, hidden, *rows = memory.run((self, reach, inside, n_top), there, compute, ahead)
        memory.commit()
        record = rows.pop() if n_top else None
        found = dict(zip(inside, rows, strict=True))
        if len(inside) < len(taps):
            found[n_layer] = hidden
        return TrunkOutput(logits, TargetRows(hidden, found), record)

    def jittered(self, amount: float, seed: int = 0) -> HybridModel:
        """The same weights with every embedding value off by up to `amount` (relative),
        reproducibly per seed: a model as inexact as rounding would make it."""
        generator = torch.Generator().manual_seed(seed)
        signs = 2 * torch.rand(self.config.n_embd, generator=generator) - 1
        factors, embed = (1 + amount * signs).to(self.device), self._embedding
        other = copy(self)
        other._embedding = lambda tokens: embed(tokens) * factors
        return other

    def _layers(
        self,
        memory: ModelMemory,
        inside: Sequence[int],
        n_top: int,
        tokens: Tensor,
        positions: Tensor,
        outputs: Tensor,
    ) -> tuple[Tensor, ...]:
        of_blocks, block_rope = None, self._block_rope
        if block_rope is not None:
            of_blocks = RopeAndMemory(*block_rope.at(positions), memory, block_rope.table)
        around = RopeAndMemory(
            *self._rope.at(positions),
            memory,
            self._rope.table,
            tokens=tokens,
            positions=positions,
            of_blocks=of_blocks,
        )
        x = self._embedding(tokens)
        if self._embedding_factors is not None:
            x = multiply(x, self._embedding_factors)
        taps = TapCollector(inside)
        x = self._trunk(x, tokens, around, taps)
        logits, hidden = self._output(x, outputs, invariant=around.invariant)
        if not n_top:
            return logits, hidden, *taps.found()
        record = row_record(logits, n_top, tokens_after(tokens, outputs))
        return logits, hidden, *taps.found(), record
