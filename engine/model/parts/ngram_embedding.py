"""Embeddings of hashed n-grams (the per-layer embedding of qwen4exp): sizes, tensors, states."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from engine.model.parts import Shapes, StateSize

TABLE = "per_layer_token_embd.weight"
"""The rows that n-grams are hashed to, larger than all else: it stays in the file."""


@dataclass(frozen=True, slots=True)
class NgramEmbeddingPart:
    """Rows for the n-grams that end at a token, for n from 2 to n_gram, several of each n (heads).

    multipliers: n_gram factors of the hash. sizes, offsets: of the range of rows of each head,
    orders first. end_id: a token after which n-grams begin anew. n_streams: streams it adds to.
    d_conv: taps of the convolution after it, n_gram tokens apart. n_rows: of the table.
    """

    n_gram: int
    d_conv: int
    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    end_id: int
    n_streams: int
    n_embd: int
    n_rows: int

    @property
    def kind(self) -> str:
        """See engine.model.parts.MixerPart."""
        return "n-gram embedding"

    @property
    def n_taps(self) -> int:
        """Taps of the convolution when those between the d_conv are counted, which are zero."""
        return (self.d_conv - 1) * self.n_gram + 1

    @property
    def n_channels(self) -> int:
        """Channels of the convolution: all streams."""
        return self.n_streams * self.n_embd

    def shapes(self, n_embd: int, present: Container[str]) -> Shapes:
        """See engine.model.parts.MixerPart."""
        each = (self.n_streams, n_embd)
        return {
            "ple_key.weight": (self.n_channels, n_embd),
            "ple_value.weight": (n_embd, n_embd),
            "ple_norm_key.weight": each,
            "ple_norm_query.weight": each,
            "ple_norm_conv.weight": each,
            "ple_conv1d.weight": (self.n_channels, self.d_conv),
        }

    def table_shape(self) -> tuple[int, int]:
        """Of the tensor TABLE."""
        return self.n_rows, self.n_embd // len(self.sizes)

    def states(self) -> Mapping[str, StateSize]:
        """The last tokens, and the convolution's window."""
        row = (self.n_channels,)
        return {
            "tokens": StateSize((self.n_gram - 1, 1), ((1,),), is_window=True),
            "ngrams": StateSize((self.n_taps - 1, *row), (row,), is_window=True),
        }

    def cells(self) -> None:
        """None."""
