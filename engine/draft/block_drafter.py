"""Block drafters: the shared base, which keeps target rows in memory and drafts a block per pass.

Rows of accepted tokens are stored in memory; the rows of a block are in it only while it is
drafted. So a rollback of the target costs nothing here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.batch import Span, UBatch
from engine.draft.drafter import Draft, DraftRequest, MemoryDrafter
from engine.draft.model_drafter import N_MARKS, SeenRows
from engine.draft.spec import DrafterInputs
from engine.errors import OptionError
from engine.machine.device import read
from engine.memory.hybrid import HybridMemory
from engine.model.drafters.dflash import BlockOutput, DFlash
from engine.model.layers import TargetRows
from kernels.rows.reductions import top_k

N_CANDIDATES = 10
"""A confidence is a softmax over this many logits, as p_min of draft-dflash is defined."""


@dataclass(slots=True)
class _TargetContext:
    """What the target has decoded. n_injected: positions in memory. tokens, rows: the later ones,
    each part float32 [n, n_taps * n_embd]."""

    n_injected: int = 0
    tokens: list[int] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)

    def joined(self) -> Tensor:
        """All waiting rows."""
        if len(self.rows) > 1:
            self.rows = [torch.cat(self.rows)]
        return self.rows[0]


class BlockDrafter(MemoryDrafter, ABC):
    """Drafts a block for every sequence in one pass; subclasses choose its tokens.

    A block always has the number of rows that n_max implies, whatever the limit of a request,
    because drafts depend on the block length. No draft where a whole block no longer fits into the
    context.
    """

    def __init__(self, inputs: DrafterInputs) -> None:
        """Raises OptionError without a drafter file."""
        if inputs.draft is None:
            raise OptionError(
                f"{self.name} needs the file of a drafter.", "Give it with -md or open it."
            )
        self._model: DFlash = inputs.draft.model
        config, options = self._model.config, inputs.options
        self.n_max = min(options.n_max, config.longest)
        self._n_min, self._p_min = min(options.n_min, config.longest), options.p_min
        make = partial(HybridMemory.for_layers, config.cells(), ahead=not config.causal)
        self._memory, self._n_ubatch = inputs.memory(self.name, make), inputs.n_ubatch
        self._block_length = config.block_length(self.n_max)
        self._draws = inputs.draws
        self._contexts: dict[int, _TargetContext] = {}
        self._seen = SeenRows(0, self._memory.attention.device)
        self._n_wrong: dict[int, Tensor] = {}

    @property
    def taps(self) -> tuple[int, ...]:
        return self._model.config.taps

    def observe(self, seq: int, pos0: int, tokens: Sequence[int], rows: TargetRows) -> None:
        """Keep the rows; they are stored with the next draft, or once there are n_ubatch."""
        context = self._contexts.setdefault(seq, _TargetContext())
        context.tokens.extend(tokens)
        context.rows.append(rows.side_by_side(self.taps))
        if len(context.tokens) >= self._n_ubatch:
            self._inject([seq])

    def decoded(self, ubatch: UBatch, rows: TargetRows) -> None:
        """Remember the rows where the target computed them."""
        marks = self._marks(rows.side_by_side(self.taps))
        for i, seq in enumerate(ubatch.seq_ids):
            self._seen.note(seq, int(ubatch.positions[i, 0]), marks[i])

    def resume(self, seq: int, n_tokens: int) -> None:
        super().resume(seq, n_tokens)
        context = self._contexts.setdefault(seq, _TargetContext())
        n_waiting = max(0, n_tokens - context.n_injected)
        if context.tokens:
            context.rows = [context.joined()[:n_waiting]]
            del context.tokens[n_waiting:]
        context.n_injected = min(context.n_injected, n_tokens)
        self._memory.seq_rm(seq, context.n_injected)

    def next_position(self, seq: int) -> int:
        context = self._contexts.get(seq, _TargetContext())
        return context.n_injected + len(context.tokens)

    def forget(self, seq: int) -> None:
        super().forget(seq)
        self._contexts.pop(seq, None)
        self._seen.forget(seq)
        self._n_wrong.pop(seq, None)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        m, n_ctx = self._block_length, self._memory.attention.n_ctx
        able = [request for request in requests if request.pos0 + m <= n_ctx]
        drafts = {request.seq: Draft(drafter=self.name, reason="limit") for request in requests}
        self._inject([request.seq for request in able])
        at_once = max(1, self._n_ubatch // m)
        for some in (able[i : i + at_once] for i in range(0, len(able), at_once)):
            out = self._model.block(self._blocks(some), self._memory)
            for request in some:
                self._memory.seq_rm(request.seq, request.pos0)
            for request, draft in zip(some, self._choose(some, out), strict=True):
                draft.block = m
                drafts[request.seq] = draft
        marked = [seq for seq in drafts if seq in self._n_wrong]
        if marked:
            (counts,) = read(torch.stack([self._n_wrong.pop(seq) for seq in marked]))
            for seq, count in zip(marked, counts.tolist(), strict=True):
                drafts[seq].n_wrong_rows = count
        for draft in drafts.values():
            if len(draft.tokens) < self._n_min:
                draft.cut(0, "n_min")
        return [drafts[request.seq] for request in requests]

    @abstractmethod
    def _choose(self, requests: Sequence[DraftRequest], out: BlockOutput) -> list[Draft]:
        """Drafts from a pass over blocks, one per request; n_max tokens, or less by p_min."""

    def _best(self, logits: Tensor) -> tuple[list[Any], list[Any], list[Any]]:
        """The best candidates of rows f32 [B, n, n_drafted] in descending order, on the host:
        target ids, logits and their softmax, [B][n][k]."""
        values, ids = top_k(logits, min(N_CANDIDATES, logits.shape[-1]))
        if self._model.ids is not None:
            ids = self._model.ids[ids]
        found = read(ids, values, torch.softmax(values, -1))
        return found[0].tolist(), found[1].tolist(), found[2].tolist()

    def _marks(self, rows: Tensor) -> Tensor:
        """Marks [..., N_MARKS] of rows [..., n_taps * n_embd], independent of the order of the
        taps."""
        return rows.unflatten(-1, (len(self.taps), -1))[..., :N_MARKS].amax(-2)

    def _inject(self, seqs: Sequence[int]) -> None:
        spans, rows = [], {}
        for seq in seqs:
            context = self._contexts[seq]
            if context.tokens:
                spans.append(Span(seq, context.n_injected, context.tokens, []))
                rows[seq] = context.joined()
        for ubatch in self._memory.split(spans, self._n_ubatch, "equal") if spans else ():
            parts = [
                rows[seq][first : first + ubatch.n_seq_tokens]
                for seq, position in zip(ubatch.seq_ids, ubatch.positions[:, 0], strict=True)
                for first in [int(position) - self._contexts[seq].n_injected]
            ]
            joined = torch.stack(parts)
            marks = self._marks(joined)
            for i, seq in enumerate(ubatch.seq_ids):
                found = self._seen.n_wrong(seq, int(ubatch.positions[i, 0]), marks[i])
                self._n_wrong[seq] = found + self._n_wrong.get(seq, 0)
            self._model.inject(ubatch, joined, self._memory)
        for seq in rows:
            context = self._contexts[seq]
            self._contexts[seq] = _TargetContext(context.n_injected + len(context.tokens))

    def _blocks(self, requests: Sequence[DraftRequest]) -> UBatch:
        tokens = np.full((len(requests), self._block_length), self._model.config.mask_token)
        tokens[:, 0] = [request.last for request in requests]
        first = np.array([[request.pos0] for request in requests])
        return UBatch(
            tokens.astype(np.int64),
            first + np.arange(self._block_length),
            tuple(request.seq for request in requests),
            np.zeros(0, np.int64),
        )
