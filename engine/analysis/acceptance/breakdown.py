"""Acceptance breakdown by place in the draft, context depth, token class, previous round and target
entropy, of one run or of two compared.

Only judged tokens count: the accepted ones of a draft and the first rejected one. A drafted end
token that the target chose too is the target's own, as in llama.cpp, and does not count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine.analysis.acceptance.accept_rules import AcceptRule, rule_of
from engine.analysis.acceptance.counts import Logistic, fisher_less, logistic, wilson
from engine.trace.records import EMITTED_KINDS, MISSING
from engine.trace.run_ref import RunColumns, RunRef, paired, places_of, round_keys

_DRAFTED_KINDS = ("accepted", "rejected", "ignored", "replacement", "bonus", "target")
_LONGEST_DRAFT = 1024
_MOST_POSITIONS = 1 << 22
"""Longest part of a sequence's text that is analysed, tokens."""


class DraftedTokens:
    """The drafted tokens of some rounds. length: int64 [n]; tokens: ids [n, k], MISSING if none;
    confidence: float [n, k]."""

    def __init__(
        self, run: RunRef, rounds: RunColumns, order: np.ndarray, verified: np.ndarray
    ) -> None:
        self._rows = rows = RunColumns(run.store, "tokens", run.run_id)
        drafted = rows.is_text("kind", *_DRAFTED_KINDS) & (rows["draft_index"] >= 0)
        at = np.flatnonzero(drafted & (rows["draft_index"] < _LONGEST_DRAFT))
        row = rows_of(rounds, order, rows["round"][at], rows["seq_id"][at])
        self._at, row = at[row >= 0], row[row >= 0]
        index = rows["draft_index"][self._at]
        self._place = row, index
        self.length = verified.copy()
        np.maximum.at(self.length, row, index + 1)
        self._shape = len(order), int(self.length.max(initial=0))
        self.tokens = np.full(self._shape, MISSING, np.int64)
        self.tokens[self._place] = rows["token_id"][self._at]
        self.confidence = self.column("draft_p")

    def column(self, name: str) -> np.ndarray:
        """A trace column per token, float [n, k], NaN if none."""
        found = np.full(self._shape, np.nan)
        found[self._place] = self._rows[name][self._at]
        return found

    def fate(self, rounds: RunColumns, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Number of leading tokens that equal the run's text at their place, int64 [n], and whether
        the next one is known to differ, bool [n]."""
        text = self._rows
        mine = np.flatnonzero(text.is_text("kind", *EMITTED_KINDS) & (text["token_id"] >= 0))
        pos = text["pos"][mine]
        mine = mine[(pos >= 0) & (pos < _MOST_POSITIONS)]
        seq_ids, seq = np.unique(rounds["seq_id"][order], return_inverse=True)
        there = np.isin(text["seq_id"][mine], seq_ids)
        mine = mine[there]
        seq_of, pos = np.searchsorted(seq_ids, text["seq_id"][mine]), text["pos"][mine]
        known = np.full((len(seq_ids), int(pos.max(initial=0)) + 2), MISSING, np.int64)
        known[seq_of, pos] = text["token_id"][mine]
        n, k = self.tokens.shape
        place = rounds["pos0"][order][:, None] + 1 + np.arange(k)
        inside = (place >= 0) & (place < known.shape[1])
        said = np.where(inside, known[seq[:, None], np.where(inside, place, 0)], MISSING)
        there = (said != MISSING) & (self.tokens != MISSING)
        same = there & (said == self.tokens)
        n_right = np.where(same.all(1), k, np.argmin(same, 1)) if k else np.zeros(n, np.int64)
        after = np.minimum(n_right, max(k - 1, 0))
        wrong = there[np.arange(n), after] & ~same[np.arange(n), after] if k else np.zeros(n, bool)
        return n_right, wrong


def rows_of(
    rounds: RunColumns, order: np.ndarray, round_: np.ndarray, seq_id: np.ndarray
) -> np.ndarray:
    """Index into `order` of each round of a sequence, -1 if absent."""
    return places_of(round_keys(rounds)[order], paired(round_, seq_id))


INDEX, DEPTH, CATEGORY, CLASS, AFTER, ENTROPY, SEQUENCE = BY = (
    "position in draft",
    "context depth",
    "category",
    "token class",
    "after",
    "entropy, nats",
    "sequence",
)
_LONGEST = 1024
_ENTROPIES = (0.05, 0.25, 0.5, 1.0, 2.0, 3.0)
_AFTER = ("no draft", "none accepted", "part accepted", "all accepted")
_Z = 1.96
CLEAR = 0.01
"""Significance level at which two rates differ."""
_MOST_SEQUENCES = 64
_CLASSES = (
    ("white space", re.compile(r"\s+")),
    ("digits", re.compile(r"\s*[0-9][0-9.,_]*")),
    ("words", re.compile(r"\s*(?:[^\W\d_]|['’-])*[^\W\d_](?:[^\W\d_]|['’-])*")),
    ("identifiers", re.compile(r"\s*[\w$@]+")),
    ("punctuation", re.compile(r"\s*[^\w\s]+\s*")),
)
_INNER_CAPITAL = re.compile(r"[a-z0-9][A-Z]")
OTHER, UNKNOWN = "mixed", "unknown"


def token_class(text: str) -> str:
    """White space, digits, words, identifiers (with a sign, a digit or an inner capital),
    punctuation, or mixed."""
    if not text or "�" in text:
        return UNKNOWN
    for name, pattern in _CLASSES:
        if pattern.fullmatch(text):
            return "identifiers" if name == "words" and _INNER_CAPITAL.search(text) else name
    return OTHER


class Judged(NamedTuple):
    """Judged draft tokens, [n] each: place in the draft, position in the text, accepted or not,
    sequence, previous round (index into AFTER's names), id of the target's choice (MISSING if
    unknown), the target's entropy and the rule's acceptance probability, NaN if unknown: min(1, p /
    q), whose mean over the drafter's samples is the sum of min(p, q); just p if the drafter did not
    sample."""

    place: np.ndarray
    pos: np.ndarray
    accepted: np.ndarray
    seq: np.ndarray
    after: np.ndarray
    token: np.ndarray
    entropy: np.ndarray
    expected: np.ndarray

    @classmethod
    def of(cls, run: RunRef) -> Judged:
        """From all drafts of a run in rounds with a row of their own and a known outcome."""
        rounds = RunColumns(run.store, "rounds", run.run_id)
        drafted, accepted = rounds["num_draft_tokens"], rounds["num_accepted_draft_tokens"]
        usable = ~rounds.is_prompt & (accepted >= 0) & (rounds["n_merged"] == MISSING)
        usable &= ~rounds.is_text("stop_kind", "end") & (drafted >= 0)
        order = np.flatnonzero(usable)
        order = order[np.lexsort((rounds["round"][order], rounds["seq_id"][order]))]
        seq, n = rounds["seq_id"][order].astype(np.int64), np.clip(drafted[order], 0, _LONGEST)
        right = np.minimum(np.maximum(accepted[order], 0), n)
        how = np.where(n == 0, 0, np.where(right == n, 3, np.where(right > 0, 2, 1)))
        before = np.concatenate([[0], how[:-1]])[: len(how)]
        before[np.concatenate([[True], seq[1:] != seq[:-1]])[: len(seq)]] = 0
        judged = np.minimum(n, right + 1)
        source = np.repeat(np.arange(len(n)), judged)
        index = np.arange(len(source)) - np.repeat(np.cumsum(judged) - judged, judged)
        pos0 = rounds["pos0"][order][source]
        pos = np.where(pos0 == MISSING, MISSING, pos0 + 1 + index)
        token, entropy = _at_places(run, seq[source], pos)
        drafts = DraftedTokens(run, rounds, order, n)
        found = cls(
            index,
            pos,
            index < right[source],
            seq[source],
            before[source],
            token,
            entropy,
            _expected(run, drafts, source, index),
        )
        is_last = np.concatenate([seq[1:] != seq[:-1], [True]])[: len(seq)]
        is_end = is_last[source] & ~found.accepted & (token >= 0)
        is_end &= drafts.tokens[source, index] == token
        return cls(*(values[~is_end] for values in found))


def _at_places(run: RunRef, seq: np.ndarray, pos: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Id and entropy of the emitted tokens at places of the text."""
    rows = RunColumns(run.store, "tokens", run.run_id)
    mine = np.flatnonzero(rows.is_text("kind", *EMITTED_KINDS))
    at = places_of(paired(rows["seq_id"][mine], rows["pos"][mine]), paired(seq, pos))
    ids = np.append(rows["token_id"][mine], MISSING)  # -1: absent
    return ids[at], np.append(rows["target_entropy"][mine], np.nan)[at]


def _expected(
    run: RunRef, drafts: DraftedTokens, source: np.ndarray, index: np.ndarray
) -> np.ndarray:
    """Acceptance probability of drafted tokens under the rule, by round and index."""
    p, q = (drafts.column(name)[source, index] for name in ("rule_p", "rule_q"))
    chance = (rule_of(run.facts) or AcceptRule()).chance(p, q, index)
    return np.where(np.isfinite(p), chance, np.nan)


@dataclass(frozen=True, slots=True)
class TokenShare:
    """Judged tokens of one group. low, high: bounds of the rate, Wilson's 95 %. expected: the mean
    acceptance probability under the rule; None unless known for all. most: its upper bound if not
    all candidates of the drafter are known; `expected` is then the lower one."""

    n: int
    accepted: int
    expected: float | None = None
    most: float | None = None

    @classmethod
    def of(cls, judged: Judged, chosen: np.ndarray) -> TokenShare:
        """Figures of the chosen tokens, bool [n]."""
        chance = judged.expected[chosen]
        known = len(chance) and np.isfinite(chance).all()
        expected = float(chance.mean()) if known else None
        return cls(int(chosen.sum()), int(judged.accepted[chosen].sum()), expected)

    @property
    def rate(self) -> float | None:
        """None without tokens."""
        return self.accepted / self.n if self.n else None

    @property
    def low(self) -> float:
        return wilson(self.accepted, self.n, -_Z)

    @property
    def high(self) -> float:
        return wilson(self.accepted, self.n, _Z)


@dataclass(frozen=True, slots=True)
class Group:
    """One row of a table. b, p: of a second run, and the p-value of the difference of the rates
    (Fisher's exact test, two-sided, times the rows of the table); None without."""

    by: str
    label: str
    a: TokenShare
    b: TokenShare | None = None
    p: float | None = None


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Acceptance of one run or two, in groups. total: of all judged tokens; decay: per run,
    logistic fits of acceptance, by the name of the variable."""

    total: Group
    groups: tuple[Group, ...]
    decay: dict[str, tuple[Logistic | None, ...]]

    def by(self, name: str) -> list[Group]:
        """The rows of one table."""
        return [group for group in self.groups if group.by == name]


def breakdown(run: RunRef, other: RunRef | None = None) -> Breakdown:
    """Group the judged tokens of one or two runs by every known property."""
    runs = [run] if other is None else [run, other]
    judged = [Judged.of(one) for one in runs]
    groups: list[Group] = []
    for by, labels in _tables(runs, judged):
        names = _in_order([name for one in labels for name in one])
        if by in (CATEGORY, SEQUENCE) and len(names) < 2:
            continue
        rows = [
            _group(by, name, judged, [np.array(one) == name for one in labels], len(names))
            for name in names
        ]
        groups += [row for row in rows if row.a.n or (row.b and row.b.n)]
    every = [np.ones(len(one.place), bool) for one in judged]
    decay = {
        INDEX: tuple(_fit(one, one.place.astype(float)) for one in judged),
        DEPTH: tuple(_fit(one, np.log2(np.maximum(one.pos, 1))) for one in judged),
    }
    return Breakdown(_group("all", "all", judged, every, 1), tuple(groups), decay)


def by_words(found: Breakdown) -> str:
    """Rates by everything but the position, one line per table; for two runs both, starred where
    they differ significantly."""
    tables = {by: found.by(by) for by in (CATEGORY, CLASS, DEPTH, AFTER, ENTROPY)}
    return "\n".join(f"{by}: {', '.join(map(_rates, rows))}" for by, rows in tables.items() if rows)


def _rates(group: Group) -> str:
    shares = [group.a] if group.b is None else [group.a, group.b]
    rates = " / ".join("-" if one.rate is None else f"{one.rate:.2f}" for one in shares)
    star = " *" if group.p is not None and group.p < CLEAR else ""
    return f"{group.label} {rates} of {'/'.join(str(one.n) for one in shares)}{star}"


def _fit(judged: Judged, x: np.ndarray) -> Logistic | None:
    known = judged.pos != MISSING
    return logistic(x[known], judged.accepted[known].astype(float), np.ones(int(known.sum())))


def _group(
    by: str, label: str, judged: Sequence[Judged], chosen: Sequence[np.ndarray], n_rows: int
) -> Group:
    a, *rest = (TokenShare.of(one, rows) for one, rows in zip(judged, chosen, strict=True))
    if not rest:
        return Group(by, label, a)
    (b,) = rest
    p = 1.0
    if a.n and b.n:
        tails = (
            fisher_less(a.accepted, a.n, b.accepted, b.n),
            fisher_less(b.accepted, b.n, a.accepted, a.n),
        )
        p = min(1.0, 2 * min(tails) * n_rows)
    return Group(by, label, a, b, p)


def _tables(
    runs: Sequence[RunRef], judged: Sequence[Judged]
) -> Iterator[tuple[str, list[list[str]]]]:
    """The groupings: per run a label for each token."""
    yield INDEX, [[str(i) for i in one.place.tolist()] for one in judged]
    yield DEPTH, [[_depth(pos) for pos in one.pos.tolist()] for one in judged]
    yield CATEGORY, [_categories(run, one) for run, one in zip(runs, judged, strict=True)]
    yield CLASS, [_class_of(run, one) for run, one in zip(runs, judged, strict=True)]
    yield AFTER, [[_AFTER[i] for i in one.after.tolist()] for one in judged]
    if any(np.isfinite(one.entropy).any() for one in judged):
        yield ENTROPY, [[_entropy(h) for h in one.entropy.tolist()] for one in judged]
    n_seqs = max(len(np.unique(one.seq)) for one in judged)
    if n_seqs <= _MOST_SEQUENCES:
        yield SEQUENCE, [[str(i) for i in one.seq.tolist()] for one in judged]


def _depth(pos: int) -> str:
    if pos == MISSING:
        return UNKNOWN
    low = 0 if pos < 64 else 1 << (pos.bit_length() - 1)
    return f"{low:,} to {max(64, 2 * low) - 1:,}"


def _entropy(nats: float) -> str:
    if not np.isfinite(nats):
        return UNKNOWN
    i = int(np.searchsorted(_ENTROPIES, nats, side="right"))
    if i == len(_ENTROPIES):
        return f"{_ENTROPIES[-1]:g} and more"
    return f"{(0.0, *_ENTROPIES)[i]:g} to {_ENTROPIES[i]:g}"


def _class_of(run: RunRef, judged: Judged) -> list[str]:
    """By the text of the target's choice."""
    pieces = run.store.pieces
    known = {
        token: token_class(pieces[token].decode("utf-8", "replace"))
        for token in np.unique(judged.token).tolist()
        if token in pieces
    }
    return [known.get(token, UNKNOWN) for token in judged.token.tolist()]


def _categories(run: RunRef, judged: Judged) -> list[str]:
    """The prompt categories of a record's requests."""
    known: dict[int, str] = {}
    for request in run.facts.requests or ():
        for source in (request.record, request.settings):
            category = source.get("category")
            if isinstance(category, str):
                known.update(dict.fromkeys(request.seq_ids, category[:64]))
    return [known.get(seq, UNKNOWN) for seq in judged.seq.tolist()]


def _in_order(names: Sequence[str]) -> list[str]:
    """Unique labels: numbers ascending, others in order of appearance, `unknown` last."""

    def key(name: str) -> tuple[int, float]:
        digits = re.match(r"[\d,.]+", name)
        number = float(digits[0].replace(",", "").rstrip(".") or 0) if digits else 0.0
        return int(name == UNKNOWN), number

    kinds = [*_AFTER, *(name for name, _ in _CLASSES), OTHER]
    found = dict.fromkeys(names)
    ordered = [name for name in kinds if name in found]
    rest = sorted((name for name in found if name not in kinds), key=key)
    return [*ordered, *rest]
