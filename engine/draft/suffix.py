"""suffix: what most often followed the longest sufficient match of the newest tokens, in this text
and in the outputs of all sequences so far (SuffixDecoding, arXiv 2411.04975).

Each sequence has a tree of its own text, prompt included. A global tree holds the outputs of the
run's sequences, those that go on included, and forgets the oldest when they become too many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from engine.draft.drafter import N_TOP, Draft, Drafter, DraftRequest
from engine.draft.ngram_drafter import GROUP
from engine.draft.spec import DrafterSpec
from engine.draft.suffix_tree import REASONS, StoredSequence, SuffixDraft, SuffixLimits, SuffixTree
from engine.option_fields import FormRow, NumberRange, option

if TYPE_CHECKING:
    from engine.model.layers import TargetRows

_SHARE = NumberRange(0.0, 1.0, "Use 0 to switch it off.")


@dataclass(frozen=True, slots=True)
class SuffixOptions:
    """suffix: names and defaults are vLLM's. n_max: 0 = max_tree_depth, which bounds match and
    draft together."""

    GROUP: ClassVar[str] = GROUP
    max_tree_depth: int = option(
        24,
        "--spec-suffix-max-tree-depth",
        "longest match and draft together",
        NumberRange(1, 256, "Choose a depth from 1."),
        FormRow("", 1, 256, short="depth"),
    )
    n_max: int = option(
        0,
        "--spec-suffix-n-max",
        "longest draft, 0 = the tree's depth",
        NumberRange(0, 256, "Use 0 for the tree's depth."),
        FormRow("", 0, 256, short="max"),
    )
    max_cached_requests: int = option(
        10_000,
        "--spec-suffix-max-cached-requests",
        "outputs of the run that every sequence is looked up in, the oldest are forgotten; 0 = "
        "none, -1 = no limit",
        NumberRange(-1, 1_000_000, "Use -1 for no limit."),
        FormRow("", -1, 1_000_000, short="keep"),
    )
    max_spec_factor: float = option(
        1.0,
        "--spec-suffix-max-spec-factor",
        "most tokens of a draft for each matched one",
        NumberRange(0.0, 256.0, "Choose a number from 0 to 256."),
        FormRow("", 0.0, 256.0, short="factor"),
        metavar="F",
    )
    max_spec_offset: float = option(
        0.0,
        "--spec-suffix-max-spec-offset",
        "added to that number of tokens",
        NumberRange(-256.0, 256.0, "Choose a number from -256 to 256."),
        FormRow("", -256.0, 256.0, short="offset"),
        metavar="F",
    )
    min_token_prob: float = option(
        0.1,
        "--spec-suffix-min-token-prob",
        "a draft ends before fewer of the matched places than this share went the same way",
        _SHARE,
        FormRow("", 0.0, 1.0, short="min p"),
        metavar="P",
    )

    @property
    def longest(self) -> int:
        """Tokens of the longest draft."""
        return self.n_max or self.max_tree_depth

    def limits(self, n_max: int) -> SuffixLimits:
        """The limits of a draft of at most n_max tokens."""
        return SuffixLimits(n_max, self.max_spec_factor, self.max_spec_offset, self.min_token_prob)


@dataclass(slots=True)
class _Request:
    """A text in both trees: n_prompt tokens of a prompt, and its output. output: None where the
    global tree does not hold it, or no more."""

    tree: SuffixTree
    text: StoredSequence
    n_prompt: int
    output: StoredSequence | None = None


SuffixAnswer = tuple[SuffixDraft, SuffixTree, list[int]]
"""A draft, the tree that it is from, and what was looked up there."""


class SuffixTexts:
    """The trees of all requests: one of each, and one of everybody's outputs."""

    def __init__(self, depth: int, max_cached: int) -> None:
        """max_cached: outputs that are kept, negative = no limit."""
        self._depth, self._max_cached = depth, max_cached
        self._outputs = SuffixTree(depth)
        self._requests: dict[int, _Request] = {}
        self._cached: dict[int, StoredSequence] = {}

    @property
    def n_cached(self) -> int:
        """Outputs in the global tree."""
        return len(self._cached)

    def start(self, request: int, prompt: Sequence[int]) -> None:
        """A request begins. What one of the same number put out is forgotten."""
        self._evict(request)
        found = _Request(SuffixTree(self._depth), StoredSequence(), len(prompt))
        found.tree.append(found.text, prompt)
        self._requests[request] = found
        if not self._max_cached:
            return
        if 0 < self._max_cached <= len(self._cached):
            self._evict(next(iter(self._cached)))  # the oldest
        found.output = self._cached[request] = StoredSequence()

    def add(self, request: int, tokens: Sequence[int]) -> None:
        """A request goes on."""
        found = self._requests[request]
        found.tree.append(found.text, tokens)
        if found.output:
            self._outputs.append(found.output, tokens)

    def n_tokens(self, request: int) -> int:
        """Tokens of a request's text so far."""
        return len(self._requests[request].text.tokens)

    def stop(self, request: int) -> None:
        """A request ends; its output is kept."""
        found = self._requests.pop(request)
        if found.output:
            found.output.open.clear()

    def draft(self, request: int, limits: SuffixLimits) -> SuffixAnswer:
        """The draft of the higher score, the request's own of two equals."""
        found = self._requests[request]
        pattern = found.text.tokens[-self._depth :]
        own, common = (tree.draft(pattern, limits) for tree in (found.tree, self._outputs))
        if common.score > own.score:
            return common, self._outputs, pattern
        return own, found.tree, pattern

    def _evict(self, request: int) -> None:
        output = self._cached.pop(request, None)
        if output is None:
            return
        self._outputs.remove(output)
        if request in self._requests:
            self._requests[request].output = None


class SuffixDrafter(Drafter):
    """Drafts from the trees; the share of the places that went on as drafted is its confidence."""

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
        """Take over what was decoded after the prompt."""
        if seq in self._requests:
            self._take(seq, pos0, tokens)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request; all of them see everybody's newest token."""
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
        found, tree, pattern = self._texts.draft(request, self._options.limits(n_asked))
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
    "what most often followed the newest tokens, here and in earlier outputs",
    lambda inputs: SuffixDrafter(inputs.options),
    SuffixOptions,
    lambda options: options.longest,
    field="suffix",
    reasons=REASONS,
)
