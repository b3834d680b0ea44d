"""suffix: the most frequent continuation of the longest sufficient match of the newest tokens, in
this text and in the outputs of all sequences so far (SuffixDecoding, arXiv 2411.04975).

Each sequence has a tree of its own text, prompt included. A global tree holds the outputs of the
run's sequences, running ones included, and drops the oldest above a limit.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from engine.draft.drafter import N_TOP, Draft, Drafter, DraftRequest
from engine.draft.ngram_drafter import GROUP
from engine.draft.spec import DrafterSpec
from engine.option_fields import FormRow, NumberRange, option

if TYPE_CHECKING:
    from engine.model.layers import TargetRows

_ROUNDING = 1e-6

NO_MATCH, TEXT_END, SHORT_MATCH, LOW_SHARE = "no-match", "text-end", "short-match", "low-share"
REASONS = {
    TEXT_END: "no longer continuation is stored, or not within the tree's depth",
    SHORT_MATCH: "max_spec_factor and max_spec_offset allow no more after a match of this length",
    LOW_SHARE: "too few of the matches continue with the same token (min_token_prob)",
}
"""Why a draft has no further tokens, in addition to NO_MATCH."""
_SHARE = NumberRange(0.0, 1.0, "Use 0 to switch it off.")


@dataclass(frozen=True, slots=True)
class SuffixOptions:
    """suffix: names and defaults are vLLM's. n_max: 0 = max_tree_depth, which bounds match and
    draft together."""

    GROUP: ClassVar[str] = GROUP
    max_tree_depth: int = option(
        24,
        "--spec-suffix-max-tree-depth  limit of the tokens of match and draft together",
        NumberRange(1, 256, "Choose a depth from 1."),
        FormRow("", 1, 256, short="depth"),
    )
    n_max: int = option(
        0,
        "--spec-suffix-n-max  longest draft, 0 = the depth of the tree",
        NumberRange(0, 256, "Use 0 for the tree's depth."),
        FormRow("", 0, 256, short="max"),
    )
    max_cached_requests: int = option(
        10_000,
        "--spec-suffix-max-cached-requests  earlier outputs of the run in which every sequence "
        "is looked up; the oldest are dropped first; 0 = none, -1 = no limit",
        NumberRange(-1, 1_000_000, "Use -1 for no limit."),
        FormRow("", -1, 1_000_000, short="keep"),
    )
    max_spec_factor: float = option(
        1.0,
        "--spec-suffix-max-spec-factor F  limit of the draft length, in tokens per matched token",
        NumberRange(0.0, 256.0, "Choose a number from 0 to 256."),
        FormRow("", 0.0, 256.0, short="factor"),
    )
    max_spec_offset: float = option(
        0.0,
        "--spec-suffix-max-spec-offset F  tokens to add to that limit",
        NumberRange(-256.0, 256.0, "Choose a number from -256 to 256."),
        FormRow("", -256.0, 256.0, short="offset"),
    )
    min_token_prob: float = option(
        0.1,
        "--spec-suffix-min-token-prob P  a draft ends before a token that fewer than this share "
        "of the matches continue with",
        _SHARE,
        FormRow("", 0.0, 1.0, short="min p"),
    )

    @property
    def longest(self) -> int:
        """Tokens of the longest draft."""
        return self.n_max or self.max_tree_depth

    def most_after(self, n_match: int, n_max: int) -> int:
        """Most tokens of a draft after a match of n_match tokens, n_max at most."""
        n = int(n_match * self.max_spec_factor + self.max_spec_offset + _ROUNDING)
        return max(0, min(n_max, n))


@dataclass(slots=True, eq=False)
class StoredSequence:
    """One sequence of a tree. open: the ends of paths that still grow, by their starting place."""

    tokens: list[int] = field(default_factory=list)
    open: dict[int, _Node] = field(default_factory=dict)


class _Node:
    """count: places whose path includes this node. tail: the sequence and place of the only path
    that continues from here; its tokens are the rest of the path, and there are no children."""

    __slots__ = ("children", "count", "tail")

    def __init__(self, tail: tuple[StoredSequence, int]) -> None:
        self.count = 1
        self.children: dict[int, _Node] | None = None
        self.tail: tuple[StoredSequence, int] | None = tail


@dataclass(slots=True)
class SuffixDraft:
    """A continuation of the last n_match tokens of a pattern.

    probs: for each token, the share of the match's places that continued this way up to it. score:
    their sum. reason: why there are no more tokens, a key of REASONS.
    """

    n_match: int = 0
    tokens: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)
    score: float = 0.0
    reason: str = NO_MATCH

    def add(self, token: int, prob: float) -> None:
        """Append a token."""
        self.tokens.append(token)
        self.probs.append(prob)
        self.score += prob


class SuffixTree:
    """A trie of all suffixes of some token sequences, cut to a depth, with counts. Sequences can be
    extended and removed. depth: longest path, at least 1.

    Up to `depth` tokens from every place of a sequence form a path from the root; the count of a
    node is the number of places whose path reaches it. A path shared with no other place is not
    stored: its last node keeps the place, and is unrolled by a token when another path arrives.
    Text that never repeats costs one node per token, whatever the depth. Children with equal
    counts: the oldest wins.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._root: dict[int, _Node] = {}

    def append(self, sequence: StoredSequence, tokens: Sequence[int]) -> None:
        """Add tokens to a sequence of this tree, or to a new one."""
        for token in tokens:
            self._append(sequence, token)

    def remove(self, sequence: StoredSequence) -> None:
        """Remove a sequence; it must not be extended afterwards."""
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

    def draft(self, pattern: Sequence[int], n_max: int, options: SuffixOptions) -> SuffixDraft:
        """The draft with the highest score over all match lengths; ties go to the longer match.
        pattern: a text's newest tokens, at most depth of them. n_max: most tokens of the draft."""
        best = SuffixDraft()
        for n_match, start in self._matches(pattern):
            found = SuffixDraft(n_match, reason=SHORT_MATCH)
            at, prob = start, 1.0
            for i in range(options.most_after(n_match, n_max)):
                total = at[0].count
                ahead = max(self._children(at), key=_count, default=None)
                if ahead is None:
                    found.reason = TEXT_END if i else NO_MATCH
                    break
                if prob * ahead[1][0].count / total < options.min_token_prob:
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
        """The alternatives of each token of a draft: the n most frequent tokens with their shares,
        largest first."""
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
        """Nodes of the last 1, 2, … tokens as long as they form a path; never the whole pattern."""
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
        """Continuations by token, oldest first."""
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
            node = sequence.open[place]  # an earlier step may have moved it
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
        """Extend the path of a place, newest token included, to one of these nodes of a depth."""
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
"""A node and the path length to here, which exceeds the node's own within its tail."""


def _count(choice: tuple[int, _Place]) -> int:
    return choice[1][0].count


SuffixAnswer = tuple[SuffixDraft, SuffixTree, list[int]]
"""A draft, its tree, and the pattern looked up there."""


class SuffixTexts:
    """The trees of all requests: one each, plus a global one of all outputs."""

    def __init__(self, depth: int, max_cached: int) -> None:
        """max_cached: outputs that are kept, negative = no limit."""
        self._depth, self._max_cached = depth, max_cached
        self._outputs = SuffixTree(depth)
        self._requests: dict[int, tuple[SuffixTree, StoredSequence]] = {}
        """Each request's own tree, and its text there."""
        self._cached: dict[int, StoredSequence] = {}
        """Outputs in the global tree by request, oldest first."""

    def start(self, request: int, prompt: Sequence[int]) -> None:
        """Start a request; earlier output under the same number is dropped."""
        self._evict(request)
        tree, text = self._requests[request] = SuffixTree(self._depth), StoredSequence()
        tree.append(text, prompt)
        if not self._max_cached:
            return
        if 0 < self._max_cached <= len(self._cached):
            self._evict(next(iter(self._cached)))  # the oldest
        self._cached[request] = StoredSequence()

    def add(self, request: int, tokens: Sequence[int]) -> None:
        """Extend a request."""
        tree, text = self._requests[request]
        tree.append(text, tokens)
        if output := self._cached.get(request):
            self._outputs.append(output, tokens)

    def n_tokens(self, request: int) -> int:
        """Tokens of a request's text so far."""
        return len(self._requests[request][1].tokens)

    def stop(self, request: int) -> None:
        """End a request; its output is kept."""
        del self._requests[request]
        if output := self._cached.get(request):
            output.open.clear()

    def draft(self, request: int, n_max: int, options: SuffixOptions) -> SuffixAnswer:
        """The draft with the higher score; ties go to the request's own tree."""
        tree, text = self._requests[request]
        pattern = text.tokens[-self._depth :]
        own, common = (one.draft(pattern, n_max, options) for one in (tree, self._outputs))
        if common.score > own.score:
            return common, self._outputs, pattern
        return own, tree, pattern

    def _evict(self, request: int) -> None:
        output = self._cached.pop(request, None)
        if output is not None:
            self._outputs.remove(output)


class SuffixDrafter(Drafter):
    """Drafts from the trees; confidence is the share of places that continued as drafted."""

    name = "suffix"

    def __init__(self, options: SuffixOptions) -> None:
        self.n_max = options.longest
        self._options = options
        self._texts = SuffixTexts(options.max_tree_depth, options.max_cached_requests)
        self._requests: dict[int, int] = {}
        self._n_started = 0

    def begin(self, seq: int, prompt: Sequence[int]) -> None:
        """A request starts in a slot."""
        self.forget(seq)
        self._requests[seq] = self._n_started
        self._texts.start(self._n_started, prompt)
        self._n_started += 1

    def observe(self, seq: int, pos0: int, tokens: Sequence[int], rows: TargetRows) -> None:
        """Add the tokens decoded after the prompt."""
        if seq in self._requests:
            self._take(seq, pos0, tokens)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request; all of them see the newest tokens of every sequence."""
        for request in requests:
            self._take(request.seq, request.pos0, [request.last])
        return [self._draft(self._requests[request.seq], request.n_max) for request in requests]

    def forget(self, seq: int) -> None:
        """The request ends; its output stays in the global tree."""
        if (request := self._requests.pop(seq, None)) is not None:
            self._texts.stop(request)

    def _take(self, seq: int, pos0: int, tokens: Sequence[int]) -> None:
        request = self._requests[seq]
        self._texts.add(request, tokens[self._texts.n_tokens(request) - pos0 :])

    def _draft(self, request: int, n_max: int) -> Draft:
        n_asked = min(n_max, self.n_max)
        found, tree, pattern = self._texts.draft(request, n_asked, self._options)
        if not found.tokens:
            return Draft(drafter=self.name, reason=found.reason)
        choices = tree.choices(pattern, found, N_TOP)
        before = [1.0, *found.probs[:-1]]
        reason = found.reason
        if len(found.tokens) == n_asked:
            reason = "limit" if n_asked < self.n_max else ""
        return Draft(
            found.tokens,
            [p / given for p, given in zip(found.probs, before, strict=True)],
            [[token for token, _ in choice] for choice in choices],
            [[share for _, share in choice] for choice in choices],
            self.name,
            reason=reason,
        )


SPEC = DrafterSpec(
    SuffixDrafter.name,
    "most frequent continuation of the newest tokens, here and in earlier outputs",
    lambda inputs: SuffixDrafter(inputs.options),
    SuffixOptions,
    lambda options: options.longest,
    field="suffix",
    reasons=REASONS,
)
