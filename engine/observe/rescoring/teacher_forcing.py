"""The logits of a model along given texts: every token decoded once, as prompts are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from engine.batch import Span
from engine.memory.hybrid import HybridMemory
from engine.memory.kv import AttentionKV, GatheredCells
from engine.model.hybrid import HybridModel
from engine.model.parts import CellKey

_LONGEST_PASS = 512
_MOST_LOGITS = 1 << 26
"""Bytes of logits that one pass may give: measures of them take several times as much."""


class HalfCells(AttentionKV):
    """Keys and values rounded to half precision, as a server keeps them unless told otherwise."""

    def update(
        self, layer: CellKey, k: torch.Tensor, v: torch.Tensor | None = None
    ) -> GatheredCells:
        """Write this ubatch's keys and values [n_seqs, n_seq_tokens, n_heads, dim]."""
        return super().update(layer, _rounded(k), v if v is None else _rounded(v))


def _rounded(rows: torch.Tensor) -> torch.Tensor:
    return rows.half().to(rows.dtype)


class Teacher:
    """Decodes texts of up to n_tokens tokens with several models side by side, which have the
    vocabulary and the layers in common. half: those whose attention cells are rounded."""

    def __init__(
        self, models: Sequence[HybridModel], n_tokens: int, half: Sequence[HybridModel] = ()
    ) -> None:
        self._models = [*models, *half]
        config = models[0].config
        self._memories = [
            HybridMemory.for_model(config, 1, n_tokens, model.device) for model in self._models
        ]
        for memory in self._memories[len(models) :]:
            cells = memory.attention
            memory.attention = HalfCells(cells.layers, 1, n_tokens, cells.device)
        self._n_pass = max(1, min(_LONGEST_PASS, _MOST_LOGITS // (4 * config.n_vocab)))

    @torch.inference_mode()
    def rows(
        self, tokens: Sequence[int], first: int = 0
    ) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Behind each part of a text: the index of the first row, and of every model the logits
        [n, n_vocab] after the tokens at that index, the next … Rows before `first` are left out.
        """
        for memory in self._memories:
            memory.clear(0)
        start = 0
        while start < len(tokens):
            n = _LONGEST_PASS if start + _LONGEST_PASS <= first else self._n_pass
            stop = min(start + n, len(tokens))
            wanted = range(min(max(first - start, 0), stop - start), stop - start)
            span = Span(0, start, tokens[start:stop], wanted)
            yield (
                start + wanted.start,
                [
                    self._decode(model, memory, span)
                    for model, memory in zip(self._models, self._memories, strict=True)
                ],
            )
            start = stop

    def _decode(self, model: HybridModel, memory: HybridMemory, span: Span) -> torch.Tensor:
        parts = [
            model.forward(ubatch, memory).logits
            for ubatch in memory.split([span], len(span.tokens), "equal")
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
