"""The round of one sequence: its draft, verification, acceptance and rollback, with its phase clock
and token columns, and the observer interface."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from engine.batch import Span
from engine.decode.sequences import DecodingSequence
from engine.draft.drafter import Draft
from engine.machine.clock import run_clock
from engine.memory.hybrid import HybridMemory
from engine.model.layers import TargetRows
from engine.sampling.grammar import AllowedTokens, is_allowed
from engine.sampling.sampler import Sampler
from engine.trace.records import MISSING, N_TOP, PHASES
from engine.trace.store import TraceStore


@dataclass(slots=True)
class Round:
    """One round of one sequence, filled in step by step; the recorder writes it to the trace.

    Fields that are not described here are columns of the rounds table (engine.trace.records).

    Draft: number: of the round; seq: memory sequence; tokens: what the target decodes from pos0
    on, without filler: the newest token and the draft, or a part of a prompt. unverified: drafted
    tokens cut off by verify_max. tree: the draft if it was a tree; after verification, draft is the
    branch that was judged, path its nodes, and n_rows the number of tokens of all branches.
    Verify: logits: float32 [>= len(accepted), n_vocab]; row i chooses accepted[i] and judges
    drafted token i; None if nothing is chosen. record: of these rows (kernels.rows.record), None
    if the pass made none. of_tokens: the target's hidden rows of the tokens that stay in memory,
    [len(accepted), n_embd].
    Judge: accepted: the accepted prefix of the draft and n_own tokens of the target: one, or two
    after a replay that agreed. own_row: logits row that the last token was chosen from, None = the
    row at its position. rule_p, rule_q: probabilities of each token of `examined` under target and
    drafter as the rule saw them, NaN or missing where it did not look. allowed: the grammar's
    mask, by logits row. before: the sampler's state before the round, for a replay. n_emitted: how
    many of the accepted tokens are output; None = all.
    Undo: n_replays: number of restores. restored_bytes: restored from checkpoints.
    """

    number: int
    seq_id: int
    seq: int
    pos0: int
    tokens: Sequence[int]
    draft: Draft | None = None
    unverified: Draft | None = None
    tree: Draft | None = None
    path: Sequence[int] = ()
    n_rows: int = 0
    is_prompt: bool = False
    cache_wrong: int | None = None

    logits: torch.Tensor | None = None
    record: np.ndarray | None = None
    of_tokens: TargetRows | None = None
    rs_idx_before: int | None = None
    valid_depth: int | None = None

    accepted: list[int] = field(default_factory=list)
    n_own: int = 0
    own_row: int | None = None
    rule_p: Sequence[float] = ()
    rule_q: Sequence[float] = ()
    allowed: Mapping[int, AllowedTokens] = field(default_factory=dict)
    accept_rule: str = ""
    before: Sampler | None = None
    n_emitted: int | None = None
    sampler_wrong: int | None = None
    sampler_draws: int | None = None

    rollback_path: str = "none"
    rollback_depth: int = 0
    memory_rollback: int = 0
    rs_idx_after: int | None = None
    n_replays: int = 0
    checkpoint_bytes: int = 0
    restored_bytes: int = 0

    @property
    def is_simple(self) -> bool:
        """Whether its tokens are one of the target, or a verified chain and then the target's."""
        if self.is_prompt or self.unverified or self.allowed:
            return False
        if self.draft is None:
            return len(self.accepted) == len(self.tokens) == self.n_own == 1 and self.n_emitted != 0
        if self.tree or self.n_replays:
            return False
        # a rejected token that is chosen again counts as the target's own
        n, drafted = self.n_accepted, self.draft.tokens
        return not (n < len(drafted) and drafted[n : n + 1] == self.emitted[n : n + 1])

    @property
    def drafted(self) -> Sequence[int]:
        """Drafted tokens that are verified."""
        return self.draft.tokens if self.draft else ()

    @property
    def span(self) -> Span:
        """Its span in a batch: every token has logits; of a whole prompt only the last one."""
        n = len(self.tokens)
        return Span(self.seq, self.pos0, self.tokens, [n - 1] if self.is_prompt else range(n))

    @property
    def decoded(self) -> list[int]:
        """Tokens from pos0 on that stay in memory."""
        return list(self.tokens) if self.is_prompt else [self.tokens[0], *self.accepted[:-1]]

    @property
    def pos_next(self) -> int:
        """Position of the first accepted token."""
        return self.pos0 + (len(self.tokens) if self.is_prompt else 1)

    @property
    def n_accepted(self) -> int:
        """Drafted tokens that the target accepted."""
        return len(self.accepted) - self.n_own

    @property
    def n_kept(self) -> int:
        """Tokens of the verify batch that stay in memory."""
        return self.n_accepted + 1

    @property
    def emitted(self) -> Sequence[int]:
        """Accepted tokens that are output."""
        return self.accepted[: self.n_emitted]

    @property
    def own_kinds(self) -> Sequence[str]:
        """Kinds of the target's own tokens, from engine.trace.records.TOKEN_KINDS."""
        if self.draft is None:
            return ["target"] * self.n_own
        first = "bonus" if self.n_accepted >= len(self.drafted) else "replacement"
        return [first, *["bonus"] * (self.n_own - 1)][: self.n_own]

    @property
    def n_judged(self) -> int:
        """Drafted tokens that were judged: the accepted ones and the first rejected one."""
        return min(len(self.drafted), self.n_accepted + 1)

    @property
    def examined(self) -> tuple[Sequence[int], Sequence[int]]:
        """Judged draft tokens, then the target's own tokens, and the logits row of each."""
        n_all = len(self.accepted)
        if self.draft is None:
            return self.accepted, range(n_all)
        drafted = self.drafted
        n_accepted = n_all - self.n_own
        n = min(len(drafted), n_accepted + 1)
        rows = [*range(n), *range(n_accepted, n_all)]
        return [*drafted[:n], *self.accepted[n_accepted:]], rows

    @property
    def rows(self) -> torch.Tensor:
        """Logits [len(accepted), n_vocab] from which the accepted tokens were chosen."""
        n, row = len(self.accepted), self.own_row
        assert self.logits is not None  # set wherever tokens were chosen
        if row is None:
            return self.logits[:n]
        return torch.cat((self.logits[: n - 1], self.logits[row : row + 1]))


_PLACES = {phase: i for i, phase in enumerate(PHASES)}


def _no_time() -> array[float]:
    return array("d", bytes(8 * len(PHASES)))


@dataclass(slots=True)
class PhaseClock:
    """Milliseconds per phase of a round, spent on single sequences or on all together."""

    _of: dict[int | None, array[float]] = field(default_factory=partial(defaultdict, _no_time))
    _since: float = 0.0

    def start(self) -> None:
        """Start timing."""
        self._since = run_clock()

    def stop(self, phase: str, seqs: Sequence[int] = ()) -> float:
        """Book the time since the last call to a phase and restart; returns that time, ms.

        seqs: memory sequences that share it equally; none = all.
        """
        now = run_clock()
        ms, place = (now - self._since) * 1e3, _PLACES[phase]
        for seq in seqs or (None,):
            self._of[seq][place] += ms / (len(seqs) or 1)
        self._since = now
        return ms

    def move(self, ms: float, source: str, target: str, seqs: Sequence[int]) -> None:
        """Rebook time of these sequences to another phase."""
        for seq in seqs:
            self._of[seq][_PLACES[source]] -= ms / len(seqs)
            self._of[seq][_PLACES[target]] += ms / len(seqs)


def phases_of(clocks: Sequence[PhaseClock], seqs: Sequence[int], n: np.ndarray) -> np.ndarray:
    """Milliseconds by PHASES, float64 [n_seqs, n_phases]: what its clock booked to each sequence
    alone, plus its share of the time booked to the n sequences of its round together."""
    nothing, of = _no_time(), [(*clocks, *clocks), (*seqs, *[None] * len(seqs))]
    spent = [clock._of.get(seq, nothing) for clock, seq in zip(*of, strict=True)]
    own, common = np.frombuffer(b"".join(spent)).reshape(2, len(n), -1)
    return own + common / n[:, None]


_OF_DRAFT = {
    "draft_p": "probs",
    "draft_top_id": "top_ids",
    "draft_top_p": "top_probs",
    "draft_conf": "sure",
}
"""Columns of drafted tokens and the Draft fields that hold them."""
_DRAFT_FIELDS = attrgetter(*_OF_DRAFT.values())
_SPENT = range(7)
"""Columns of a row of `rounds` from drafter to verify_width."""
_MANY = 16
"""Simple rounds from which on they are added at once: 16 took 0.84 of the time, 100 0.42, 8 more
(AMD Zen 3)."""
_OF_PLAIN = attrgetter("number", "seq_id", "pos0", "accepted")
_OF_CHAIN = attrgetter(
    *("number", "seq_id", "pos0", "n_own", "draft", "tokens", "accepted", "rule_p", "rule_q")
)
_KINDS = np.array(["accepted", "rejected", "ignored", "target", "replacement", "bonus"])
_FACTS = "target_p", "target_rank", "target_entropy", "target_top_id", "target_top_p"
"""Columns filled from TargetFacts."""


class TokenColumns(defaultdict[str, list[Any]]):
    """Columns of the table `tokens`, built round by round; a column shorter than the others has
    no observations in the last rows. facts: fields of TargetFacts for everything the rounds
    examined."""

    def __init__(self, facts: Sequence[np.ndarray]) -> None:
        super().__init__(list)
        self._facts, self._n_examined = facts, 0

    def add(self, rounds: Sequence[Round]) -> list[list[Any]]:
        """Add the tokens of rounds. Returns the columns drafter to verify_width of `rounds`."""
        columns: list[list[Any]] = [[] for _ in _SPENT]
        for is_simple, some in groupby(rounds, attrgetter("is_simple")):
            group = [*some]
            if is_simple and not any(round_.draft for round_ in group):
                added = [self._add_plain(group)]
            elif is_simple and len(group) >= _MANY:
                added = [self._add_chains(group)]
            else:
                added = [*map(self._add_round, group)]
            for found in added:
                for column, values in zip(columns, found, strict=True):
                    column += values
        return columns

    def _add_plain(self, rounds: Sequence[Round]) -> Sequence[Sequence[Any]]:
        """Add the tokens of simple rounds without a draft; returns their columns drafter to
        verify_width."""
        n, first = len(rounds), self._n_examined
        self._n_examined += n
        ps = [round_.rule_p[0] if round_.rule_p else None for round_ in rounds]
        others = {"fact": range(first, first + n), "rule_p": () if ps.count(None) == n else ps}
        numbers, seq_ids, pos0, accepted = zip(*map(_OF_PLAIN, rounds), strict=True)
        chosen, positions = [*chain.from_iterable(accepted)], [pos + 1 for pos in pos0]
        self._add(numbers, seq_ids, positions, ["target"] * n, chosen, others)
        return [[value] * n for value in ("", None, 0, 0, 1, "target", 1)]

    def _add_chains(self, rounds: Sequence[Round]) -> Sequence[Sequence[Any]]:
        """Add the tokens of simple rounds, all at once; returns their columns drafter to
        verify_width."""
        parts = [*zip(*map(_OF_CHAIN, rounds), strict=True)]
        *places, own, drafts, tokens, accepted, rule_p, rule_q = parts
        some = [draft or Draft() for draft in drafts]
        drafted, emitted = [draft.tokens for draft in some], [round_.emitted for round_ in rounds]
        counts = *map(len, drafted), *map(len, accepted), *map(len, emitted), *own
        n_drafted, n_all, n_emitted, n_own = np.array(counts).reshape(4, -1)
        n_right, has_draft = n_all - n_own, np.array([draft is not None for draft in drafts])
        n_kept, n_judged = np.minimum(n_right, n_emitted), np.minimum(n_drafted, n_right + 1)
        n_rows, n_examined = n_drafted + n_emitted - n_kept, n_judged + n_own
        of = np.repeat(np.arange(len(rounds)), n_rows)
        i = np.arange(of.size) - (n_rows.cumsum() - n_rows)[of]
        nth = i - n_drafted[of]  # of its own tokens
        is_own, first = nth >= 0, n_examined.cumsum() - n_examined
        own_kinds = np.where(has_draft, np.where(n_right < n_drafted, 4, 5), 3)
        kinds = np.where(i < n_kept[of], 0, np.where((i == n_right[of]) & (i < n_judged[of]), 1, 2))
        kinds = _KINDS[np.where(is_own, np.where(nth > 0, 5, own_kinds[of]), kinds)]
        fact = first[of] + np.where(is_own, n_judged[of] + nth, i)
        fact[~is_own & (i >= n_judged[of])] = -1
        numbers, seq_ids, pos0 = np.array(places)[:, of]
        positions = pos0 + 1 + np.where(is_own, n_kept[of] + nth, i)
        others: dict[str, Sequence[Any]] = {}
        for name, ps in (("rule_p", rule_p), ("rule_q", rule_q)):
            if any(ps):
                known = [*_padded(ps, n_examined), None]
                others[name] = [known[at] for at in fact.tolist()]
        others["draft_index"] = _padded([*map(range, n_drafted.tolist())], n_rows)
        for name, field_ in _OF_DRAFT.items():
            values = [getattr(draft, field_) for draft in some]
            others[name] = _padded(values, n_rows) if any(values) else ()
        fact[fact >= 0] += self._n_examined
        others["fact"] = fact.tolist()
        same = numbers.tolist(), seq_ids.tolist(), positions.tolist(), kinds.tolist()
        kept = zip(drafted, emitted, n_kept.tolist(), strict=True)
        self._add(*same, [token for x, y, n in kept for token in (*x, *y[n:])], others)
        self._n_examined += int(n_examined.sum())
        ends = np.where(n_emitted > n_right + 1, "bonus", _KINDS[own_kinds])
        ends = np.where(n_own > 0, np.where(n_emitted > n_right, ends, "end"), "")
        figures = (x.tolist() for x in (n_drafted, n_right, n_emitted, ends))
        names, limits = [draft.drafter for draft in some], [draft.n_max for draft in some]
        return names, limits, *figures, [*map(len, tokens)]

    def _add_round(self, round_: Round) -> tuple[Any, ...]:
        """Add the tokens of a round in the order in which they are written: drafted, replayed, then
        the target's own. Returns the values drafter to verify_width of its row of `rounds`."""
        draft, emitted, kinds, n_own = round_.draft, round_.emitted, round_.own_kinds, round_.n_own
        n_accepted, n_emitted = len(round_.accepted) - n_own, len(emitted)
        n_kept, n_judged, first = min(n_accepted, n_emitted), 0, 0
        if draft:
            n_judged, of_drafted = round_.n_judged, ["accepted"] * n_kept
            of_drafted += ["ignored"] * (len(draft.tokens) - n_kept)
            if n_accepted < n_judged:
                of_drafted[n_accepted] = "rejected"
                if n_kept < n_emitted and draft.tokens[n_accepted] == emitted[n_kept]:
                    # an end token inside the draft counts as the target's own (llama.cpp), and a
                    # replay may choose a drafted token that the first verification rejected
                    of_drafted[n_accepted], first = kinds[0], 1
            others = self._examined(round_, 0, range(n_judged))
            if round_.allowed and draft.probs:
                top_ids = enumerate(draft.top_ids[:n_judged])
                others["draft_top_forbidden"] = [_forbidden(round_, i, ids) for i, ids in top_ids]
            if tree := round_.tree:
                others["draft_node"] = round_.path
                others["draft_parent"] = [tree.parents[node] for node in round_.path]
            self._add_at(round_, 0, of_drafted, draft.tokens, _of_draft(draft) | others)
        if rest := round_.unverified:
            n, others = len(round_.drafted), _of_draft(rest, len(round_.drafted))
            self._add_at(round_, n, ["ignored"] * len(rest.tokens), rest.tokens, others)
        if tree := round_.tree:
            depths, names = tree.depths, _OF_DRAFT.items()
            for i in sorted({*range(len(depths))} - {*round_.path}):
                others = {name: getattr(tree, values)[i : i + 1] for name, values in names}
                others |= {"draft_node": [i], "draft_parent": [tree.parents[i]]}
                self._add_at(round_, depths[i], ["side"], [tree.tokens[i]], others)
        if round_.n_replays:
            again = {"draft_index": range(n_kept)}
            self._add_at(round_, 0, ["replayed"] * n_kept, emitted[:n_kept], again)
        rows = range(n_accepted + first, n_accepted + n_emitted - n_kept)
        others = self._examined(round_, n_judged + first, rows)
        self._add_at(round_, n_kept + first, kinds[first:], emitted[n_kept + first :], others)
        self._n_examined += n_judged + n_own
        # the kind of the last emitted token; an end token inside the draft stops it earlier, and a
        # part of a prompt chooses nothing
        kind = "end" if n_own else ""
        if n_own and n_emitted > n_accepted:
            kind = kinds[n_emitted - n_accepted - 1]
        last = [n_emitted], [kind], [round_.n_rows or len(round_.tokens)]
        if draft is None:
            counts = (None, None) if round_.is_prompt else (0, n_accepted)
            return [""], [None], [counts[0]], [counts[1]], *last
        return [draft.drafter], [draft.n_max], [len(draft.tokens)], [n_accepted], *last

    def filled(self) -> dict[str, list[Any] | np.ndarray]:
        """All columns, padded to equal length."""
        n = len(self["pos"])
        for column in self.values():
            column += [None] * (n - len(column))
        facts_of = self.pop("fact", ())
        places = np.array([-1 if fact is None else fact for fact in facts_of], np.int64)
        facts = zip(_FACTS, self._facts, strict=False)
        return {**self, **{name: _with_blank(values)[places] for name, values in facts}}

    def _add_at(
        self,
        round_: Round,
        place: int,
        kinds: Sequence[str],
        tokens: Sequence[int],
        others: Mapping[str, Sequence[Any]],
    ) -> None:
        """Add tokens at consecutive positions; place 0 is that of the first accepted token. others:
        further columns, which may be shorter."""
        n, pos = len(tokens), round_.pos_next + place
        same = [round_.number] * n, [round_.seq_id] * n
        self._add(*same, range(pos, pos + n), kinds[:n], tokens, others)

    def _add(
        self,
        numbers: Sequence[int],
        seq_ids: Sequence[int],
        positions: Sequence[int],
        kinds: Sequence[str],
        tokens: Sequence[int],
        others: Mapping[str, Sequence[Any]],
    ) -> None:
        n_before = len(self["pos"])
        self["round"] += numbers
        self["seq_id"] += seq_ids
        self["pos"] += positions
        self["kind"] += kinds
        self["token_id"] += tokens
        for name, values in others.items():
            if values:
                column = self[name]
                if n_blank := n_before - len(column):
                    column += [None] * n_blank
                column += values

    def _examined(self, round_: Round, at: int, rows: range) -> dict[str, Sequence[Any]]:
        """Columns of examined tokens, starting with number `at` of the round's. rows: of its
        logits."""
        first, n = self._n_examined + at, len(rows)
        found: dict[str, Sequence[Any]] = {"fact": range(first, first + n)}
        if round_.rule_p:
            found["rule_p"], found["rule_q"] = (
                round_.rule_p[at : at + n],
                round_.rule_q[at : at + n],
            )
        if round_.allowed:
            top_ids = self._facts[3][first : first + n]
            found["target_top_forbidden"] = [*map(partial(_forbidden, round_), rows, top_ids)]
        return found


def _padded(values: Sequence[Sequence[Any]], n: np.ndarray) -> list[Any]:
    """Values of each round, filled up to its number of rows with None."""
    short = zip(values, n.tolist(), strict=True)
    return [*chain.from_iterable((*one, *[None] * (n - len(one))) for one, n in short)]


def _of_draft(draft: Draft, first: int = 0) -> dict[str, Sequence[Any]]:
    """Columns of drafted tokens. first: draft index of the first one."""
    columns = dict(zip(_OF_DRAFT, _DRAFT_FIELDS(draft), strict=True))
    columns["draft_index"] = range(first, first + len(draft.tokens))
    return columns


def _forbidden(round_: Round, logits_row: int, ids: Sequence[int]) -> list[int] | None:
    """1 for each token that the grammar forbids there, 0 for others; None without a grammar."""
    allowed = round_.allowed.get(logits_row)
    return None if allowed is None else [int(not is_allowed(allowed, int(token))) for token in ids]


def _with_blank(values: np.ndarray) -> np.ndarray:
    """Facts in the layout of columns, with one blank row appended for tokens that have none."""
    blank = MISSING if values.dtype.kind == "i" else np.nan
    shape = (len(values) + 1, *[N_TOP] * (values.ndim - 1))
    found = np.full(shape, blank, values.dtype)
    found[:-1].T[: values.T.shape[0]] = values.T
    return found


WatchRound = Callable[[Round], None]
"""A callback for each round that has emitted tokens: round_.emitted, chosen from round_.rows."""


class RoundObserver:
    """A read-only observer of every round of a run."""

    def begin(
        self,
        sequences: Sequence[DecodingSequence],
        memory: HybridMemory,
        end_tokens: Collection[int],
    ) -> None:
        """Called before the first round. end_tokens: those that end a text."""

    def judged(self, sequence: DecodingSequence, round_: Round) -> None:
        """Called when round_.accepted is set. Except after a prompt, the sequence's n_tokens and
        last are still those from before the round."""

    def closed(
        self, number: int, memory: HybridMemory, running: Sequence[DecodingSequence]
    ) -> None:
        """Called at the end of a round. running: sequences with tokens in memory, including those
        that have just stopped."""

    @property
    def n_unseen(self) -> int:
        """Number of rounds from the next one on in which it will not read the memory, provided that
        no sequence ends."""
        return 0

    def steps(self, trace: TraceStore, run_id: int) -> Generator[None]:
        """Check the finished run in small steps. The results are in the run's facts at the end, or
        when the generator is closed early."""
        yield from ()
