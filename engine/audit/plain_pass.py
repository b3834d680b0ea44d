"""The text of a sequence decoded plainly: in a fresh memory, without drafts and rollbacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.batch import Span
from engine.memory.hybrid import HybridMemory
from engine.model.hybrid import HybridModel
from engine.model.taps import TargetRows
from engine.options import RunOptions

if TYPE_CHECKING:
    from engine.session import Session


@dataclass(frozen=True, slots=True)
class PassedPart:
    """What a pass over some tokens gave. logits: [n, n_vocab] after the last n of its tokens."""

    pos0: int
    n_tokens: int
    logits: torch.Tensor
    rows: TargetRows

    @property
    def first_output(self) -> int:
        """Position of the token whose logits are the first."""
        return self.pos0 + self.n_tokens - len(self.logits)


class PlainPass:
    """Decodes a text from its beginning on, part by part. n_tokens: decoded so far."""

    def __init__(
        self, session: Session, options: RunOptions, text: Sequence[int], taps: Sequence[int] = ()
    ) -> None:
        self._plain = options.plain
        self._model: HybridModel = session.model
        self.memory: HybridMemory = session.make_memory(self._plain, 1, len(text) + 1, 0)
        self._text, self._taps = text, taps
        self.n_tokens = 0

    @torch.inference_mode()
    def decode(self, n: int, first_output: int) -> PassedPart:
        """Decode n more tokens in one pass, with the logits after those from first_output on."""
        pos0, tokens = self.n_tokens, list(self._text[self.n_tokens : self.n_tokens + n])
        outputs = range(max(0, first_output - pos0), n)
        (ubatch,) = self.memory.split([Span(0, pos0, tokens, outputs)], n, "equal")
        out = self._model.forward(ubatch, self.memory, taps=self._taps)
        self.n_tokens += n
        return PassedPart(pos0, n, out.logits, out.rows[0])
