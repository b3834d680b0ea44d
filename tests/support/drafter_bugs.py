"""Known mistakes of engines, each switched on in copies of the drafters, the rule or the records.

A bug that patches is a context in which a run is made; one of the records changes what was written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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
from engine.memory.hybrid import HybridMemory
from engine.model.layers import TargetRows
from engine.options import Prompt, RunOptions
from engine.sampling.distribution import TokenDraws
from engine.session import Session
from engine.trace.records import MISSING
from engine.trace.run_ref import RunRef

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Bug:
    """stage: that is to be named; words: that its sentence has. kinds: drafters that can have it.

    patch: makes it; prompt, options: change what is asked; edit: changes the run afterwards.
    """

    stage: str
    words: str
    kinds: tuple[str, ...]
    patch: Callable[[Patch, Session], None] | None = None
    prompt: Callable[[Session, Prompt], Prompt] | None = None
    good_prompt: Callable[[Session, Prompt], Prompt] | None = None
    options: Callable[[RunOptions], RunOptions] | None = None
    edit: Callable[[RunRef], None] | None = None


# -- prompts -----------------------------------------------------------------------------------


def _control(session: Session) -> int:
    n = session.tokenizer.n_vocab
    return next(i for i in range(n) if session.tokenizer.is_control(i))


def with_first(session: Session, prompt: Prompt) -> Prompt:
    """The prompt after a control token, as an engine that adds one has it."""
    return Prompt((_control(session), *prompt.tokens), prompt.text)


def _special_as_text(session: Session, prompt: Prompt) -> Prompt:
    text = session.tokenizer.piece(_control(session)).decode()
    cut = session.tokenizer.encode(text, parse_special=False)
    return Prompt((*cut, *prompt.tokens), prompt.text)


def _other_template(session: Session, prompt: Prompt) -> Prompt:
    more = session.tokenizer.encode("# answer\n")
    return Prompt((*prompt.tokens, *more), prompt.text)


def _other_text(session: Session, prompt: Prompt) -> Prompt:
    return session.prompt("x = 1\n" + session.tokenizer.decode(prompt.tokens))


def _other_cut(session: Session, prompt: Prompt) -> Prompt:
    text = session.tokenizer.decode(prompt.tokens)
    ids = [i for letter in text for i in session.tokenizer.encode(letter)]
    return Prompt(tuple(ids), prompt.text)


# -- rows --------------------------------------------------------------------------------------


def alone(patch: Patch) -> None:
    """Drafts step by step, which the bugs patch."""
    patch.setattr(DraftMtp, "_at_once", lambda self, request: None)


def _before_norm(patch: Patch, session: Session) -> None:
    norm, _ = session.model.final_norm
    alone(patch)
    patch.setattr(DraftMtp, "_taken", lambda self, rows: rows.hidden / norm)


def _rolled_rows(patch: Patch, session: Session) -> None:
    alone(patch)
    taken = {kind: kind._taken for kind in (DraftMtp, DraftEagle3)}
    for kind, own in taken.items():
        patch.setattr(kind, "_taken", lambda self, rows, own=own: torch.roll(own(self, rows), 1, 0))


def _zero_rows(patch: Patch, session: Session) -> None:
    alone(patch)
    for kind in (DraftMtp, DraftEagle3):
        own = kind._taken
        patch.setattr(
            kind, "_taken", lambda self, rows, own=own: own(self, each(rows, torch.zeros_like))
        )
    observe = BlockDrafter.observe
    patch.setattr(
        BlockDrafter,
        "observe",
        lambda self, seq, pos0, tokens, rows: observe(
            self, seq, pos0, tokens, each(rows, torch.zeros_like)
        ),
    )


def each(rows: TargetRows, change: Callable[[torch.Tensor], torch.Tensor]) -> TargetRows:
    return TargetRows(change(rows.hidden), {i: change(x) for i, x in rows.taps.items()})


def _next_layers(by: int) -> Callable[[Patch, Session], None]:
    def patch_layers(patch: Patch, session: Session) -> None:
        for kind in (DraftEagle3, BlockDrafter):
            own = kind.taps.fget
            patch.setattr(
                kind, "taps", property(lambda self, own=own: tuple(tap + by for tap in own(self)))
            )

    return patch_layers


def _reversed_layers(patch: Patch, session: Session) -> None:
    for kind in (DraftEagle3, BlockDrafter):
        own = kind.taps.fget
        patch.setattr(kind, "taps", property(lambda self, own=own: own(self)[::-1]))


def _stale_last(patch: Patch, session: Session) -> None:
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


def _not_updated(patch: Patch, session: Session) -> None:
    """After a rejection the newest row is that of the round before."""
    alone(patch)
    decoded, write = RowDrafter.decoded, PairedRows.write
    width: dict[int, int] = {}

    def remember(self: RowDrafter, ubatch: UBatch, rows: TargetRows) -> None:
        decoded(self, ubatch, rows)
        width[int(ubatch.positions[0, 0])] = ubatch.n_seq_tokens

    def stale(self: PairedRows, pos0: int, tokens: Any, rows: Any, hidden: Any) -> None:
        write(self, pos0, tokens, rows, hidden)
        if width.get(pos0, 0) > len(tokens):
            newest = len(self.tokens) - self.ahead
            self.rows[newest] = self.rows[newest - len(tokens)]

    for kind in (RowDrafter, DraftEagle3):
        patch.setattr(kind, "decoded", remember)
    patch.setattr(PairedRows, "write", stale)


def _one_token(patch: Patch, session: Session) -> None:
    """What logits that are NaN come to where they are not looked at."""
    alone(patch)
    patch.setattr(ModelDrafter, "_ids", lambda self, rows: torch.zeros_like(rows))
    patch.setattr(DraftEagle3, "_ids", lambda self, rows: torch.zeros_like(rows))


# -- positions and state -----------------------------------------------------------------------


def _too_far(patch: Patch, session: Session) -> None:
    alone(patch)
    own = row_drafter.single_tokens
    for module in (row_drafter, draft_simple_module()):
        patch.setattr(module, "single_tokens", lambda requests, n: own(requests, n + 1))


def draft_simple_module() -> Any:
    from engine.draft import draft_simple

    return draft_simple


def _counts_undecoded(patch: Patch, session: Session) -> None:
    """The last token of a draft that is accepted whole counts as decoded, and is not."""
    observe = DraftSimple.observe

    def skipping(self: DraftSimple, seq: int, pos0: int, tokens: Any, rows: Any) -> None:
        progress = self._progress.get(seq)
        before = list(progress.guessed) if progress else []
        observe(self, seq, pos0, tokens, rows)
        if before and list(tokens[: len(before)]) == before and len(tokens) > len(before):
            self._progress[seq].n_decoded += 1

    patch.setattr(DraftSimple, "observe", skipping)


def _not_rolled_back(patch: Patch, session: Session) -> None:
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


def _no_prompt(patch: Patch, session: Session) -> None:
    """The drafter's memory has nothing of the prompt."""
    inject = BlockDrafter._inject

    def without(self: BlockDrafter, seqs: Any) -> None:
        inject(self, seqs)
        for seq in seqs:
            if not hasattr(self, "_prompt_seen"):
                self._prompt_seen = set()
            if seq not in self._prompt_seen:
                self._prompt_seen.add(seq)
                n = self._contexts[seq].n_injected
                self._memory.attention.seq_rm(seq, 0, n)

    patch.setattr(BlockDrafter, "_inject", without)


# -- blocks ------------------------------------------------------------------------------------


def _other_mask(patch: Patch, session: Session) -> None:
    blocks = BlockDrafter._blocks

    def masked(self: BlockDrafter, requests: Any) -> UBatch:
        ubatch = blocks(self, requests)
        ubatch.tokens[:, 1:] = 0
        return ubatch

    patch.setattr(BlockDrafter, "_blocks", masked)


def _whole_block(patch: Patch, session: Session) -> None:
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


def _flipped(patch: Patch, session: Session) -> None:
    from functools import partial

    own = DrafterInputs.memory

    def memory(self: DrafterInputs, drafter: str, make: Any) -> HybridMemory:
        if drafter in ("draft-dflash", "draft-dspark"):
            make = partial(make.func, *make.args, ahead=not make.keywords["ahead"])
            drafter += "-flipped"
        return own(self, drafter, make)

    patch.setattr(DrafterInputs, "memory", memory)


def _next_row(patch: Patch, session: Session) -> None:
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


def _unmapped(patch: Patch, session: Session) -> None:
    patch.setattr(DraftEagle3, "_ids", lambda self, rows: rows)
    map_blocks(patch, lambda ids: torch.arange(len(ids), device=ids.device))


def _added_twice(patch: Patch, session: Session) -> None:
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


def _second_best(patch: Patch, session: Session) -> None:
    alone(patch)
    step = ModelDrafter._step

    def second(self: ModelDrafter, requests: Any, logits: torch.Tensor, of: Any = None) -> Any:
        best = logits.argmax(-1, keepdim=True)
        return step(self, requests, logits.scatter(-1, best, -1e9), of)

    patch.setattr(ModelDrafter, "_step", second)


def _cut_head(patch: Patch, session: Session) -> None:
    alone(patch)
    step = ModelDrafter._step
    n = session.config.n_vocab // 2

    def cut(self: ModelDrafter, requests: Any, logits: torch.Tensor, of: Any = None) -> Any:
        return step(self, requests, logits[..., :n], of)

    patch.setattr(ModelDrafter, "_step", cut)


def _drawn(patch: Patch, session: Session) -> None:
    """Candidates are drawn, and accepted where they are the target's."""
    for kind in (ModelDrafter, BlockDrafter):
        init = kind.__init__

        def drawing(self: Any, *args: Any, init: Any = init, **more: Any) -> None:
            init(self, *args, **more)
            self._draws = TokenDraws(1.5, 3)

        patch.setattr(kind, "__init__", drawing)
    alone(patch)


# -- rule and counts ---------------------------------------------------------------------------


def _never_the_last(patch: Patch, session: Session) -> None:
    def stricter(draft: Any, rows: Any, sampler: Any, end_tokens: Any) -> list[int]:
        accepted = acceptance.match(draft, rows, sampler, end_tokens)
        return accepted[: max(1, len(draft.tokens))] if draft.tokens else accepted

    patch.setitem(acceptance.RULES, "match", stricter)


def _at_most_one(patch: Patch, session: Session) -> None:
    def stricter(draft: Any, rows: Any, sampler: Any, end_tokens: Any) -> list[int]:
        return acceptance.match(draft, rows, sampler, end_tokens)[:2]

    patch.setitem(acceptance.RULES, "match", stricter)


def _bonus_counts(run: RunRef) -> None:
    rounds = run.store.rounds
    accepted, drafted = (
        rounds._arrays[f"num_{name}_tokens"][: len(rounds)] for name in ("accepted_draft", "draft")
    )
    mine = drafted > accepted
    mine &= accepted >= 0
    accepted[mine] += 1


def _replays_count(run: RunRef) -> None:
    rounds = run.store.rounds
    accepted, drafted = (
        rounds.column(f"num_{name}_tokens").copy() for name in ("accepted_draft", "draft")
    )
    mine = drafted > 0
    partial = mine & (accepted < drafted)
    run.facts["requests"] = [
        {
            "seq_ids": [0],
            "told": {
                "draft_n": int(drafted[mine].sum() + accepted[partial].sum() + partial.sum()),
                "draft_n_accepted": int(
                    accepted[mine].sum() + accepted[partial].sum() + partial.sum()
                ),
            },
        }
    ]


def without_tops(run: RunRef) -> None:
    """A run as a log without candidates has it."""
    tokens = run.store.tokens
    for name in ("draft_top_id", "draft_top_p", "draft_p", "draft_conf"):
        if (array := tokens._arrays.get(name)) is None:
            continue  # a look-up has none
        array[: len(tokens)] = MISSING if name.endswith("_id") else float("nan")


def without_rejected(run: RunRef) -> None:
    """A run as a stream has it: ids of rejected tokens are not known."""
    without_tops(run)
    tokens = run.store.tokens
    kinds = tokens.texts("kind")
    array = tokens._arrays["token_id"]
    for row, kind in enumerate(kinds):
        if kind in ("rejected", "ignored"):
            array[row] = MISSING


def _spec(**changed: Any) -> Callable[[RunOptions], RunOptions]:
    return lambda options: replace(options, spec=replace(options.spec, **changed))


_ROW = ("mtp", "eagle3")
_BLOCKS = ("dflash", "dspark")
_MODEL = ("mtp", "simple", "eagle3")

BUGS: dict[str, Bug] = {
    "other text": Bug("text", "text", _MODEL, prompt=_other_text),
    "other template": Bug("text", "generation prompt", _MODEL, prompt=_other_template),
    "no first token": Bug("special tokens", "lacks special", _MODEL, prompt=with_first),
    "special token as text": Bug(
        "special tokens", "ordinary", _MODEL, prompt=_special_as_text, good_prompt=with_first
    ),
    "other cut": Bug("tokens", "other tokens", _MODEL, prompt=_other_cut),
    "one position too far": Bug("positions", "too far", ("eagle3", "eagle3-d2t"), _too_far),
    "before the norm": Bug("target rows", "before the target's final norm", ("mtp",), _before_norm),
    "rolled rows": Bug("target rows", "moved around", _ROW, _rolled_rows),
    "zero rows": Bug("target rows", "zeros", (*_ROW, "dflash", "dflash2", "dspark"), _zero_rows),
    "next layers": Bug("target rows", "layers one on", ("eagle3-d2t", "dflash"), _next_layers(1)),
    "layers before": Bug("target rows", "layers one before", ("eagle3",), _next_layers(-1)),
    "reversed layers": Bug(
        "target rows", "Rows of layers", ("eagle3", "dflash", "dflash2"), _reversed_layers
    ),
    "stale row": Bug("target rows", "last token of the verify batch", _ROW, _stale_last),
    "row not updated": Bug("target rows", "round before", _ROW, _not_updated),
    "NaN": Bug("target rows", "NaN", _ROW, _one_token),
    "undecoded token": Bug("drafter state", "counts as decoded", ("simple",), _counts_undecoded),
    "not rolled back": Bug("drafter state", "stay", ("simple",), _not_rolled_back),
    "prompt not seen": Bug("drafter state", "prompt", _BLOCKS, _no_prompt),
    "other mask": Bug("block", "Masks are token 0", (*_BLOCKS, "dflash2"), _other_mask),
    "whole block": Bug("block", "rows, not", ("dflash",), _whole_block),
    "flipped mask": Bug("block", "those after them", (*_BLOCKS, "dflash2"), _flipped),
    "next row": Bug("block", "from row", ("dspark", "dflash"), _next_row),
    "unmapped ids": Bug("candidates", "not applied", ("eagle3-d2t", "dflash-d2t"), _unmapped),
    "ids added twice": Bug("candidates", "twice", ("eagle3-d2t", "dflash-d2t"), _added_twice),
    "second best": Bug("candidates", "rank 2", _MODEL, _second_best),
    "cut head": Bug("candidates", "head is cut", _MODEL, _cut_head),
    "drawn candidates": Bug("candidates", "drawn", _MODEL, _drawn),
    "p_min": Bug("candidates", "p_min", _MODEL, options=_spec(p_min=0.7)),
    "n_max": Bug("candidates", "n_max", _MODEL, options=_spec(n_max=6)),
    "never the last": Bug("acceptance rule", "last token", _MODEL, _never_the_last),
    "at most one": Bug("acceptance rule", "No more than 1", _MODEL, _at_most_one),
    "bonus counts": Bug("counting", "own token", _MODEL, edit=_bonus_counts),
    "replays count": Bug("counting", "replays", _MODEL, edit=_replays_count),
}
