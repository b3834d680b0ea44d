"""Row drafters: the shared base of drafters that read the target's rows, as pairs of a token and a
row in a memory of their own.

A pair joins a token with the row of the token before it. While drafting, the drafter uses its own
rows; cells for accepted positions are recomputed from the target's rows in the first step of the
next draft. So rejected tokens never stay in memory.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from operator import ne
from typing import Any, ClassVar

import torch
from torch import Tensor

from engine.batch import Span, UBatch
from engine.draft.drafter import Draft, DraftRequest, width_at
from engine.draft.model_drafter import N_MARKS, ModelDrafter, SeenRows, on_host, single_tokens
from engine.draft.spec import DrafterInputs
from engine.machine.device import upload
from engine.memory.hybrid import HybridMemory
from engine.model.layers import StepOutput, TargetRows

_End = tuple[int, int, int, int]
"""A token that a branch may continue from: the branch's memory sequence, the one that holds the
tokens before it, its node, and its row in the step that produced it."""


@dataclass(slots=True)
class PairedRows:
    """What the target has decoded, by position of the drafter's memory.

    ahead: the pair at position p has the token at p + ahead of the text and the row of the token
    before it. rows: float32 [n_ctx + 1, n_row], as the drafter takes them; marks: [n_ctx + 1,
    N_MARKS] of the target's. n_decoded: positions below this are in the drafter's memory with
    correct pairs.
    """

    ahead: int
    rows: Tensor
    marks: Tensor
    tokens: list[int] = field(default_factory=list)
    n_decoded: int = 0

    @classmethod
    def empty(cls, ahead: int, n_ctx: int, n_row: int, device: torch.device) -> PairedRows:
        """An empty store for n_ctx tokens. The first token of a text has no row before it: zeros,
        if it has a pair."""
        rows, marks = (torch.empty(n_ctx + 1, n, device=device) for n in (n_row, N_MARKS))
        rows[0] = marks[0] = 0
        return cls(ahead, rows, marks)

    def afresh(self) -> PairedRows:
        """The same pairs, with none in memory yet."""
        rows, marks = map(torch.empty_like, (self.rows, self.marks))
        other = PairedRows(self.ahead, rows, marks, self.tokens.copy())
        n = len(self.tokens) + 1 - self.ahead
        other.rows[:n], other.marks[:n] = self.rows[:n], self.marks[:n]
        return other

    def write(self, pos0: int, tokens: Sequence[int], rows: Tensor, hidden: Tensor) -> None:
        """Store tokens at pos0 of the text, and rows where the pairs after them use them."""
        self.tokens[pos0:] = tokens
        start, stop = pos0 + 1 - self.ahead, len(self.tokens) + 1 - self.ahead
        self.rows[start:stop] = rows
        self.marks[start:stop] = hidden[:, :N_MARKS]

    def waiting(self, last: int) -> list[int]:
        """Tokens of the pairs from n_decoded on, up to that of the newest token."""
        return [*self.tokens[self.n_decoded + self.ahead :], last]


class RowDrafter(ModelDrafter):
    """Drafts with one attention layer of its own. AHEAD: see PairedRows.ahead. tree: see widths in
    engine.draft.drafter; each branch has a memory sequence, as in the target."""

    AHEAD: ClassVar[int]

    def __init__(self, memory: HybridMemory, n_row: int, inputs: DrafterInputs) -> None:
        super().__init__(inputs)
        self._tree = inputs.tree
        self._n_slots = memory.attention.n_seqs // math.prod(self._tree)
        self._memory, self._n_row, self._n_ubatch = memory, n_row, inputs.n_ubatch
        self._device = memory.attention.device
        self._paired: dict[int, PairedRows] = {}
        self._seen = SeenRows(1 - self.AHEAD, self._device)
        self._n_wrong_tokens: dict[int, int] = {}
        self._own = torch.empty(0)

    def take_text(self, other: Any) -> bool:
        self._paired = {seq: other._paired[seq].afresh() for seq in other._paired}
        self._seen = deepcopy(other._seen)
        return True

    @abstractmethod
    def _taken(self, rows: TargetRows) -> Tensor:
        """Convert the target's rows to the drafter's input rows [n, n_row]."""

    @abstractmethod
    def _forward(self, ubatch: UBatch, rows: Tensor, tokens: Tensor | None = None) -> StepOutput:
        """A pass over pairs. rows: [n_seqs, n_seq_tokens, n_row]. tokens: replace those of
        `ubatch`. The next step uses the hidden rows of the result."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """See ModelDrafter; a tree extends every branch by the most probable tokens."""
        if not self._tree:
            return super().draft(requests)
        drafts = {request.seq: self._grow(request) for request in requests}
        self._finish(drafts)
        return [drafts[request.seq] for request in requests]

    def _grow(self, request: DraftRequest) -> Draft:
        """Draft a tree, one level per step. p_min and non-finite logits end branches."""
        draft, limit, n_used = Draft(drafter=self.name), self._limit(request), 1
        ends: list[_End] = [(request.seq, request.seq, -1, 0)]
        step = self._step([request], self._first([request]))
        for level in range(limit):
            ids, values, probs, n_wrong = on_host(step)
            if n_wrong:
                draft.n_wrong_rows = n_wrong[0]
            grown = []
            for row, (source, _, node, _) in enumerate(ends):
                if not math.isfinite(values[row][0]):
                    draft.non_finite = draft.non_finite or (level, values[row][0])
                    draft.reason = "non-finite"
                    continue
                for rank in range(min(width_at(self._tree, level), len(ids[row]))):
                    if probs[row][rank] < self._p_min:
                        draft.reason = "p_min"
                        break
                    seq = source
                    if rank:
                        seq = request.seq + n_used * self._n_slots
                        n_used += 1
                    grown.append((seq, source, len(draft.tokens), row))
                    draft.add(ids[row], probs[row], rank)
                    draft.parents.append(node)
            if not grown or level + 1 == limit:
                break
            for seq, source, *_ in grown:
                self._memory.seq_cp(source, seq)
            ends = sorted(grown)
            seqs, _, nodes, rows = zip(*ends, strict=True)
            alive = [replace(request, seq=seq) for seq in seqs]
            newest = upload([draft.tokens[node] for node in nodes], self._device)
            logits = self._next(alive, level + 1, newest, rows)
            step = self._step(alive, logits)
        for i in range(1, n_used):
            self._memory.clear(request.seq + i * self._n_slots)
        if draft.length == limit < self.n_max:
            draft.reason = "limit"
        return draft

    def observe(self, seq: int, pos0: int, tokens: Sequence[int], rows: TargetRows) -> None:
        """Keep the pairs; cells of drafted tokens are removed."""
        paired = self._of(seq)
        self._memory.seq_rm(seq, paired.n_decoded)
        paired.write(pos0, tokens, self._taken(rows), rows.hidden)

    def decoded(self, ubatch: UBatch, rows: TargetRows) -> None:
        """Remember the rows where the target computed them."""
        for i, seq in enumerate(ubatch.seq_ids):
            self._seen.note(seq, int(ubatch.positions[i, 0]), rows.hidden[i])

    def resume(self, seq: int, n_tokens: int) -> None:
        """Remove the cells after these tokens."""
        super().resume(seq, n_tokens)
        paired = self._of(seq)
        paired.n_decoded = min(paired.n_decoded, max(0, n_tokens - self.AHEAD))
        self._memory.seq_rm(seq, paired.n_decoded)
        del paired.tokens[n_tokens:]

    def next_position(self, seq: int) -> int:
        paired = self._of(seq)
        return max(len(paired.tokens), paired.n_decoded + self.AHEAD)

    def forget(self, seq: int) -> None:
        super().forget(seq)
        self._paired.pop(seq, None)
        self._seen.forget(seq)

    def _first(self, requests: Sequence[DraftRequest]) -> Tensor:
        spans = []
        for request in requests:
            start, tokens = self._take_pairs(request)
            spans.append(Span(request.seq, start, tokens, [len(tokens) - 1]))
        logits, own = {}, {}
        none = torch.zeros((), dtype=torch.int64, device=self._device)
        wrong = {request.seq: none for request in requests}
        for ubatch in self._memory.split(spans, self._n_ubatch, "equal"):
            rows = []
            for i, seq in enumerate(ubatch.seq_ids):
                paired, part = self._paired[seq], _part(ubatch, i)
                rows.append(paired.rows[part])
                if self._seen:
                    wrong[seq] = wrong[seq] + self._wrong_rows(seq, part)
            out = self._forward(ubatch, torch.stack(rows))
            flat = out.hidden.flatten(0, 1)
            for i, row in enumerate(ubatch.outputs.tolist()):
                seq = ubatch.seq_ids[row // ubatch.n_seq_tokens]
                logits[seq], own[seq] = out.logits[i], flat[row]
        if self._seen:
            self._n_wrong = torch.stack([wrong[request.seq] for request in requests])
        self._own = torch.stack([own[request.seq] for request in requests])
        return torch.stack([logits[request.seq] for request in requests])

    def _take_pairs(self, request: DraftRequest) -> tuple[int, list[int]]:
        """Start and tokens of the pairs to be decoded; they count as decoded afterwards."""
        paired = self._paired[request.seq]
        start, tokens = paired.n_decoded, self._waiting(request)
        true = paired.waiting(request.last)
        self._n_wrong_tokens[request.seq] = 0 if tokens == true else sum(map(ne, tokens, true))
        paired.n_decoded += len(tokens)
        return start, tokens

    def _wrong_rows(self, seq: int, part: slice) -> Tensor:
        """How many rows at these positions differ from those that the target computed there,
        int64."""
        return self._seen.n_wrong(seq, part.start, self._paired[seq].marks[part])

    def _next(
        self, requests: Sequence[DraftRequest], n_drafted: int, tokens: Tensor, rows: Sequence[int]
    ) -> Tensor:
        if [*rows] != [*range(len(self._own))]:
            self._own = self._own[upload(rows, self._device)]
        ubatch = single_tokens(requests, n_drafted - self.AHEAD)
        out = self._forward(ubatch, self._own.unsqueeze(1), tokens.unsqueeze(1))
        self._own = out.hidden.squeeze(1)
        return out.logits

    def _waiting(self, request: DraftRequest) -> list[int]:
        """Tokens of the pairs that are to be decoded."""
        return self._paired[request.seq].waiting(request.last)

    def _drafted(self, drafts: Mapping[int, Draft]) -> None:
        for seq, draft in drafts.items():
            draft.n_wrong_tokens = (draft.n_wrong_tokens or 0) + self._n_wrong_tokens.pop(seq)

    def _of(self, seq: int) -> PairedRows:
        if seq not in self._paired:
            n_ctx = self._memory.attention.n_ctx
            self._paired[seq] = PairedRows.empty(self.AHEAD, n_ctx, self._n_row, self._device)
        return self._paired[seq]


def _part(ubatch: UBatch, row: int) -> slice:
    """Positions of a row of a ubatch."""
    first = int(ubatch.positions[row, 0])
    return slice(first, first + ubatch.n_seq_tokens)
