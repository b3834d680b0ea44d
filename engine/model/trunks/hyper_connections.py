"""Hyper-connections: several residual streams, which every half of a block reads and writes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.model.config import ModelConfig
from engine.model.feed_forward import FeedForward, make_feed_forward
from engine.model.mixers import make_mixer
from engine.model.mixers.mixer import Mixer, RopeAndMemory
from engine.model.mixers.ngram_embedding import NgramEmbedding
from engine.model.parts import BlockParts
from engine.model.parts.ngram_embedding import TABLE
from engine.model.parts.trunks import HyperConnections
from engine.model.taps import TapCollector
from engine.model.weights import Weights
from kernels.norm import head_norm
from kernels.pointwise import add
from kernels.rows import join
from kernels.rows.streams import add_to_streams, mix_streams, open_low


class StreamMixer:
    """Mixes the normed streams into one, each of their numbers by a gate of its own.

    With an injection matrix it also gives how much of what comes of the mixture each stream gains.
    """

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

    def __call__(
        self, streams: torch.Tensor, *, invariant: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """streams [B, T, n_streams, n_embd] -> mixture [B, T, n_embd], gains [B, T, n_streams] as
        kernels.rows.streams takes them."""
        normed = head_norm(streams, self._norm, self._eps)
        down = self._down(normed.flatten(2), invariant=invariant)
        low, *gains = down.split_with_sizes(self._sizes, -1)
        low = open_low(low, self._n_streams, invariant=invariant)
        gate = self._up(low, invariant=invariant).view(streams.shape)
        mixture = mix_streams(normed, gate, invariant=invariant)
        return mixture, gains[0] if gains else None

    def advance(
        self,
        streams: torch.Tensor,
        compute: Callable[[torch.Tensor], torch.Tensor],
        *,
        invariant: bool,
    ) -> torch.Tensor:
        """The streams with what `compute` makes of the mixture added to each."""
        mixture, gains = self(streams, invariant=invariant)
        assert gains is not None  # both halves of a block have an injection
        return add_to_streams(streams, compute(mixture), gains, invariant=invariant)


class HyperBlock:
    """Adds n-gram embeddings, if the block has them, then what mixer and feed-forward part give."""

    def __init__(
        self,
        trunk: HyperConnections,
        parts: BlockParts,
        weights: Weights,
        config: ModelConfig,
        layer: int,
        embedding: NgramEmbedding | None,
    ) -> None:
        mixer = make_mixer(parts.mixers, weights, config, layer)
        assert mixer is not None  # such blocks have both halves
        assert parts.ffn is not None
        self._embedding = embedding
        self._mixer: Mixer = mixer
        self._ffn: FeedForward = make_feed_forward(parts.ffn, weights, config.eps)
        self._halves = [
            StreamMixer(trunk, weights, name, config.eps) for name in ("hc_attn", "hc_ffn")
        ]

    def __call__(
        self, streams: torch.Tensor, tokens: torch.Tensor, around: RopeAndMemory
    ) -> torch.Tensor:
        """streams [B, T, n_streams, n_embd] -> the same shape."""
        invariant = around.invariant
        if self._embedding is not None:
            streams = add(streams, self._embedding(streams, tokens, around))
        mix, feed = self._halves
        streams = mix.advance(streams, lambda x: self._mixer(x, around), invariant=invariant)
        return feed.advance(
            streams, lambda x: self._ffn(x, invariant=invariant), invariant=invariant
        )


class HyperConnected:
    """Streams begin as copies of the embedding; a last mixer replaces the output norm."""

    def __init__(self, blocks: list[HyperBlock], last: StreamMixer, n_streams: int) -> None:
        self._blocks, self._last, self._n_streams = tuple(blocks), last, n_streams

    def __call__(
        self, x: torch.Tensor, tokens: torch.Tensor, around: RopeAndMemory, taps: TapCollector
    ) -> torch.Tensor:
        """See engine.model.trunks.Trunk."""
        streams = join([x] * self._n_streams).view(*x.shape[:2], self._n_streams, -1)
        for block in self._blocks:
            streams = block(streams, tokens, around)
        return self._last(streams, invariant=around.invariant)[0]


def make_hyper_connected(
    config: ModelConfig, weights: Weights, of_block: Callable[[int], Weights]
) -> HyperConnected:
    """See engine.model.trunks.make_trunk."""
    part = config.trunk
    assert isinstance(part, HyperConnections)
    blocks = []
    for layer, parts in enumerate(config.blocks):
        of_this, embedding = of_block(layer), None
        if parts.before is not None and part.ngrams is not None:
            table = weights.stored_rows(TABLE)
            embedding = NgramEmbedding(part.ngrams, of_this, config, layer, table)
        blocks.append(HyperBlock(part, parts, of_this, config, layer, embedding))
    return HyperConnected(
        blocks, StreamMixer(part, weights, "output_hc", config.eps), part.n_streams
    )
