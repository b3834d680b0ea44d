"""Known mistakes in making drafts: what a drafter of an engine may do otherwise than ours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import torch

from engine.audit.draft_models import BlockModel, Candidates, DraftModel, Entries
from engine.audit.recorded_drafts import (
    CLEAN,
    DEVIATIONS,
    SHIFTED,
    Deviation,
    DraftedText,
    RecordedDraft,
)
from engine.model.taps import TargetRows
from engine.observe.drafter_diff.records import BLOCK, CANDIDATES, FEW, POSITIONS, ROWS, STATE
from engine.observe.drafter_diff.target_rows import TextRows
from engine.session import Session
from kernels.norm import rms_norm

Change = Callable[[Candidates], Candidates]
"""What a mistake makes of the candidates of a row, best first."""


_SHOWS_DRAWN = 8
"""Drafts that have to be among the ten best each: a few of another model may be by chance."""


@dataclass(frozen=True, slots=True)
class Guess:
    """A known mistake. about: a sentence. deviation, text, model: what is replayed; change: of the
    candidates, None for none; left: what is in memory with a draft beyond the text's, by round."""

    stage: str
    about: str
    deviation: Deviation
    text: DraftedText
    model: DraftModel
    change: Change | None = None
    left: Mapping[int, Entries] = field(default_factory=dict)


class Mistakes:
    """The mistakes that a drafter of a text may have made. n_ctx: cells of its memory. shown: a
    token as it is written in a sentence."""

    def __init__(
        self,
        session: Session,
        model: DraftModel,
        text: DraftedText,
        target: TextRows,
        n_ctx: int,
        shown: Callable[[int], str],
    ) -> None:
        self._session, self._model, self._text, self._target = session, model, text, target
        self._n_ctx, self._shown = n_ctx, shown

    def all(self, window: Sequence[RecordedDraft]) -> Iterator[Guess]:
        yield from self._of_candidates()
        yield from self._of_rows()
        yield from self._of_blocks()
        yield from self._of_state()
        yield from self._of_rejected(window)

    def _of_state(self) -> Iterator[Guess]:
        missing = Deviation("", "the drafter has not seen the prompt", since_prompt=True)
        for deviation in (*DEVIATIONS, missing):
            if deviation.is_of_rows and not self._model.reads_rows:
                continue
            which = deviation.batch
            text = self._text.in_batches(self._model, which) if which else self._text
            moves = deviation.place or deviation.step or deviation.drift
            stage = POSITIONS if moves else ROWS if deviation.what == SHIFTED else STATE
            if deviation.token_shift or deviation.round_shift:
                stage = STATE
            yield self._guess(stage, deviation.about, deviation, text)

    def _guess(
        self,
        stage: str,
        about: str,
        deviation: Deviation = CLEAN,
        text: DraftedText | None = None,
        model: DraftModel | None = None,
        change: Change | None = None,
    ) -> Guess:
        about = f"{about[0].upper()}{about[1:].rstrip('.')}."
        return Guess(stage, about, deviation, text or self._text, model or self._model, change)

    def _with_table(self, table: torch.Tensor | None) -> DraftedText:
        return replace(self._text, table=table)

    def _of_rows(self) -> Iterator[Guess]:
        if self._text.table is None:
            return
        table, model, rows = self._text.table, self._model, self._target.rows
        assert table is not None
        zero = self._model.table(_mapped(rows, torch.zeros_like))
        yield self._guess(ROWS, "the target's rows are zeros", text=self._with_table(zero))
        n = self._text.starts[0]
        about = "the target's rows of the prompt are zeros, as if they had not been handed over"
        unread = _mapped(rows, lambda x: torch.cat((torch.zeros_like(x[:n]), x[n:])))
        yield self._guess(ROWS, about, text=self._with_table(model.table(unread)))
        norm, eps = self._norm()
        last = self._session.config.n_layer if self._target.taps else None
        if (last is None or last in self._target.taps) and norm is not None:
            raw = _mapped(rows, lambda x: x / norm, last)
            about = "rows are taken before the target's final norm, not after it"
            yield self._guess(ROWS, about, text=self._with_table(model.table(raw)))
            again = _mapped(rows, lambda x: rms_norm(x.contiguous(), norm, eps), last)
            about = "the target's final norm is applied twice"
            yield self._guess(ROWS, about, text=self._with_table(model.table(again)))
        if not self._target.taps and norm is not None:
            yield from self._of_layers(norm, eps)
        if self._target.taps and norm is not None:
            normed = _mapped(rows, lambda x: rms_norm(x.contiguous(), norm, eps))
            about = "rows of its layers are normed by the target's final norm"
            yield self._guess(ROWS, about, text=self._with_table(model.table(normed)))
        for by in (1, -1):
            layers = [tap + by for tap in self._target.taps]
            if layers and all(0 <= layer <= self._session.config.n_layer for layer in layers):
                what = "outputs" if by > 0 else "inputs of the layers before"
                about = f"rows are of layers one {'on' if by > 0 else 'before'} ({what})"
                yield self._guess(ROWS, about, text=self._with_table(model.table(rows, layers)))
        for order in model.orders:
            about = f"rows of layers {', '.join(map(str, order))}, not {self._listed}"
            yield self._guess(ROWS, about, text=self._with_table(model.table(rows, order)))

    def _of_layers(self, norm: torch.Tensor, eps: float) -> Iterator[Guess]:
        """Rows of other layers than the last one, normed as its are, or as they are."""
        for layer, raw in sorted(self._target.rows.taps.items(), reverse=True):
            if raw.shape != self._target.rows.hidden.shape:
                continue
            what = f"layer {layer - 1}" if layer else "the embedding"
            for how, x in (("", rms_norm(raw.contiguous(), norm, eps)), (" without a norm", raw)):
                table = self._model.table(TargetRows(x))
                about = f"rows are of {what}{how}, not of the last layer"
                yield self._guess(ROWS, about, text=self._with_table(table))

    @property
    def _listed(self) -> str:
        return ", ".join(map(str, self._target.taps))

    def _norm(self) -> tuple[torch.Tensor | None, float]:
        return self._session.model.final_norm

    def _of_rejected(self, window: Sequence[RecordedDraft]) -> Iterator[Guess]:
        table = self._text.table
        if table is None:
            return
        model, first = self._model, self._text.drafts.index(window[0])
        drafts = self._text.drafts[max(0, first - 1) : first + len(window)]
        partial = [
            (last, later)
            for last, later in pairwise(drafts)
            if last.n_accepted < last.n_drafted and later.pos0 == last.pos0 + last.n_accepted + 1
        ]
        rejected = self._target.of_rejected([last for last, _ in partial])
        before = model.newest_row(0) + 1
        choices: list[tuple[str, Callable[[RecordedDraft, torch.Tensor], torch.Tensor | None]]] = [
            (
                "after a rejection the newest row is that of the last token of the verify batch",
                lambda last, own: own[-1],
            ),
            (
                "after a rejection the newest row is that of the rejected token",
                lambda last, own: (
                    own[last.n_accepted + 1] if last.n_accepted + 1 < len(own) else None
                ),
            ),
            (
                "after a rejection the newest row is the first of the verify batch",
                lambda last, own: own[0] if last.n_accepted else None,
            ),
        ]
        for about, pick in choices:
            stale = table.clone()
            for last, later in partial:
                own = rejected.get(last.round)
                if own is None:
                    continue
                entries = model.table(own)
                assert entries is not None
                row = pick(last, entries[before:])
                if row is not None:
                    stale[model.newest_row(later.pos0)] = row
            yield self._guess(ROWS, about, text=self._with_table(stale))
        stale = table.clone()
        for last, later in partial:
            stale[model.newest_row(later.pos0)] = stale[model.newest_row(last.pos0)]
        about = "after a rejection the row of the round before stays"
        yield self._guess(ROWS, about, text=self._with_table(stale))
        left = {}
        for last, later in partial:
            if (own := rejected.get(last.round)) is not None:
                entries = model.table(own)
                assert entries is not None
                known = [self._text.tokens[last.pos0], *last.tokens]
                places = range(last.n_accepted + 1 - model.ahead, len(known) - model.ahead)
                left[later.round] = Entries(
                    [last.pos0 + i for i in places],
                    [known[i + model.ahead] for i in places],
                    entries[places.start : places.stop],
                )
        about = "rows of rejected tokens stay in its memory for the next draft"
        yield replace(self._guess(STATE, about), left=left)

    def _of_blocks(self) -> Iterator[Guess]:
        if not isinstance(self._model, BlockModel):
            return
        config, tokenizer = self._model.config, self._session.tokenizer
        n_vocab = self._session.config.n_vocab
        others = [0, tokenizer.eos_id, tokenizer.bos_id, config.mask_token + 1]
        others += [config.mask_token - 1, n_vocab - 1]
        for mask in dict.fromkeys(others):
            if mask is not None and mask != config.mask_token and 0 <= mask < n_vocab:
                about = f"masks are token {mask}, not {config.mask_token}"
                yield self._guess(BLOCK, about, model=self._block(mask=mask))
        about = "masks are the newest token again"
        yield self._guess(BLOCK, about, model=self._block(mask=-1))
        lengths = (config.block_size, self._model.n_block + 1, self._model.n_block - 1)
        for length in dict.fromkeys(lengths):
            if length != self._model.n_block and length > self._model.first:
                about = f"blocks have {length} rows, not {self._model.n_block}"
                yield self._guess(BLOCK, about, model=self._block(n_block=length))
        sees = "rows do not see" if config.causal is False else "rows see"
        about = f"block {sees} those after them"
        yield self._guess(BLOCK, about, model=self._block(flipped=True))
        for first in (self._model.first + 1, self._model.first - 1):
            if first >= 0:
                about = f"tokens are taken from row {first} of a block on, not {self._model.first}"
                for more in (0, 1)[: 1 + (first > self._model.first)]:
                    model = self._block(n_block=self._model.n_block + more, first=first)
                    yield self._guess(BLOCK, about, model=model)

    def _block(
        self,
        mask: int | None = None,
        n_block: int | None = None,
        first: int | None = None,
        *,
        flipped: bool = False,
    ) -> BlockModel:
        own = self._model
        assert isinstance(own, BlockModel)
        made = own.like(self._n_ctx, flipped=flipped)
        made.mask = own.mask if mask is None else mask
        made.n_block = own.n_block if n_block is None else n_block
        made.first = own.first if first is None else first
        return made

    def _of_candidates(self) -> Iterator[Guess]:
        drafted = self._model.drafted_ids
        if drafted is not None:
            own = drafted.tolist()
            row_of = {token: i for i, token in enumerate(own)}
            last = self._session.config.n_vocab - 1
            for about, wrong in (
                ("the map of draft ids (d2t) is not applied", lambda t: row_of[t]),
                (
                    "offsets of the map of draft ids (d2t) are taken for ids",
                    lambda t: t - row_of[t],
                ),
                ("the map of draft ids (d2t) is added twice", lambda t: min(t + row_of[t], last)),
                (
                    "the map of draft ids (d2t) is read one row on",
                    lambda t: own[min(row_of[t] + 1, len(own) - 1)],
                ),
                (
                    "the map of draft ids (d2t) is read one row before",
                    lambda t: own[max(row_of[t] - 1, 0)],
                ),
            ):
                yield self._guess(
                    CANDIDATES, about, change=partial(_renamed, {t: wrong(t) for t in own})
                )
        about = "the candidate of rank {} is drafted, not the best one"
        for rank in (1, 2):
            yield self._guess(CANDIDATES, about.format(rank + 1), change=partial(_from_rank, rank))

    def vague(
        self, window: Sequence[RecordedDraft], best: Mapping[int, Sequence[int]], *, drawn: bool
    ) -> Iterator[Guess]:
        """What explains a part of anything, after all else."""
        ids = {token for draft in window for token in draft.tokens}
        if len(ids) == 1:
            token = next(iter(ids))
            about = f"all drafts are of token {self._shown(token)} alone: rows or logits are NaN"
            yield self._guess(ROWS, about, change=lambda row: {token: 0.0})
        most = max((token for draft in self._text.drafts for token in draft.tokens), default=0)
        beyond = sum(any(i > most for i in best.get(draft.round, ())) for draft in window)
        if beyond >= FEW:
            about = f"only ids up to {most} are ever drafted: the output head is cut"
            yield self._guess(CANDIDATES, about, change=partial(_cut_at, most))
        drafted = {token for draft in self._text.drafts for token in draft.tokens}
        wanted = Counter(token for draft in window for token in {*best.get(draft.round, ())})
        never = {token for token, n in wanted.items() if n >= FEW and token not in drafted}
        if never:
            token = max(never, key=lambda token: wanted[token])
            more = f" and {len(never) - 1} others are" if len(never) > 1 else " is"
            about = f"token {self._shown(token)}{more} never drafted: left out of the candidates"
            yield self._guess(CANDIDATES, about, change=partial(_without, never))
        if names := _names(window, best):
            about = (
                "each id of the drafter's is one other id in what is drafted: a wrong map of ids"
            )
            yield self._guess(CANDIDATES, about, change=partial(_renamed, names))
        if drawn and len(window) >= _SHOWS_DRAWN:
            about = "candidates are drawn, not the best ones taken: a temperature of the drafter"
            yield self._guess(CANDIDATES, about, change=_any_of_ten)


def _mapped(
    rows: TargetRows, change: Callable[[torch.Tensor], torch.Tensor], only: int | None = None
) -> TargetRows:
    """only: the one layer whose rows are changed, None for all."""
    taps = {i: change(x) if only in (None, i) else x for i, x in rows.taps.items()}
    return TargetRows(change(rows.hidden), taps)


def _renamed(names: dict[int, int], row: Candidates) -> Candidates:
    found: Candidates = {}
    for token, value in row.items():
        if token in names:
            found.setdefault(names[token], value)
    return found


def _without(tokens: Collection[int], row: Candidates) -> Candidates:
    return {token: value for token, value in row.items() if token not in tokens}


def _names(window: Sequence[RecordedDraft], best: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """Of each id of right drafts the one that was drafted in its place; empty where it is not
    always the same one."""
    found: dict[int, set[int]] = {}
    n = 0
    for draft in window:
        for own, token in zip(best.get(draft.round, ()), draft.tokens, strict=False):
            found.setdefault(own, set()).add(token)
            n += 1
    names = {own: min(tokens) for own, tokens in found.items()}
    is_map = all(len(tokens) == 1 for tokens in found.values()) and n > 2 * len(names)
    changed = sum(own != token for own, token in names.items())
    return names if is_map and changed >= FEW else {}


def _from_rank(rank: int, row: Candidates) -> Candidates:
    return dict(list(row.items())[rank:])


def _cut_at(most: int, row: Candidates) -> Candidates:
    return {token: value for token, value in row.items() if token <= most}


def _any_of_ten(row: Candidates) -> Candidates:
    """All of the ten best as good as the best."""
    return dict.fromkeys(list(row)[:10], 0.0)
