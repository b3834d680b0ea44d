"""The tree of suffixes that the drafter `suffix` looks matches up in (SuffixDecoding, arXiv
2411.04975): every place of its sequences is the start of a path, as deep as the tree is."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_ROUNDING = 1e-6

NO_MATCH, TEXT_END, SHORT_MATCH, LOW_SHARE = "no-match", "text-end", "short-match", "low-share"
REASONS = {
    TEXT_END: "nothing stored goes on further, or not within the tree's depth",
    SHORT_MATCH: "max_spec_factor and max_spec_offset allow no more after so short a match",
    LOW_SHARE: "too few of the matched places went the same way (min_token_prob)",
}
"""Why a draft has no more tokens, in addition to NO_MATCH."""


@dataclass(slots=True, eq=False)
class StoredSequence:
    """One sequence of a tree. open: where the paths end that still grow, by the place that they
    start from."""

    tokens: list[int] = field(default_factory=list)
    open: dict[int, _Node] = field(default_factory=dict)


class _Node:
    """count: places whose path comes here. tail: the sequence and the place whose path is the only
    one to go on from here; its tokens are the further path then, and there are no children."""

    __slots__ = ("children", "count", "tail")

    def __init__(self, tail: tuple[StoredSequence, int]) -> None:
        self.count = 1
        self.children: dict[int, _Node] | None = None
        self.tail: tuple[StoredSequence, int] | None = tail


@dataclass(frozen=True, slots=True)
class SuffixLimits:
    """What bounds a draft: n_max tokens, and factor * matched tokens + offset of them; a token
    whose prob would be below min_prob is left out."""

    n_max: int
    factor: float = 1.0
    offset: float = 0.0
    min_prob: float = 0.1

    def longest(self, n_match: int) -> int:
        """Most tokens after a match of n_match tokens."""
        return max(0, min(self.n_max, int(n_match * self.factor + self.offset + _ROUNDING)))


@dataclass(slots=True)
class SuffixDraft:
    """What followed the last n_match tokens of a pattern.

    probs: share of the places of the match that went on this way up to and with each token. score:
    their sum. reason: why there are not more of them, a key of REASONS.
    """

    n_match: int = 0
    tokens: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)
    score: float = 0.0
    reason: str = NO_MATCH

    def add(self, token: int, prob: float) -> None:
        """One more token."""
        self.tokens.append(token)
        self.probs.append(prob)
        self.score += prob


class SuffixTree:
    """A trie of all suffixes of some token sequences, cut to a depth, with counts. Sequences can be
    appended to and removed. depth: longest path, at least 1.

    From every place of a sequence the tokens that follow, at most `depth` of them, are a path from
    the root; the count of a node is the number of places whose path reaches it. A path that no
    other place shares is not stored: its last node keeps the place, and is unrolled by a token when
    another path comes along. Text that never repeats costs one node per token, whatever the depth.
    Of children with equal counts the one that was created first is taken.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._root: dict[int, _Node] = {}

    def append(self, sequence: StoredSequence, tokens: Sequence[int]) -> None:
        """Add tokens to a sequence of this tree, or to a new one."""
        for token in tokens:
            self._append(sequence, token)

    def remove(self, sequence: StoredSequence) -> None:
        """Take a sequence out; it must not be appended to any more."""
        for place in range(len(sequence.tokens)):
            children: dict[int, _Node] | None = self._root
            for token in sequence.tokens[place : place + self.depth]:
                if children is None:
                    break
                node = children[token]
                node.count -= 1
                if not node.count:
                    del children[token]
                    break
                children = node.children
        sequence.open.clear()

    def draft(self, pattern: Sequence[int], limits: SuffixLimits) -> SuffixDraft:
        """The path draft of the highest score over all lengths of match, the longer match of two
        with equal scores. pattern: a text's newest tokens, at most depth of them."""
        best = SuffixDraft()
        for n_match, start in self._matches(pattern):
            found = SuffixDraft(n_match, reason=SHORT_MATCH)
            at, prob = start, 1.0
            for i in range(limits.longest(n_match)):
                total = at[0].count
                ahead = max(self._children(at), key=_count, default=None)
                if ahead is None:
                    found.reason = TEXT_END if i else NO_MATCH
                    break
                if prob * ahead[1][0].count / total < limits.min_prob:
                    found.reason = LOW_SHARE
                    break
                token, at = ahead
                prob = prob * at[0].count / total
                found.add(token, prob)
            if found.score >= best.score:
                best = found
        return best

    def choices(
        self, pattern: Sequence[int], draft: SuffixDraft, n: int
    ) -> list[list[tuple[int, float]]]:
        """What each token of a path draft was chosen from: the n most frequent tokens with their
        shares, the largest first."""
        found = []
        at = self._find(pattern[len(pattern) - draft.n_match :])
        for drafted in draft.tokens:
            assert at is not None
            ahead = dict(self._children(at))
            most = heapq.nlargest(n, ahead.items(), key=_count)
            found.append([(token, one[0].count / at[0].count) for token, one in most])
            at = ahead[drafted]
        return found

    def _matches(self, pattern: Sequence[int]) -> Iterator[tuple[int, _Place]]:
        """Where the last 1, 2, … tokens lead, as long as they are a path; never all of them."""
        for n_match in range(1, len(pattern)):
            found = self._find(pattern[len(pattern) - n_match :])
            if found is None:
                return
            yield n_match, found

    def _find(self, tokens: Sequence[int]) -> _Place | None:
        node = self._root.get(tokens[0])
        for i, token in enumerate(tokens[1:], 1):
            if node is None:
                return None
            if node.tail:
                sequence, place = node.tail
                rest = sequence.tokens[place + i : place + len(tokens)]
                return (node, len(tokens)) if rest == list(tokens[i:]) else None
            node = node.children.get(token) if node.children else None
        return (node, len(tokens)) if node else None

    def _children(self, at: _Place) -> Iterator[tuple[int, _Place]]:
        """Continuations by token, in the order of their creation."""
        node, depth = at
        if node.tail:
            sequence, place = node.tail
            if depth < self.depth and place + depth < len(sequence.tokens):
                yield sequence.tokens[place + depth], (node, depth + 1)
        elif node.children:
            for token, child in node.children.items():
                yield token, (child, depth + 1)

    def _append(self, sequence: StoredSequence, token: int) -> None:
        newest = len(sequence.tokens)
        sequence.tokens.append(token)
        for place in list(sequence.open):
            node = sequence.open[place]  # which an earlier step may have moved
            if newest - place == self.depth:
                del sequence.open[place]
            elif node.tail is None or node.tail[1] != place or node.tail[0] is not sequence:
                if node.children is None:
                    node.children = {}
                self._step(node.children, sequence, place, newest - place + 1)
        self._step(self._root, sequence, newest, 1)

    def _step(
        self, children: dict[int, _Node], sequence: StoredSequence, place: int, depth: int
    ) -> None:
        """Lead the path of a place, newest token included, to one of these nodes of a depth."""
        token = sequence.tokens[-1]
        node = children.get(token)
        if node is None:
            node = children[token] = _Node((sequence, place))
        else:
            node.count += 1
            if node.tail:
                self._unroll(node, depth)
        sequence.open[place] = node

    def _unroll(self, node: _Node, depth: int) -> None:
        """Store one more token of a node's tail."""
        assert node.tail
        sequence, place = node.tail
        node.tail = None
        if depth == self.depth or place + depth == len(sequence.tokens):
            return
        child = _Node((sequence, place))
        node.children = {sequence.tokens[place + depth]: child}
        if place in sequence.open:
            sequence.open[place] = child


_Place = tuple[_Node, int]
"""A node and the length of the path to here; longer than the node's own path within its tail."""


def _count(choice: tuple[int, _Place]) -> int:
    return choice[1][0].count
