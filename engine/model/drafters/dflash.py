"""The DFlash family: its trunk, DFlash2's selector and DSpark's Markov head. Context rows are
stored in memory, and a block is drafted in one pass.

A block is the last chosen token followed by mask tokens. Its rows attend to the whole context and
to each other; each gives logits of the token at its place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from engine.batch import UBatch
from engine.errors import UnsupportedModelError
from engine.machine.device import inference_mode
from engine.model.config import ModelConfig
from engine.model.drafters.dflash_config import OUT_SCALE, POST_NORMS, DFlashConfig
from engine.model.feed_forward import Swiglu
from engine.model.layers import RopeTables
from engine.model.memory import ModelMemory, RopeAndMemory
from engine.model.mixers.compressed import CompressedAttention
from engine.model.parts.feed_forward import DensePart
from engine.model.parts.trunks import SinkhornConnections
from engine.model.trunks.hyper_connections import StreamBlock, copied, make_reader
from engine.model.weights import Embedding, Projection, Weights
from kernels.attention import attend
from kernels.norm import head_norm, rms_norm
from kernels.pointwise import add, multiply
from kernels.recurrence.conv import block_conv
from kernels.rope import apply_rope
from kernels.rows import copy_rows, join, take_rows
from kernels.rows.reductions import argmax, top_k

Lattice = tuple[Tensor, Tensor]
"""Candidates of the rows 1 .. m - 1 of blocks, best first by their logits: ids, int64
[B, m - 1, T], and scores, f32 [B, m - 1, T, T], by the predecessor and the candidate; in the first
row all predecessors are the last chosen token."""


class Selector:
    """Scores of neighbouring tokens. ids: as in MarkovHead."""

    def __init__(self, weights: Weights, config: DFlashConfig, ids: Tensor | None) -> None:
        assert config.selector is not None
        _, self._top_k, self._scale, self._cap = config.selector
        self._ids = ids
        self._predecessor = weights.table("selector_predecessor.weight")
        self._successor = weights.table("selector_successor.weight")
        self._gate = weights.project("selector_hidden.weight")

    @inference_mode
    def base(self, logits: Tensor) -> Tensor:
        """The head's logits, scaled and optionally capped, in unchanged order."""
        base = logits * self._scale
        return self._cap * torch.tanh(base / self._cap) if self._cap else base

    @inference_mode
    def lattice(self, logits: Tensor, hidden: Tensor, last: Tensor, *, invariant: bool) -> Lattice:
        """logits: f32 [B, m, n_drafted], the head's; hidden: f32 [B, m, n_embd]; last: int64 [B],
        the chosen tokens that the blocks start with."""
        n_best = min(self._top_k, logits.shape[-1])
        values, ids = top_k(logits[:, 1:], n_best)
        if self._ids is not None:
            ids = self._ids[ids]
        gate = self._gate(hidden[:, 1:], invariant=invariant)
        first = last[:, None, None].expand(-1, 1, n_best)
        before = torch.cat((first, ids[:, :-1]), 1)
        known = self._rows(self._predecessor, before) * gate.unsqueeze(2)
        # not a matrix product, whose bits would depend on the number of blocks
        pairs = known.unsqueeze(3) * self._rows(self._successor, ids).unsqueeze(2)
        return ids, self.base(values).unsqueeze(2) + pairs.sum(-1)

    @staticmethod
    def _rows(table: Embedding, ids: Tensor) -> Tensor:
        rows = table(ids.flatten(1))
        return rows.view(*ids.shape, -1)


class MarkovHead:
    """The chain over a block, from row `first` on. ids: int64 [n_drafted], the target id of every
    row of the head; None if they are equal."""

    def __init__(self, weights: Weights, config: DFlashConfig, ids: Tensor | None) -> None:
        self.first = 0 if config.anchor else 1
        self._before = weights.table("markov_w1.weight")
        self._bias = weights.project("markov_w2.weight")
        self._confidence = weights.biased("conf_proj") if config.confident else None
        self._ids, self._rank = ids, config.markov

    def __call__(
        self, logits: Tensor, hidden: Tensor, last: Tensor, *, invariant: bool
    ) -> tuple[Tensor, Tensor]:
        """logits f32 [B, m, n_drafted], hidden f32 [B, m, n_embd] and the last chosen tokens int64
        [B] -> logits with the bias, and confidences before the sigmoid [B, m], or [B, 0] without a
        head for them. Row 0 of a block that does not draft from its anchor has neither."""
        n_seqs, m, n_drafted = logits.shape
        columns = logits.new_empty(n_seqs, m, n_drafted)
        before = logits.new_empty(n_seqs, m, self._rank)
        previous = last.unsqueeze(1)
        if self.first:
            copy_rows(columns[:, :1], logits[:, :1])
            copy_rows(before[:, :1], self._before(previous))
        for row in range(self.first, m):
            here = slice(row, row + 1)
            known = self._before(previous)
            copy_rows(before[:, here], known)
            column = add(logits[:, here], self._bias(known, invariant=invariant))
            copy_rows(columns[:, here], column)
            previous = argmax(column)
            if self._ids is not None:
                previous = take_rows(self._ids, previous)
        if self._confidence is None:
            return columns, logits.new_empty(n_seqs, 0)
        sure = self._confidence(join((hidden, before)), invariant=invariant)
        return columns, sure.view(n_seqs, m)


Sublayer = Callable[[Tensor], Tensor]


class BlockOutput(NamedTuple):
    """Result of one pass for blocks of m rows.

    hidden: f32 [B, m, n_embd], after the final norm. logits: f32 [B, m, n_drafted], of the ids that
    can be drafted, including a Markov head's bias. confidence: f32 [B, m], before the sigmoid; [B,
    0] without a head for it.
    """

    hidden: Tensor
    logits: Tensor
    confidence: Tensor


class DynamicConv:
    """The two convolutions around a sublayer (DFlash2); both derive their weights from its
    input."""

    def __init__(self, weights: Weights, config: DFlashConfig, name: str) -> None:
        assert config.conv is not None
        self._base = weights.keep(f"{name}_conv_base")
        self._own = weights.project(f"{name}_conv_proj.weight")
        self._shape = (2, *config.conv)

    def __call__(self, y: Tensor, sublayer: Sublayer, *, invariant: bool) -> Tensor:
        """y [B, T, n_embd], normed -> sublayer(y), convolved before and after."""
        own = self._own(y, invariant=invariant).view(*y.shape[:2], *self._shape)
        inside = sublayer(block_conv(y, self._base[0], own[:, :, 0]))
        return block_conv(inside, self._base[1], own[:, :, 1])


class DFlashBlock:
    """One layer: a Qwen3 block, with DFlash2's convolutions and Gemma's output norms and scale if
    the file has them."""

    def __init__(self, weights: Weights, config: DFlashConfig, layer: int) -> None:
        self.attention = BlockAttention(weights, config, layer)
        self._norms = [weights.keep(f"{name}_norm.weight") for name in ("attn", "ffn")]
        self._ffn = Swiglu(DensePart(config.n_ff, ("geglu", ()) if config.gelu else None), weights)
        self._convs = [
            DynamicConv(weights, config, name) if config.conv else None for name in ("attn", "ffn")
        ]
        self._post_norms = [weights.keep(name) if name in weights else None for name in POST_NORMS]
        self._out_scale = None
        if OUT_SCALE in weights:
            self._out_scale = weights.keep(OUT_SCALE).expand(config.n_embd).contiguous()
        self._eps = config.eps

    def __call__(self, x: Tensor, around: RopeAndMemory) -> Tensor:
        """x [B, T, n_embd] -> the same shape."""
        sublayers = (
            partial(self.attention, around=around),
            partial(self._ffn, invariant=around.invariant),
        )
        parts = zip(self._norms, self._convs, sublayers, self._post_norms, strict=True)
        for norm, conv, sublayer, post_norm in parts:
            y = rms_norm(x, norm, self._eps)
            y = conv(y, sublayer, invariant=around.invariant) if conv else sublayer(y)
            x = add(x, y if post_norm is None else rms_norm(y, post_norm, self._eps))
        return x if self._out_scale is None else multiply(x, self._out_scale)


class DrafterLayers:
    """The layers of a drafter, in sequence."""

    def __init__(self, blocks: list[DFlashBlock]) -> None:
        self._blocks = blocks

    def inject(self, context: Tensor, around: RopeAndMemory) -> None:
        """Store context rows [B, T, n_embd] in the memory of every layer."""
        for block in self._blocks:
            block.attention.inject(context, around)

    def __call__(self, x: Tensor, around: RopeAndMemory) -> Tensor:
        """x [B, T, n_embd], embedded tokens of a block -> the same shape, not normed."""
        for block in self._blocks:
            x = block(x, around)
        return x


class Streams:
    """The layers of DeepSeek-V4, whose streams are combined by gates at the end."""

    def __init__(
        self, config: ModelConfig, weights: Weights, of_block: Callable[[int], Weights]
    ) -> None:
        self._blocks, self._attentions = [], []
        for layer, parts in enumerate(config.blocks):
            block = StreamBlock(parts, of_block(layer), config, layer)
            assert isinstance(block.mixer, CompressedAttention)
            self._blocks.append(block)
            self._attentions.append(block.mixer)
        reader = make_reader(config, weights)
        assert reader is not None
        self._reader = reader

    def inject(self, context: Tensor, around: RopeAndMemory) -> None:
        for attention in self._attentions:
            attention.inject(context, around)

    def __call__(self, x: Tensor, around: RopeAndMemory) -> Tensor:
        streams = copied(x, SinkhornConnections.n_streams)
        for block in self._blocks:
            streams = block(streams, around)
        return self._reader(streams, invariant=around.invariant)


class DFlash:
    """The trunk, and optionally `selector` (DFlash2) or `markov` (DSpark).

    weights_of: weights under a name prefix. embedding: the drafter's own or the target's, like the
    head, whose logits are of the ids that can be drafted. ids: int64 [n_drafted], their ids in the
    target's vocabulary; None for all. Raises UnsupportedModelError for a mask token outside the
    vocabulary.
    """

    def __init__(
        self,
        config: DFlashConfig,
        weights_of: Callable[[str], Weights],
        embedding: Embedding,
        head: Projection,
        ids: Tensor | None,
    ) -> None:
        n_vocab = len(embedding)
        if config.mask_token >= n_vocab:
            raise UnsupportedModelError(
                f"{config.name}: the mask token {config.mask_token} is outside the {n_vocab} "
                "tokens of its target.",
                "Choose a drafter that was made for this target.",
            )
        self.config, self.ids, self.device = config, ids, embedding.device
        self._embedding, self._head, weights = embedding, head, weights_of("")
        of_block = [weights_of(f"blk.{layer}.") for layer in range(config.n_layer)]
        self._layers: DrafterLayers | Streams
        if config.streams:
            self._layers = Streams(config.streams, weights, of_block.__getitem__)
        else:
            blocks = [DFlashBlock(w, config, i) for i, w in enumerate(of_block)]
            self._layers = DrafterLayers(blocks)
        self._rope = RopeTables(config.rope, weights.device)
        self.selector = Selector(weights, config, ids) if config.selector else None
        self.markov = MarkovHead(weights, config, ids) if config.markov else None
        self._fuse = weights.project("fc.weight")
        self._context_norm = weights.keep("enc.output_norm.weight")
        self._norm = weights.keep("output_norm.weight")
        self._factors = None
        if config.embedding_scale != 1.0:
            factors = torch.full((config.n_embd,), config.embedding_scale)
            self._factors = factors.to(self.device)

    def fused(self, rows: Tensor, *, invariant: bool = False) -> Tensor:
        """Fuse the target's rows, concatenated f32 [..., n_taps * n_embd], to context [...,
        n_embd]."""
        return rms_norm(self._fuse(rows, invariant=invariant), self._context_norm, self.config.eps)

    def logits(self, hidden: Tensor, *, invariant: bool = False) -> Tensor:
        """The head's logits of hidden rows f32 [..., n_embd]: [..., n_drafted], before a Markov
        head or a selector."""
        return self._head(hidden, invariant=invariant)

    @inference_mode
    def inject(self, ubatch: UBatch, rows: Tensor, memory: ModelMemory) -> None:
        """Store the tokens of `ubatch` in memory. rows: [n_seqs, n_seq_tokens, …] for `fused`."""
        there = memory.begin(ubatch)
        reach = self._rope.reach(ubatch.last_position)
        compute = partial(self._inject, memory)
        memory.run((self, reach, "inject"), (there.positions, rows), compute)
        memory.commit()

    @inference_mode
    def block(self, ubatch: UBatch, memory: ModelMemory) -> BlockOutput:
        """Run the blocks of `ubatch`, one per row; they stay in memory until removed."""
        there = memory.begin(ubatch)
        reach = self._rope.reach(ubatch.last_position)
        compute = partial(self._block, memory)
        out = memory.run((self, reach, "block"), (there.tokens, there.positions), compute)
        memory.commit()
        return BlockOutput(*out)

    def _inject(self, memory: ModelMemory, positions: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        around = RopeAndMemory(*self._rope.at(positions), memory)
        context = self.fused(rows, invariant=around.invariant)
        self._layers.inject(context, around)
        return ()

    def _block(self, memory: ModelMemory, tokens: Tensor, positions: Tensor) -> BlockOutput:
        around = RopeAndMemory(*self._rope.at(positions), memory)
        x = self._embedding(tokens)
        if self._factors is not None:
            x = multiply(x, self._factors)
        x = self._layers(x, around)
        hidden = rms_norm(x, self._norm, self.config.eps)
        logits = self.logits(hidden, invariant=around.invariant)
        if self.markov is None:
            return BlockOutput(hidden, logits, hidden.new_empty(len(hidden), 0))
        # with several streams, confidence reads their row before the norm
        scored = x if self.config.streams else hidden
        found = self.markov(logits, scored, tokens[:, 0], invariant=around.invariant)
        return BlockOutput(hidden, *found)


class BlockAttention:
    """The attention of one layer. A file without `attn_v` uses the key projection as values, normed
    without a weight and not rotated."""

    def __init__(self, weights: Weights, config: DFlashConfig, layer: int) -> None:
        d = config.head_dim
        self._layer, self._head_dim, self._scale = layer, d, config.scale
        self._q = weights.project("attn_q.weight")
        self._own_values = "attn_v.weight" in weights
        names = ("attn_k.weight", "attn_v.weight") if self._own_values else ("attn_k.weight",)
        self._kv = weights.project(*names)
        self._output = weights.project("attn_output.weight")
        # x / rms(x) is sqrt(d) x / |x|
        self._eps = config.eps * d
        self._q_norm, self._k_norm = (
            (d**0.5 * weights.keep(f"attn_{name}_norm.weight")).expand(n, -1).contiguous()
            for name, n in (("q", config.n_heads), ("k", config.n_heads_kv))
        )
        self._v_norm = torch.full_like(self._k_norm, d**0.5)
        self._sinks = weights.keep("attn_sinks.weight") if "attn_sinks.weight" in weights else None
        self._value_factors = None
        if config.value_scale != 1.0:
            device = weights.device
            self._value_factors = torch.full((config.n_embd,), config.value_scale, device=device)

    def inject(self, context: Tensor, around: RopeAndMemory) -> None:
        """Store keys and values of context rows [B, T, n_embd] in memory."""
        around.memory.attention.update(self._layer, *self._keys_and_values(context, around))

    def __call__(self, x: Tensor, around: RopeAndMemory) -> Tensor:
        """x [B, T, n_embd], normed rows of the block -> the same shape."""
        n_seqs, n_tokens, _ = x.shape
        q = self._heads(self._q(x, invariant=around.invariant))
        q = apply_rope(head_norm(q, self._q_norm, self._eps), around.cos, around.sin)
        k, v = self._keys_and_values(x, around)
        cells = around.memory.attention.update(self._layer, k, v)
        out = attend(
            q,
            cells.k,
            cells.v,
            cells.mask,
            scale=self._scale,
            sinks=self._sinks,
            invariant=around.invariant,
        )
        y = self._output(out.reshape(n_seqs, n_tokens, -1), invariant=around.invariant)
        return y if self._value_factors is None else multiply(y, self._value_factors)

    def _keys_and_values(self, x: Tensor, around: RopeAndMemory) -> tuple[Tensor, Tensor]:
        kv = self._kv(x, invariant=around.invariant)
        if self._own_values:
            half = kv.shape[-1] // 2
            k, v = (self._heads(part) for part in kv.split_with_sizes([half, half], -1))
        else:
            k = self._heads(kv)
            v = head_norm(k, self._v_norm, self._eps)
        k = apply_rope(head_norm(k, self._k_norm, self._eps), around.cos, around.sin)
        return k, v

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self._head_dim)
