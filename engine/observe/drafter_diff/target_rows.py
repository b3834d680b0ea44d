"""Rows that the target makes of a text, which drafters read: of the text itself, and of verify
batches with their rejected tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.audit.recorded_drafts import RecordedDraft
from engine.batch import Span
from engine.gguf.binary import check_cancelled
from engine.memory.hybrid import HybridMemory
from engine.model.hybrid import HybridModel
from engine.model.taps import TargetRows, join_rows

PASS = 256
"""Tokens of a pass."""


class TextRows:
    """`rows` of a text, with the layers in `taps` and those next to them; without taps, the
    embedding and the layers before the last one."""

    def __init__(
        self,
        model: HybridModel,
        text: Sequence[int],
        taps: tuple[int, ...],
        cancelled: Callable[[], bool],
    ) -> None:
        self._model, self._text, self.taps, self._cancelled = model, text, taps, cancelled
        memory = HybridMemory.for_model(model.config, 1, len(text) + 1, model.device)
        self.rows = self._forward(memory, 0, text)

    def _all_taps(self) -> tuple[int, ...]:
        n_layer = self._model.config.n_layer
        near = {tap + i for tap in self.taps for i in (-1, 0, 1)} or {0, n_layer - 2, n_layer - 1}
        return tuple(sorted(tap for tap in near if 0 <= tap <= n_layer))

    def of_rejected(self, drafts: Sequence[RecordedDraft]) -> dict[int, TargetRows]:
        """Rows of the whole verify batch of drafts that were accepted in part, by round."""
        text = self._text
        memory = HybridMemory.for_model(self._model.config, 1, len(text) + 80, self._model.device)
        found, n = {}, 0
        for draft in drafts:
            known = draft.tokens
            if draft.n_accepted >= draft.n_drafted or len(known) < draft.n_drafted:
                continue
            if draft.pos0 > n:
                self._forward(memory, n, text[n : draft.pos0])
                n = draft.pos0
            save = memory.save(0)
            found[draft.round] = self._forward(memory, n, [text[n], *known])
            memory.restore(0, save)
        return found

    def _forward(self, memory: HybridMemory, pos0: int, tokens: Sequence[int]) -> TargetRows:
        parts = []
        for ubatch in memory.split([Span(0, pos0, tokens, [])], PASS, "equal"):
            check_cancelled(self._cancelled)
            rows = self._model.forward(ubatch, memory, taps=self._all_taps()).rows
            parts.append(rows[0])
        return join_rows(parts)
