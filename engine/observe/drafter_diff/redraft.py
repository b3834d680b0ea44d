"""Drafts of any engine made again by the drafter at hand: which are not its own, and which known
mistake reproduces them.

The target decodes the text once for the rows that the drafter reads. Every draft is made again from
these; where recorded ids differ by more than rounding turns, drafts are made again with one
mistake after the other switched on, until one of them gives what was recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch

from engine.audit.draft_models import BlockModel, Candidates, DraftModel, candidates, draft_model
from engine.audit.recorded_drafts import SHIFTED, RecordedDraft
from engine.audit.redone_drafts import (
    CLEAN,
    DEVIATIONS,
    Deviation,
    DraftedText,
    Replay,
    shares_apart,
)
from engine.batch import Span
from engine.draft.registry import model_drafters
from engine.errors import OptionError
from engine.gguf.binary import check_cancelled, never
from engine.memory.hybrid import HybridMemory
from engine.model.families import FAMILIES
from engine.model.mtp_file import DRAFT_MTP
from engine.model.taps import TargetRows, join_rows
from engine.observe.drafter_diff.records import (
    BLOCK,
    CANDIDATES,
    FEW,
    POSITIONS,
    ROWS,
    RULE,
    STATE,
    UNEXPLAINED,
    Cause,
    Counts,
    Missing,
)
from engine.observe.drafter_diff.sides import LONGEST_TEXT, DraftSide
from engine.observe.rescoring.identity import is_observed
from engine.options import RunOptions, SpecOptions
from engine.session import Session
from kernels.norm import rms_norm

_MOST_DRAFTS, _MOST_WALKED, _MOST_REPLAYED = 96, 48, 32
_SHARE, _SHARE_ROUNDED, _SHARE_AFTER, _SHARE_VAGUE = 0.05, 0.15, 0.25, 0.3
"""Of drafts that have to be wrong: of all where both round alike, of all elsewhere, of those after
a rejection, and of all where no mistake, or one that gives a part of anything, explains them."""
_TIE, _EXACT_TIE = (0.05, 0.5), (0.005, 0.05)
"""How far below the best logit a drafted one may lie by rounding: of the distance to the tenth, and
in all; of runs of this engine in modes that round alike, less."""
_EXACT = ("f32", "blocks")
_ROUNDED = 0.05
"""Share of the best tokens that rounding of another engine may move."""
_LEAST_OWN = 0.8
"""Of the target's own tokens, those that have to be its choice for the text to be this model's."""
_EXPLAINS = 0.34
"""Of the distance from right drafts, what a mistake may leave to be taken for the cause."""
_ROWS_APART = 0.1
"""Of a row's square, what rounding of another engine may turn."""
_TINY = 1e-30
_PASS = 256

Change = Callable[[Candidates], Candidates]
"""What a mistake makes of the candidates of a row, best first."""


@dataclass(frozen=True, slots=True)
class Guess:
    """A known mistake. about: a sentence. deviation, text, model: what is replayed; change: of the
    candidates, None for none; takes: rank of the candidate that is taken, from 0."""

    stage: str
    about: str
    deviation: Deviation
    text: DraftedText
    model: DraftModel
    change: Change | None = None
    other: DraftedText | None = None


class Redrafter:
    """Drafts of one side, made again. Raises OptionError for a drafter that is not at hand."""

    @torch.inference_mode()
    def __init__(
        self, session: Session, side: DraftSide, cancelled: Callable[[], bool] = never
    ) -> None:
        self._session, self._cancelled = session, cancelled
        self.drafter = drafter_for(session, side)
        facts = side.run.facts
        is_exact = not is_observed(facts) and {facts.compute, session.compute} <= {*_EXACT}
        self._tie = _EXACT_TIE if is_exact else _TIE
        self._share = _SHARE if is_exact else _SHARE_ROUNDED
        side = replace(side, text=side.text[:LONGEST_TEXT])
        self._side = side
        longest = min(64, max(draft.n_drafted for draft in side.drafts))
        recorded = side.run.facts.options
        n_max = max(longest, recorded.spec.n_max if recorded else 0)
        self._options = RunOptions(spec=SpecOptions(types=(self.drafter,), n_max=min(n_max, 64)))
        self._n_ctx = 3 * len(side.text) + 64 * (longest + 2)
        self._model = draft_model(session, self._options, self.drafter, self._n_ctx)
        loaded = session.drafts.get(self.drafter)
        config: Any = getattr(loaded.model, "config", None) if loaded else None
        self._taps: tuple[int, ...] = tuple(getattr(config, "taps", ()) or ())
        self._n_layer = session.config.n_layer
        self._rows = self._target_rows()
        self._stood_in: set[int] = set()
        self._best: dict[int, list[int]] = {}
        self._drafts = [d for d in map(self._padded, side.drafts) if d is not None]
        self._text = DraftedText(
            side.seq_id,
            side.text,
            [at for at in side.starts if 0 <= at < len(side.text)] or [side.n_prompt],
            self._model.table(self._rows),
            self._drafts,
        )
        self._chosen = self._target_choices()

    def _padded(self, draft: RecordedDraft) -> RecordedDraft | None:
        """A draft with a stand-in for the token that was rejected where its id is not known: the
        text's own, which it was not."""
        tokens, text = list(draft.tokens), self._side.text
        at = draft.pos0 + 1 + len(tokens)
        if draft.pos0 >= len(text) or any(
            not 0 <= t < self._session.config.n_vocab for t in tokens
        ):
            return None
        if len(tokens) < draft.n_drafted:
            if len(tokens) != draft.n_accepted or at >= len(text) - 1:
                return draft if tokens else None
            tokens.append(text[at])
            self._stood_in.add(draft.round)
        return draft._replace(tokens=tokens)

    # -- the target's rows ---------------------------------------------------------------------

    def _all_taps(self) -> tuple[int, ...]:
        near = {tap + i for tap in self._taps for i in (-1, 0, 1)}
        return tuple(sorted(tap for tap in near if 0 <= tap <= self._n_layer))

    def _target_rows(self) -> TargetRows:
        model, text = self._session.model, self._side.text
        memory = HybridMemory.for_model(model.config, 1, len(text) + 1, model.device)
        parts = []
        for start in range(0, len(text), _PASS):
            check_cancelled(self._cancelled)
            span = Span(0, start, text[start : start + _PASS], [])
            for ubatch in memory.split([span], _PASS, "equal"):
                out = model.forward(ubatch, memory, taps=self._all_taps())
                parts.append(out.rows[0])
        return join_rows(parts)

    def _rejected_rows(self, drafts: Sequence[RecordedDraft]) -> dict[int, TargetRows]:
        """Rows of the whole verify batch of drafts that were accepted in part, by round."""
        model, text = self._session.model, self._side.text
        memory = HybridMemory.for_model(model.config, 1, len(text) + 80, model.device)
        found, n = {}, 0
        for draft in drafts:
            known = draft.tokens
            if draft.n_accepted >= draft.n_drafted or len(known) < draft.n_drafted:
                continue
            check_cancelled(self._cancelled)
            if draft.pos0 > n:
                self._forward(memory, n, text[n : draft.pos0])
                n = draft.pos0
            save = memory.save(0)
            found[draft.round] = self._forward(memory, n, [text[n], *known])
            memory.restore(0, save)
        return found

    def _forward(self, memory: HybridMemory, pos0: int, tokens: Sequence[int]) -> TargetRows:
        parts = []
        for ubatch in memory.split([Span(0, pos0, tokens, [])], _PASS, "equal"):
            rows = self._session.model.forward(ubatch, memory, taps=self._all_taps()).rows
            parts.append(rows[0])
        return join_rows(parts)

    def _target_choices(self) -> list[bool]:
        """Of each emitted token, whether the target may have chosen it: at temperature 0 the most
        probable one but for rounding, else one of the most probable."""
        side, n = self._side, self._side.n_prompt
        is_greedy = float(side.setting.get("temperature", 0.0) or 0.0) <= 0
        found: list[bool] = []
        for start in range(n - 1, len(side.text) - 1, _PASS):
            stop = min(start + _PASS, len(side.text) - 1)
            rows = candidates(self._session.model.logits_of(self._rows.hidden[start:stop]))
            found += [
                not _gap(row, token, _TIE)[1] if is_greedy else token in row
                for row, token in zip(rows, side.text[start + 1 : stop + 1], strict=True)
            ]
        return found

    @property
    def other_model(self) -> Missing | None:
        """What to say where the text is not the target's; None where it may be."""
        drafted = self._accepted_places()
        own = [chosen for i, chosen in enumerate(self._chosen) if i not in drafted]
        if len(own) < 8 or sum(own) >= _LEAST_OWN * len(own):
            return None
        return Missing(
            f"The text of {self._side.name} is not this model's: {sum(own)} of {len(own)} of the "
            "target's own tokens are its choice.",
            "Give the file that it was made with.",
        )

    def rows_cause(self, handed: np.ndarray) -> Cause | None:
        """Whether the rows that were handed over, float32 [n, n_embd], are other ones than the
        target's."""
        own = self._rows.hidden[: len(handed)].flatten(1).numpy()
        found = handed[: len(own)]
        if found.shape != own.shape:
            return Cause(ROWS, self._side.name, "Rows of another width are handed over.")
        scale = np.maximum(np.square(own).sum(1), _TINY)
        apart = np.square(found - own).sum(1) / scale
        wrong = np.flatnonzero(~(apart < _ROWS_APART))
        if len(wrong) < FEW:
            return None
        what = "zeros" if not found[wrong].any() else "not those after its final norm"
        if not np.isfinite(found[wrong]).all():
            what = "NaN or infinite"
        return Cause(
            ROWS,
            self._side.name,
            f"Rows that the target hands over are {what}.",
            f"position {wrong[0]}",
            f"{len(wrong)} of {len(own)} rows",
        )

    def lossy_rule(self) -> Cause | None:
        """Whether drafted tokens were accepted that the target does not choose."""
        drafted = self._accepted_places()
        places = sorted(i for i in drafted if i < len(self._chosen))
        wrong = [i for i in places if not self._chosen[i]]
        if len(wrong) < FEW or len(wrong) < _SHARE * len(places):
            return None
        pos = self._side.n_prompt + wrong[0]
        drafts = self._side.drafts
        first = next(d for d in drafts if d.pos0 < pos <= d.pos0 + d.n_accepted)
        accepted, n_drafted = self._side.counts
        return Cause(
            RULE,
            self._side.name,
            "Drafted tokens are accepted that the target does not choose: a lossy rule.",
            f"round {first.round} at position {pos}",
            f"{len(wrong)} of {len(places)} accepted tokens",
            (accepted, n_drafted),
            (accepted - len(wrong), n_drafted),
        )

    def _accepted_places(self) -> set[int]:
        """Indices of emitted tokens that were drafted."""
        n = self._side.n_prompt
        return {
            draft.pos0 + 1 + i - n for draft in self._side.drafts for i in range(draft.n_accepted)
        }

    # -- right drafts --------------------------------------------------------------------------

    @torch.inference_mode()
    def cause(self) -> Cause | None:
        """Why recorded drafts are not the drafter's own; None where they are, but for rounding."""
        if not self._drafts:
            return None
        sampled = self._drafts[:_MOST_DRAFTS]
        apart = self._from_the_text(sampled)
        wrong = [draft for draft in sampled if apart[draft.round] > 0]
        if len(wrong) < FEW or not self._is_persistent(sampled, wrong):
            return None
        window = self._window(wrong)
        clean = Replay(self._model, self._text, CLEAN, distance=self._apart(None)).of(window)
        is_many = len(wrong) >= _SHARE_VAGUE * len(sampled)
        guess, left = self._best_guess(window, sum(clean.values()), vague=is_many)
        if guess is None and not is_many and self._tie is _TIE:
            return None  # rounding of another mode turns some
        recorded, mended = self._walk(window[0].pos0)
        first = wrong[0]
        if guess is None:
            about = "Its drafts are not the drafter's, and no known mistake gives them."
            family = FAMILIES[self._session.config.architecture]
            if self.drafter == DRAFT_MTP and family.peer_drafts:
                about += f" Of llama.cpp, {family.peer_drafts}."
            stage = UNEXPLAINED
        else:
            stage, about = guess.stage, guess.about
        n_token = self._first_apart(first)
        return Cause(
            stage,
            self._side.name,
            about,
            f"round {first.round} at position {first.pos0}, drafted token {n_token}",
            f"{len(wrong)} of {len(sampled)} drafts are not those of {self.drafter}"
            + (
                ""
                if guess is None
                else f"; of {len(window)} made again so, {self._n_right(left)} are equal"
            ),
            recorded,
            mended,
        )

    def _n_right(self, left: dict[int, float]) -> int:
        return sum(distance <= _ROUNDED for distance in left.values())

    def _window(self, wrong: Sequence[RecordedDraft]) -> Sequence[RecordedDraft]:
        first, fifth = (self._drafts.index(wrong[min(len(wrong) - 1, i)]) for i in (0, 4))
        start = max(0, first - 16)
        return self._drafts[start : min(fifth + 13, start + _MOST_REPLAYED)]

    def _is_persistent(
        self, sampled: Sequence[RecordedDraft], wrong: Sequence[RecordedDraft]
    ) -> bool:
        rounds = {draft.round for draft in wrong}
        after = [later for last, later in pairwise(sampled) if last.n_accepted < last.n_drafted]
        n_after = sum(draft.round in rounds for draft in after)
        return len(wrong) >= self._share * len(sampled) or (
            n_after >= FEW and n_after >= _SHARE_AFTER * len(after)
        )

    def _apart(
        self, change: Change | None
    ) -> Callable[[RecordedDraft, Sequence[Candidates]], float]:
        """Tokens of a draft that are not those of its rows, up to one for each, and where shares
        are known by how much these differ."""

        def apart(draft: RecordedDraft, rows: Sequence[Candidates]) -> float:
            if change is not None:
                rows = [change(row) for row in rows]
            found = 0.0
            n_known = len(draft.tokens) - (draft.round in self._stood_in)
            for i, row in enumerate(rows[: len(draft.tokens)]):
                if not row:
                    found += 1
                    continue
                best, gap = _gap(row, draft.tokens[i], self._tie)
                if i < n_known:
                    found += gap
                elif best == draft.tokens[i] and _lead(row, self._tie) > 0:
                    found += 1  # it would have drafted the token that was not drafted
            if change is None and any(len(top) > 1 for top in draft.tops):
                found += max(0.0, shares_apart(draft, rows) - _ROUNDED)
            return found

        return apart

    def _from_the_text(self, drafts: Sequence[RecordedDraft]) -> dict[int, float]:
        """Distances by round of drafts made from a right state each."""
        self._model.clear()
        apart, n, found = self._apart(None), 0, {}
        for draft in drafts:
            check_cancelled(self._cancelled)
            rows, n = self._right(draft, n, draft.tokens, len(draft.tokens))
            found[draft.round] = apart(draft, rows)
            self._best[draft.round] = [next(iter(row)) for row in rows if row]
        return found

    def _right(
        self, draft: RecordedDraft, n_written: int, tokens: Sequence[int] | None, n: int
    ) -> tuple[list[Candidates], int]:
        model, end = self._model, draft.pos0 - self._model.ahead
        model.write(self._text.entries(model, range(n_written, end), CLEAN, draft.pos0))
        newest = self._text.entries(model, [end], CLEAN, draft.pos0)
        return model.draft(newest, end + 1, tokens, n), max(n_written, end)

    def _first_apart(self, draft: RecordedDraft) -> int:
        self._model.clear()
        rows, _ = self._right(draft, 0, draft.tokens, len(draft.tokens))
        for i, row in enumerate(rows):
            if i >= len(draft.tokens) or _gap(row, draft.tokens[i], self._tie)[1]:
                return i
        return 0

    def _walk(self, pos0: int) -> tuple[Counts, Counts]:
        """Accepted and drafted tokens over a stretch of text: recorded, and with right drafts of
        the same length limit in rounds that begin where these would."""
        text, drafts = self._side.text, [d for d in self._drafts if d.pos0 >= pos0]
        n_max = max(draft.n_drafted for draft in self._side.drafts)
        stretch = drafts[:_MOST_WALKED]
        stop = stretch[-1].pos0 + stretch[-1].n_accepted + 1
        recorded = (
            sum(draft.n_accepted for draft in stretch),
            sum(draft.n_drafted for draft in stretch),
        )
        self._model.clear()
        at, n, accepted, drafted = stretch[0].pos0, 0, 0, 0
        while at < min(stop, len(text) - 1):
            check_cancelled(self._cancelled)
            draft = stretch[0]._replace(pos0=at, tokens=[])
            rows, n = self._right(draft, n, None, min(n_max, len(text) - at - 1))
            right = 0
            for row, token in zip(rows, text[at + 1 :], strict=False):
                if next(iter(row)) != token:
                    break
                right += 1
            accepted, drafted, at = accepted + right, drafted + len(rows), at + right + 1
        return recorded, (accepted, drafted)

    # -- mistakes ------------------------------------------------------------------------------

    def _best_guess(
        self, window: Sequence[RecordedDraft], clean: float, *, vague: bool
    ) -> tuple[Guess | None, dict[int, float]]:
        """The mistake that gives the recorded drafts, and what is left between."""
        most, best, left = _EXPLAINS * clean, None, dict[int, float]()
        for guess in chain(self._guesses(window), self._vague(window, drawn=vague)):
            check_cancelled(self._cancelled)
            replay = Replay(
                guess.model,
                guess.text,
                guess.deviation,
                guess.other,
                distance=self._apart(guess.change),
            )
            found = replay.of(window, most)
            total = sum(found.values())
            if total < most and len(found) == len(window):
                best, left, most = guess, found, total * _EXPLAINS
                if total <= 1e-9:
                    break
        return best, left

    def _guesses(self, window: Sequence[RecordedDraft]) -> Iterator[Guess]:
        yield from self._of_candidates()
        yield from self._of_rows()
        yield from self._of_blocks()
        yield from self._of_state()
        yield from self._of_stale_rows(window)

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
        table, model, rows = self._text.table, self._model, self._rows
        assert table is not None
        zero = self._model.table(_mapped(rows, torch.zeros_like))
        yield self._guess(ROWS, "the target's rows are zeros", text=self._with_table(zero))
        norm, eps = self._norm()
        last = self._n_layer if self._taps else None
        if (last is None or last in self._taps) and norm is not None:
            raw = _mapped(rows, lambda x: x / norm, last)
            about = "rows are taken before the target's final norm, not after it"
            yield self._guess(ROWS, about, text=self._with_table(model.table(raw)))
            again = _mapped(rows, lambda x: rms_norm(x.contiguous(), norm, eps), last)
            about = "the target's final norm is applied twice"
            yield self._guess(ROWS, about, text=self._with_table(model.table(again)))
        if self._taps and norm is not None:
            normed = _mapped(rows, lambda x: rms_norm(x.contiguous(), norm, eps))
            about = "rows of its layers are normed by the target's final norm"
            yield self._guess(ROWS, about, text=self._with_table(model.table(normed)))
        for by in (1, -1):
            layers = [tap + by for tap in self._taps]
            if layers and all(0 <= layer <= self._n_layer for layer in layers):
                what = "outputs" if by > 0 else "inputs of the layers before"
                about = f"rows are of layers one {'on' if by > 0 else 'before'} ({what})"
                yield self._guess(ROWS, about, text=self._with_table(model.table(rows, layers)))
        for order in model.orders:
            about = f"rows of layers {', '.join(map(str, order))}, not {self._listed}"
            yield self._guess(ROWS, about, text=self._with_table(model.table(rows, order)))

    @property
    def _listed(self) -> str:
        return ", ".join(map(str, self._taps))

    def _norm(self) -> tuple[torch.Tensor | None, float]:
        return self._session.model.final_norm

    def _of_stale_rows(self, window: Sequence[RecordedDraft]) -> Iterator[Guess]:
        table = self._text.table
        if table is None:
            return
        model, first = self._model, self._drafts.index(window[0])
        drafts = self._drafts[max(0, first - 1) : first + len(window)]
        partial = [
            (last, later)
            for last, later in pairwise(drafts)
            if last.n_accepted < last.n_drafted and later.pos0 == last.pos0 + last.n_accepted + 1
        ]
        rejected = self._rejected_rows([last for last, _ in partial])
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
            ):
                yield self._guess(
                    CANDIDATES, about, change=partial(_renamed, {t: wrong(t) for t in own})
                )
        about = "the candidate of rank {} is drafted, not the best one"
        for rank in (1, 2):
            yield self._guess(CANDIDATES, about.format(rank + 1), change=partial(_from_rank, rank))

    def _vague(self, window: Sequence[RecordedDraft], *, drawn: bool) -> Iterator[Guess]:
        """What explains a part of anything, after all else."""
        ids = {token for draft in window for token in draft.tokens}
        if len(ids) == 1:
            token = next(iter(ids))
            about = (
                f"all drafts are of token {self._side.shown(token)} alone: rows or logits are NaN"
            )
            yield self._guess(ROWS, about, change=lambda row: {token: 0.0})
        most = max((token for draft in self._drafts for token in draft.tokens), default=0)
        beyond = sum(any(i > most for i in self._best.get(draft.round, ())) for draft in window)
        if beyond >= FEW:
            about = f"only ids up to {most} are ever drafted: the output head is cut"
            yield self._guess(CANDIDATES, about, change=partial(_cut_at, most))
        if drawn:
            about = "candidates are drawn, not the best ones taken: a temperature of the drafter"
            yield self._guess(CANDIDATES, about, change=_any_of_ten)


def drafter_for(session: Session, side: DraftSide) -> str:
    """The drafter at hand that is meant by a run. Raises OptionError where none is."""
    able = [name for name in model_drafters() if name in session.drafters]
    named = [name for name in able if name in side.drafters]
    if not able:
        raise OptionError(
            "No drafter is at hand to make drafts again.",
            "Name its file with -md, or a model with an MTP head.",
        )
    if named:
        return named[0]
    given = [name for name in able if name in session.drafts]
    return (given or able)[0]


def _mapped(
    rows: TargetRows, change: Callable[[torch.Tensor], torch.Tensor], only: int | None = None
) -> TargetRows:
    """only: the one layer whose rows are changed, None for all."""
    taps = {i: change(x) if only in (None, i) else x for i, x in rows.taps.items()}
    return TargetRows(change(rows.hidden), taps)


def _gap(row: Candidates, token: int, tie: tuple[float, float]) -> tuple[int, float]:
    """The best token, and 0 where `token` is as good but for rounding, else 1."""
    values = list(row.values())
    best = next(iter(row))
    if token == best:
        return best, 0.0
    spread = values[0] - values[min(9, len(values) - 1)]
    return best, float(values[0] - row.get(token, -torch.inf) > min(tie[0] * spread, tie[1]))


def _lead(row: Candidates, tie: tuple[float, float]) -> float:
    """1 where the best token is clear of the second, else 0."""
    values = list(row.values())
    if len(values) < 2:
        return 1.0
    spread = values[0] - values[min(9, len(values) - 1)]
    return float(values[0] - values[1] > min(tie[0] * spread, tie[1]))


def _renamed(names: dict[int, int], row: Candidates) -> Candidates:
    found: Candidates = {}
    for token, value in row.items():
        if token in names:
            found.setdefault(names[token], value)
    return found


def _from_rank(rank: int, row: Candidates) -> Candidates:
    return dict(list(row.items())[rank:])


def _cut_at(most: int, row: Candidates) -> Candidates:
    return {token: value for token, value in row.items() if token <= most}


def _any_of_ten(row: Candidates) -> Candidates:
    """All of the ten best as good as the best."""
    return dict.fromkeys(list(row)[:10], 0.0)
