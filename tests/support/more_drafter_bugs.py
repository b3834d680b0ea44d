"""Further mistakes of engines, as in tests.support.drafter_bugs: those that were invented after the
comparison was written, in look-ups too."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from engine.batch import UBatch
from engine.decode import acceptance
from engine.draft import row_drafter, suffix
from engine.draft.block_drafter import BlockDrafter
from engine.draft.draft_eagle3 import DraftEagle3
from engine.draft.draft_mtp import DraftMtp
from engine.draft.model_drafter import ModelDrafter
from engine.draft.ngram_drafter import History, NgramDrafter
from engine.draft.ngram_map import NgramSimple
from engine.draft.row_drafter import RowDrafter
from engine.model import mtp
from engine.model.layers import RopeTables, TargetRows
from engine.options import Prompt, RunOptions
from engine.session import Session
from engine.trace.run_ref import RunRef
from kernels.norm import rms_norm
from tests.support.drafter_bugs import Bug, count, counts_of, with_first
from tests.support.drafter_patches import (
    Patch,
    alone,
    change_blocks,
    change_logits,
    change_rows,
    each,
    map_blocks,
    no_recordings,
)

_MODEL, _ROW = ("mtp", "simple", "eagle3"), ("mtp", "eagle3")
_BLOCKS = ("dflash", "dspark", "dflash2")

# -- prompts -----------------------------------------------------------------------------------


def _twice_first(session: Session, prompt: Prompt) -> Prompt:
    return with_first(session, with_first(session, prompt))


def _cut_left(session: Session, prompt: Prompt) -> Prompt:
    """As a server does that keeps the end of what is too long."""
    return Prompt(prompt.tokens[max(1, len(prompt.tokens) // 3) :], prompt.text)


# -- rows --------------------------------------------------------------------------------------


def _normed(session: Session, rows: torch.Tensor) -> torch.Tensor:
    norm, eps = session.model.final_norm
    return rms_norm(rows.contiguous(), norm, eps)


def _layer_before(patch: Patch, session: Session) -> None:
    """An MTP block reads what the layer before the last one gives."""
    alone(patch)
    layer = session.config.n_layer - 1
    patch.setattr(DraftMtp, "taps", property(lambda self: (layer,)), raising=False)
    patch.setattr(DraftMtp, "_taken", lambda self, rows: _normed(session, rows.taps[layer]))


def _normed_taps(patch: Patch, session: Session) -> None:
    change_rows(patch, partial(_normed, session))


def _steady_row(patch: Patch, session: Session) -> None:
    """Every step of a draft reads the target's row, not the drafter's own."""
    alone(patch)
    own = RowDrafter._next

    def steady(self: RowDrafter, *args: Any) -> torch.Tensor:
        rows = self._own
        logits = own(self, *args)
        self._own = rows
        return logits

    patch.setattr(RowDrafter, "_next", steady)


# -- positions and state -----------------------------------------------------------------------


def _blocks_too_far(patch: Patch, session: Session) -> None:
    change_blocks(patch, lambda ubatch: np.add(ubatch.positions, 1, out=ubatch.positions))


def _cells_stay(patch: Patch, session: Session) -> None:
    """Cells of drafted tokens stay, next to those of the text."""
    alone(patch)

    def keeping(self: RowDrafter, seq: int, pos0: int, tokens: Any, rows: TargetRows) -> None:
        self._of(seq).write(pos0, tokens, self._taken(rows), rows.hidden)

    patch.setattr(RowDrafter, "observe", keeping)


def _rejected_rows_stay(patch: Patch, session: Session) -> None:
    """Rows of rejected tokens are put into the memory of blocks too, and are never removed."""
    observe, decoded, inject = BlockDrafter.observe, BlockDrafter.decoded, BlockDrafter._inject
    batch: dict[int, tuple[int, torch.Tensor, list[int]]] = {}
    waiting: dict[int, tuple[int, torch.Tensor, list[int]]] = {}

    def remember(self: BlockDrafter, ubatch: UBatch, rows: TargetRows) -> None:
        decoded(self, ubatch, rows)
        for i, seq in enumerate(ubatch.seq_ids):
            own = rows.side_by_side(self.taps)[i]
            batch[seq] = int(ubatch.positions[i, 0]), own, ubatch.tokens[i].tolist()

    def observed(self: BlockDrafter, seq: int, pos0: int, tokens: Any, rows: TargetRows) -> None:
        observe(self, seq, pos0, tokens, rows)
        start, own, known = batch[seq]
        n = len(tokens)
        if start == pos0 and len(known) > n:
            waiting[seq] = pos0 + n, own[n:], known[n:]

    def put(self: BlockDrafter, seqs: Any) -> None:
        inject(self, seqs)
        for seq in seqs:
            if seq in waiting:
                pos, own, known = waiting.pop(seq)
                places = torch.arange(pos, pos + len(known))[None].numpy()
                tokens = torch.tensor([known]).numpy()
                self._model.inject(
                    UBatch(tokens, places, (seq,), places[0, :0]), own[None], self._memory
                )

    patch.setattr(BlockDrafter, "decoded", remember)
    patch.setattr(BlockDrafter, "observe", observed)
    patch.setattr(BlockDrafter, "_inject", put)


# -- candidates --------------------------------------------------------------------------------


def _next_ids(patch: Patch, session: Session) -> None:
    """The map of draft ids is read from one row on."""
    last = session.config.n_vocab - 1

    def moved(self: DraftEagle3, rows: torch.Tensor) -> torch.Tensor:
        n = len(self._vocabulary.ids)
        return self._vocabulary.of_target((rows + 1).clamp(max=n - 1)).clamp(max=last)

    patch.setattr(DraftEagle3, "_ids", moved)
    map_blocks(patch, lambda ids: torch.cat((ids[1:], ids[-1:])))


def _never_one(patch: Patch, session: Session) -> None:
    """One token, which is frequent, is left out of what is drafted."""
    newline = torch.tensor(session.tokenizer.encode("\n")[-1:])
    change_logits(patch, lambda _, requests, logits: logits.index_fill(-1, newline, -1e9))


# -- mistakes of one stage that no one had listed ----------------------------------------------


def _scaled_rows(patch: Patch, session: Session) -> None:
    change_rows(patch, partial(torch.mul, other=0.25))


def _one_layer_zero(patch: Patch, session: Session) -> None:
    def taken(self: DraftEagle3, rows: TargetRows) -> torch.Tensor:
        layer = self.taps[1]
        taps = {**rows.taps, layer: torch.zeros_like(rows.taps[layer])}
        features = TargetRows(rows.hidden, taps).side_by_side(self.taps)
        return self._model.fused(features, invariant=self._memory.batch_invariant)

    patch.setattr(DraftEagle3, "_taken", taken)


def _other_rope(patch: Patch, session: Session) -> None:
    no_recordings(patch)
    model: Any = session.drafts["draft-simple"]
    config = model._rope.config
    other = replace(config, freq_base=0.1 * config.freq_base)
    patch.setattr(model, "_rope", RopeTables(other))


def _halves_exchanged(patch: Patch, session: Session) -> None:
    alone(patch)
    no_recordings(patch)
    joined = mtp.join
    patch.setattr(mtp, "join", lambda parts: joined(tuple(parts)[::-1]))


def _sees_twelve(patch: Patch, session: Session) -> None:
    inject = BlockDrafter._inject

    def forgetting(self: BlockDrafter, seqs: Any) -> None:
        inject(self, seqs)
        for seq in seqs:
            stop = max(0, self._contexts[seq].n_injected - 12)
            self._memory.attention.seq_rm(seq, 0, stop)

    patch.setattr(BlockDrafter, "_inject", forgetting)


def _begins_with_a_mask(patch: Patch, session: Session) -> None:
    change_blocks(patch, lambda ubatch: np.copyto(ubatch.tokens[:, 0], ubatch.tokens[:, -1]))


def _favoured(patch: Patch, session: Session) -> None:
    token = session.tokenizer.encode(" = ")[0]
    bias = 6.0 * (torch.arange(session.config.n_vocab) == token)
    change_logits(patch, lambda _, requests, logits: logits + bias)


# -- look-ups ----------------------------------------------------------------------------------


def _learns_rejected(patch: Patch, session: Session) -> None:
    for kind in (NgramDrafter, suffix.SuffixDrafter):
        drafted: dict[int, list[int]] = {}

        def draft(self: Any, requests: Any, own: Any = kind.draft, drafted: Any = drafted) -> Any:
            found = own(self, requests)
            drafted.update(
                (one.seq, list(x.tokens)) for one, x in zip(requests, found, strict=True)
            )
            return found

        def observe(
            self: Any,
            seq: int,
            pos0: int,
            tokens: Any,
            rows: Any,
            own: Any = kind.observe,
            drafted: Any = drafted,
        ) -> None:
            batch = drafted.pop(seq, [])
            own(self, seq, pos0, [tokens[0], *batch] if batch else tokens, rows)

        patch.setattr(kind, "draft", draft)
        patch.setattr(kind, "observe", observe)


def _newest_left_out(patch: Patch, session: Session) -> None:
    """What is looked up ends before the newest token."""
    look_up = NgramSimple._look_up

    def late(self: Any, seq: int, history: History, last: int) -> Any:
        n = len(history) - 1
        return look_up(self, seq, History(history.part(0, n)), history.part(n)[0])

    patch.setattr(NgramSimple, "_look_up", late)


def _copies_too_far(patch: Patch, session: Session) -> None:
    """What is copied begins one token too far."""
    look_up = NgramSimple._look_up

    def far(self: Any, seq: int, history: History, last: int) -> Any:
        draft = look_up(self, seq, history, last)
        if draft.tokens:
            start = draft.match_pos + self._n + 1
            draft.tokens = history.part(start, start + self.n_max)
        return draft

    patch.setattr(NgramSimple, "_look_up", far)


def _prompt_rows_zero(patch: Patch, session: Session) -> None:
    own = BlockDrafter.observe

    def observe(self: Any, seq: int, pos0: int, tokens: Any, rows: TargetRows) -> None:
        own(self, seq, pos0, tokens, rows if pos0 else each(rows, torch.zeros_like))

    patch.setattr(BlockDrafter, "observe", observe)


def _prompt_alone(patch: Patch, session: Session) -> None:
    patch.setattr(suffix.SuffixDrafter, "observe", lambda self, *what: None)


def _second_choice(patch: Patch, session: Session) -> None:
    """The second most frequent token, where there is one."""
    own = suffix.SuffixDrafter._draft

    def draft(self: Any, request: int, n_max: int) -> Any:
        found = own(self, request, n_max)
        for i, top in enumerate(found.top_ids):
            if len(top) > 1:
                found.cut(i + 1, "")
                found.tokens[i] = top[1]
                break
        return found

    patch.setattr(suffix.SuffixDrafter, "_draft", draft)


def _no_prompt(patch: Patch, session: Session) -> None:
    """The tree has nothing of the prompt."""
    start = suffix.SuffixTexts.start

    def without(self: Any, request: int, prompt: Any) -> None:
        start(self, request, ())
        self._requests[request][1].tokens.extend(prompt)

    patch.setattr(suffix.SuffixTexts, "start", without)


# -- rule and counts ---------------------------------------------------------------------------


def _first_always(patch: Patch, session: Session) -> None:
    """The first token of a draft is accepted unseen."""

    def lossy(draft: Any, rows: Any, sampler: Any, end_tokens: Any) -> list[int]:
        if len(draft.tokens) < 2 or draft.tokens[0] in end_tokens:
            return acceptance.match(draft, rows, sampler, end_tokens)
        sampler.accept(draft.tokens[0])
        accepted = [draft.tokens[0]]
        for i, drafted in enumerate(draft.tokens[1:], start=1):
            accepted.append(sampler.draw(rows(i)))
            if accepted[-1] != drafted or acceptance.closes(i, drafted, draft, end_tokens):
                return accepted
        return acceptance.with_bonus(accepted, rows, sampler)

    patch.setitem(acceptance.RULES, "match", lossy)


def _rounds_counted(run: RunRef) -> None:
    """Its counter of accepted tokens counts rounds with any."""
    accepted, drafted = counts_of(run)
    count(run, accepted[drafted > 0] > 0, drafted[drafted > 0])


def _stale(options: RunOptions) -> RunOptions:
    return replace(options, faults=("stale-logits",))


def _longer_ngram(options: RunOptions) -> RunOptions:
    sizes = replace(options.spec.ngram_simple, size_n=4)
    return replace(options, spec=replace(options.spec, ngram_simple=sizes))


def _own_cells(patch: Patch, session: Session) -> None:
    """Cells of accepted tokens stay as drafting wrote them."""
    alone(patch)

    def keeping(self: RowDrafter, seq: int, pos0: int, tokens: Any, rows: TargetRows) -> None:
        paired = self._of(seq)
        there = self._memory.seq_pos_max(seq) + 1 - paired.n_decoded
        paired.n_decoded += max(0, min(len(tokens) - 1, there)) * bool(pos0)
        self._memory.seq_rm(seq, paired.n_decoded)
        paired.write(pos0, tokens, self._taken(rows), rows.hidden)

    for kind in (RowDrafter, DraftEagle3):
        patch.setattr(kind, "observe", keeping)


def _first_dropped(patch: Patch, session: Session) -> None:
    alone(patch)
    own = ModelDrafter.draft

    def draft(self: ModelDrafter, requests: Any) -> Any:
        self.n_max += 1
        found = own(self, [replace(one, n_max=one.n_max + 1) for one in requests])
        self.n_max -= 1
        for one in found:
            for row in (one.tokens, one.probs, one.top_ids, one.top_probs):
                del row[:1]
        return found

    patch.setattr(ModelDrafter, "draft", draft)


def _far_steps(patch: Patch, session: Session) -> None:
    alone(patch)
    own = row_drafter.single_tokens
    patch.setattr(row_drafter, "single_tokens", lambda requests, n: own(requests, n + 40))


def _emptied(patch: Patch, session: Session) -> None:
    own = BlockDrafter._inject

    def inject(self: BlockDrafter, seqs: Any) -> None:
        for seq in seqs:
            self._memory.attention.seq_rm(seq, 0, -1)
        own(self, seqs)

    patch.setattr(BlockDrafter, "_inject", inject)


def _as_far_as_it_may(patch: Patch, session: Session) -> None:
    patch.setattr(suffix.SuffixOptions, "most_after", lambda self, n_match, n_max: n_max)


def _counts_late(run: RunRef) -> None:
    """Each round has the count of the one before."""
    accepted, drafted = counts_of(run)
    mine = drafted > 0
    accepted[mine] = np.minimum(np.roll(accepted[mine], 1), drafted[mine])


def _one_for_any(run: RunRef) -> None:
    """A round counts one accepted token where there are more."""
    accepted, _ = counts_of(run)
    np.minimum(accepted, 1, out=accepted)


MORE_BUGS: dict[str, Bug] = {
    "first token twice": Bug(
        "special tokens", "not have special", _MODEL, prompt=_twice_first, good_prompt=with_first
    ),
    "cut on the left": Bug("text", "end of the other", _MODEL, prompt=_cut_left),
    "layer before the last": Bug("target rows", "layer", ("mtp",), _layer_before),
    "normed layers": Bug("target rows", "normed", ("eagle3", "dflash", "dflash2"), _normed_taps),
    "steady row": Bug("target rows", "same row", _ROW, _steady_row),
    "blocks too far": Bug("positions", "too far", _BLOCKS, _blocks_too_far),
    "cells stay": Bug("drafter state", "stay", _ROW, _cells_stay),
    "rejected rows stay": Bug("drafter state", "stay", _BLOCKS, _rejected_rows_stay),
    "next ids": Bug("candidates", "d2t", ("eagle3-d2t", "dflash-d2t"), _next_ids),
    "one token never": Bug("candidates", "never drafted", _MODEL, _never_one),
    "learns rejected": Bug("drafter state", "rejected", ("suffix", "ngram-mod"), _learns_rejected),
    "newest left out": Bug("drafter state", "late", ("ngram-simple",), _newest_left_out),
    "copies too far": Bug("drafter state", "ahead", ("ngram-simple",), _copies_too_far),
    "no prompt looked up": Bug("drafter state", "prompt", ("suffix",), _no_prompt),
    "prompt rows zero": Bug("target rows", "of the prompt", _BLOCKS, _prompt_rows_zero),
    "only the prompt": Bug("drafter state", "only the prompt", ("suffix",), _prompt_alone),
    "second choice": Bug("candidates", "rank 2", ("suffix",), _second_choice),
    "longer n-gram": Bug("candidates", "size_n", ("ngram-simple",), options=_longer_ngram),
    "first always": Bug("acceptance rule", "lossy", _MODEL, _first_always),
    "stale logits": Bug("acceptance rule", "after a rejection", _MODEL, options=_stale),
    "scaled rows": Bug("target rows", "0.25 times", ("eagle3",), _scaled_rows),
    "one layer zero": Bug("target rows", "are zeros", ("eagle3", "eagle3-d2t"), _one_layer_zero),
    "other rope": Bug("positions", "frequency base", ("simple",), _other_rope),
    "halves exchanged": Bug("block", "halves", ("mtp",), _halves_exchanged),
    "sees twelve": Bug("drafter state", "at most 12", _BLOCKS, _sees_twelve),
    "begins with a mask": Bug("block", "start with a mask", _BLOCKS, _begins_with_a_mask),
    "favoured token": Bug("candidates", "favoured", ("mtp", "simple"), _favoured),
    "own cells": Bug("drafter state", "of its own", _ROW, _own_cells),
    "first dropped": Bug("drafter state", "one token ahead", _MODEL, _first_dropped),
    "far steps": Bug("positions", "too far", _ROW, _far_steps),
    "emptied memory": Bug("drafter state", "emptied", _BLOCKS, _emptied),
    "as far as it may": Bug("candidates", "max_spec_factor", ("suffix",), _as_far_as_it_may),
    "counts late": Bug("counting", "previous round", _MODEL, edit=_counts_late),
    "one for any": Bug("counting", "fewer accepted", _MODEL, edit=_one_for_any),
    "rounds counted": Bug("counting", "counters", (*_MODEL, "suffix"), edit=_rounds_counted),
}
