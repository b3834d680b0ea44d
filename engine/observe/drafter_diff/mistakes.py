"""Possible mistakes of an engine's drafter, stage by stage: one stage's input or computation is
changed, at some places or rounds of the text, and everything else is right."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise, product
from typing import Any

import torch

from engine.audit.deviations import CLEAN, OF_ENGINES, SHIFTED, Deviation
from engine.audit.draft_models import BlockModel, DraftModel, Entries, StepwiseModel
from engine.audit.recorded_drafts import DraftedText, RecordedDraft
from engine.observe.drafter_diff.candidate_mistakes import (
    Seen,
    any_of_ten,
    observed,
    of_choice,
    of_map,
    of_shards,
)
from engine.observe.drafter_diff.guesses import CHANCE, GOES_ON, Guess, n_by_chance
from engine.observe.drafter_diff.operations import PHASES, in_place, of_cells, part_changes
from engine.observe.drafter_diff.records import BLOCK, CANDIDATES, POSITIONS, ROWS, STATE, Drafts
from engine.observe.drafter_diff.sides import LONGEST_TEXT, DraftSide
from engine.observe.drafter_diff.target_rows import CHANGES, MOVED, TextRows, mapped
from engine.observe.drafter_diff.tensor_changes import ROUNDED, other_windows, rounded_by_pass
from engine.observe.drafter_diff.wrong_drafts import POWERS, in_passes, places_of
from engine.session import Session

_Gives = Callable[[RecordedDraft, Entries, int], bool]
_MOST_MASKS, _LONGEST_WINDOW, _MOST_OTHERS, _TAIL = 1024, 128, 4, 4
_FARTHEST, _SHOWN_BY, _MOST_FITTING = 64, 3, 6
_COUNTED_BY, _MOST_COUNTED, _MOST_IDS = 8, 64, 48
"""Drafts and values used to estimate how many values give a draft by chance."""
_Places = Mapping[str, Collection[int]]
_Which = Callable[[list[Entries], list[Entries]], Entries]
_READ: dict[str, _Which] = {
    "that of the previous step": lambda given, _: given[max(0, len(given) - 2)],
    "that of two steps before": lambda given, _: given[max(0, len(given) - 3)],
    "what the previous step read (not updated)": lambda _, read: read[-1],
    "that of the first step": lambda given, _: given[0],
}
"""Which entry a step reads a part from, given those that steps should read and those that they
read."""


class Mistakes:
    """The possible mistakes of a text's drafter. n_ctx: cells of its memory. shown: formats a token
    for a sentence. others: of its run. in_trees: its drafts are trees."""

    def __init__(
        self,
        session: Session,
        model: DraftModel,
        text: DraftedText,
        target: TextRows,
        n_ctx: int,
        shown: Callable[[int], str],
        others: Sequence[DraftSide] = (),
        *,
        in_trees: bool = False,
    ) -> None:
        self._session, self._model, self._text, self._target = session, model, text, target
        self._n_ctx, self._shown, tokenizer = n_ctx, shown, session.tokenizer
        self._others, self._in_trees = others, in_trees
        ids = (0, tokenizer.eos_id, tokenizer.bos_id, session.config.n_vocab - 1)
        self._special = [token for token in dict.fromkeys(ids) if token is not None]

    def all(self, window: Drafts, wrong: Drafts) -> Iterator[Guess]:
        """wrong: the first wrong drafts."""
        yield from self._of_candidates()
        yield from self._chosen_alone()
        yield from self._of_rejected(window)
        yield from self._of_rows()
        yield from self._of_sequences()
        yield from self._of_some_rows()
        yield from self._of_blocks(wrong)
        yield from self._of_state(wrong)
        n = self._text.starts[0]
        sizes = dict.fromkeys((n, n // 2, *POWERS))
        yield from self._of_beginnings([size for size in sizes if 0 < size <= n])
        yield from self._of_steps()

    def _of_state(self, wrong: Drafts) -> Iterator[Guess]:
        rows, taps = self._target.rows, self._target.taps if len(self._target.taps) > 1 else ()
        for deviation in chain(OF_ENGINES, self._unseen(wrong)):
            which = deviation.batch
            model = self._model
            if deviation.is_of_rows and not model.reads_rows:
                continue
            if not model.has_newest and (deviation.own or deviation.drops or deviation.early):
                continue
            if model.can_cut if deviation.only else deviation.late and not model.can_cut:
                continue
            off = deviation.place, deviation.step, deviation.drift, deviation.off
            moves = any(off) or deviation.stride != 1 or deviation.restarts
            stage = POSITIONS if moves else ROWS if deviation.what == SHIFTED else STATE
            if deviation.token_shift or deviation.round_shift:
                stage = STATE
            for whole, tap in product((True, False), (None, *taps)) if which else ():
                at = torch.tensor(self._text.others_of_batch(len(rows), which, with_prompt=whole))
                moved = mapped(rows, partial(torch.index_select, dim=0, index=at), tap)
                where = "" if tap is None else f", only in layer {tap}"
                yield self._of_table(deviation.about + where, model.table(moved))
            if not which:
                yield self._guess(stage, deviation.about, deviation=deviation)

    def _unseen(self, wrong: Drafts) -> Iterator[Deviation]:
        for size in self._windows(wrong):
            about = f"the drafter sees at most {size} tokens"
            about += " in its attention" * (not self._model.can_cut)
            yield Deviation("", about, window=size)
        for token in self._fitting(
            wrong, self._special, lambda draft, own, t: self._gives(draft, own._replace(tokens=[t]))
        ):
            about = f"drafts continue from token {token} instead of the newest one"
            for noticed in (False, True):
                yield Deviation("", about, token=token, takes_back=noticed)
        for what, with_newest in (("drafted tokens are decoded", False), ("drafts are made", True)):
            far = (by for by in range(-_FARTHEST, _FARTHEST + 1) if abs(by) > 2)
            moves = [-self._text.starts[0], *far]
            for by in self._fitting(wrong, moves, partial(self._gives_moved, with_newest)):
                about = f"{what} {abs(by)} positions too {'high' if by > 0 else 'low'}"
                yield Deviation("", about, place=by * with_newest, step=by)

    def _of_beginnings(self, sizes: Sequence[int]) -> Iterator[Guess]:
        """First tokens of a text missing in the drafter's memory, or replaced, or the last ones of
        its prompt."""
        n = self._text.starts[0]
        end = n - self._model.ahead
        for size in sizes:
            which = "the prompt" if size == n else f"the first {size} tokens"
            last = {f"the prompt's last {size} tokens": range(end - size, end)}
            yield from self._of_places({which: range(size)}, last)

    def _of_places(self, read: _Places, lacked: _Places) -> Iterator[Guess]:
        """Places of the prompt missing in the drafter's memory, or with other tokens. lacked:
        further ones that may be missing."""
        text = self._text
        for what, places in chain(read.items(), lacked.items()):
            about = f"the drafter has not seen {what}"
            yield self._guess(STATE, about, deviation=Deviation("", about, lacks=places))
        named = {f"token {token}": token for token in self._special[:2]}
        named["the prompt's last token"] = text.tokens[text.starts[0] - 1]
        named["the newest token after the prompt"] = text.tokens[text.starts[0]]
        for (which, places), (what, token) in product(read.items(), named.items()):
            about = f"the drafter reads {which} as {what}"
            tokens = [token if i in places else own for i, own in enumerate(text.tokens)]
            yield self._guess(STATE, about, text=replace(text, tokens=tokens))

    def _guess(self, stage: str, about: str, **parts: Any) -> Guess:
        about = f"{about[0].upper()}{about[1:].rstrip('.')}."
        right = {"deviation": CLEAN, "text": self._text, "model": self._model}
        return Guess(stage, about, **{**right, **parts})

    def _of_table(self, about: str, table: torch.Tensor | None) -> Guess:
        return self._guess(ROWS, about, text=replace(self._text, table=table))

    def _of_rows(self) -> Iterator[Guess]:
        if (own := self._text.table) is None:
            return
        yield self._of_table("the drafter normalises its rows", CHANGES["normed"](own))
        ends = sorted({0, *self._text.starts, len(self._text.tokens)})
        sizes = [end - start for start, end in pairwise(ends)]
        for bits in (2, 3, 4):
            about = f"rows are rounded to about {bits} bits, with one scale for each pass"
            rows = mapped(self._target.rows, partial(rounded_by_pass, bits, sizes))
            yield self._of_table(about, self._model.table(rows))
        for about, rows, layers in self._target.wrong(self._model.orders):
            yield self._of_table(about, self._model.table(rows, layers))

    def _of_some_rows(self) -> Iterator[Guess]:
        """Rows that are wrong only in some places."""
        table, model = self._text.table, self._model
        if table is None:
            return
        n = self._text.starts[0]  # a server may also split a prompt a few tokens before its end
        for size, tail in product((*(s for s in POWERS if 1 < s < n), n), (0, _TAIL)):
            ends = sorted({*range(size, n - tail, size), *[n - tail] * (tail < n), n})
            apart = f", its last {tail} tokens in a separate pass" * bool(tail)
            about = f"a prompt's later passes, of {size} tokens{apart}, are"
            if len(ends) > 1 and not tail:
                first = [p % size if p < n else p for p in range(len(table))]
                yield self._of_table(f"rows of {about} those of the first", table[first])
            last = [*range(len(table))]
            for before, end in pairwise(ends):
                last[before - 1] = end - 1
            if len(ends) > 1:
                yield self._of_table(f"rows before {about} the last of these", table[last])
        own, taps = self._target.rows, self._target.taps
        changes: dict[str, torch.Tensor | None] = {k: f(table) for k, f in MOVED.items()}
        for what, change in {"zeros": torch.zeros_like, **ROUNDED}.items():
            changes[what] = model.table(mapped(own, change))
        for tap in taps if len(taps) > 1 else ():
            changes[f"zeros in layer {tap}"] = model.table(mapped(own, torch.zeros_like, tap))
        both = product(places_of(self._text).items(), changes.items())
        for (where, places), (what, rows) in both:
            about = f"rows of {where} are {what}"
            scope = "", {place + 1 for place in places}, None
            if (guess := self._of_table(about, rows).within(scope, self._text)) is not None:
                yield guess

    def of_parts(self, only: str = "", wrong: Drafts = ()) -> Iterator[Guess]:
        """Mistakes of each part, and of rows that it derives from the target's; and any number of
        tokens not seen. only: of one stage. wrong: wrong drafts, near which a part may start to be
        wrong."""
        draft = self._text.drafts[-1]

        def look() -> None:
            self._gives(draft, self._right_before(draft))
            self._model.table(self._target.rows)

        near = {d.pos0 + i for d in wrong[:1] for i in (-1, 0, 1, 2)} | {*self._text.starts[:1]}
        far = (size for size in POWERS if 8 < size < len(self._text.tokens))
        ids = sorted({*self._text.tokens})
        ids = ids[:: 1 + len(ids) // _MOST_IDS]
        places, target = sorted({*near, *far}), self._session.model
        found = part_changes(self._model.core, look, places, ids, target)
        found = chain(found, of_cells(self._model.cells))
        parts = [one for one in found if only in ("", one.stage)]
        # a kernel's number is a simpler mistake than a table, and otherwise few come first
        parts.sort(key=lambda x: (not x.is_number, x.stage != POSITIONS, x.stage != CANDIDATES))
        stays = self._model.n_true(2, 3) > 1  # written by later passes of a draft
        for phase, words in PHASES.items() if stays else [*PHASES.items()][:-1]:
            for one in (one for one in parts if phase in one.phases and one.changes):
                guess = self._guess(one.stage, one.about + words, changes=one.changes, during=phase)
                if not phase and self._text.table is not None:
                    with guess.applied():
                        table = self._model.table(self._target.rows)
                    guess = replace(guess, text=replace(self._text, table=table))
                yield guess
                first, is_short = getattr(self._model, "first", None), "draft" in one.phases
                if first is None or phase or not is_short:
                    continue
                for which, steps in ((", but not", range(1 - first, 64)), (", only", {-first})):
                    scope = f"{which} in the row of the newest token", None, steps
                    if (part := guess.within(scope, self._text)) is not None:
                        yield part
        sizes = [n for n in range(1, self._text.starts[0]) if n not in POWERS and not only]
        yield from self._of_beginnings(sizes)
        yield from self._of_places({} if only else in_passes(self._text, self._model.ahead), {})

    def _of_steps(self) -> Iterator[Guess]:
        """Parts of what a step hands to the next one, each replaced."""
        model = self._model
        if not isinstance(model, StepwiseModel):
            return
        if (ids := model.ids) is not None:
            row_of = {token: i for i, token in enumerate(ids.tolist())}
            about = "the token passed to the next step is not mapped to the target's id (d2t)"
            yield self._handing(
                CANDIDATES, about, "tokens", lambda own, _: [row_of.get(t, t) for t in own]
            )
        for lost in ("all", "drafted") if self._in_trees else ():
            what = "nothing" if lost == "all" else "no drafted token"
            about = f"branches of its trees except the first start with {what} in memory"
            yield self._guess(STATE, about, changes=((model, "lost", lost),), during="draft")
        names = [*["row"] * model.reads_rows, "token", "position"]
        for name, (where, which) in product(names, _READ.items()):
            about = f"the {name} that a step reads while it drafts is {where}"
            stage = POSITIONS if name == "position" else STATE
            yield self._handing(stage, about, f"{name}s", lambda _, other: other, which)
        for by, how in ((1, "far"), (-1, "early")):
            about = f"the position of a step is one too {how}"
            yield self._handing(
                POSITIONS, about, "positions", lambda own, _, by=by: [at + by for at in own]
            )
        if not model.reads_rows:
            return
        changes: dict[str, Callable[[Any], Any]] = {**CHANGES}
        output = vars(model.core).get("_output")
        if (norm := getattr(output, "norm", None)) is not None:
            changes["normalised by its final norm (again)"] = output.hidden
            changes["taken before its final norm"] = partial(torch.div, other=norm)
        for what, change in changes.items():
            about = f"the row that a step passes to the next one is {what}"
            yield self._handing(STATE, about, "rows", lambda own, _, change=change: change(own))
        for where, which in _READ.items():
            about = f"the row that a step passes to the next one is added to {where}"
            yield self._handing(STATE, about, "rows", torch.add, which)

    def _handing(
        self,
        stage: str,
        about: str,
        part: str,
        change: Callable[..., Any],
        which: _Which = lambda given, _: given[0],
    ) -> Guess:
        """change: what a later step reads for a part of Entries, given the right value and that of
        the entry that `which` selects."""

        def hands(given: list[Entries], read: list[Entries]) -> Entries:
            if not read:
                return given[-1]
            own, other = given[-1], which(given, read)
            return own._replace(**{part: change(getattr(own, part), getattr(other, part))})

        return self._guess(stage, about, changes=((self._model, "hands", hands),), during="draft")

    def _of_sequences(self) -> Iterator[Guess]:
        """Newest tokens and rows of the run's other sequences: at the same positions, and at the
        same place in the verify batch of a round."""
        text, own, model = self._text, self._text.table, self._model
        before = model.newest_row(0) + 1
        stage = BLOCK if isinstance(model, BlockModel) else STATE
        for other in self._others[:_MOST_OTHERS]:
            starts = {draft.round: draft for draft in other.drafts}
            both = [(one, starts[one.round]) for one in text.drafts if one.round in starts]
            which, tokens = f"of sequence {other.seq_id}, not of {text.seq_id}", [*text.tokens]
            for one, its in both:
                tokens[one.pos0] = other.text[its.pos0]
            about = f"drafts continue from the newest token {which}"
            yield self._guess(stage, about, text=replace(text, tokens=tokens))
            if own is None:
                continue
            table = model.table(self._target.like(other.text[:LONGEST_TEXT]).rows)
            assert table is not None
            n, moved = min(len(own), len(table)), own.clone()
            for one, its in both:
                n_rows = min(its.n_accepted + 1, one.n_accepted + 1, len(own) - before - one.pos0)
                part = table[before + its.pos0 : before + its.pos0 + max(0, n_rows)]
                moved[before + one.pos0 : before + one.pos0 + len(part)] = part
            about = f"rows are those {which}"
            start = min(before + min(other.n_prompt, text.starts[0]), n)
            for where, rows in (
                (" in the prompt", torch.cat((table[:start], own[start:]))),
                (" at the same positions", torch.cat((table[:n], own[n:]))),
                (" in the same places of verify batches", moved),
            ):
                yield self._of_table(about + where, rows)

    def _of_rejected(self, window: Drafts) -> Iterator[Guess]:
        if self._text.table is None:
            return
        for about, table in self._target.after_rounds(self._model, self._text, window):
            if isinstance(table, torch.Tensor):
                yield self._of_table(about, table)
            else:
                yield replace(self._guess(STATE, about), left=table)

    def _of_blocks(self, wrong: Drafts) -> Iterator[Guess]:
        model = self._model
        if not isinstance(model, BlockModel):
            return
        n, first, mask = model.n_block, model.first, model.mask
        found: dict[str, dict[str, Any]] = {}
        others = [t for t in (*self._special, mask + 1, mask - 1) if 0 <= t != mask]
        for other in (*others, *self._masks(wrong)):
            if other < self._session.config.n_vocab:
                found[f"masks are token {other}, not {mask}"] = {"mask": other}
        for row in range(1, n):
            for other in dict.fromkeys((*others, -1, *self._masks(wrong, row))):
                what = f"token {other}" if other >= 0 else "the newest token"
                found[f"row {row} of a block is {what}, not the mask"] = {"masks": {row: other}}
        found["blocks start with a mask instead of the newest token"] = {"masks": {0: mask}}
        found["blocks start with the token before the newest"] = {"masks": {0: -2}}
        found["masks are copies of the newest token"] = {"mask": -1}
        for length in (model.config.block_size, n + 1, n - 1):
            if length != n and length > first:
                found[f"blocks have {length} rows, not {n}"] = {"n_block": length}
        for about, windows in other_windows(model.config.windows):
            yield self._guess(BLOCK, about, model=model.like(self._n_ctx, windows))
        for other in (first + 1, first - 1):
            about = f"tokens are read from row {other} of a block on instead of row {first}"
            if other >= 0:
                found[about] = {"first": other}
            if other > first:
                found[f"{about}, and blocks have one more row"] = {"first": other, "n_block": n + 1}
        if model.core.markov is not None:
            about = f"its sample_from_anchor is read as {str(first > 0).lower()}"
            about += f": the first token is read from row {1 - first}"
            sizes = {"first": 1 - first, "n_block": n + 1 - 2 * first}
            changes = tuple((model, name, size) for name, size in sizes.items())
            changes += ((model.core.markov, "first", 1 - first),)
            yield self._guess(BLOCK, about, changes=changes, during="draft")
        found["all rows of a block have the same position"] = {"apart": 0}
        found["rows of a block are two positions apart"] = {"apart": 2}
        for row, by in product(range(n - 1, 0, -1), (-1, 1)):
            which = "the last row" if row == n - 1 else f"row {row}"
            how = "early" if by < 0 else "far"
            found[f"{which} of a block is one position too {how}"] = {"moved": {row: by}}
        if model.core.selector is not None:
            about = "its selector is skipped"
            yield self._guess(BLOCK, about, changes=((model.core, "selector", None),))
            found["its walk follows the best candidate, not the chosen one"] = {"walks": False}
        for about, changed in found.items():
            stage = POSITIONS if {"apart", "moved"} & changed.keys() else BLOCK
            stage = CANDIDATES if "walks" in changed else stage
            changes = tuple((model, name, value) for name, value in changed.items())
            yield self._guess(stage, about, changes=changes, during="draft")

    def _masks(self, wrong: Drafts, row: int = 0) -> list[int]:
        """Tokens that give wrong drafts as masks, or in one row of a block, from a right state."""
        model = self._model
        assert isinstance(model, BlockModel)
        own = model.mask

        def gives(draft: RecordedDraft, newest: Entries, mask: int) -> bool:
            changes = (model, "masks", {row: mask}) if row else (model, "mask", mask)
            with in_place([changes]):
                return mask != own and self._gives(draft, newest)

        most = _MOST_MASKS // (model.n_block if row else 1)
        start = max(0, own - most // 2)
        stop = min(start + most, self._session.config.n_vocab)
        return self._fitting(wrong, range(start, stop), gives)

    def _windows(self, wrong: Drafts) -> list[int]:
        """Context lengths with which a drafter makes the wrong drafts, from a right state."""

        def gives(draft: RecordedDraft, newest: Entries, size: int) -> bool:
            self._model.lose(max(0, draft.pos0 - size))
            return size < draft.pos0 and self._gives(draft, newest)

        return self._fitting(wrong, range(_LONGEST_WINDOW, 0, -1), gives)

    def _gives_moved(self, whole: bool, draft: RecordedDraft, newest: Entries, by: int) -> bool:
        first = newest.positions[0] + by
        if (not self._model.has_newest and not whole) or first < 0:
            return False
        return self._gives(draft, newest.moved(by) if whole else newest, first + 1)

    def _fitting(self, wrong: Drafts, values: Sequence[int], gives: _Gives) -> list[int]:
        """A few values that give the first of these drafts. None if as many other values would
        probably give them by chance, since few drafts are given by many."""
        found = list(values)
        for draft in wrong[:_SHOWN_BY]:
            newest = self._right_before(draft)
            found = [value for value in found if gives(draft, newest, value)]
        found = found[:_MOST_FITTING]
        some = {*values[:: 1 + len(values) // _MOST_COUNTED]}
        shares: dict[int, list[float]] = {value: [] for value in found}
        for draft in wrong[:_COUNTED_BY] if found else ():
            newest = self._right_before(draft)
            tried = (value for value in values if value in some or value in shares)
            given = {value for value in tried if gives(draft, newest, value)}
            for value in given & shares.keys():
                shares[value].append(len(given & some - {value}) / len(some))
        return [x for x in found if n_by_chance(len(values) - 1, shares[x]) < CHANCE]

    def _right_before(self, draft: RecordedDraft) -> Entries:
        """Write the right memory of a draft; returns the entry that it continues from."""
        model, end = self._model, draft.pos0 - self._model.ahead
        model.clear()
        model.write(self._text.entries(model, range(end), CLEAN, draft.pos0))
        return self._text.entries(model, [end], CLEAN, draft.pos0)

    def _gives(self, draft: RecordedDraft, newest: Entries, first: int | None = None) -> bool:
        """Whether the current memory gives a draft. first: position of its first token."""
        first = newest.positions[0] + 1 if first is None else first
        for n in sorted({1, len(draft.tokens)}):  # for most values the first token decides
            rows = self._model.draft(newest, first, draft.tokens, n)
            best = [next(iter(row), -1) for row in rows]
            if best != draft.tokens[: len(best)]:
                return False
        return True

    def _of_candidates(self) -> Iterator[Guess]:
        ids, n_vocab = self._model.drafted_ids, self._session.config.n_vocab
        maps = of_map(ids.tolist(), n_vocab) if ids is not None else of_shards(n_vocab)
        yield from (self._guess(CANDIDATES, x, change=y) for x, y in chain(maps, of_choice()))

    def _chosen_alone(self) -> Iterator[Guess]:
        """Wrong candidates that the next step does not see: it continues from the best one."""
        if isinstance(self._model, StepwiseModel):
            for guess in self._of_candidates():
                about = f"{guess.about.rstrip('.')}, but the next step reads the right one."
                yield replace(guess, about=about, deviation=GOES_ON)

    def vague(self, seen: Seen) -> Iterator[Guess]:
        """Mistakes that explain a part of anything, after all others."""
        for first in dict.fromkeys((0, min((step for step, _ in seen[2]), default=0))):
            where = f", only from drafted token {first} on", None, range(first, _FARTHEST)
            for about, change in observed(self._text.drafts, seen, self._shown, first):
                guess = self._guess(CANDIDATES, about, change=change)
                yield (guess.within(where, self._text) if first else None) or guess

    def drawn(self) -> Iterator[Guess]:
        """Sampling, which resembles many mistakes and is assumed if no other fits."""
        about = "candidates are sampled, not the best ones taken: a temperature of the drafter"
        for deviation in (CLEAN, GOES_ON):
            yield self._guess(CANDIDATES, about, deviation=deviation, change=any_of_ten)
