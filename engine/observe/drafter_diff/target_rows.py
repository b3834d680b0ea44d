"""Target rows of a text, which drafters read: of the text itself, and of verify batches with their
rejected tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from engine.audit.draft_models import DraftModel, Entries
from engine.audit.recorded_drafts import DraftedText
from engine.batch import Span
from engine.gguf.binary import check_cancelled
from engine.memory.hybrid import HybridMemory
from engine.model.hybrid import HybridModel
from engine.model.layers import TargetRows, join_rows
from engine.observe.drafter_diff.records import Drafts
from engine.observe.drafter_diff.tensor_changes import CHANGED, TensorChange
from kernels.norm import rms_norm

_LAYERS_OFF = {1: "one on (outputs)", -1: "one before (inputs)", 2: "two on", -2: "two before"}


_FACTORS = (0.5, 2.0, 0.7, 1.4, 0.25, 4.0, 0.125, 8.0, 0.06, 0.03, 0.01, 0.003, 20.0, -1.0)
CHANGES: dict[str, TensorChange] = {
    "zeros": torch.zeros_like,
    **{f"about {factor:g} times as large": partial(torch.mul, other=factor) for factor in _FACTORS},
    **CHANGED,
}
MOVED: dict[str, TensorChange] = {
    "those of the previous position": lambda x: torch.cat((x[:1], x[:-1])),
    "those of the next position": lambda x: torch.cat((x[1:], x[-1:])),
    "means of the previous and their own position": lambda x: (x + torch.cat((x[:1], x[:-1]))) / 2,
}
_CUT: dict[str, TensorChange] = {
    f"clamped at about {most:g}": partial(torch.clamp, min=-most, max=most)
    for most in (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
}
PASS = 256
"""Tokens per pass."""
_NEAR = 0.1
"""Relative squared distance of rows that another engine's rounding and a factor may leave."""


class TextRows:
    """`rows` of a text, with the layers in `taps` and two next to each; without taps, the embedding
    and the layers before the last one."""

    def __init__(
        self,
        model: HybridModel,
        text: Sequence[int],
        taps: tuple[int, ...],
        cancelled: Callable[[], bool],
    ) -> None:
        self._model, self._text, self.taps, self._cancelled = model, text, taps, cancelled
        n = model.config.n_layer
        near = {tap + i for tap in taps for i in range(-2, 3)} or {0, n - 2, n - 1}
        self._near = tuple(sorted(tap for tap in near if 0 <= tap <= n))
        memory = HybridMemory.for_model(model.config, 1, len(text) + 1, model.device)
        self.rows = self._forward(memory, 0, text)

    def like(self, text: Sequence[int]) -> TextRows:
        """The same for another text."""
        return TextRows(self._model, text, self.taps, self._cancelled)

    def of_rejected(self, drafts: Drafts) -> dict[int, TargetRows]:
        """Rows of the whole verify batch of partly accepted drafts, by round."""
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

    def after_rounds(
        self, model: DraftModel, text: DraftedText, window: Drafts
    ) -> Iterator[tuple[str, torch.Tensor | dict[int, Entries]]]:
        """Possible wrong rows after a rejection or a full acceptance, as tables of all rows; and
        rows of rejected tokens that may stay in memory, by round. text: with a table."""
        assert text.table is not None
        table, first = text.table, text.drafts.index(window[0])
        drafts = text.drafts[max(0, first - 1) : first + len(window)]
        pairs = [
            (last, later)
            for last, later in pairwise(drafts)
            if later.pos0 == last.pos0 + last.n_accepted + 1
        ]
        cut = [pair for pair in pairs if pair[0].n_accepted < pair[0].n_drafted]
        made = self.of_rejected([last for last, _ in cut])
        rejected = {number: model.table(rows) for number, rows in made.items()}
        before = model.newest_row(0) + 1
        choices: dict[str, Callable[[int], int]] = {
            "that of the last token of the verify batch": lambda n: -1,
            "that of the rejected token": lambda n: before + n + 1,
            "that of the first token of the verify batch": lambda n: before,
        }
        for what, index in choices.items():
            stale = table.clone()
            for last, later in cut:
                if (own := rejected.get(last.round)) is not None:
                    stale[model.newest_row(later.pos0)] = own[index(last.n_accepted)]
            yield f"after a rejection the newest row is {what}", stale
        whole = [pair for pair in pairs if pair not in cut]
        for end, some in ("a rejection", cut), ("a fully accepted draft", whole):
            stale = table.clone()
            for last, later in some:
                stale[model.newest_row(later.pos0)] = stale[model.newest_row(last.pos0)]
            yield f"after {end} the row of the previous round is kept", stale
        left = {}
        for last, later in cut:
            if (own := rejected.get(last.round)) is not None:
                known = [text.tokens[last.pos0], *last.tokens]
                places = range(last.n_accepted + 1 - model.ahead, len(known) - model.ahead)
                left[later.round] = Entries(
                    [last.pos0 + i for i in places],
                    [known[i + model.ahead] for i in places],
                    own[places.start : places.stop],
                )
        yield "rows of rejected tokens stay in its memory during the next draft", left

    def wrong(
        self, orders: Sequence[Sequence[int]]
    ) -> Iterator[tuple[str, TargetRows, Sequence[int] | None]]:
        """Possible mistakes of all rows: a sentence, the rows, and the layers that are read.
        orders: other orders of its layers."""
        rows, taps = self.rows, self.taps
        for what, change in (MOVED | CHANGES | _CUT).items():
            yield f"the target's rows are {what}", mapped(rows, change), None
            for tap in taps:
                yield f"rows of layer {tap} are {what}", mapped(rows, change, tap), None
        zeros = mapped(rows, torch.zeros_like)
        for tap in taps if len(taps) > 1 else ():
            alone = mapped(zeros, partial(torch.add, rows.taps[tap]), tap)
            yield f"the target's rows are zeros except for layer {tap}", alone, None
        (norm, eps), n_layer = self._model.final_norm, self._model.config.n_layer
        if norm is not None:
            last, normed = n_layer if taps else None, partial(_normed, norm, eps)
            if not taps or n_layer in taps:
                raw = mapped(rows, partial(torch.div, other=norm), last)
                yield "rows are taken before the target's final norm, not after it", raw, None
                yield "the target's final norm is applied twice", mapped(rows, normed, last), None
            if taps:
                about = "rows of its layers are normalised by the target's final norm"
                yield about, mapped(rows, normed), None
            for layer, x in sorted(rows.taps.items(), reverse=True):
                if taps or x.shape != rows.hidden.shape:
                    continue
                what = f"rows are of layer {layer - 1}" if layer else ("rows are of the embedding")
                yield f"{what}, not of the last layer", TargetRows(normed(x)), None
                yield f"{what} without a norm, not of the last layer", TargetRows(x), None
        for by, how in _LAYERS_OFF.items():
            layers = [tap + by for tap in taps]
            if layers and layers == [layer for layer in layers if layer in rows.taps]:
                yield f"rows are those of layers {how}", rows, layers
        added = {i: x - rows.taps[i - 1] for i, x in rows.taps.items() if i - 1 in rows.taps}
        if len(taps) > 1:
            for what, share in (("mean", 1 / len(taps)), ("sum", 1.0)):
                mean = torch.stack([rows.taps[tap] * share for tap in taps]).sum(0)
                about = f"rows are the {what} of its layers instead of each layer's"
                yield about, TargetRows(rows.hidden, dict.fromkeys(taps, mean)), None
        if taps and {*taps} <= added.keys():
            about = "rows are what each layer adds to the one before it, not their sum"
            yield about, TargetRows(rows.hidden, added), None
        for i, tap in enumerate(taps):
            for other in (one for one in rows.taps if len(taps) > 1 and one != tap):
                about = f"rows of layer {other} are used in place of those of layer {tap}"
                yield about, rows, [*taps[:i], other, *taps[i + 1 :]]
        for order in orders:
            about = f"rows of layers {', '.join(map(str, order))}, not {', '.join(map(str, taps))}"
            yield about, rows, order

    def about(self, handed: np.ndarray, which: np.ndarray) -> str:
        """The nearest mistake that explains the rows handed over, float32 [n, n_embd]. which: the
        wrong ones, int [k]."""
        found = torch.from_numpy(handed[which])
        if not found.isfinite().all():
            return "rows are NaN or infinite"
        apart = {}
        for about, rows, _ in self.wrong(()):
            other = rows.hidden[: len(handed)].flatten(1)[which]
            apart[about] = float((found - other).square().sum(1).median())
        size, about = float(found.square().sum(1).median()), min(apart, key=apart.__getitem__)
        return about if apart[about] <= _NEAR * size else "rows are not those after its final norm"

    def _forward(self, memory: HybridMemory, pos0: int, tokens: Sequence[int]) -> TargetRows:
        parts = []
        for ubatch in memory.split([Span(0, pos0, tokens, [])], PASS, "equal"):
            check_cancelled(self._cancelled)
            rows = self._model.forward(ubatch, memory, taps=self._near).rows
            parts.append(rows[0])
        return join_rows(parts)


def _normed(norm: torch.Tensor, eps: float, x: torch.Tensor) -> torch.Tensor:
    return rms_norm(x.contiguous(), norm, eps)


def mapped(rows: TargetRows, change: TensorChange, only: int | None = None) -> TargetRows:
    """Each row changed. only: the single layer whose rows are changed, None for all."""
    taps = {i: change(x) if only in (None, i) else x for i, x in rows.taps.items()}
    return TargetRows(change(rows.hidden), taps)
