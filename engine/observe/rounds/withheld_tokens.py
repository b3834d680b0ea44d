"""Withheld tokens: division of tokens that a stream holds back among its rounds.

Their number is known when the next chunk arrives. They are the tail of the previous round, the head
of the round of that chunk, or whole rounds in between, whose figures then arrive in one sum. Every
round has a length that its path allows, and all tokens are used: any consistent chain is possible.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise

from msgspec import Struct

_MOST_TAIL = 64
"""Most tokens of a round after its last chunk."""

_MOST_HIDDEN, _HIDDEN_EACH = 1 << 17, 16
"""Limits of tokens without a chunk of their own: per server, plus some for every chunk."""


class NoShareError(ValueError):
    """No lengths of the rounds fit the counters. The message is a sentence without its end."""


class PlaneReach:
    """Depth of a server's snapshot planes, as far as its rounds show, and how many tokens its
    streams hold back.

    deepest_removal: the deepest rollback in place. shallowest_restore: the shallowest that needed a
    checkpoint. n_rs_seq is at least the former and less than the latter.
    """

    def __init__(self) -> None:
        self.deepest_removal = 0
        self.shallowest_restore: float = math.inf
        self._n_hidden_left = _MOST_HIDDEN
        self.asked = set[int]()
        """Depths whose paths were requested where lengths do not determine them, -1 for shared
        tokens: their rounds depend on what is known about the planes."""

    def hold_back(self, n_tokens: int, n_chunks: int = 1) -> bool:
        """Count chunks with this many additional tokens. False if those of all chunks so far exceed
        what a server can hold back."""
        left = self._n_hidden_left + _HIDDEN_EACH * n_chunks - n_tokens
        self._n_hidden_left = max(left, 0)
        return left >= 0

    def learn(self, path: str, undone: int) -> None:
        """Learn from a round whose length determines its path."""
        if path == "seq_rm":
            self.deepest_removal = max(self.deepest_removal, undone)
        elif path == "restore":
            self.shallowest_restore = min(self.shallowest_restore, undone)

    def tell(self, n_rs_seq: int) -> None:
        """Set the number of planes from the server's log."""
        self.deepest_removal = max(self.deepest_removal, n_rs_seq)
        self.shallowest_restore = min(self.shallowest_restore, n_rs_seq + 1)

    @property
    def is_late(self) -> bool:
        """Whether rounds could be read differently now that more is known."""
        return self.is_contradictory or any(n < 0 or self.path(n) for n in self.asked)

    @property
    def is_contradictory(self) -> bool:
        return self.deepest_removal >= self.shallowest_restore

    @property
    def n_rs_seq(self) -> int | None:
        """Snapshot planes, None if several numbers are possible."""
        only = self.deepest_removal + 1 == self.shallowest_restore
        return self.deepest_removal if only else None

    @property
    def has_planes(self) -> bool | None:
        """Whether there are planes, None if unknown."""
        if self.deepest_removal:
            return True
        return False if self.shallowest_restore == 1 else None

    def path(self, undone: int) -> str:
        """The path of a rollback, "" if unknown."""
        if self.is_contradictory:
            return ""
        if undone <= self.deepest_removal:
            return "seq_rm"
        return "restore" if undone >= self.shallowest_restore else ""


class Chunks(Struct):
    """Chunks with equal predicted_ms (their name). before_ms: the previous name. drafted, accepted:
    increase of the counters. gap: tokens held back before the first chunk, of this group or the
    previous one. first_seen, last_seen: numbers of the tokens that end its first and last chunk.
    is_cut: the answer ended inside it."""

    name_ms: float
    before_ms: float
    drafted: int
    accepted: int
    gap: int
    first_seen: int
    last_seen: int
    is_cut: bool = False

    @property
    def undone(self) -> int:
        """Drafted tokens that were not accepted."""
        return self.drafted - self.accepted


@dataclass(frozen=True, slots=True, order=True)
class Merged:
    """A group as n_merged rounds of n_tokens in total. path: "" if unknown. The smallest number is
    the simplest."""

    n_merged: int
    n_tokens: int
    path: str


def only_share(groups: list[Chunks], n_tokens: int, reach: PlaneReach) -> Merged | None:
    """A group as one round of n tokens if it shares none, as nearly all do; None otherwise."""
    path = _path_of(groups[0], n_tokens, reach) if len(groups) == 1 else None
    return None if path is None or groups[0].gap else _one(n_tokens, path)


def possible_shares(
    groups: list[Chunks], start: int, stop: int, reach: PlaneReach, lengths: set[int]
) -> list[list[Merged]]:
    """The possibilities for each group without an `only_share`; the first of each fit together.
    Groups follow token `start` and end with token `stop`. lengths: of drafts of separate rounds,
    including 0.

    Raises NoShareError if nothing fits.
    """
    reach.asked.add(-1)
    for strict in (True, False):
        ends = _ends(groups, start, stop, reach, lengths, strict)
        if all(ends):
            break
    else:
        group = groups[0]
        raise NoShareError(
            f"a round that drafted {group.drafted} and accepted {group.accepted} tokens cannot "
            f"have emitted {stop - start}"
            if len(groups) == 1
            else f"no rounds have the counters of tokens {start + 1} to {stop}"
        )
    found, at = [], start
    for group, begins, these in zip(groups, [{start}, *ends], ends, strict=False):
        bounds = min(these), max(these)
        shares = {
            (begin, share)
            for begin in begins
            for share in _shares(group, begin, bounds, reach, lengths, strict)
            if begin + share.n_tokens in these
        }
        chosen = min(share for begin, share in shares if begin == at)
        at += chosen.n_tokens
        found.append([chosen, *({share for _, share in shares} - {chosen})])
    return found


def _ends(
    groups: list[Chunks], start: int, stop: int, reach: PlaneReach, lengths: set[int], strict: bool
) -> list[set[int]]:
    """The possible last tokens of each group; empty if nothing fits."""
    bounds = [
        (one.last_seen, min(after.first_seen - 1, one.last_seen + _MOST_TAIL))
        for one, after in pairwise(groups)
    ] + [(stop, stop)]
    steps: list[set[tuple[int, int]]] = []
    begins = {start}
    for group, bound in zip(groups, bounds, strict=True):
        steps.append(
            {
                (begin, begin + share.n_tokens)
                for begin in begins
                for share in _shares(group, begin, bound, reach, lengths, strict)
            }
        )
        begins = {end for _, end in steps[-1]}
    ends: list[set[int]] = []
    for step in reversed(steps):
        ends.insert(0, {end for _, end in step} & begins)
        begins = {begin for begin, end in step if end in begins}
    return ends


def _shares(
    group: Chunks,
    begin: int,
    bounds: tuple[int, int],
    reach: PlaneReach,
    lengths: set[int],
    strict: bool,
) -> Iterator[Merged]:
    """The possibilities for a group after token `begin` that ends within bounds."""
    least, most = bounds[0] - begin, bounds[1] - begin
    may_be_single = not (strict and group.gap and lengths) or group.drafted <= max(lengths)
    for share in _single(group, reach) if may_be_single else ():
        if least <= share.n_tokens <= most:
            yield share
    if group.gap:
        yield from _merged(group, least, most, reach, lengths, strict)


def _path_of(group: Chunks, n_tokens: int, reach: PlaneReach) -> str | None:
    """The path of a group as one round of n tokens, None if impossible."""
    n_own, undone = n_tokens - group.accepted, group.undone
    known = reach.path(undone) if undone else "none"
    if not group.is_cut:
        path = _PATHS.get(n_own) if undone else "none" if n_own == 1 else None
        return path if known in ("", path) else None
    if not known:
        reach.asked.add(undone)
    fits = n_tokens >= 1 and n_own <= (1 if known in ("none", "seq_rm") else 2)
    return known or ("restore" if n_own == 2 else "") if fits else None


_PATHS = {1: "seq_rm", 2: "restore"}
_one = lru_cache(1 << 12)(partial(Merged, 1))


def _single(group: Chunks, reach: PlaneReach) -> Iterator[Merged]:
    for n in range(1 if group.is_cut else group.accepted + 1, group.accepted + 3):
        if (path := _path_of(group, n, reach)) is not None:
            yield _one(n, path)


def _merged(
    group: Chunks, least: int, most: int, reach: PlaneReach, lengths: set[int], strict: bool
) -> Iterator[Merged]:
    """Several rounds whose figures came in one sum."""
    if not group.drafted:
        # a round without a draft has one token
        if not (strict and lengths and 0 not in lengths):
            yield from (Merged(n, n, "none") for n in range(max(least, 2), most + 1))
        return
    n_drafted = lengths - {0}
    path = "" if group.undone else "none"
    n_each = next(iter(n_drafted)) if len(n_drafted) == 1 and 0 not in lengths else 0
    if strict and n_each and group.drafted % n_each == 0 and not group.is_cut:
        n_rounds = group.drafted // n_each
        if n_rounds < 2:
            return
        undone = (
            [] if reach.deepest_removal >= n_each else range(1, min(n_rounds, group.undone) + 1)
        )
        for n_restored in (0, *undone):
            n_tokens = group.accepted + n_rounds + n_restored
            if least <= n_tokens <= most:
                yield Merged(n_rounds, n_tokens, path)
        return
    for n_tokens in range(max(least, group.accepted + 2), most + 1):
        n_least = max(2, -(-(n_tokens - group.accepted) // 2))
        yield Merged(n_least, n_tokens, path)
