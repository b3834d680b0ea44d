"""Draft models without the bookkeeping of engine.draft: what would they draft after given entries?

An *entry* is what a drafter stores for one position: a token of the text and, except for
draft-simple, a row of the target. Entries are written to one sequence of a memory of their own, and
drafts are made in a copy of it, so rollback is never needed here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.batch import UBatch
from engine.draft.draft_simple import STAND_IN
from engine.machine.device import read, upload
from engine.memory.hybrid import HybridMemory
from engine.model.drafters.dflash import DFlash
from engine.model.drafters.eagle3 import Eagle3
from engine.model.hybrid import HybridModel
from engine.model.layers import TargetRows
from engine.model.memory import AttentionMemory
from engine.model.mtp import MtpHead
from engine.options import RunOptions
from engine.session import Session
from kernels.rows.reductions import top_k

_CONTEXT, _DRAFT, _KEPT = 0, 1, 2
_N_CANDIDATES = 256
_MOST_PERMUTED = 4

Candidates = dict[int, float]
"""Logits of the best tokens of one row, by target ids, best first."""


class Entries(NamedTuple):
    """Entries of a drafter's memory. rows: f32 [n, n_row], None where there are none."""

    positions: Sequence[int]
    tokens: Sequence[int]
    rows: Tensor | None = None

    def part(self, start: int, stop: int) -> Entries:
        """A slice of the entries."""
        which = slice(start, stop)
        rows = None if self.rows is None else self.rows[which]
        return Entries(self.positions[which], self.tokens[which], rows)

    def moved(self, n: int) -> Entries:
        """The same entries, n positions on."""
        return self._replace(positions=[p + n for p in self.positions]) if n else self


class DraftModel(ABC):
    """ahead: the entry at position p has the text's token at p + ahead. left: the entries that the
    latest draft wrote, after the newest one. core: the model that computes."""

    core: Any
    ahead = 0
    reads_rows = True
    has_newest = True
    """Whether the newest token has an entry, too."""

    def __init__(self, memory: HybridMemory, n_ubatch: int) -> None:
        # recording passes would take longer than it saves here
        self._memory = HybridMemory(memory.attention, memory.recurrent)
        self._n_ubatch = n_ubatch
        self.left, self._steady, self._stride = Entries((), ()), False, 1
        self._written = self._kept = 0  # the last token in memory, and that of the kept state
        self.orders: list[tuple[int, ...]] = []
        """Wrong orders of the target layers that it reads."""

    @property
    def drafted_ids(self) -> Tensor | None:
        """Target ids of the rows of the drafter's head, int64; None if they are the same."""
        return None

    @property
    def cells(self) -> AttentionMemory:
        """The memory of keys and values."""
        return self._memory.attention

    @property
    def can_cut(self) -> bool:
        """Whether entries can be removed: only with cells alone."""
        return self._memory.recurrent is None

    def cut(self, start: int) -> None:
        """Remove entries from a position on."""
        self._memory.seq_rm(_CONTEXT, start)

    def lose(self, stop: int, start: int = 0) -> None:
        """Remove cells below a position; states keep the whole text."""
        self._memory.attention.seq_rm(_CONTEXT, max(0, start), stop)

    def table(self, rows: TargetRows | None, layers: Sequence[int] | None = None) -> Tensor | None:
        """The rows of entries by position, f32 [n, n_row]. rows: the target's, of a whole text.
        layers: those that are read, None = the right ones."""
        return None

    def write(self, entries: Entries) -> None:
        """Write entries, whatever memory holds."""
        for at in range(0, len(entries.tokens), self._n_ubatch):
            part = slice(at, at + self._n_ubatch)
            rows = None if entries.rows is None else entries.rows[part].unsqueeze(0)
            self._pass(_ubatch(entries.positions[part], entries.tokens[part], _CONTEXT), rows)
            self._written = entries.tokens[part][-1]

    def write_left(self, entries: Entries) -> None:
        """Write entries that a draft has left."""
        self.write(entries)

    def write_part(self, entries: Entries, only: str) -> None:
        """Write entries to its "attention" or its "states" alone."""
        recurrent = self._memory.recurrent
        if recurrent is None or not entries.tokens:
            return
        save = recurrent.save(_CONTEXT)
        self.write(entries)
        if only == "attention":
            recurrent.restore(_CONTEXT, save)
        else:
            self._memory.attention.seq_rm(_CONTEXT, entries.positions[0])

    def clear(self) -> None:
        """Clear the memory."""
        self._memory.clear(_CONTEXT)

    def keep(self) -> None:
        """Keep the current state for `go_back`."""
        self._memory.seq_cp(_CONTEXT, _KEPT)
        self._kept = self._written

    def go_back(self) -> None:
        """Restore the kept state."""
        self._memory.seq_cp(_KEPT, _CONTEXT)
        self._written = self._kept

    def draft(
        self,
        newest: Entries,
        first: int,
        tokens: Sequence[int] | None,
        n: int,
        *,
        in_place: bool = False,
        steady: bool = False,
        stride: int = 1,
    ) -> list[Candidates]:
        """The candidates of each of n drafted tokens, given the entries in memory.

        newest: the entry that a draft continues from. first: position of the first drafted one.
        tokens: the drafted ones, None for the most probable ones. in_place: leave the drafted
        entries in memory. steady: pair all drafted tokens with one row. stride: distance of their
        positions.
        """
        seq = _CONTEXT if in_place else _DRAFT
        if not in_place:
            self._memory.clear(_DRAFT)
            self._memory.seq_cp(_CONTEXT, _DRAFT)
        self._steady, self._stride = steady, stride
        return self._draft(newest, first, tokens, n, seq)

    @abstractmethod
    def _pass(self, ubatch: UBatch, rows: Tensor | None) -> None:
        """Decode entries. rows: [1, n, n_row]."""

    @abstractmethod
    def n_true(self, n_accepted: int, n_drafted: int) -> int:
        """Entries of the text that a draft leaves in a run's memory."""

    def newest_row(self, pos0: int) -> int:
        """Position of the newest entry with a row once the target has decoded pos0 tokens."""
        return pos0 - 1

    @abstractmethod
    def _draft(
        self, newest: Entries, first: int, tokens: Sequence[int] | None, n: int, seq: int
    ) -> list[Candidates]: ...


class StepwiseModel(DraftModel):
    """A model that drafts one token per step."""

    ids: Tensor | None = None
    hands: Callable[[list[Entries], list[Entries]], Entries] | None = None
    """What a step reads, from what all steps so far should read and what they did read; None if
    right."""
    lost: str = ""
    """Entries missing in memory for branches of a tree that do not begin with the best token:
    "all", or those of the "drafted" tokens."""

    @property
    def drafted_ids(self) -> Tensor | None:
        return self.ids

    @abstractmethod
    def _step(self, ubatch: UBatch, rows: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Logits [1, n_drafted] after an entry, and the row of the next one, [1, n_row]."""

    def n_true(self, n_accepted: int, n_drafted: int) -> int:
        return 1

    def at_step(
        self, given: list[Entries], handed: list[Entries], seq: int, n_outputs: int
    ) -> tuple[Tensor, Tensor | None]:
        """See `_step`; `handed` collects what is read. n_outputs: 0 = no logits."""
        handed.append(given[-1] if self.hands is None else self.hands(given, handed))
        positions, tokens, rows = handed[-1]
        rows = None if rows is None else rows.unsqueeze(0)
        return self._step(_ubatch(positions, tokens, seq, n_outputs=n_outputs), rows)

    def _draft(
        self, newest: Entries, first: int, tokens: Sequence[int] | None, n: int, seq: int
    ) -> list[Candidates]:
        return self.step_by_step(newest, first, tokens, n, seq)

    def step_by_step(
        self,
        newest: Entries,
        first: int,
        tokens: Sequence[int] | None,
        n: int,
        seq: int,
        *,
        at_once: bool = False,
    ) -> list[Candidates]:
        """See `draft`, with one pass per token. at_once: for known tokens; the head, most of a
        pass, reads the rows of all of them at the end."""
        found: list[Candidates] = []
        given, handed, made = [newest], list[Entries](), list[Tensor]()
        for i in range(n):
            logits, row = self.at_step(given, handed, seq, 0 if at_once else 1)
            found += candidates(logits, self.ids) if len(logits) else []
            made += [row] if at_once and row is not None else []
            row = given[-1].rows if self._steady and i else row
            token = next(iter(found[-1])) if tokens is None else tokens[i]
            position = first + i * self._stride
            if self.lost and tokens is not None and token != next(iter(found[-1])):
                self._memory.seq_rm(seq, first if self.lost == "drafted" else 0, position)
            given.append(Entries([position], [token], row))
        rows = [one.rows for one in handed[1:] if one.rows is not None]
        known = [one.tokens[0] for one in handed[1:]]
        joined = torch.cat(rows) if rows else None
        self.left = Entries(range(first, first + n - 1), known, joined)
        if made:
            invariant = self._memory.batch_invariant
            found = candidates(self.core.logits(torch.cat(made), invariant=invariant), self.ids)
        return found


class SimpleModel(StepwiseModel):
    """The model of draft-simple."""

    reads_rows = False

    def __init__(self, model: HybridModel, n_vocab: int, memory: HybridMemory, n: int) -> None:
        super().__init__(memory, n)
        self.core = model
        self._n_own = model.config.n_vocab
        self._n_both = min(n_vocab, self._n_own)

    def n_true(self, n_accepted: int, n_drafted: int) -> int:
        return 1 + min(n_accepted, n_drafted - 1)

    def _draft(
        self, newest: Entries, first: int, tokens: Sequence[int] | None, n: int, seq: int
    ) -> list[Candidates]:
        (position,) = newest.positions
        is_moved = first != position + 1 or self._stride != 1
        if not n or tokens is None or is_moved or self.hands is not None:
            return self.step_by_step(newest, first, tokens, n, seq)
        self.left = Entries(range(first, first + n - 1), list(tokens[: n - 1]))
        places, known = range(position, first + n - 1), [*newest.tokens, *self.left.tokens]
        return candidates(self._forward(_ubatch(places, known, seq, n_outputs=n)), self.ids)

    def _pass(self, ubatch: UBatch, rows: Tensor | None) -> None:
        self._forward(ubatch)

    def _step(self, ubatch: UBatch, rows: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return self._forward(ubatch), None

    def _forward(self, ubatch: UBatch) -> Tensor:
        ubatch.tokens[ubatch.tokens >= self._n_own] = STAND_IN
        return self.core.forward(ubatch, self._memory).logits[:, : self._n_both]


class _RowModel(StepwiseModel):
    """A model that reads a target row with each token."""

    core: Any

    def _pass(self, ubatch: UBatch, rows: Tensor | None) -> None:
        assert rows is not None
        self.core.forward(ubatch, rows, self._memory)

    def _step(self, ubatch: UBatch, rows: Tensor | None) -> tuple[Tensor, Tensor | None]:
        assert rows is not None
        out = self.core.forward(ubatch, rows, self._memory)
        return out.logits, out.hidden[:, -1]

    def _draft(
        self, newest: Entries, first: int, tokens: Sequence[int] | None, n: int, seq: int
    ) -> list[Candidates]:
        at_once = tokens is not None and self.hands is None and not self.lost
        return self.step_by_step(newest, first, tokens, n, seq, at_once=at_once)


class MtpModel(_RowModel):
    """An MTP head: position p pairs the token at p with the target's hidden row of p - 1."""

    def __init__(self, head: MtpHead, memory: HybridMemory, n: int) -> None:
        super().__init__(memory, n)
        self.core = head

    def table(self, rows: TargetRows | None, layers: Sequence[int] | None = None) -> Tensor | None:
        assert rows is not None
        return torch.cat((torch.zeros_like(rows.hidden[:1]), rows.hidden))

    def newest_row(self, pos0: int) -> int:
        return pos0


class Eagle3Model(_RowModel):
    """An EAGLE-3 block: position p pairs the token at p + 1 with the feature row of p."""

    ahead = 1

    def __init__(self, model: Eagle3, ids: Tensor | None, memory: HybridMemory, n: int) -> None:
        super().__init__(memory, n)
        self.core, self.ids = model, ids
        self.orders = _orders(model.config.taps)

    def table(self, rows: TargetRows | None, layers: Sequence[int] | None = None) -> Tensor | None:
        assert rows is not None
        return self.core.fused(rows.side_by_side(layers or self.core.config.taps))


class BlockModel(DraftModel):
    """A drafter of the DFlash family. n_max: tokens that a run drafts.

    mask: token of the rows to fill, -1 for the newest token; masks: replacements of it by row, -2
    for the token before the newest. n_block: rows of a block. first: row of the first drafted
    token. apart: distance of positions; moved: shifts of the positions of some rows. walks: a
    selector continues from the chosen token, not from its row's best candidate. sure: the
    confidence head's output for the latest block.
    """

    has_newest = False
    apart, walks = 1, True
    sure: Sequence[float] = ()
    masks: Mapping[int, int] = MappingProxyType({})
    moved: Mapping[int, int] = MappingProxyType({})

    def __init__(self, model: DFlash, n_max: int, memory: HybridMemory, n: int) -> None:
        super().__init__(memory, n)
        self.core = model
        self._n_max = min(n_max, model.config.longest)
        self.mask = model.config.mask_token
        self.n_block = model.config.block_length(self._n_max)
        self.first = self.n_block - self._n_max
        self.orders = _orders(model.config.taps)
        self.config = model.config

    def like(self, n_ctx: int, windows: Sequence[int | None]) -> BlockModel:
        """Another one with a memory for n_ctx tokens. windows: of its layers."""
        config, ahead = replace(self.config, windows=tuple(windows)), not self.config.causal
        memory = HybridMemory.for_layers(config.cells(), 3, n_ctx, self.core.device, ahead=ahead)
        return BlockModel(self.core, self._n_max, memory, self._n_ubatch)

    @property
    def drafted_ids(self) -> Tensor | None:
        return self.core.ids

    def table(self, rows: TargetRows | None, layers: Sequence[int] | None = None) -> Tensor | None:
        assert rows is not None
        return rows.side_by_side(layers or self.config.taps)

    def _pass(self, ubatch: UBatch, rows: Tensor | None) -> None:
        assert rows is not None
        self.core.inject(ubatch, rows, self._memory)

    def n_true(self, n_accepted: int, n_drafted: int) -> int:
        return 0

    def _draft(
        self, newest: Entries, first: int, tokens: Sequence[int] | None, n: int, seq: int
    ) -> list[Candidates]:
        m, model = self.n_block, self.core
        (position,), (last,) = newest.positions, newest.tokens
        mask = last if self.mask < 0 else self.mask
        block = [last, *[mask] * (m - 1)]
        for i, token in self.masks.items():
            block[i] = token if token >= 0 else self._written if token == -2 else last
        places = [position + i * self.apart + self.moved.get(i, 0) for i in range(m)]
        out = model.block(_ubatch(places, block, seq), self._memory)
        self.sure = torch.sigmoid(out.confidence[0, self.first :]).tolist()
        if model.selector is None:
            rows = candidates(out.logits[0, self.first :], model.ids)
            if not model.config.markov or tokens is None:
                return rows[:n]
            # each row continues from the best token of the one before
            n_same = 0
            for row, token in zip(rows, tokens, strict=False):
                if next(iter(row)) != token:
                    break
                n_same += 1
            return rows[: min(n, n_same + 1)]
        start = upload([last], out.logits.device)
        invariant = self._memory.batch_invariant
        ids, scores = read(
            *model.selector.lattice(out.logits, out.hidden, start, invariant=invariant)
        )
        found: list[Candidates] = []
        before = 0
        for i, (own, by_predecessor) in enumerate(zip(ids[0], scores[0], strict=True)):
            row = by_predecessor[before]
            order = np.argsort(-row, kind="stable")
            found.append(dict(zip(own[order].tolist(), row[order].tolist(), strict=True)))
            token = next(iter(found[-1])) if tokens is None else (*tokens, -1)[min(i, len(tokens))]
            at = np.flatnonzero(own == token)
            if len(found) == n or not at.size:
                break
            before = int(at[0]) if self.walks else 0
        return found


def draft_model(session: Session, options: RunOptions, drafter: str, n_ctx: int) -> DraftModel:
    """The model of a drafter that has one, with memory for n_ctx tokens."""
    target, sizes = session.model, (3, n_ctx, session.model.device)
    n_ubatch = min(options.n_ubatch, options.n_batch)
    if drafter == "draft-mtp":
        assert target.head is not None
        memory = HybridMemory.for_layers(target.config.mtp_cells(), *sizes)
        return MtpModel(target.head, memory, n_ubatch)
    loaded = session.drafts[drafter]
    if isinstance(loaded, HybridModel):
        memory = HybridMemory.for_model(loaded.config, *sizes)
        return SimpleModel(loaded, target.config.n_vocab, memory, n_ubatch)
    config: Any = loaded.config
    if drafter == "draft-eagle3":
        memory = HybridMemory.for_layers(config.cells(), *sizes)
        return Eagle3Model(loaded.model, loaded.vocabulary.ids, memory, n_ubatch)
    memory = HybridMemory.for_layers(config.cells(), *sizes, ahead=not config.causal)
    return BlockModel(loaded.model, options.spec.n_max, memory, n_ubatch)


def taps_of(session: Session, options: RunOptions) -> tuple[int, ...]:
    """Target layers whose rows the drafters of these options read, ascending."""
    names = [name for name in options.spec.types if name in session.drafts]
    configs = (getattr(session.drafts[name], "config", None) for name in names)
    return tuple(sorted({tap for config in configs for tap in getattr(config, "taps", ())}))


def _orders(layers: Sequence[int]) -> list[tuple[int, ...]]:
    n = len(layers)
    turned = [tuple(np.roll(layers, i).tolist()) for i in range(1, n)]
    if n <= _MOST_PERMUTED:
        turned += permutations(layers)
    found = dict.fromkeys([tuple(layers[::-1]), *turned, *((layer,) * n for layer in layers)])
    return [order for order in found if order != tuple(layers)]


def _ubatch(
    positions: Sequence[int], tokens: Sequence[int], seq: int, *, n_outputs: int = 0
) -> UBatch:
    """A ubatch of one sequence, with logits of the last n_outputs tokens."""
    n = len(tokens)
    outputs = np.arange(n - n_outputs, n)
    return UBatch(np.array([tokens]), np.array([positions]), (seq,), outputs)


def candidates(logits: Tensor, ids: Tensor | None = None) -> list[Candidates]:
    """The best candidates of rows [n, n_drafted]. ids: target ids by the drafter's."""
    values, best = top_k(logits, min(_N_CANDIDATES, logits.shape[-1]))
    found = read(values, best if ids is None else ids[best])
    pairs = zip(found[1].tolist(), found[0].tolist(), strict=True)
    return [dict(zip(tokens, row, strict=True)) for tokens, row in pairs]
