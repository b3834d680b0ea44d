"""The drafter interface, drafts, and trees of drafted tokens.

A tree is verified as its branches, side by side: each is the whole path from the newest token to a
leaf, in a memory sequence of its own that starts as a copy of the text's (`fork`), as in
llama.cpp's examples/speculative. So every layer starts from the state of its own branch, and every
policy rolls it back as usual; kernels and masks know nothing of trees. The price is rows: shared
prefixes are computed once per branch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from engine.sampling.distribution import Distribution, TokenDraws

if TYPE_CHECKING:
    import torch

    from engine.batch import UBatch
    from engine.memory.hybrid import HybridMemory
    from engine.model.layers import TargetRows


N_TOP = 5
"""Alternatives kept per position on each side (target and draft)."""


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Continue a sequence whose next token `last`, at position `pos0`, is chosen but not decoded.

    n_max: most tokens that may be drafted, at least 1.
    """

    seq: int
    pos0: int
    last: int
    n_max: int


@dataclass(slots=True, eq=False)
class PendingDrafts:
    """Drafts of one call whose tokens are still on the device: UNKNOWN placeholders of the right
    number.

    tokens: by sequence, int64 [n]. parts: tensors to be read back; `fill` stores their values.
    late: called after the device was waited for, returns how many ms longer than the host it took.
    """

    tokens: dict[int, torch.Tensor]
    parts: Sequence[torch.Tensor]
    fill: Callable[[Sequence[np.ndarray]], None]
    late: Callable[[], float] = float


@dataclass(slots=True)
class Draft:
    """Drafted tokens, the drafter's confidence in each, and its best alternatives.

    probs: softmax over the ten largest raw logits, as p_min is defined, or shares of counts
    (suffix); probs, top_ids and top_probs are empty if the drafter has none. q: the distribution
    that each token was sampled from, empty if the drafter took its best token with certainty.
    match_pos: position in the history of the n-gram found. n_raw: tokens found before trimming.
    reason: why the draft is shorter than the drafter's longest, or empty
    (engine.draft.registry.meaning). non_finite: number of tokens before the first row with
    non-finite logits, and its largest logit; None if all were finite. n_wrong_rows: input rows that
    the target did not compute at their position, None if unchecked; n_wrong_tokens: tokens in the
    drafter's memory that differ from the text. sure: the confidence head's output per token, empty
    without one. block: rows of its block, None if it was not drafted as one. n_max: the limit set
    by adaptive depth, None without. ms: its share of the call for all sequences. parents: of a tree
    (engine.draft.drafter), for each token the lower index of its parent, -1 = the newest token;
    empty for a chain. pending: what will supply the tokens, None if they are here.
    """

    tokens: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)
    top_probs: list[list[float]] = field(default_factory=list)
    drafter: str = ""
    q: list[Distribution] = field(default_factory=list)
    match_pos: int | None = None
    n_raw: int = 0
    reason: str = ""
    non_finite: tuple[int, float] | None = None
    n_wrong_rows: int | None = None
    n_wrong_tokens: int | None = None
    sure: list[float] = field(default_factory=list)
    block: int | None = None
    n_max: int | None = None
    ms: float = field(default=0.0, compare=False)
    parents: list[int] = field(default_factory=list)
    pending: PendingDrafts | None = field(default=None, compare=False)

    @property
    def depths(self) -> list[int]:
        """Number of drafted tokens before each one."""
        if not self.parents:
            return [*range(len(self.tokens))]
        found: list[int] = []
        for parent in self.parents:
            found.append(found[parent] + 1 if parent >= 0 else 0)
        return found

    @property
    def length(self) -> int:
        """Tokens of the longest branch."""
        return max(self.depths, default=-1) + 1 if self.parents else len(self.tokens)

    def is_finite(self, logit: float) -> bool:
        """Whether the logits of this row and of all earlier ones are finite, by their largest."""
        if self.non_finite is None and not math.isfinite(logit):
            self.non_finite, self.reason = (len(self.tokens), logit), "non-finite"
        return self.non_finite is None

    def add(self, ids: Sequence[int], probs: Sequence[float] | np.ndarray, rank: int = 0) -> None:
        """Add one of a row's candidates, best first."""
        self.tokens.append(ids[rank])
        self.probs.append(float(probs[rank]))
        self.top_ids.append([*ids[:N_TOP]])
        self.top_probs.append([*map(float, probs[:N_TOP])])

    def take(
        self,
        seq: int,
        ids: Sequence[int],
        logits: Sequence[float],
        probs: Sequence[float] | np.ndarray,
        p_min: float,
        draws: TokenDraws | None,
    ) -> bool:
        """Add the best candidate of a row, or a sampled one; False if the draft ends before it."""
        if not self.is_finite(logits[0]):
            return False
        rank = draws.rank(seq, logits) if draws else 0
        if probs[rank] < p_min:
            self.reason = "p_min"
            return False
        if draws:
            self.q.append(draws.q(ids, logits, np.asarray(probs) >= p_min))
        self.add(ids, probs, rank)
        return True

    def cut(self, n_max: int, reason: str) -> None:
        """Keep at most n_max tokens of every branch; the reason is noted if any are dropped."""
        self.n_raw = max(self.n_raw, len(self.tokens))
        if self.length > n_max:
            self.reason = reason
            self.keep([i for i, depth in enumerate(self.depths) if depth < n_max])

    def keep(self, kept: Sequence[int]) -> None:
        """Keep the tokens of these indices, ascending, and their ancestors."""
        for name in ("tokens", "probs", "top_ids", "top_probs", "q", "sure"):
            values = getattr(self, name)
            setattr(self, name, [values[i] for i in kept] if values else [])
        if self.parents:
            new = {old: i for i, old in enumerate(kept)}
            self.parents = [new.get(self.parents[i], -1) for i in kept]

    def split(self, n: int) -> Draft | None:
        """Keep n tokens; returns the others as a draft of their own, or None."""
        if len(self.tokens) <= n:
            return None
        rest = Draft(drafter=self.drafter)
        for name in ("tokens", "probs", "top_ids", "top_probs", "q", "sure"):
            values = getattr(self, name)
            setattr(rest, name, values[n:])
            del values[n:]
        return rest


def awaited(drafts: Iterable[Draft | None]) -> list[PendingDrafts]:
    """The PendingDrafts of these drafts, each once."""
    return list({id(x): x for draft in drafts if draft and (x := draft.pending)}.values())


class Drafter:
    """Proposes continuations and observes what the target accepts.

    n_max: most tokens of a draft. has_memory: whether it has a memory of its own, described by
    `held` and `next_position`. stays_on_device: whether drafts may stay pending if no step reads
    them.
    """

    name: str
    n_max: int
    has_memory = False
    stays_on_device = False

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose rows it reads (engine.model.layers); `observe` and `decoded` supply
        these, possibly among others."""
        return ()

    def begin(self, seq: int, prompt: Sequence[int]) -> None:
        """The prompt of a sequence has been decoded; generation starts."""

    def observe(self, seq: int, pos0: int, tokens: Sequence[int], rows: TargetRows) -> None:
        """The target has decoded `tokens` from pos0 on, and they are accepted.

        rows: the target's rows of these tokens, [len(tokens), n_embd].
        """

    def decoded(self, ubatch: UBatch, rows: TargetRows) -> None:
        """A forward pass of the target, before any rollback.

        rows: [n_seqs, n_seq_tokens, n_embd], including tokens that will be rejected.
        """

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request, possibly empty."""
        raise NotImplementedError

    def accept(self, seq: int, n_accepted: int, *, is_other: bool) -> None:
        """A draft of this sequence was verified. is_other: another drafter made it."""

    def resume(self, seq: int, n_tokens: int) -> None:
        """Another sequence takes the slot and reuses its first n_tokens; later tokens and
        everything learned are void. Drafters that learn from text restart: `begin` supplies the
        whole prompt."""
        self.forget(seq)

    def held(self, seq: int) -> int:
        """Tokens of a sequence that its memory holds."""
        return 0

    def next_position(self, seq: int) -> int:
        """Position of the token that its next draft continues from, by its own state."""
        return 0

    def forget(self, seq: int) -> None:
        """The sequence has ended; its slot may be used again."""


class MemoryDrafter(Drafter):
    """A drafter with a memory of its own, which can sample tokens."""

    has_memory = True
    _memory: HybridMemory
    _draws: TokenDraws | None

    def resume(self, seq: int, n_tokens: int) -> None:
        """Truncate the memory to these tokens; a new sequence gets its own random numbers."""
        if self._draws:
            self._draws.forget(seq)

    def held(self, seq: int) -> int:
        return self._memory.seq_pos_max(seq) + 1

    def forget(self, seq: int) -> None:
        self._memory.clear(seq)
        if self._draws:
            self._draws.forget(seq)


def branches(parents: Sequence[int]) -> list[list[int]]:
    """Nodes of every path to a leaf; a node's first child comes before its others."""
    inner, paths = set(parents), []
    for leaf in range(len(parents)):
        if leaf not in inner:
            path = [leaf]
            while (parent := parents[path[-1]]) >= 0:
                path.append(parent)
            paths.append(path[::-1])
    return sorted(paths)


def branch_of(draft: Draft, path: Sequence[int]) -> Draft:
    """The branch through these nodes as a draft of its own."""
    branch = replace(draft)
    branch.keep(path)
    branch.parents = []
    return branch


def tree_of(continuations: Sequence[Sequence[int]], widths: Sequence[int]) -> Draft:
    """A tree of continuations of one text, best first, with shared prefixes merged.

    widths: most children of a node at each level, 1 below that. A continuation that exceeds the
    width is cut there.
    """
    draft, children = Draft(), dict[int, list[int]]()
    for tokens in continuations:
        node = -1
        for level, token in enumerate(tokens):
            known = children.setdefault(node, [])
            child = next((one for one in known if draft.tokens[one] == token), None)
            if child is None:
                if len(known) == width_at(widths, level):
                    break
                child = len(draft.tokens)
                draft.tokens.append(token)
                draft.parents.append(node)
                known.append(child)
            node = child
    return draft


def width_at(widths: Sequence[int], level: int) -> int:
    """Most children of a node at a level."""
    return widths[level] if level < len(widths) else 1
