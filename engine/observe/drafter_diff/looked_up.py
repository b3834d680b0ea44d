"""Lookup drafts made again: a new drafter sees the text of a side round by round, rightly and then
with one known mistake after the other. Needs no model."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial, partialmethod
from itertools import chain, pairwise, product
from operator import itemgetter
from time import thread_time
from typing import Any

import torch

from engine.audit.deviations import BEHIND
from engine.audit.lookups import SHARED, SHOWINGS, Showing
from engine.audit.recorded_drafts import Counts, RecordedDraft, added
from engine.draft.drafter import Draft, Drafter, DraftRequest
from engine.draft.ngram_cache import N_LONGEST, NgramCache, learn
from engine.draft.ngram_drafter import History
from engine.draft.ngram_mod import EMPTY, NgramPool, entry_of
from engine.draft.registry import DRAFTERS
from engine.draft.spec import DrafterInputs
from engine.draft.suffix import SuffixTree
from engine.gguf.binary import check_cancelled, never
from engine.memory.hybrid import LentMemories
from engine.model.layers import TargetRows
from engine.observe.drafter_diff.operations import Changes, in_place
from engine.observe.drafter_diff.records import (
    CANDIDATES,
    FEW,
    STATE,
    UNEXPLAINED,
    Cause,
    place_of,
    signature,
)
from engine.observe.drafter_diff.sides import LONGEST_TEXT, DraftSide
from engine.observe.drafter_diff.wrong_drafts import whens
from engine.options import RunOptions
from engine.trace.run_ref import RunColumns

_UNSEEN = (
    Showing(BEHIND, "it has not seen the prompt", no_prompt=True),
    *(Showing(BEHIND, f"it lacks the prompt's last {n} tokens", n_cut=n) for n in range(1, 17)),
)
_SHOWINGS = (
    Showing(BEHIND, "it has seen only the prompt, and no decoded tokens", n_lost=1 << 30),
    Showing(BEHIND, "it sees decoded tokens one round too late", late=True),
    *(showing for showing in SHOWINGS if showing.forgets),
)
_LEARNED: dict[str, Callable[[int, int], int | None]] = {
    "it is not informed how many of its tokens were accepted": lambda n, of: None,
    "it is informed of one accepted token too few": lambda n, of: max(0, n - 1),
    "it is informed of one accepted token too many": lambda n, of: n + 1,
    "it is always informed that no token was accepted": lambda n, of: 0,
    "it is always informed that its whole draft was accepted": lambda n, of: of,
}
_SEEN: dict[str, Callable[[list[int]], list[int]]] = {
    "each token of a round as its first one": lambda tokens: tokens[:1] * len(tokens),
    "each token of a round as its last one": lambda tokens: tokens[-1:] * len(tokens),
    "the tokens of a round in reverse order": lambda tokens: tokens[::-1],
    "only the first token of each round": lambda tokens: tokens[:1],
    "only the last token of each round": lambda tokens: tokens[-1:],
    "each round without its first token": lambda tokens: tokens[1:],
}
_LENGTHS: dict[str, Callable[[list[int]], list[int]]] = {
    "it drafts nothing": lambda tokens: [],
    **{f"it drafts at most {n} token{'s' * (n > 1)}": itemgetter(slice(n)) for n in (1, 2, 3, 4)},
    "its drafts lack their last token": lambda tokens: tokens[:-1],
    "its drafts are half as long": lambda tokens: tokens[: max(1, len(tokens) // 2)],
    "its drafts lack their first token": lambda tokens: tokens[1:],
}
"""Mistakes in what it learns from accepted tokens and draft lengths, sees of a round, and leaves of
its drafts."""


def _earliest(history: History, ngram: Sequence[int], low: int, high: int) -> int:
    return next(iter(history.find_all(ngram, low, high)), -1)


def _behind(start: int, history: History, ngram: Sequence[int], low: int, high: int) -> int:
    """History.find_last, from `start` on at least; start: relative to the end if below 0."""
    return history.find_last(ngram, max(low, start + len(history) * (start < 0)), high)


def _learning(
    self: NgramCache, n_known: int | None, seq: int, history: History, last: int
) -> Draft:
    """NgramCache._look_up that counts its own drafts, too. n_known: tokens before a draft that are
    not counted again; None: n-grams across two look-ups are counted instead of drafts."""
    n = self._n_learned.get(seq, 0)
    if n_known is None and 0 < n <= len(history):
        start = max(0, n - N_LONGEST)
        learn(self._tables[seq], [*history.part(start), last], n - start)
        self._n_learned[seq] = len(history) + 1
    draft = _LOOK_UP(self, seq, history, last)
    before = [*history.part(1 - N_LONGEST), last]
    if draft.tokens and n_known is not None:
        learn(self._tables[seq], [*before, *draft.tokens], min(n_known, len(before)))
    return draft


def _filling(self: NgramPool, of_text: bool, tokens: Sequence[int]) -> None:
    """NgramPool.add that overwrites no entry; of_text: but those that it adds itself."""
    parts = [tokens[i : i + self._n + 1] for i in range(len(tokens) - self._n)]
    new = (part for part in parts if self._entries[entry_of(part[:-1])] == EMPTY)
    for part in [*new] if of_text else new:
        _ADD(self, part)


_LOOK_UP, _ADD, _CHILDREN = NgramCache._look_up, NgramPool.add, SuffixTree._children
_FARTHEST = 160
_MOST, _SHARE, _EXPLAINS = 256, 0.05, 0.34
_MOST_LATE, _MANY_RIGHT = 48, 5
"""How far before the first wrong draft a look-up may have stopped, in tokens; right drafts that
show that it works up to there."""
_FOREIGN = "tokens are drafted that are nowhere in the text in this order"
_SIZES = ("N_ENTRIES", "EMPTY", "N_SLOTS", "N_STATIC", "N_TOP", "N_LONGEST")
_OF_POOLS = ("CHUNK", "LOW_ACCEPTANCE", "LOW_STREAK", "MOST_OCCUPANCY")
_ENDLESS = 1 << 40
_SECONDS_EQUAL, _MOST_EQUAL = 1.0, 2
"""CPU seconds for finding other mistakes that give all drafts; how many of them are reported."""
_NO_ROWS = TargetRows(torch.empty(0))
_SMALL, _STEPPED = 16, 64
_Rounds = tuple[str, Collection[int]]
_Shared = tuple[int, DraftRequest, list[int], RecordedDraft]
"""A round of another sequence: its number, request, final tokens, and draft."""
_Try = tuple[str, str, Showing, Any, Changes]
"""A possible mistake: stage, sentence, how a text is shown, options, attributes."""
_Made = tuple[RecordedDraft, RecordedDraft]
"""A draft as recorded, and as made again; empty if there was none."""


class LookedUp:
    """The drafts of a side with a lookup drafter. options: of the run, as far as known. others:
    sequences of its run, from which a shared drafter learns."""

    def __init__(
        self,
        side: DraftSide,
        options: RunOptions,
        cancelled: Callable[[], bool] = never,
        others: Sequence[DraftSide] = (),
    ) -> None:
        self._side, self._options, self._cancelled = side, options, cancelled
        self._name, self._now = side.drafters[0], 0
        self._others = [*others] if self._name in SHARED else []
        self._shared = [
            round_ for i, one in enumerate(self._others, 1) for round_ in _rounds(i, one)
        ]
        self._shared.sort(key=itemgetter(0))
        self._numbers = _numbers(side) if self._others else {}

    def cause(self) -> Cause | None:
        """Why recorded drafts are not the drafter's own; None if they are."""
        made = self._made(Showing())
        wrong = _apart(made)
        n_drafts = sum(bool(pair[0].tokens or pair[1].tokens) for pair in made)
        if len(wrong) < FEW or len(wrong) < _SHARE * n_drafts:
            return None
        stage, found, least = STATE, None, _EXPLAINS * len(wrong)
        at, until, equal = wrong[0][0].pos0, 0.0, list[str]()
        for its_stage, about, showing, options, working in self._tries(made, wrong):
            try:
                again = self._made(showing, options, working, wrong)
            except (ArithmeticError, LookupError, ValueError):
                continue  # it cannot work so
            # if it ended before all wrong ones, none is given
            is_whole = again and again[-1][0].pos0 >= wrong[-1][0].pos0
            left = len(_apart(again)) if is_whole else len(wrong)
            if left < least:
                stage, found, least = its_stage, f"{about[0].upper()}{about[1:]}.", left
                until = thread_time() + _SECONDS_EQUAL
            elif not (left or least) and its_stage == stage:
                equal.append(about)
            if not least and (len(equal) == _MOST_EQUAL or thread_time() > until):
                break
        if equal:
            found = f"{found} These would give the same drafts: {'; or '.join(equal)}."
        if found is None:
            drafted = [pair for pair in wrong if pair[0].tokens and pair[1].tokens]
            stage = UNEXPLAINED
            if len(drafted) >= FEW:
                stage, found = signature(self._side, drafted, made, 0)
            if found is None or stage not in (STATE, CANDIDATES):
                stage, found = self._by_source(wrong)
        size = f"{len(wrong)} of {len(made)} drafts are not what {self._name} computes"
        if made.index(wrong[0]) >= _MANY_RIGHT:
            size += f", only from position {at} on"
        own, right = (self._counts(pair[i] for pair in made) for i in (0, 1))
        return Cause(stage, self._side.name, found, place_of(wrong[0][0]), size, own, right)

    def _tries(self, made: Sequence[_Made], wrong: Sequence[_Made]) -> Iterator[_Try]:
        """Possible mistakes, everywhere first, then in some rounds alone."""
        at, right = wrong[0][0].pos0, Showing()
        starts = [one for one in self._side.starts if at - _MOST_LATE <= one <= at]
        ends = [(f" from about position {one} on", range(one, _ENDLESS)) for one in starts]
        skipped = [*self._skipping(ends)]
        if not any(pair[0].tokens for pair in wrong):  # whatever finds nothing would give that
            yield from skipped
        shown = [
            *((STATE, one.about, one) for one in _SHOWINGS),
            *((STATE, about, Showing(learned=own)) for about, own in _LEARNED.items()),
            *((STATE, f"it sees {what}", Showing(kept=own)) for what, own in _SEEN.items()),
        ]
        cut = [(CANDIDATES, about, Showing(left=own)) for about, own in _LENGTHS.items()]
        yield from ((STATE, one.about, one, None, ()) for one in _UNSEEN)
        yield from ((*one, None, ()) for one in shown)
        yield from ((*one[:2], right, None, one[2]) for one in self._workings())
        yield from ((CANDIDATES, about, right, own, ()) for about, own in self._other_settings())
        yield from ((*one[:2], right, None, one[2]) for one in self._other_numbers())
        yield from ((*one, None, ()) for one in cut)
        yield from skipped
        for some, spans in ((shown, False), (cut, True)):
            scopes = [*self._whens(made, wrong, spans=spans), *ends[-2:]]
            for (stage, about, one), (words, rounds) in product(some, scopes):
                yield stage, about + words, replace(one, rounds=rounds), None, ()
        yield from self._skipping([*self._whens(made, wrong, spans=False)])

    def _whens(
        self, made: Sequence[_Made], wrong: Sequence[_Made], *, spans: bool
    ) -> Iterator[_Rounds]:
        """Subsets of rounds by outcomes of drafts: words, and first positions. What is learned at
        the end of a round belongs to the next one. spans: all rounds up to the next draft, not only
        the first."""
        rounds = [one for one, _ in made]
        drafted = [i for i, one in enumerate(rounds) if one.n_drafted]
        places = [rounds.index(one) for one, _ in wrong]
        shown = {bisect_left(drafted, place) for place in places}
        if drafted and (shown := shown & {*range(len(drafted))}):
            for words, after in whens([rounds[i] for i in drafted], shown):
                firsts = [drafted[k - 1] + 1 for k in after if k]
                ends = [drafted[k] + 1 if spans else drafted[k - 1] + 2 for k in after if k]
                parts = (rounds[i:end] for i, end in zip(firsts, ends, strict=True))
                yield words, {one.pos0 for one in chain(*parts)}

    def _skipping(self, scopes: Sequence[_Rounds]) -> Iterator[_Try]:
        """Functions of a drafter's parts that store their input, each disabled in some rounds."""
        module = vars(sys.modules[type(self._new()[0]).__module__])
        kinds = [x for x in module.values() if isinstance(x, type)]
        kinds = [kind for kind in kinds if kind.__module__.startswith("engine.draft.")]
        for kind, (words, rounds) in product(kinds, scopes):
            for name, own in vars(kind).items():
                keeps = getattr(own, "__annotations__", {}).get("return") == "None"
                if keeps and not name.startswith("__"):
                    about = f"its `{kind.__name__}.{name}` stores nothing{words}"
                    changes = ((kind, name, self._without(own, rounds)),)
                    yield STATE, about, Showing(), None, changes

    def _without(self, own: Callable[..., None], rounds: Collection[int]) -> Callable[..., None]:
        """A method that does nothing in some rounds."""

        def called(*args: Any, **options: Any) -> None:
            if self._now not in rounds:
                own(*args, **options)

        return called

    def _workings(self) -> Iterator[tuple[str, str, Changes]]:
        """Mistakes of a drafter's algorithm: stage, sentence, and replaced attributes."""
        if self._name == "ngram-simple":
            about = "it copies the tokens after the earliest match instead of the latest"
            yield STATE, about, ((None, "find", _earliest),)
            about = "it searches only the decoded tokens for matches, not the prompt"
            generated = partial(_behind, self._side.n_prompt)
            yield STATE, about, ((None, "find", generated),)
            for size in range(8, _FARTHEST, 8):
                about = f"it searches only about the newest {size} tokens for matches"
                yield STATE, about, ((None, "find", partial(_behind, -size)),)
        if self._name == "suffix":
            about = "of equally frequent continuations it drafts the newest, not the oldest"
            newest = partialmethod(lambda self, at: iter([*_CHILDREN(self, at)][::-1]))
            yield STATE, about, ((SuffixTree, "_children", newest),)
        for of_text in (False, True) if self._name == "ngram-mod" else ():
            about = "its table keeps the first token that followed an n-gram, not the latest"
            about += ", except within one text that it adds" * of_text
            yield STATE, about, ((NgramPool, "add", partialmethod(_filling, of_text)),)
        module = sys.modules[type(self._new()[0]).__module__]
        for n in (1 << i for i in range(6, 22)) if self._name == "ngram-mod" else ():
            about = f"its table has only about {n} entries, so that n-grams overwrite each other"
            yield STATE, about, ((module, "N_ENTRIES", n), (module, "_MASK", n - 1))
        for n in range(1, N_LONGEST) if self._name == "ngram-cache" else ():
            about = f"it looks up n-grams of at most {n} token{'s' * (n > 1)}"
            yield CANDIDATES, about, ((None, "longest", n),)
        if self._name == "ngram-cache":
            for n_known, about in (
                (None, "it also learns n-grams that span two lookups"),
                (N_LONGEST, "it learns from its own drafts, including rejected tokens"),
                (0, "it learns from its own drafts and counts the tokens before them again"),
            ):
                own = partialmethod(_learning, n_known)
                yield STATE, about, ((NgramCache, "_look_up", own),)

    def _other_numbers(self) -> Iterator[tuple[str, str, Changes]]:
        """Constants of the drafter's algorithm, changed one at a time: stage, sentence, and
        replacements."""
        module = sys.modules[type(self._new()[0]).__module__]
        constants = {name: x for name, x in vars(module).items() if name.isupper()}
        for name, value in constants.items():
            others: dict[str, Any] = {}
            if type(value) in (int, float) and name not in _SIZES:
                numbers: Sequence[float] = [factor * value for factor in (0, 0.5, 2)]
                if type(value) is int and value <= _SMALL:
                    numbers = sorted(range(2 * value + 1), key=lambda one: abs(one - value))
                elif type(value) is int and value <= _STEPPED:
                    numbers = range(0, 4 * value + 1, value // _SMALL)
                others = {f"{type(value)(one):g}": type(value)(one) for one in (*numbers, 1)}
                others["no bound"] = type(value)(_ENDLESS)
            elif isinstance(value, tuple) and isinstance(value[0], tuple):
                floors = {its: x for its, x in constants.items() if type(x) is tuple}
                others = {f"the numbers of {its}": x for its, x in floors.items()}
                others |= {
                    "no minimum number of observations": tuple((0, share) for _, share in value),
                    "no minimum share": tuple((least, 0) for least, _ in value),
                }
                for by, i in product((1, -1), range(len(value))):
                    which = f"one observation {'more' if by > 0 else 'less'}"
                    which += f" from length {i + 1} on" * (i > 0)
                    others[which] = tuple((n + by * (k >= i), x) for k, (n, x) in enumerate(value))
            for what, other in others.items():
                if other != value:
                    said = f", not {value:g}" if isinstance(value, int | float) else ""
                    about = f"it drafts as if {name} were {what}{said}"
                    stage = STATE if name in _OF_POOLS else CANDIDATES
                    yield stage, about, ((module, name, other),)

    def _other_settings(self) -> Iterator[tuple[str, Any]]:
        """Options of the drafter with one number changed, and its value."""
        spec = DRAFTERS[self._name]
        own = spec.options_of(self._options.spec)
        for name in (field.name for field in fields(own) if spec.field):
            value = getattr(own, name)
            others: tuple[float, ...] = ()
            if is_int := type(value) is int:
                others = (*range(value - 4, value + 5), 1, 2, 2 * value, value // 2, 64)
            elif type(value) is float:
                others = (0.0, value / 2, 2 * value, 1.0, 0.1, 0.25, 0.5, 0.75, 1e3)
            for other in dict.fromkeys(one for one in others if one >= is_int and one != value):
                about = f"it drafts as if {name} were {other:g}, not {value:g}"
                yield about, replace(own, **{name: other})

    def _by_source(self, wrong: Sequence[_Made]) -> tuple[str, str]:
        """Stage and sentence by the origin of the tokens of most wrong drafts."""
        n = 0
        for one, _ in wrong:
            text = self._side.text[: one.pos0 + 1]
            known = map(pairwise, [text, *(other.text for other in self._others)])
            n += not {*pairwise([text[-1], *one.tokens])} <= {*chain(*known)}
        if 2 * n > len(wrong):
            return STATE, f"Most likely: {_FOREIGN} ({n} of {len(wrong)} wrong drafts)."
        return CANDIDATES, ("Its drafts are in the text, but not at the matches of its settings.")

    def _counts(self, drafts: Iterable[RecordedDraft]) -> Counts:
        """Tokens that the text confirms, and all tokens, at the same contexts."""
        return added((self._side.n_confirmed(one) or 0, len(one.tokens)) for one in drafts)

    def _made(
        self, how: Showing, options: Any = None, working: Changes = (), wrong: Sequence[_Made] = ()
    ) -> list[_Made]:
        """Drafts of rounds as recorded and made again, while rounds are consecutive. options: of
        the drafter, None for its own; working: replaced attributes, of the drafter if the object is
        None. wrong: drafts to be given; it stops if it does not give most of the first ones."""
        drafter, longest, judged = self._new(options)
        with in_place([(one or drafter, name, value) for one, name, value in working]):
            return self._drafted(how, drafter, longest, judged, {one.pos0 for one, _ in wrong})

    def _new(self, options: Any = None) -> tuple[Drafter, int, int]:
        """A drafter, the longest draft that it makes, and the longest that its own settings
        allow."""
        spec, text = DRAFTERS[self._name], self._side.text[:LONGEST_TEXT]
        own = replace(self._options, faults=())
        options = options or spec.options_of(self._options.spec)
        target: Any = self._side.session.model if self._side.session else None
        lent = LentMemories()
        inputs = DrafterInputs(target, None, options, 1, len(text), own.n_ubatch, False, None, lent)
        judged = spec.longest(spec.options_of(self._options.spec))
        return spec.make(inputs), spec.longest(options), judged

    def _drafted(
        self, how: Showing, drafter: Drafter, longest: int, judged: int, wrong: Collection[int]
    ) -> list[_Made]:
        side, text = self._side, self._side.text[:LONGEST_TEXT]
        recorded = {draft.pos0: draft for draft in side.drafts}
        before, spec = side.n_prompt if how.no_prompt else 0, self._options.spec
        self._now = 0
        drafter.begin(0, text[before : max(before, side.n_prompt - how.n_cut)])
        for i, other in enumerate(self._others, 1):
            drafter.begin(i, other.text[: other.n_prompt])
        waiting = deque(self._shared)
        found: list[_Made] = []
        shown: list[tuple[int, list[int]]] = []
        starts = [at for at in side.starts if side.n_prompt <= at < len(text)]
        n_wrong = n_left = 0
        for number, pos in enumerate(starts):
            check_cancelled(self._cancelled)
            if len(found) == _MOST or (number and pos <= starts[number - 1]):
                break
            self._now, then = pos, starts[number + 1] if number + 1 < len(starts) else _ENDLESS
            here, after = (how if how.acts(place) else Showing() for place in (pos, then))
            draft = recorded.get(pos) or RecordedDraft(-1, pos, [], [], 0, 0, 0.0, 0)
            at = max(side.n_prompt, pos - here.stale)
            round_, at_once = self._numbers.get(pos, 0), list[_Shared]()
            while waiting and waiting[0][0] <= round_:
                at_once.append(waiting.popleft())
                if at_once[-1][0] < round_:
                    drafter.draft([at_once[-1][1]])
                    _teach(drafter, at_once.pop())
            request = DraftRequest(0, at - before, text[at], longest)
            made, *_ = drafter.draft([request, *(one[1] for one in at_once)])
            tokens = here.left(made.tokens[:longest])
            # a draft may be shorter than its drafter made it
            is_cut = spec.verify_max is not None or spec.adapt != "none"
            if len(draft.tokens) < draft.n_drafted or is_cut:
                tokens = tokens[: len(draft.tokens)]
            # near the end of a text a draft is limited by the room left
            room = len(text) - pos - 2
            if room < judged:
                tokens, draft = tokens[:room], draft._replace(tokens=draft.tokens[: max(0, room)])
            if room > 0:
                tops = [
                    dict(zip(*top, strict=True))
                    for top in zip(made.top_ids, made.top_probs, strict=True)
                ]
                again = draft._replace(tokens=tokens, n_drafted=len(tokens), tops=tops)
                found.append((draft._replace(tops=[]), again))
                n_wrong += pos in wrong
                n_left += draft.tokens != tokens
                if wrong and n_left > 1 + _EXPLAINS * n_wrong:
                    break
            self._now = then
            learned = after.learned(draft.n_decoded - 1, draft.n_drafted)
            if draft.n_drafted and learned is not None:
                drafter.accept(0, learned, is_other=False)
            stop = pos + draft.n_decoded - after.n_lost
            kept = after.kept(text[pos : max(pos, stop)])
            if after.rejected:
                kept = [text[pos], *draft.tokens]
            shown.append((pos - before, kept))
            while len(shown) > after.late:
                drafter.observe(0, *shown.pop(0), _NO_ROWS)
            for one in at_once:
                _teach(drafter, one)
        return found


def _numbers(side: DraftSide) -> dict[int, int]:
    """The number of each round of a sequence, by its first position."""
    rounds = RunColumns(side.run.store, "rounds", side.run.run_id)
    mine = (rounds["seq_id"] == side.seq_id) & ~rounds.is_prompt
    return dict(zip(rounds["pos0"][mine].tolist(), rounds["round"][mine].tolist(), strict=True))


def _rounds(seq: int, side: DraftSide) -> Iterator[_Shared]:
    """The rounds of another sequence. seq: its number for the drafter."""
    drafts, text = {draft.pos0: draft for draft in side.drafts}, side.text
    for pos, round_ in _numbers(side).items():
        if side.n_prompt <= pos < len(text):
            draft = drafts.get(pos) or RecordedDraft(-1, pos, [], [], 0, 0, 0.0, 0)
            request = DraftRequest(seq, pos, text[pos], max(1, draft.n_drafted))
            yield round_, request, text[pos : pos + draft.n_decoded], draft


def _teach(drafter: Drafter, shared: _Shared) -> None:
    """Let a drafter learn from another sequence's round."""
    _, request, kept, draft = shared
    if draft.n_drafted:
        drafter.accept(request.seq, draft.n_decoded - 1, is_other=False)
    drafter.observe(request.seq, request.pos0, kept, _NO_ROWS)


def _apart(made: Sequence[_Made]) -> list[_Made]:
    return [pair for pair in made if pair[0].tokens != pair[1].tokens]
