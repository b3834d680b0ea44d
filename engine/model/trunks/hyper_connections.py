"""Hyper-connections: several residual streams, which every half of a block reads and writes, with
embeddings of the n-grams that end at a token added (per-layer embedding)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from engine.gguf.reader import StoredRows
from engine.model.config import ModelConfig
from engine.model.feed_forward import FeedForward, make_feed_forward
from engine.model.layers import StreamReader, TapCollector
from engine.model.memory import Mixer, RopeAndMemory
from engine.model.mixers import make_mixer
from engine.model.parts import BlockParts
from engine.model.parts.recurrent import TABLE, NgramEmbeddingPart
from engine.model.parts.trunks import HyperConnections, SinkhornConnections
from engine.model.recurrence import ConvInputs, StateKey, TokenInputs
from engine.model.weights import Weights
from kernels.norm import head_norm, rms_norm
from kernels.pointwise import add, open_low
from kernels.rows import join
from kernels.rows.ngrams import NgramHash, agreeing, hash_rows
from kernels.rows.streams import (
    add_to_streams,
    advance_streams,
    mix_streams,
    stream_gates,
    weigh_streams,
)

Compute = Callable[[Tensor], Tensor]
"""The computation of a half of a block on the row [B, T, n_embd] read from the streams."""


class StreamMixer:
    """Mixes the normed streams into one, with a gate for each element. With an injection matrix it
    also gives how much of the half's result each stream gains."""

    def __init__(self, part: HyperConnections, weights: Weights, name: str, eps: float) -> None:
        norm = weights.keep(f"{name}_norm.weight")
        self._n_streams, n_embd = norm.shape
        # x / rms(x) is sqrt(d) x / |x|
        self._eps, self._norm = eps * n_embd, n_embd**0.5 * norm
        self._sizes = [part.rank]
        down = [f"{name}_down.weight"]
        if f"{name}_inject.weight" in weights:
            down.append(f"{name}_inject.weight")
            self._sizes.append(self._n_streams)
        self._down = weights.project(*down)
        self._up = weights.project(f"{name}_up.weight")

    def __call__(self, streams: Tensor, *, invariant: bool) -> Tensor:
        return self._mix(streams, invariant)[0]

    def _mix(self, streams: Tensor, invariant: bool) -> tuple[Tensor, Tensor | None]:
        """The mixture, and gains [B, T, n_streams] for kernels.rows.streams."""
        normed = head_norm(streams, self._norm, self._eps)
        down = self._down(normed.flatten(2), invariant=invariant)
        low, *gains = down.split_with_sizes(self._sizes, -1)
        low = open_low(low, self._n_streams, invariant=invariant)
        gate = self._up(low, invariant=invariant).view(streams.shape)
        mixture = mix_streams(normed, gate, invariant=invariant)
        return mixture, gains[0] if gains else None

    def advance(self, streams: Tensor, compute: Compute, *, invariant: bool) -> Tensor:
        """streams [B, T, n_streams, n_embd] -> the same shape: the result added to each stream."""
        mixture, gains = self._mix(streams, invariant)
        assert gains is not None  # both halves of a block have an injection
        return add_to_streams(streams, compute(mixture), gains, invariant=invariant)


class SinkhornGates:
    """Gates of four streams from all their elements, normed together (kernels.rows.streams).

    The product stays f32 in every compute mode, because it affects every later number.
    """

    def __init__(
        self, part: SinkhornConnections, weights: Weights, name: str, config: ModelConfig
    ) -> None:
        self._sinkhorn, self._eps = (part.n_rounds, part.eps), config.eps
        self._product = weights.stack([weights.numbers(f"{name}_fn.weight")], compute="f32")
        self._base, self._scale = (
            weights.keep(f"{name}_{one}.weight") for one in ("base", "scale")
        )
        width = part.n_streams * config.n_embd
        self._ones = torch.ones(width, device=weights.device)

    def __call__(self, streams: Tensor, *, invariant: bool) -> Tensor:
        """streams [B, T, 4, n_embd] -> [B, T, 24], or [B, T, 4] of the last gates."""
        normed = rms_norm(streams.flatten(2), self._ones, self._eps)
        product = self._product(normed, invariant=invariant)
        return stream_gates(product, self._scale, self._base, *self._sinkhorn, invariant=invariant)


class SinkhornHalf:
    """Reads a row through gates and a norm; then the streams are mixed, and the result is added to
    each."""

    def __init__(self, gates: SinkhornGates, norm: Tensor, eps: float) -> None:
        self._gates, self._norm, self._eps = gates, norm, eps

    def advance(self, streams: Tensor, compute: Compute, *, invariant: bool) -> Tensor:
        gates = self._gates(streams, invariant=invariant)
        read = rms_norm(weigh_streams(streams, gates), self._norm, self._eps)
        return advance_streams(streams, compute(read), gates)


class SinkhornReader:
    """Reads the final row: through gates, or as the mean of the streams."""

    def __init__(self, gates: SinkhornGates | None, device: torch.device) -> None:
        n = SinkhornConnections.n_streams
        self._gates, self._mean = gates, torch.full((n,), 1 / n, device=device)

    def __call__(self, streams: Tensor, *, invariant: bool) -> Tensor:
        if self._gates is None:
            return weigh_streams(streams, self._mean.expand(*streams.shape[:2], -1))
        return weigh_streams(streams, self._gates(streams, invariant=invariant))


class StreamBlock:
    """Adds the results of mixer and feed-forward part to the streams."""

    def __init__(
        self, parts: BlockParts, weights: Weights, config: ModelConfig, layer: int
    ) -> None:
        mixer = make_mixer(parts.mixers, weights, config, layer)
        assert mixer is not None  # such blocks have both halves
        assert parts.ffn is not None
        self.mixer: Mixer = mixer
        self._ffn: FeedForward = make_feed_forward(parts.ffn, weights, config.eps)
        self._halves = _halves(parts, weights, config)

    def __call__(self, streams: Tensor, around: RopeAndMemory) -> Tensor:
        """streams [B, T, n_streams, n_embd] -> the same shape."""
        invariant = around.invariant
        mix, feed = self._halves
        streams = mix.advance(streams, lambda x: self.mixer(x, around), invariant=invariant)
        return feed.advance(
            streams,
            lambda x: self._ffn(x, invariant=invariant, tokens=around.tokens),
            invariant=invariant,
        )


def _halves(
    parts: BlockParts, weights: Weights, config: ModelConfig
) -> tuple[StreamMixer | SinkhornHalf, StreamMixer | SinkhornHalf]:
    trunk = config.trunk
    if isinstance(trunk, HyperConnections):
        first, second = (
            StreamMixer(trunk, weights, name, config.eps) for name in ("hc_attn", "hc_ffn")
        )
        return first, second
    assert isinstance(trunk, SinkhornConnections)
    assert parts.mixer_norm is not None  # the norms are those that BlockParts names
    assert parts.ffn_norm is not None
    of_mixer, of_ffn = (
        SinkhornHalf(SinkhornGates(trunk, weights, name, config), weights.keep(norm), config.eps)
        for name, norm in (("hc_attn", parts.mixer_norm), ("hc_ffn", parts.ffn_norm))
    )
    return of_mixer, of_ffn


def make_reader(
    config: ModelConfig, weights: Weights, name: str = "output_hc"
) -> StreamReader | None:
    """The reader of the row before the head from the streams that a trunk passes on; None if it
    passes on a row. name: of its tensors."""
    trunk = config.trunk
    if isinstance(trunk, HyperConnections):
        return StreamMixer(trunk, weights, name, config.eps)
    if isinstance(trunk, SinkhornConnections) and trunk.has_head:
        return SinkhornReader(SinkhornGates(trunk, weights, name, config), weights.device)
    return None


class NgramEmbedding:
    """Rows of a mapped table, gated per stream by their agreement with it, and their
    convolution."""

    def __init__(
        self,
        part: NgramEmbeddingPart,
        weights: Weights,
        config: ModelConfig,
        layer: int,
        table: StoredRows,
    ) -> None:
        self._part, self._table = part, table
        self._tokens, self._window = StateKey(layer, "tokens"), StateKey(layer, "ngrams")
        self._key_value = weights.project("ple_key.weight", "ple_value.weight")
        # x / rms(x) is sqrt(d) x / |x|
        self._eps = config.eps * part.n_embd
        self._norms = [
            part.n_embd**0.5 * weights.keep(f"ple_norm_{name}.weight")
            for name in ("key", "query", "conv")
        ]
        self._taps = _spread(weights.keep("ple_conv1d.weight"), part)
        self._hashing = NgramHash(part.multipliers, part.sizes, part.offsets, part.end_id)

    def __call__(self, streams: Tensor, tokens: Tensor, around: RopeAndMemory) -> Tensor:
        """streams [B, T, n_streams, n_embd], tokens int64 [B, T] -> what is added to the
        streams."""
        memory, invariant = around.recurrent, around.invariant
        assert around.positions is not None
        context = memory.advance(self._tokens, TokenInputs(tokens, around.positions))
        rows = self._table.take(hash_rows(context, self._hashing)).flatten(2)
        joined = self._key_value(rows, invariant=invariant)
        key, value = joined.split_with_sizes([self._part.n_channels, self._part.n_embd], -1)
        of_key, of_query, of_conv = self._norms
        key = head_norm(key.view(streams.shape), of_key, self._eps)
        query = head_norm(streams, of_query, self._eps)
        gained = agreeing(key, query, value, invariant=invariant)
        normed = head_norm(gained, of_conv, self._eps).flatten(2)
        convolved = memory.advance(self._window, ConvInputs(normed, self._taps))
        return add(gained, convolved.view(streams.shape))


def _spread(weight: Tensor, part: NgramEmbeddingPart) -> Tensor:
    """Taps [C, d_conv] with zeros between them, n_gram apart; contiguous per tap, as the
    convolution reads them."""
    apart = functional.pad(weight[..., None], (0, part.n_gram - 1)).flatten(1)
    return apart[:, : part.n_taps].t().contiguous().t()


OfBlock = Callable[[int], Weights]
"""Gives the weights of a block; asked in file order."""


class StreamTrunk:
    """A trunk whose streams start as copies of the embedding, and end in one row or are passed
    on."""

    def __init__(self, config: ModelConfig, weights: Weights, of_block: OfBlock) -> None:
        part = config.trunk
        assert isinstance(part, (HyperConnections, SinkhornConnections))
        self._blocks: list[StreamBlock] = []
        self._embeddings: dict[int, NgramEmbedding] = {}
        """Embeddings of n-grams, by the layer before which they are added."""
        for layer, parts in enumerate(config.blocks):
            of_this = of_block(layer)
            if isinstance(part, HyperConnections) and part.ngrams and parts.before is not None:
                table = weights.stored_rows(TABLE)
                embedding = NgramEmbedding(part.ngrams, of_this, config, layer, table)
                self._embeddings[layer] = embedding
            self._blocks.append(StreamBlock(parts, of_this, config, layer))
        self._n_streams, self._mean = part.n_streams, SinkhornReader(None, weights.device)
        self._reader = self._mean if part.n_handed == 1 else None

    def __call__(
        self, x: Tensor, tokens: Tensor, around: RopeAndMemory, taps: TapCollector
    ) -> Tensor:
        streams = copied(x, self._n_streams)
        for i, block in enumerate(self._blocks):
            self._tap(taps, i, streams)
            if i in self._embeddings:
                streams = add(streams, self._embeddings[i](streams, tokens, around))
            streams = block(streams, around)
        self._tap(taps, len(self._blocks), streams)
        if self._reader is None:
            return streams
        return self._reader(streams, invariant=around.invariant)

    def _tap(self, taps: TapCollector, layer: int, streams: Tensor) -> None:
        if taps.wants(layer):
            taps.enters(layer, self._mean(streams, invariant=True))


def copied(x: Tensor, n_streams: int) -> Tensor:
    """x [B, T, n_embd] copied to equal streams [B, T, n_streams, n_embd]."""
    return join([x] * n_streams).view(*x.shape[:2], n_streams, -1)
