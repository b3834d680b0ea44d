"""Mistakes of drafters tied to a place or to one part of a memory, as those in drafter_bugs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from engine.batch import UBatch
from engine.draft import draft_simple, ngram_map
from engine.draft.block_drafter import BlockDrafter
from engine.draft.draft_eagle3 import DraftEagle3
from engine.draft.draft_simple import DraftSimple
from engine.draft.ngram_drafter import History
from engine.draft.row_drafter import RowDrafter
from engine.model.drafters.dflash import Selector
from engine.model.drafters.dflash_config import DFlashConfig
from engine.model.drafters.eagle3 import Eagle3
from engine.model.layers import TargetRows
from engine.model.mtp import MtpHead
from engine.observe.drafter_diff.target_rows import CHANGES
from engine.session import Session
from engine.trace.run_ref import RunRef
from tests.support.drafter_bugs import Bug, counts_of
from tests.support.drafter_patches import (
    Patch,
    alone,
    change_logits,
    map_blocks,
    no_prompt,
    no_recordings,
    stays,
)


def _late(patch: Patch, session: Session) -> None:
    """Rows of a round are injected after the block of the next one."""
    inject, draft = BlockDrafter._inject, BlockDrafter.draft

    def drafting(self: BlockDrafter, requests: Any) -> Any:
        self._inject = lambda seqs: None  # type: ignore[method-assign]
        found = draft(self, requests)
        del self._inject
        inject(self, [request.seq for request in requests])
        return found

    patch.setattr(BlockDrafter, "draft", drafting)


def _half_rolled_back(patch: Patch, session: Session) -> None:
    observe = DraftSimple.observe

    def keeping(self: DraftSimple, seq: int, pos0: int, tokens: Any, rows: Any) -> None:
        memory = self._memory
        remove = memory.seq_rm

        def half(seq: int, p0: int, p1: int = -1) -> bool:
            assert memory.recurrent is not None
            return memory.recurrent.seq_rm(seq, p0) and memory.attention.seq_rm(seq, p0 + 1)

        memory.seq_rm = half  # type: ignore[method-assign]
        try:
            observe(self, seq, pos0, tokens, rows)
        finally:
            memory.seq_rm = remove  # type: ignore[method-assign]

    patch.setattr(DraftSimple, "observe", keeping)


def _overcuts(patch: Patch, session: Session) -> None:
    """A rollback removes the last accepted token from the draft model's cells, too."""
    observe = DraftSimple.observe

    def cutting(self: DraftSimple, seq: int, pos0: int, tokens: Any, rows: Any) -> None:
        guessed = [*self._progress[seq].guessed] if pos0 else []
        observe(self, seq, pos0, tokens, rows)
        if guessed != [*tokens][: len(guessed)]:
            n = self._progress[seq].n_decoded
            self._memory.attention.seq_rm(seq, n - 1, n)

    patch.setattr(DraftSimple, "observe", cutting)


def _overcuts_rows(patch: Patch, session: Session) -> None:
    """The cell before the newest goes with those of the drafted tokens."""
    alone(patch)
    observe = RowDrafter.observe

    def cutting(self: RowDrafter, seq: int, pos0: int, tokens: Any, rows: TargetRows) -> None:
        observe(self, seq, pos0, tokens, rows)
        n = self._of(seq).n_decoded
        self._memory.attention.seq_rm(seq, n - bool(pos0), n)

    patch.setattr(RowDrafter, "observe", cutting)


def _short_offsets(patch: Patch, session: Session) -> None:
    last = session.config.n_vocab - 1

    def short(rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return (rows + (ids - rows + 128) % 256 - 128).clamp(0, last)

    patch.setattr(
        DraftEagle3, "_ids", lambda self, rows: short(rows, self._vocabulary.of_target(rows))
    )
    map_blocks(patch, lambda ids: short(torch.arange(len(ids)), ids))


def _in_a_ring(patch: Patch, session: Session) -> None:
    alone(patch)
    no_recordings(patch)
    for kind in (MtpHead, Eagle3):
        layers = kind._layers

        def wrapped(self: Any, *args: Any, layers: Any = layers) -> Any:
            memory, tokens, positions, *more = args
            return layers(self, memory, tokens, positions % 64, *more)

        patch.setattr(kind, "_layers", wrapped)


def _row_before(patch: Patch, session: Session) -> None:
    span = draft_simple.Span

    def before(seq: int, pos0: int, tokens: Any, outputs: Any) -> Any:
        return span(seq, pos0, tokens, [max(0, at - 1) for at in outputs])

    patch.setattr(draft_simple, "Span", before)


def _penalised(patch: Patch, session: Session) -> None:
    def weaker(self: Any, requests: Any, logits: torch.Tensor) -> torch.Tensor:
        for row, request in zip(logits, requests, strict=True):
            recent = [*self._progress[request.seq].tokens[-24:], request.last]
            row[recent] = torch.where(row[recent] > 0, row[recent] / 1.7, row[recent] * 1.7)
        return logits

    change_logits(patch, weaker)


def _unmapped_step(patch: Patch, session: Session) -> None:
    onward = DraftEagle3._next

    def unmapped(self: Any, requests: Any, n: int, tokens: torch.Tensor, rows: Any) -> Any:
        tokens = (self._vocabulary.ids[None] == tokens[:, None]).int().argmax(1)
        return onward(self, requests, n, tokens, rows)

    patch.setattr(DraftEagle3, "_next", unmapped)


def _first_walk(patch: Patch, session: Session) -> None:
    lattice = Selector.lattice

    def first(self: Any, *args: Any, **more: Any) -> Any:
        ids, scores = lattice(self, *args, **more)
        return ids, scores[:, :, :1].expand_as(scores)

    patch.setattr(Selector, "lattice", first)


def _earliest(patch: Patch, session: Session) -> None:
    class Other(History):
        def find_last(self, ngram: Any, low: int, high: int) -> int:
            return next(iter(self.find_all(ngram, low, high)), -1)

    patch.setattr(ngram_map.NgramSimple, "find", staticmethod(Other.find_last))


def _judged(run: RunRef) -> None:
    accepted, drafted = counts_of(run)
    partial = (accepted >= 0) & (drafted > accepted)
    drafted[partial] = accepted[partial] + 1


def _as_padding(patch: Patch, session: Session) -> None:
    observe = DraftSimple.observe

    def padded(self: DraftSimple, seq: int, pos0: int, tokens: Any, rows: Any) -> None:
        observe(self, seq, pos0, tokens, rows)
        if not pos0:
            known = self._progress[seq].tokens
            known[: len(known) // 2] = [0] * (len(known) // 2)

    patch.setattr(DraftSimple, "observe", padded)


def _token_before(patch: Patch, session: Session) -> None:
    blocks, observe = BlockDrafter._blocks, BlockDrafter.observe
    newest: dict[int, int] = {}

    def seen(self: BlockDrafter, seq: int, pos0: int, tokens: Any, rows: Any) -> None:
        newest[seq] = tokens[-1]
        observe(self, seq, pos0, tokens, rows)

    def begin_earlier(self: BlockDrafter, requests: Any) -> Any:
        ubatch = blocks(self, requests)
        ubatch.tokens[:, 0] = [newest[request.seq] for request in requests]
        return ubatch

    patch.setattr(BlockDrafter, "observe", seen)
    patch.setattr(BlockDrafter, "_blocks", begin_earlier)


def _newest_rejected(patch: Patch, session: Session) -> None:
    """After a partial acceptance the newest row is that of the last token of the verify batch."""
    observe, decoded = BlockDrafter.observe, BlockDrafter.decoded
    batches: dict[int, TargetRows] = {}

    def remember(self: BlockDrafter, ubatch: UBatch, rows: TargetRows) -> None:
        decoded(self, ubatch, rows)
        batches.update((seq, rows[i]) for i, seq in enumerate(ubatch.seq_ids))

    def stale(self: BlockDrafter, seq: int, pos0: int, tokens: Any, rows: TargetRows) -> None:
        last = batches[seq].taps
        if 1 < len(tokens) < len(batches[seq]):
            taps = {i: torch.cat((x[:-1], last[i][-1:])) for i, x in rows.taps.items()}
            rows = TargetRows(rows.hidden, taps)
        observe(self, seq, pos0, tokens, rows)

    patch.setattr(BlockDrafter, "decoded", remember)
    patch.setattr(BlockDrafter, "observe", stale)


def _few_cells(patch: Patch, session: Session) -> None:
    first = DraftSimple._first

    def forgetting(self: DraftSimple, requests: Any) -> torch.Tensor:
        for request in requests:
            self._memory.attention.seq_rm(request.seq, 0, max(0, request.pos0 - 20))
        return first(self, requests)

    patch.setattr(DraftSimple, "_first", forgetting)


def _fused_normed(patch: Patch, session: Session) -> None:
    taken = DraftEagle3._taken
    patch.setattr(DraftEagle3, "_taken", lambda self, rows: CHANGES["normed"](taken(self, rows)))


def _other_anchor(patch: Patch, session: Session) -> None:
    no_recordings(patch)
    model = session.drafts["draft-dspark"].model
    patch.setattr(model, "config", replace(model.config, anchor=not model.config.anchor))
    patch.setattr(model.markov, "first", 1 - model.markov.first)


def _no_window(patch: Patch, session: Session) -> None:
    no_recordings(patch)
    cells = DFlashConfig.cells
    patch.setattr(
        DFlashConfig,
        "cells",
        lambda self: {i: one._replace(window=None) for i, one in cells(self).items()},
    )


PLACED_BUGS: dict[str, Bug] = {
    "a round late": Bug("drafter state", "one round too late", ("dflash",), _late),
    "half rolled back": Bug("drafter state", "in its attention", ("simple",), _half_rolled_back),
    "cut too far": Bug(
        "drafter state", "also removes the last accepted token", ("simple",), _overcuts
    ),
    "cut too far in rows": Bug(
        "drafter state", "also removes the last accepted token", ("eagle3",), _overcuts_rows
    ),
    "8-bit offsets": Bug("candidates", "8-bit", ("eagle3-d2t", "dflash-d2t"), _short_offsets),
    "positions in a ring": Bug("positions", "ring of 64", ("mtp", "eagle3"), _in_a_ring),
    "row before the newest": Bug("drafter state", "before the newest", ("simple",), _row_before),
    "penalised": Bug("candidates", "penalised", ("simple",), _penalised),
    "not mapped in steps": Bug("candidates", "not mapped", ("eagle3-d2t",), _unmapped_step),
    "walk from the first": Bug("candidates", "walk", ("dflash2",), _first_walk),
    "earliest match": Bug("drafter state", "earliest match", ("ngram-simple",), _earliest),
    "read as padding": Bug("drafter state", "as token 0", ("simple",), _as_padding),
    "token before": Bug("block", "token before the newest", ("dflash2",), _token_before),
    "newest rejected": Bug(
        "target rows", "last token of the verify batch", ("dflash", "dspark"), _newest_rejected
    ),
    "stale when whole": Bug("target rows", "fully accepted", ("eagle3",), stays(True)),
    "few cells": Bug("drafter state", "at most 20", ("simple",), _few_cells),
    "fused rows normed": Bug("target rows", "he drafter normalises", ("eagle3",), _fused_normed),
    "other anchor": Bug("block", "sample_from_anchor", ("dspark",), _other_anchor),
    "prompt cut": Bug("drafter state", "prompt's last 5", ("dflash", "dspark"), no_prompt(5)),
    "no window": Bug("block", "windows are ignored", ("dflash-d2t",), _no_window),
    "judged counts": Bug("counting", "only the accepted ones", ("mtp", "simple"), edit=_judged),
}
