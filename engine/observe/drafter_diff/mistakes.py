"""What a drafter of an engine may do otherwise than ours, stage by stage: one stage's input or
working is changed, at some of the text's places or rounds, and all else is right."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from engine.audit.draft_models import BlockModel, DraftModel, Entries, StepwiseModel
from engine.audit.recorded_drafts import (
    CLEAN,
    OF_ENGINES,
    OUTCOMES,
    SHIFTED,
    Deviation,
    DraftedText,
    RecordedDraft,
    outcomes,
)
from engine.model.rope_tables import RopeTables
from engine.observe.drafter_diff.candidate_mistakes import (
    Change,
    any_of_ten,
    observed,
    of_choice,
    of_map,
)
from engine.observe.drafter_diff.records import BLOCK, CANDIDATES, POSITIONS, ROWS, STATE
from engine.observe.drafter_diff.target_rows import FACTORS, TextRows, mapped
from engine.session import Session

_Drafts = Sequence[RecordedDraft]
_Gives = Callable[[RecordedDraft, Entries, int], bool]
_GOES_ON = Deviation("", "", best=True)
_MOST_MASKS, _LONGEST_WINDOW = 1024, 128
_BASES = (10.0, 0.1, 100.0, 0.01)
_FARTHEST, _SHOWN_BY, _MOST_FITTING = 64, 3, 6
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True, slots=True)
class Guess:
    """A mistake. about: a sentence. deviation, text, model: what is replayed; change: of the
    candidates, None for none; left: what is in memory with a draft beyond the text's, by round;
    changed: attributes of `part`, which is the model or its core, in place of its own."""

    stage: str
    about: str
    deviation: Deviation
    text: DraftedText
    model: DraftModel
    change: Change | None = None
    left: Mapping[int, Entries] = field(default_factory=dict)
    part: Any = None
    changed: Mapping[str, Any] = field(default_factory=dict)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """While it is replayed."""
        own = {name: getattr(self.part, name) for name in self.changed}
        try:
            for name, value in self.changed.items():
                setattr(self.part, name, value)
            yield
        finally:
            for name, value in own.items():
                setattr(self.part, name, value)


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

    def all(self, window: _Drafts, wrong: _Drafts) -> Iterator[Guess]:
        """wrong: the first drafts that are."""
        at = self._text.drafts.index(wrong[0])
        ends = outcomes(self._text.drafts[at - 1]) if at else ()
        yield from self._of_candidates()
        yield from self._chosen_alone()
        yield from self._of_rows()
        yield from self._of_blocks(wrong)
        yield from self._of_state("", wrong)
        yield from self._of_rejected(window)
        yield from self._of_module()
        yield from self._of_steps()
        for after in ends:
            yield from self._of_state(after, wrong)
        yield from self._of_some_rows()

    def _of_state(self, after: str, wrong: _Drafts) -> Iterator[Guess]:
        for deviation in (*OF_ENGINES, *(() if after else self._unseen(wrong))):
            which = deviation.batch
            model = self._model
            if (after and which) or (deviation.is_of_rows and not model.reads_rows):
                continue
            if not model.has_newest and (deviation.own or deviation.drops or deviation.early):
                continue
            if model.can_cut if deviation.only else deviation.late and not model.can_cut:
                continue
            moves = deviation.place or deviation.step or deviation.drift or deviation.stride != 1
            stage = POSITIONS if moves else ROWS if deviation.what == SHIFTED else STATE
            if deviation.token_shift or deviation.round_shift:
                stage = STATE
            about = deviation.about + (f", only after {OUTCOMES[after]}" if after else "")
            guess = self._guess(stage, about, deviation=replace(deviation, after=after))
            if which:
                for whole in (True, False):
                    text = self._text.in_batches(self._model, which, with_prompt=whole)
                    yield replace(guess, text=text)
            else:
                yield guess

    def _unseen(self, wrong: _Drafts) -> Iterator[Deviation]:
        n = self._text.starts[0]
        yield Deviation("", "the drafter has not seen the prompt", unseen=n)
        for size in (size for size in _SIZES if size < n):
            yield Deviation("", f"the drafter has not seen the first {size} tokens", unseen=size)
        for size in self._windows(wrong):
            yield Deviation("", f"the drafter sees no more than {size} tokens", window=size)
        for what, with_newest in (("drafted tokens are decoded", False), ("drafts are made", True)):
            moves = [-n, *(by for by in range(-_FARTHEST, _FARTHEST + 1) if abs(by) > 2)]
            for by in self._fitting(wrong, moves, partial(self._gives_moved, with_newest)):
                about = f"{what} {abs(by)} positions too {'far' if by > 0 else 'early'}"
                yield Deviation("", about, place=by * with_newest, step=by)

    def _guess(self, stage: str, about: str, **parts: Any) -> Guess:
        about = f"{about[0].upper()}{about[1:].rstrip('.')}."
        right = {"deviation": CLEAN, "text": self._text, "model": self._model}
        return Guess(stage, about, **{**right, **parts})

    def _of_table(self, about: str, table: torch.Tensor | None) -> Guess:
        return self._guess(ROWS, about, text=replace(self._text, table=table))

    def _of_rows(self) -> Iterator[Guess]:
        for about, rows, layers in (
            self._target.wrong(self._model.orders) if self._model.reads_rows else ()
        ):
            yield self._of_table(about, self._model.table(rows, layers))

    def _of_some_rows(self) -> Iterator[Guess]:
        """Rows that are wrong in some places alone."""
        rows, n = self._target.rows, len(self._text.tokens)
        if (table := self._text.table) is None:
            return
        for size in (s for s in _SIZES if 1 < s < self._text.starts[0]):
            moved = [p % size if p < self._text.starts[0] else p for p in range(len(table))]
            about = f"rows of a prompt's later passes, of {size} tokens, are those of the first"
            yield self._of_table(about, table[moved])
        changes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "zeros": torch.zeros_like,
            "those of the position before": lambda x: torch.cat((x[:1], x[:-1])),
            "those of the position after": lambda x: torch.cat((x[1:], x[-1:])),
        }
        for where, places in self._places().items():
            mask = torch.zeros(n, dtype=torch.bool)
            mask[[at for at in places if at < n]] = True
            for what, change in changes.items():
                some = mapped(rows, partial(_where, mask[:, None], change))
                about = f"rows of {where} are {what}"
                if what == "zeros" and where == "the prompt":
                    about += ", as if they had not been handed over"
                yield self._of_table(about, self._model.table(some))

    def _places(self) -> dict[str, Collection[int]]:
        """Places of a text that its rows may be wrong in, by what they are."""
        n, drafts = self._text.starts[0], self._text.drafts
        found: dict[str, Collection[int]] = {
            "the prompt": range(n),
            "decoded tokens": range(n, len(self._text.tokens)),
            "accepted tokens": [d.pos0 + 1 + i for d in drafts for i in range(d.n_accepted)],
            "tokens that were not drafted": [draft.pos0 for draft in drafts],
        }
        for end, after in OUTCOMES.items():
            ended = [draft for draft in drafts if end in outcomes(draft)]
            found[f"the newest token after {after}"] = [d.pos0 + d.n_accepted for d in ended]
        for size in _SIZES:
            if size < n:
                found[f"the prompt but its last {size} tokens"] = range(n - size)
        return {where: places for where, places in found.items() if places}

    def _of_module(self) -> Iterator[Guess]:
        """What the drafter's own module reads and how it turns it."""
        own = vars(self._model.core)
        rope = own.get("_rope")
        if isinstance(rope, RopeTables):
            for base in _BASES:
                about = f"its rope has {base:g} times the frequency base, or about that"
                yield self._with(POSITIONS, about, _rope=rope.turned(base))
            for stretch in (0.0, 0.5, 2.0, 0.25, 4.0):
                about = f"its rope turns by {stretch:g} times the angles, as with another scaling"
                yield self._with(POSITIONS, about, _rope=rope.turned(1.0, stretch))
        norms = {x: y for x, y in own.items() if x.endswith("norm") and torch.is_tensor(y)}
        for name, weight in norms.items():
            about = f"the weights of its norm `{name.strip('_')}` are left out"
            yield self._with(BLOCK, about, **{name: torch.ones_like(weight)})
        output, config = own.get("_output"), own.get("config")
        if getattr(output, "norm", None) is not None:
            about = "the weights of the norm before its head are left out"
            guess = self._guess(BLOCK, about, part=output)
            yield replace(guess, changed={"norm": torch.ones_like(output.norm)})
        if (before := getattr(config, "norm_before_residual", None)) is not None:
            about = f"its residual is taken {'before' if before else 'after'} the norm of its rows"
            yield self._with(BLOCK, about, config=replace(config, norm_before_residual=not before))
        if own.get("_fuse_norm") is not None:
            with self._with(ROWS, "unnormed", _fuse_norm=None).applied():
                table = self._model.table(self._target.rows)
            yield self._of_table("rows are not normed before they are fused", table)
        for (one, x), (other, y) in pairwise(norms.items()):
            if x.shape == y.shape:
                about = f"its norms `{one.strip('_')}` and `{other.strip('_')}` are exchanged"
                yield self._with(BLOCK, about, **{one: y, other: x})
        embedding = own.get("_embedding")
        if embedding is not None and self._model.reads_rows:
            about = "embeddings of its tokens are zeros"
            yield self._with(BLOCK, about, _embedding=lambda ids: embedding(ids) * 0)
        if own.get("_factors") is not None:
            yield self._with(BLOCK, "embeddings of its tokens are not scaled", _factors=None)
        for name in ("_join", "_attention"):
            if (joined := own.get(name)) is not None and self._model.reads_rows:
                about = "token and row are joined the other way round: halves are exchanged"
                yield self._with(BLOCK, about, **{name: partial(_halves, joined)})
        for name in ("_attention", "_ffn"):
            if (part := own.get(name)) is not None:
                about = f"its {name.strip('_')} adds nothing"
                yield self._with(BLOCK, about, **{name: partial(_nothing, part)})
        if own.get("selector") is not None:
            yield self._with(BLOCK, "its selector is left out", selector=None)
            about = "its walk takes the best candidate for the one chosen before every row"
            guess = self._guess(CANDIDATES, about, part=self._model)
            yield replace(guess, changed={"walks": False})
        if (markov := own.get("_markov")) is not None:
            about = "its chain over a block is left out"
            yield self._with(BLOCK, about, _markov=_no_chain)
            assert isinstance(self._model, BlockModel)
            about = "every row of its chain goes on from the newest token, not from the one before"
            linked = partial(_one_link, markov, self._model.first)
            yield self._with(CANDIDATES, about, _markov=linked)

    def _with(self, stage: str, about: str, **core: Any) -> Guess:
        return replace(self._guess(stage, about), part=self._model.core, changed=core)

    def _of_steps(self) -> Iterator[Guess]:
        """What one step of a draft hands on to the next one."""
        if not isinstance(self._model, StepwiseModel) or not self._model.reads_rows:
            return
        if (ids := self._model.ids) is not None:
            row_of = {token: i for i, token in enumerate(ids.tolist())}
            about = "the token that a step hands on is not mapped to the target's id (d2t)"
            guess = self._guess(CANDIDATES, about, part=self._model)
            yield replace(guess, changed={"fed": lambda token: row_of.get(token, token)})
        changes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "zeros": torch.zeros_like,
            "normed": lambda x: x * x.square().mean(-1, keepdim=True).rsqrt(),
        }
        for factor in FACTORS:
            changes[f"about {factor:g} times what it should be"] = partial(torch.mul, other=factor)
        for what, change in changes.items():
            guess = self._guess(STATE, f"what a step hands on to the next one is {what}")
            yield replace(guess, part=self._model, changed={"handed_on": change})

    def _of_rejected(self, window: _Drafts) -> Iterator[Guess]:
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
        made = self._target.of_rejected([last for last, _ in partial])
        rejected = {number: model.table(rows) for number, rows in made.items()}
        before = model.newest_row(0) + 1
        choices: dict[str, Callable[[int], int]] = {
            "that of the last token of the verify batch": lambda n: -1,
            "that of the rejected token": lambda n: before + n + 1,
            "the first of the verify batch": lambda n: before,
        }
        for what, index in choices.items():
            stale = table.clone()
            for last, later in partial:
                if (own := rejected.get(last.round)) is not None:
                    stale[model.newest_row(later.pos0)] = own[index(last.n_accepted)]
            yield self._of_table(f"after a rejection the newest row is {what}", stale)
        stale = table.clone()
        for last, later in partial:
            stale[model.newest_row(later.pos0)] = stale[model.newest_row(last.pos0)]
        yield self._of_table("after a rejection the row of the round before stays", stale)
        left = {}
        for last, later in partial:
            if (own := rejected.get(last.round)) is not None:
                known = [self._text.tokens[last.pos0], *last.tokens]
                places = range(last.n_accepted + 1 - model.ahead, len(known) - model.ahead)
                left[later.round] = Entries(
                    [last.pos0 + i for i in places],
                    [known[i + model.ahead] for i in places],
                    own[places.start : places.stop],
                )
        about = "rows of rejected tokens stay in its memory for the next draft"
        yield replace(self._guess(STATE, about), left=left)

    def _of_blocks(self, wrong: _Drafts) -> Iterator[Guess]:
        model = self._model
        if not isinstance(model, BlockModel):
            return
        n, first, mask = model.n_block, model.first, model.mask
        found: dict[str, dict[str, Any]] = {}
        tokenizer, n_vocab = self._session.tokenizer, self._session.config.n_vocab
        others = [0, tokenizer.eos_id, tokenizer.bos_id, mask + 1, mask - 1, n_vocab - 1]
        for other in (*others, *self._masks(wrong)):
            if other is not None and other != mask and 0 <= other < n_vocab:
                found[f"masks are token {other}, not {mask}"] = {"mask": other}
        found["blocks begin with a mask, not with the newest token"] = {"anchored": False}
        found["masks are the newest token again"] = {"mask": -1}
        for length in (model.config.block_size, n + 1, n - 1):
            if length != n and length > first:
                found[f"blocks have {length} rows, not {n}"] = {"n_block": length}
        sees = "rows do not see" if model.config.causal is False else "rows see"
        found[f"block {sees} those after them"] = {"flipped": True}
        if any(model.config.windows):
            found["its windows are left out: a block sees all of the context"] = {"unbound": True}
        for other in (first + 1, first - 1):
            about = f"tokens are taken from row {other} of a block on, not {first}"
            if other >= 0:
                found[about] = {"first": other}
            if other > first:
                found[f"{about}, and blocks are a row longer"] = {"first": other, "n_block": n + 1}
        found["all rows of a block are in one position"] = {"apart": 0}
        found["rows of a block are two positions apart"] = {"apart": 2}
        for about, changed in found.items():
            stage = POSITIONS if "apart" in changed else BLOCK
            yield self._guess(stage, about, model=self._block(**changed))

    def _masks(self, wrong: _Drafts) -> list[int]:
        """Tokens that give wrong drafts as masks, from a right state."""
        model = self._model
        assert isinstance(model, BlockModel)
        own = model.mask

        def gives(draft: RecordedDraft, newest: Entries, mask: int) -> bool:
            model.mask = mask
            return mask != own and self._gives(draft, newest)

        start = max(0, own - _MOST_MASKS // 2)
        try:
            stop = min(start + _MOST_MASKS, self._session.config.n_vocab)
            return self._fitting(wrong, range(start, stop), gives)
        finally:
            model.mask = own

    def _windows(self, wrong: _Drafts) -> list[int]:
        """How many tokens back a drafter sees that makes wrong drafts, from a right state."""
        if not self._model.can_cut:
            return []

        def gives(draft: RecordedDraft, newest: Entries, size: int) -> bool:
            self._model.cut(0, max(0, draft.pos0 - size))
            return size < draft.pos0 and self._gives(draft, newest)

        return self._fitting(wrong, range(_LONGEST_WINDOW, 0, -1), gives)

    def _gives_moved(self, whole: bool, draft: RecordedDraft, newest: Entries, by: int) -> bool:
        first = newest.positions[0] + by
        if (not self._model.has_newest and not whole) or first < 0:
            return False
        return self._gives(draft, newest.moved(by) if whole else newest, first + 1)

    def _fitting(self, wrong: _Drafts, values: Sequence[int], gives: _Gives) -> list[int]:
        """The values with which all these drafts are made, a few at most."""
        found = list(values)
        for draft in wrong[:_SHOWN_BY]:
            newest = self._right_before(draft)
            found = [value for value in found if gives(draft, newest, value)]
        return found[:_MOST_FITTING]

    def _right_before(self, draft: RecordedDraft) -> Entries:
        """Write what is to be in memory with a draft; the entry that it goes on from."""
        model, end = self._model, draft.pos0 - self._model.ahead
        model.clear()
        model.write(self._text.entries(model, range(end), CLEAN, draft.pos0))
        return self._text.entries(model, [end], CLEAN, draft.pos0)

    def _gives(self, draft: RecordedDraft, newest: Entries, first: int | None = None) -> bool:
        """Whether the memory as it is gives a draft. first: position of its first token."""
        first = newest.positions[0] + 1 if first is None else first
        rows = self._model.draft(newest, first, draft.tokens, len(draft.tokens))
        best = [next(iter(row), -1) for row in rows]
        return best == draft.tokens[: len(best)]

    def _block(self, flipped: bool = False, unbound: bool = False, **changed: Any) -> BlockModel:
        assert isinstance(self._model, BlockModel)
        made = self._model.like(self._n_ctx, flipped=flipped, unbound=unbound)
        for name, value in changed.items():
            setattr(made, name, value)
        return made

    def _of_candidates(self) -> Iterator[Guess]:
        ids = self._model.drafted_ids
        if ids is not None:
            for about, change in of_map(ids.tolist(), self._session.config.n_vocab):
                yield self._guess(CANDIDATES, about, change=change)
        for about, change in of_choice():
            yield self._guess(CANDIDATES, about, change=change)

    def _chosen_alone(self) -> Iterator[Guess]:
        """Wrong candidates that the next step knows nothing of: it goes on from the best one."""
        if isinstance(self._model, StepwiseModel):
            for guess in self._of_candidates():
                about = f"{guess.about.rstrip('.')}, and the next step goes on from the right one."
                yield replace(guess, about=about, deviation=_GOES_ON)

    def vague(
        self, window: _Drafts, best: Mapping[int, Sequence[int]], above: Mapping[int, int]
    ) -> Iterator[Guess]:
        """What explains a part of anything, after all else. best, above: see `observed`."""
        drafts = self._text.drafts
        for about, change in observed(window, drafts, best, above, self._shown):
            stage = ROWS if about.endswith("NaN") else CANDIDATES
            yield self._guess(stage, about, change=change)

    def drawn(self) -> Iterator[Guess]:
        """What many a mistake looks like, and which is left where no other does."""
        about = "candidates are drawn, not the best ones taken: a temperature of the drafter"
        for deviation in (CLEAN, _GOES_ON):
            yield self._guess(CANDIDATES, about, deviation=deviation, change=any_of_ten)


def _where(
    mask: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    return torch.where(mask, change(x), x)


def _halves(own: Callable[..., torch.Tensor], x: torch.Tensor, *more: Any, **options: Any) -> Any:
    """What a layer makes of two rows side by side, put in the other order."""
    return own(x.roll(x.shape[-1] // 2, -1), *more, **options)


def _nothing(own: Callable[..., torch.Tensor], *args: Any, **options: Any) -> torch.Tensor:
    return own(*args, **options) * 0


def _no_chain(
    logits: torch.Tensor, hidden: torch.Tensor, last: torch.Tensor, *, invariant: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """In the place of a MarkovHead."""
    return logits, logits.new_empty(len(logits), 0)


def _one_link(
    own: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    first: int,
    logits: torch.Tensor,
    hidden: torch.Tensor,
    last: torch.Tensor,
    *,
    invariant: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A MarkovHead whose rows, from `first` on, each come next after the newest token."""
    found = [logits[:, :first]]
    for row in range(first, logits.shape[1]):
        parts = (torch.cat((x[:, :first], x[:, row : row + 1]), 1) for x in (logits, hidden))
        found.append(own(*parts, last, invariant=invariant)[0][:, first:])
    return torch.cat(found, 1), logits.new_empty(len(logits), 0)
