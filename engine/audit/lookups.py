"""The audit of lookup drafts: new drafters see the text as in the run, round by round, and must
draft the same.

They share the lookup code with the run's own drafters. So each draft is also searched for in the
texts: its tokens must have followed there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from engine.audit.deviations import BEHIND, DIFFERS, KEPT, OTHER
from engine.audit.recorded_drafts import DraftAudit, drafted_rows
from engine.draft.drafter import Drafter, DraftRequest, branches
from engine.draft.ngram_drafter import History, NgramSizes
from engine.draft.registry import DRAFTERS
from engine.model.layers import TargetRows
from engine.options import RunOptions
from engine.session import Session
from engine.trace.run_ref import RunColumns
from engine.trace.store import TraceStore

_MOST_ROUNDS = 512
_NO_ROWS = TargetRows(torch.empty(0))
_COPIES = ("ngram-simple", "ngram-map-k", "ngram-map-k4v")
SHARED = ("ngram-mod", "suffix")
"""Drafters that search the output of all sequences of a run."""


class _RoundPart(NamedTuple):
    """One sequence in one round. width: tokens of its batch. tokens: drafted ones. n_chosen: tokens
    that the target accepted or chose, emitted or not."""

    seq: int
    pos0: int
    width: int
    is_prompt: bool
    drafter: str
    tokens: list[int]
    n_accepted: int
    n_chosen: int


_Asked = tuple[int, str, str, int]
"""A draft request of a round: sequence, drafter name, reason of the draft, and match_pos."""


@dataclass(frozen=True, slots=True)
class Showing:
    """How drafters see a text. rejected: with the drafted tokens in place of the accepted ones;
    n_lost: without this many of the newest; forgets: they are reset when a sequence ends;
    no_prompt: without the prompt; late: every round one round later; learned: what they learn from
    accepted tokens, from these and drafted ones, None = nothing; left: what is left of their draft;
    kept: what they see of a round's decoded tokens. rounds: positions of the newest tokens of the
    rounds in which it applies, None = all."""

    what: str = ""
    about: str = ""
    rejected: bool = False
    n_lost: int = 0
    stale: bool = False
    forgets: bool = True
    no_prompt: bool = False
    late: bool = False
    learned: Callable[[int, int], int | None] = lambda n_accepted, n_drafted: n_accepted
    left: Callable[[list[int]], list[int]] = lambda tokens: tokens
    kept: Callable[[list[int]], list[int]] = lambda tokens: tokens
    rounds: Collection[int] | None = None

    def acts(self, pos0: int) -> bool:
        """Whether it applies in the round with this newest token."""
        return self.rounds is None or pos0 in self.rounds


SHOWINGS = (
    Showing(KEPT, "it learned rejected tokens", rejected=True),
    Showing(BEHIND, "it misses the newest token of each round", n_lost=1),
    Showing(BEHIND, "it continues from the token before the newest", stale=True),
    Showing(OTHER, "it has the text of the slot's previous sequence", forgets=False),
)


def audit_lookups(
    session: Session,
    options: RunOptions,
    run_id: int,
    trace: TraceStore,
    texts: Mapping[int, Sequence[int]],
) -> list[DraftAudit]:
    """What is wrong with the lookup drafters of a run; see audit_drafts.

    Raises LookupCacheError if the file of ngram-cache is gone.
    """
    names = [name for name in DRAFTERS if name in options.spec.types and not DRAFTERS[name].needs]
    if not names or trace.runs[run_id].lane:
        return []  # lanes draft in one run and verify in others
    rounds = _Rounds(trace, run_id)
    if rounds.last.keys() - texts.keys():
        return []  # slots are reused after each other's texts, and one of these is wrong
    spec = replace(options.spec, types=tuple(names))
    its_options = replace(options, spec=spec, faults=())

    def shown(showing: Showing) -> dict[tuple[str, int], int]:
        drafters = session.make_drafters(its_options, len(texts), rounds.n_ctx)
        return _Play(drafters, options, rounds, texts, showing).wrong()

    wrong = shown(Showing())
    foreign = _foreign(rounds, options, texts)
    found = []
    for key in {**foreign, **wrong}:
        about = "new drafters given the same text draft other tokens"
        number, what, about = foreign.get(key, (wrong.get(key, 0), DIFFERS, about))
        if key in wrong:
            fits = (showing for showing in SHOWINGS if key not in shown(showing))
            if showing := next(fits, None):
                what, about = showing.what, showing.about
        found.append(DraftAudit(key[1], min(number, wrong.get(key, number)), key[0], what, about))
    return found


class _Rounds:
    """The rounds of a run in order. n_ctx: cells of each sequence."""

    def __init__(self, trace: TraceStore, run_id: int) -> None:
        rounds = RunColumns(trace, "rounds", run_id)
        tokens = RunColumns(trace, "tokens", run_id)
        asked = RunColumns(trace, "drafts", run_id)
        self.n_ctx = trace.runs[run_id].n_ctx or 0
        self.parts: dict[int, list[_RoundPart]] = {}
        self.asked: dict[int, list[_Asked]] = {}
        drafted = drafted_rows(tokens)
        counts = "num_accepted_draft_tokens", "num_target_tokens"
        names = "round", "seq_id", "pos0", "verify_width", *counts
        rows = zip(*(rounds[name].tolist() for name in names), strict=True)
        drafters = rounds.texts("drafter", np.arange(rounds.n))
        for i, (number, seq, pos0, width, n_accepted, n_own) in enumerate(rows):
            n, mine = max(n_accepted, 0) + n_own, drafted.get((number, seq), [])
            its_tokens = tokens["token_id"][mine].tolist()
            is_first = bool(rounds.is_prompt[i])
            part = _RoundPart(seq, pos0, width, is_first, drafters[i], its_tokens, n_accepted, n)
            self.parts.setdefault(number, []).append(part)
        everything = np.arange(asked.n)
        columns = (asked[n].tolist() for n in ("round", "seq_id", "match_pos"))
        texts = (asked.texts(name, everything) for name in ("drafter", "reason"))
        for number, seq, at, name, reason in zip(*columns, *texts, strict=True):
            self.asked.setdefault(number, []).append((seq, name, reason, at))
        self.last = {part.seq: number for number, parts in self.parts.items() for part in parts}
        self._in_order(RunColumns(trace, "ubatches", run_id))

    def _in_order(self, ubatches: RunColumns) -> None:
        """Sequences of a round in the order of verification."""
        mine = np.flatnonzero(ubatches.is_text("purpose", "verify"))
        order: dict[int, list[str]] = {}
        texts = ubatches.texts("seq_ids", mine)
        for number, text in zip(ubatches["round"][mine].tolist(), texts, strict=True):
            order.setdefault(number, []).extend(text.split())
        for number, seqs in order.items():
            places = {seq: i for i, seq in reversed([*enumerate(seqs)])}
            self.parts[number].sort(key=lambda part: places.get(str(part.seq), len(seqs)))


class _Play:
    """New drafters that see what the run's saw."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        options: RunOptions,
        rounds: _Rounds,
        texts: Mapping[int, Sequence[int]],
        showing: Showing,
    ) -> None:
        self._drafters, self._options, self._rounds = drafters, options, rounds
        self._texts, self._showing = texts, showing
        self._slots: dict[int, int] = {}
        self._free = list(range(options.parallel))
        self._n_prompt: dict[int, int] = {}
        self._wrong: dict[tuple[str, int], int] = {}

    def wrong(self) -> dict[tuple[str, int], int]:
        """The first round with another draft, by drafter and sequence."""
        for number, parts in list(self._rounds.parts.items())[: self._n_played()]:
            for part in sorted(parts):
                if part.seq not in self._slots:
                    self._slots[part.seq] = self._free.pop(0) if self._free else -1 - part.seq
            decoding = [part for part in parts if not part.is_prompt]
            asked = self._rounds.asked.get(number, [])
            for drafter in self._drafters:
                self._draft(number, drafter, [a for a in asked if a[1] == drafter.name])
            for part in decoding:
                self._observe(part)
            for part in parts:
                if part.is_prompt and part.n_chosen:
                    n = self._n_prompt[part.seq] = part.pos0 + part.width
                    for drafter in self._drafters:
                        drafter.begin(self._slots[part.seq], self._texts[part.seq][:n])
            for part in parts:
                if self._rounds.last[part.seq] == number:
                    self._end(part.seq)
        return self._wrong

    def _n_played(self) -> int:
        """Rounds that are replayed. Suffix lookup takes a share of a run's time."""
        n_part = len(self._rounds.parts) // 4
        is_dear = any(drafter.name == "suffix" for drafter in self._drafters)
        return max(24, min(_MOST_ROUNDS, n_part)) if is_dear else _MOST_ROUNDS

    def _draft(self, number: int, drafter: Drafter, asked: Sequence[_Asked]) -> None:
        parts = {part.seq: part for part in self._rounds.parts[number]}
        requests = [self._request(parts[seq]) for seq, *_ in asked]
        if not requests:
            return
        drafts = drafter.draft(requests)
        for (seq, _, reason, _), request, draft in zip(asked, requests, drafts, strict=True):
            part = parts[seq]
            recorded = part.tokens if part.drafter == drafter.name else []
            draft.cut(request.n_max, "limit")
            is_same = draft.tokens == recorded
            if draft.parents:  # the judged branch is recorded in this way
                paths = branches(draft.parents)
                is_same = recorded in [[draft.tokens[i] for i in path] for path in paths]
            # it may have been dropped whole, unverified
            is_cut = self._options.spec.verify_max == 0 and not part.drafter
            if reason == "grammar" or is_cut:
                is_same = draft.tokens[: len(recorded)] == recorded
            if not is_same:
                self._wrong.setdefault((drafter.name, seq), number)

    def _request(self, part: _RoundPart) -> DraftRequest:
        text, options = self._texts[part.seq], self._options
        first = self._n_prompt.get(part.seq, 0)
        n_emitted = part.pos0 + 1 - first
        limit = min(options.spec.longest, self._rounds.n_ctx - part.pos0 - 2)
        if options.n_predict >= 0:
            limit = min(limit, options.n_predict - n_emitted - 1)
        last = text[max(first, part.pos0 - self._showing.stale)]
        return DraftRequest(self._slots[part.seq], part.pos0, last, max(1, limit))

    def _observe(self, part: _RoundPart) -> None:
        text, slot = self._texts[part.seq], self._slots[part.seq]
        n = part.n_chosen - self._showing.n_lost
        tokens = list(text[part.pos0 : part.pos0 + n])
        if self._showing.rejected:
            tokens = [text[part.pos0], *part.tokens]
        for drafter in self._drafters:
            if part.drafter:
                drafter.accept(slot, part.n_accepted, is_other=part.drafter != drafter.name)
            drafter.observe(slot, part.pos0, tokens, _NO_ROWS)

    def _end(self, seq: int) -> None:
        self._free.append(self._slots[seq])
        for drafter in self._drafters if self._showing.forgets else ():
            drafter.forget(self._slots[seq])


def _foreign(
    rounds: _Rounds, options: RunOptions, texts: Mapping[int, Sequence[int]]
) -> dict[tuple[str, int], tuple[int, str, str]]:
    """Drafted tokens that did not follow in the text, by drafter and sequence: the first round,
    what is wrong, and the tokens."""
    known = {seq: History(text) for seq, text in texts.items()}
    rejected: dict[tuple[str, int], History] = {}
    found: dict[tuple[str, int], tuple[int, str, str]] = {}
    for number, parts in list(rounds.parts.items())[:_MOST_ROUNDS]:
        at = {(name, seq): pos for seq, name, _, pos in rounds.asked.get(number, [])}
        for part in parts:
            key = part.drafter, part.seq
            n = _looked_up(options, part.drafter)
            if key in found or not part.tokens or not n:
                continue
            own, drafts = known[part.seq], rejected.setdefault(key, History())
            text = [*own.part(0, part.pos0 + 1), *part.tokens]
            stop = part.pos0 + 1
            for i in range(stop, len(text)):
                ngram = text[max(0, i - n) : i + 1]
                if part.drafter in _COPIES:
                    start = at[key] + i - stop
                    follows = start + n < stop and own.holds(ngram, start)
                else:
                    follows = own.find_last(ngram, 0, stop - len(ngram)) >= 0
                    if part.drafter in SHARED:
                        follows |= any(k.find_last(ngram, 0, len(k)) >= 0 for k in known.values())
                if not follows:
                    what, about = DIFFERS, f"{ngram} has not occurred in the text"
                    if drafts.find_last(ngram[-2:], 0, len(drafts)) >= 0:
                        what, about = KEPT, f"{ngram[-2:]} is only in drafted tokens"
                    for seq in (seq for seq in known if seq != part.seq):
                        if known[seq].find_last(ngram, 0, len(known[seq])) >= 0:
                            what, about = OTHER, f"{ngram} is only in the text of sequence {seq}"
                    found[key] = number, what, about
                    break
            drafts.write(len(drafts), [text[part.pos0], *part.tokens])
    return found


def _looked_up(options: RunOptions, drafter: str) -> int:
    """Tokens before a drafted one that must occur before it in a text; 0 if a draft may come from
    elsewhere."""
    spec = options.spec
    if drafter in _COPIES:
        sizes: NgramSizes = getattr(spec, drafter.replace("-", "_"))
        return sizes.size_n
    if drafter == "ngram-mod":
        return spec.ngram_mod.n_match
    if drafter == "ngram-cache" and (spec.lookup_cache_static or spec.lookup_cache_dynamic):
        return 0
    return 1 if drafter in ("ngram-cache", "suffix") else 0
