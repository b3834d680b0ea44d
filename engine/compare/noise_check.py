"""Noise measured without any memory code that lanes are judged for: texts decoded afresh.

Rollbacks, restores, copies and verify batches are what a noise lane shares with the lanes that it
bounds. Here an empty memory takes a text from position 0 on, in one batch and again in short
batches of several widths next to another sequence. Nothing is ever removed, restored or copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any

import numpy as np
import torch

from engine.analysis.noise_ceiling import rows_beyond
from engine.batch import Span
from engine.compare.divergence import ReferenceLogits
from engine.decode.round import Round
from engine.model.hybrid import HybridModel
from engine.options import RunOptions
from engine.session import Session

_WIDTHS = (2, 3, 5, 1, 4, 8)
_ALL_OF_FIRST = 12
_EVERY = 8
_MOST_ROWS = 32
"""Rows that are kept of a text: the first ones, which short batches decode, then every eighth."""
_MOST_TEXTS = 3
ONE_BATCH, SHORT_BATCHES = "one batch", "short batches"


@dataclass(slots=True)
class _Text:
    """Tokens of a sequence, and the leader's logits [n_vocab] after some of them, by position."""

    tokens: list[int] = field(default_factory=list)
    rows: dict[int, torch.Tensor] = field(default_factory=dict)
    n_seen: int = 0


class NoiseCheck:
    """Collects what a leader decodes and decodes it afresh when a sequence ends.

    found: `ceiling` and `share` as in engine.analysis.noise_ceiling, and per way of batching the
    checked rows, those beyond the ceiling and the worst NMSE; first: where the first of them is.
    """

    def __init__(
        self,
        session: Session,
        model: HybridModel,
        options: RunOptions,
        ceiling: float,
        share: float,
    ) -> None:
        self._session, self._model = session, model
        self._options = replace(options, kv="per-seq")
        self.found: dict[str, Any] = {"ceiling": ceiling, "share": share, "batches": []}
        self._texts: dict[int, _Text] = {}
        self._n_checked = 0

    def observe(self, part: Round) -> None:
        """A round of the leader."""
        if part.seq_id not in self._texts:
            if not part.is_prompt or len(self._texts) + self._n_checked >= _MOST_TEXTS:
                return
            self._texts[part.seq_id] = _Text()
        text = self._texts[part.seq_id]
        text.tokens += part.decoded
        for pos, row in enumerate(part.rows, part.pos_next - 1):
            if len(text.rows) < _MOST_ROWS and (
                text.n_seen < _ALL_OF_FIRST or text.n_seen % _EVERY == 0
            ):
                text.rows[pos] = row.clone()
            text.n_seen += 1

    @torch.inference_mode()
    def finish(self, seq_id: int) -> None:
        """Check a sequence that has ended."""
        text = self._texts.pop(seq_id, None)
        if text is None:
            return
        self._n_checked += 1
        wanted = torch.stack(list(text.rows.values()))
        first = list(text.rows)[:_ALL_OF_FIRST]
        n_prompt = first[0] + 1
        ways = {
            ONE_BATCH: [(0, len(text.tokens))],
            SHORT_BATCHES: [(0, n_prompt), *_short(n_prompt, first[-1] + 1)],
        }
        for name, batches in ways.items():
            positions = [pos for pos in text.rows if pos < batches[-1][1]]
            n = len(positions)
            reference = ReferenceLogits(wanted[:n], wanted[:n].argmax(1).tolist())
            nmse = np.array(reference.difference(self._decode(text, batches)).nmse)
            self._note(seq_id, name, positions, batches, nmse)

    def _decode(self, text: _Text, batches: list[tuple[int, int]]) -> torch.Tensor:
        """Logits [n, n_vocab] after the wanted positions; short batches are decoded next to the
        same text from its second token on, so that rows of another sequence would show."""
        tokens, model, n_seqs = text.tokens, self._model, min(len(batches), 2)
        other = [*tokens[1:], tokens[0]]
        memory = self._session.make_memory(self._options, n_seqs, len(tokens), 0, model.device)
        n_ubatch = min(self._options.n_ubatch, self._options.n_batch)
        found: list[torch.Tensor] = []
        for start, stop in batches:
            outputs = [pos - start for pos in text.rows if start <= pos < stop]
            spans = [Span(0, start, tokens[start:stop], outputs)]
            spans += [Span(1, start, other[start:stop], [])] * (n_seqs - 1)
            ubatches = memory.split(spans, n_ubatch, "equal")
            found += [model.forward(ubatch, memory).logits for ubatch in ubatches]
        return torch.cat(found)

    def _note(
        self,
        seq_id: int,
        name: str,
        positions: list[int],
        batches: list[tuple[int, int]],
        nmse: np.ndarray,
    ) -> None:
        beyond = rows_beyond(nmse, self.found["ceiling"], self.found["share"])
        found: dict[str, Any] = {
            "seq_id": seq_id,
            "batches": name,
            "rows": len(nmse),
            "beyond": len(beyond),
            "worst": worst if math.isfinite(worst := float(nmse.max(initial=0.0))) else None,
        }
        if beyond.size:
            pos = positions[int(beyond[0])]
            start, stop = next(batch for batch in batches if batch[0] <= pos < batch[1])
            found["first"] = {"pos": pos, "row": pos - start, "width": stop - start}
        self.found["batches"].append(found)


def _short(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Batches of changing widths over positions start .. stop - 1."""
    for width in cycle(_WIDTHS):
        if start >= stop:
            return
        yield start, min(start + width, stop)
        start += width
