"""Mistakes of engines in drafters and rules, each switched on in a context."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.batch import UBatch
from engine.decode import acceptance
from engine.draft import draft_dflash, row_drafter
from engine.draft.block_drafter import BlockDrafter
from engine.draft.draft_dspark import DraftDspark
from engine.draft.draft_eagle3 import DraftEagle3
from engine.draft.draft_mtp import DraftMtp
from engine.draft.draft_simple import DraftSimple
from engine.draft.model_drafter import ModelDrafter
from engine.draft.row_drafter import PairedRows, RowDrafter
from engine.draft.spec import DrafterInputs
from engine.memory.hybrid import HybridMemory, LentMemories
from engine.model.layers import TargetRows
from engine.sampling.distribution import TokenDraws
from engine.session import Session

Patch = pytest.MonkeyPatch


def no_recordings(patch: Patch) -> None:
    """Passes are computed, not repeated as they were recorded in a run without the mistake."""
    patch.setattr(Session, "_memories", lambda self, options: LentMemories())


# -- rows --------------------------------------------------------------------------------------


def alone(patch: Patch) -> None:
    """Drafts step by step, which the bugs patch."""
    patch.setattr(DraftMtp, "_at_once", lambda self, request: None)


def before_norm(patch: Patch, session: Session) -> None:
    norm, _ = session.model.final_norm
    alone(patch)
    patch.setattr(DraftMtp, "_taken", lambda self, rows: rows.hidden / norm)


def rolled_rows(patch: Patch, session: Session) -> None:
    alone(patch)
    taken = {kind: kind._taken for kind in (DraftMtp, DraftEagle3)}
    for kind, own in taken.items():
        patch.setattr(kind, "_taken", lambda self, rows, own=own: torch.roll(own(self, rows), 1, 0))


def zero_rows(patch: Patch, session: Session) -> None:
    change_rows(patch, torch.zeros_like)


def change_rows(patch: Patch, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The target's rows are changed where drafters take them."""
    alone(patch)
    for kind in (DraftMtp, DraftEagle3):
        own = kind._taken
        patch.setattr(kind, "_taken", lambda self, rows, own=own: own(self, each(rows, change)))
    observe = BlockDrafter.observe
    patch.setattr(
        BlockDrafter,
        "observe",
        lambda self, seq, pos0, tokens, rows: observe(self, seq, pos0, tokens, each(rows, change)),
    )


def each(rows: TargetRows, change: Callable[[torch.Tensor], torch.Tensor]) -> TargetRows:
    return TargetRows(change(rows.hidden), {i: change(x) for i, x in rows.taps.items()})


def next_layers(by: int) -> Callable[[Patch, Session], None]:
    def patch_layers(patch: Patch, session: Session) -> None:
        for kind in (DraftEagle3, BlockDrafter):
            own = kind.taps.fget
            patch.setattr(
                kind, "taps", property(lambda self, own=own: tuple(tap + by for tap in own(self)))
            )

    return patch_layers


def reversed_layers(patch: Patch, session: Session) -> None:
    for kind in (DraftEagle3, BlockDrafter):
        own = kind.taps.fget
        patch.setattr(kind, "taps", property(lambda self, own=own: own(self)[::-1]))


def stale_last(patch: Patch, session: Session) -> None:
    """After a rejection the newest row is that of the last token of the verify batch."""
    alone(patch)
    decoded, write = RowDrafter.decoded, PairedRows.write
    latest: dict[int, tuple[int, torch.Tensor]] = {}

    def remember(self: RowDrafter, ubatch: UBatch, rows: TargetRows) -> None:
        decoded(self, ubatch, rows)
        for i in range(ubatch.n_seqs):
            latest[int(ubatch.positions[i, 0])] = ubatch.n_seq_tokens, self._taken(rows[i])[-1]

    def stale(self: PairedRows, pos0: int, tokens: Any, rows: Any, hidden: Any) -> None:
        write(self, pos0, tokens, rows, hidden)
        n, row = latest.get(pos0, (0, None))
        if n > len(tokens) and row is not None:
            self.rows[len(self.tokens) - self.ahead] = row

    for kind in (RowDrafter, DraftEagle3):
        patch.setattr(kind, "decoded", remember)
    patch.setattr(PairedRows, "write", stale)


def stays(after_whole: bool) -> Callable[[Patch, Session], None]:
    """After a rejection, or else after a draft that was accepted whole, the newest row is that of
    the round before."""

    def patch_rows(patch: Patch, session: Session) -> None:
        alone(patch)
        decoded, write = RowDrafter.decoded, PairedRows.write
        width: dict[int, int] = {}

        def remember(self: RowDrafter, ubatch: UBatch, rows: TargetRows) -> None:
            decoded(self, ubatch, rows)
            width[int(ubatch.positions[0, 0])] = ubatch.n_seq_tokens

        def stale(self: PairedRows, pos0: int, tokens: Any, rows: Any, hidden: Any) -> None:
            write(self, pos0, tokens, rows, hidden)
            n, own = len(tokens), width.get(pos0, 0)
            if pos0 and (own == n > 1 if after_whole else own > n):
                newest = len(self.tokens) - self.ahead
                self.rows[newest] = self.rows[newest - n]

        for kind in (RowDrafter, DraftEagle3):
            patch.setattr(kind, "decoded", remember)
        patch.setattr(PairedRows, "write", stale)

    return patch_rows


def one_token(patch: Patch, session: Session) -> None:
    """What logits that are NaN come to where they are not looked at."""
    alone(patch)
    patch.setattr(ModelDrafter, "_ids", lambda self, rows: torch.zeros_like(rows))
    patch.setattr(DraftEagle3, "_ids", lambda self, rows: torch.zeros_like(rows))


# -- positions and state -----------------------------------------------------------------------


def too_far(patch: Patch, session: Session) -> None:
    alone(patch)
    own = row_drafter.single_tokens
    for module in (row_drafter, draft_simple_module()):
        patch.setattr(module, "single_tokens", lambda requests, n: own(requests, n + 1))


def draft_simple_module() -> Any:
    from engine.draft import draft_simple

    return draft_simple


def counts_undecoded(patch: Patch, session: Session) -> None:
    """The last token of a draft that is accepted whole counts as decoded, and is not."""
    observe = DraftSimple.observe

    def skipping(self: DraftSimple, seq: int, pos0: int, tokens: Any, rows: Any) -> None:
        progress = self._progress.get(seq)
        before = list(progress.guessed) if progress else []
        observe(self, seq, pos0, tokens, rows)
        if before and list(tokens[: len(before)]) == before and len(tokens) > len(before):
            self._progress[seq].n_decoded += 1

    patch.setattr(DraftSimple, "observe", skipping)


def not_rolled_back(patch: Patch, session: Session) -> None:
    """Rejected tokens stay in the draft model's memory."""

    def keeping(self: DraftSimple, seq: int, pos0: int, tokens: Any, rows: Any) -> None:
        from engine.draft.draft_simple import _DecodedSoFar

        progress = self._progress.setdefault(seq, _DecodedSoFar())
        n_true = 0
        for guess, token in zip(progress.guessed, tokens, strict=False):
            if guess != token:
                break
            n_true += 1
        progress.n_decoded += n_true
        progress.tokens.extend(tokens)
        progress.guessed = []

    patch.setattr(DraftSimple, "observe", keeping)


def no_prompt(last: int = 1 << 20) -> Callable[[Patch, Session], None]:
    """The drafter's memory has nothing of the last tokens of the prompt."""

    def patch_memory(patch: Patch, session: Session) -> None:
        inject = BlockDrafter._inject
        seen = set[tuple[int, int]]()

        def without(self: BlockDrafter, seqs: Any) -> None:
            inject(self, seqs)
            for seq in seqs:
                if (id(self), seq) not in seen:
                    seen.add((id(self), seq))
                    n = self._contexts[seq].n_injected
                    self._memory.attention.seq_rm(seq, max(0, n - last), n)

        patch.setattr(BlockDrafter, "_inject", without)

    return patch_memory


# -- blocks ------------------------------------------------------------------------------------


def change_blocks(patch: Patch, change: Callable[[UBatch], object]) -> None:
    """Blocks are changed before they are decoded."""
    blocks = BlockDrafter._blocks

    def changed(self: BlockDrafter, requests: Any) -> UBatch:
        ubatch = blocks(self, requests)
        change(ubatch)
        return ubatch

    patch.setattr(BlockDrafter, "_blocks", changed)


def other_mask(patch: Patch, session: Session) -> None:
    change_blocks(patch, lambda ubatch: ubatch.tokens[:, 1:].fill(0))


def whole_block(patch: Patch, session: Session) -> None:
    init = BlockDrafter.__init__

    def longer(self: BlockDrafter, *args: Any, **more: Any) -> None:
        init(self, *args, **more)
        self._block_length = self._model.config.block_size

    def choose(self: Any, requests: Any, out: Any) -> Any:
        first = self._model.config.block_length(self.n_max) - self.n_max
        rows = slice(0, first + self.n_max)
        cut = out._replace(logits=out.logits[:, rows], hidden=out.hidden[:, rows])
        return own(self, requests, cut)

    own = draft_dflash.DraftDflash._choose
    patch.setattr(BlockDrafter, "__init__", longer)
    patch.setattr(draft_dflash.DraftDflash, "_choose", choose)


def flipped(patch: Patch, session: Session) -> None:
    from functools import partial

    own = DrafterInputs.memory

    def memory(self: DrafterInputs, drafter: str, make: Any) -> HybridMemory:
        if drafter in ("draft-dflash", "draft-dspark"):
            make = partial(make.func, *make.args, ahead=not make.keywords["ahead"])
            drafter += "-flipped"
        return own(self, drafter, make)

    patch.setattr(DrafterInputs, "memory", memory)


def next_row(patch: Patch, session: Session) -> None:
    """Tokens are taken from one row on."""
    for kind in (DraftDspark, draft_dflash.DraftDflash):
        own = kind._choose
        patch.setattr(
            kind,
            "_choose",
            lambda self, requests, out, own=own: own(
                self, requests, out._replace(logits=torch.roll(out.logits, -1, 1))
            ),
        )


# -- candidates --------------------------------------------------------------------------------


def unmapped(patch: Patch, session: Session) -> None:
    patch.setattr(DraftEagle3, "_ids", lambda self, rows: rows)
    map_blocks(patch, lambda ids: torch.arange(len(ids), device=ids.device))


def added_twice(patch: Patch, session: Session) -> None:
    def twice(self: DraftEagle3, rows: torch.Tensor) -> torch.Tensor:
        return (self._vocabulary.of_target(rows) + rows).clamp(max=session.config.n_vocab - 1)

    patch.setattr(DraftEagle3, "_ids", twice)
    n = session.config.n_vocab - 1
    map_blocks(patch, lambda ids: (ids + torch.arange(len(ids), device=ids.device)).clamp(max=n))


def map_blocks(patch: Patch, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    best = BlockDrafter._best

    def mapped(self: BlockDrafter, logits: torch.Tensor) -> Any:
        model = self._model
        if model.ids is None:
            return best(self, logits)
        own, model.ids = model.ids, change(model.ids)
        try:
            return best(self, logits)
        finally:
            model.ids = own

    patch.setattr(BlockDrafter, "_best", mapped)


def change_logits(patch: Patch, change: Callable[..., torch.Tensor]) -> None:
    """Drafters choose from other logits. change: of the drafter, its requests and a copy of their
    logits [n, n_vocab]."""
    alone(patch)
    step = ModelDrafter._step

    def changed(self: ModelDrafter, requests: Any, logits: torch.Tensor, of: Any = None) -> Any:
        return step(self, requests, change(self, requests, logits.clone()), of)

    patch.setattr(ModelDrafter, "_step", changed)


def second_best(patch: Patch, session: Session) -> None:
    def second(_: Any, requests: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits.scatter(-1, logits.argmax(-1, keepdim=True), -1e9)

    change_logits(patch, second)


def cut_head(patch: Patch, session: Session) -> None:
    n = session.config.n_vocab // 2
    change_logits(patch, lambda _, requests, logits: logits[..., :n])


def drawn(patch: Patch, session: Session) -> None:
    """Candidates are drawn, and accepted where they are the target's."""
    for kind in (ModelDrafter, BlockDrafter):
        init = kind.__init__

        def drawing(self: Any, *args: Any, init: Any = init, **more: Any) -> None:
            init(self, *args, **more)
            self._draws = TokenDraws(1.5, 3)

        patch.setattr(kind, "__init__", drawing)
    alone(patch)


# -- rule and counts ---------------------------------------------------------------------------


def never_the_last(patch: Patch, session: Session) -> None:
    def stricter(draft: Any, rows: Any, sampler: Any, end_tokens: Any) -> list[int]:
        accepted = acceptance.match(draft, rows, sampler, end_tokens)
        return accepted[: max(1, len(draft.tokens))] if draft.tokens else accepted

    patch.setitem(acceptance.RULES, "match", stricter)


def at_most_one(patch: Patch, session: Session) -> None:
    def stricter(draft: Any, rows: Any, sampler: Any, end_tokens: Any) -> list[int]:
        return acceptance.match(draft, rows, sampler, end_tokens)[:2]

    patch.setitem(acceptance.RULES, "match", stricter)
