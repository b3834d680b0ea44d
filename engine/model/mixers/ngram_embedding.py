"""What the n-grams that end at a token add to the residual streams (per-layer embedding)."""

from __future__ import annotations

import torch
from torch.nn import functional

from engine.gguf.reader import StoredRows
from engine.model.config import ModelConfig
from engine.model.memory import RopeAndMemory
from engine.model.parts.recurrent import NgramEmbeddingPart
from engine.model.recurrence import ConvInputs, StateKey, TokenInputs
from engine.model.weights import Weights
from kernels.norm import head_norm
from kernels.pointwise import add
from kernels.rows.ngrams import NgramHash, agreeing, hash_rows


class NgramEmbedding:
    """Rows of a mapped table, gated per stream by how they agree with it, and their convolution."""

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

    def __call__(
        self, streams: torch.Tensor, tokens: torch.Tensor, around: RopeAndMemory
    ) -> torch.Tensor:
        """streams [B, T, n_streams, n_embd], tokens int64 [B, T] -> what the streams gain."""
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


def _spread(weight: torch.Tensor, part: NgramEmbeddingPart) -> torch.Tensor:
    """Taps [C, d_conv] with zeros between them, n_gram apart; as rows in memory, as the convolution
    reads them."""
    apart = functional.pad(weight[..., None], (0, part.n_gram - 1)).flatten(1)
    return apart[:, : part.n_taps].t().contiguous().t()
