"""Memory scripts as data: contexts, and the operations on them line by line."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "=": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}


@dataclass(frozen=True, slots=True)
class TokenPart:
    """A run of tokens: `ids`, or those of a text, cut and shifted; or the pattern over positions
    start .. stop."""

    ids: tuple[int, ...] = ()
    text: str = ""
    is_pattern: bool = False
    start: int | None = None
    stop: int | None = None
    shift: int = 0

    def resolve(self, seq: int, n_vocab: int, encode: Callable[[str], list[int]]) -> list[int]:
        """The ids for a sequence of a model."""
        if self.is_pattern:
            places = range(self.start or 0, self.stop or 0)
            ids = [7 * pos + 31 * seq + 1 for pos in places]
        else:
            whole = encode(self.text) if self.text else list(self.ids)
            ids = whole[self.start : self.stop]
        return [(token + self.shift) % n_vocab for token in ids]

    @property
    def is_changed(self) -> bool:
        """Whether this is more than plain ids: a text, a pattern, cut or shifted."""
        return self != TokenPart(ids=self.ids)

    @property
    def n_most(self) -> int:
        """Upper bound of its tokens; a text has at most one per byte, plus a BOS."""
        if self.is_pattern:
            return max(0, (self.stop or 0) - (self.start or 0))
        return len(self.text.encode()) + 1 if self.text else len(self.ids[self.start : self.stop])


Tokens = tuple[TokenPart, ...]


@dataclass(frozen=True, slots=True)
class ContextSpec:
    """A memory to create. policy: None = the script's. keep: tokens that a split keeps together,
    replacing the policy's number."""

    name: str
    n_seqs: int = 1
    n_rs_seq: int = 8
    n_ctx: int = 256
    n_ubatch: int = 512
    keep: int | None = None
    kv: str = "per-seq"
    split: str = "equal"
    policy: str | None = None
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class PositionRange:
    """A sequence of a context, and positions start .. stop of it."""

    context: str
    seq: int
    start: int = 0
    stop: int = 0


@dataclass(frozen=True, slots=True)
class MeasureBound:
    """A bound on a measure (one of MEASURES or top1)."""

    measure: str
    compare: str = "<="
    limit: float = 0.0

    def holds(self, value: float) -> bool:
        """Whether a measured value satisfies the bound; NaN never does."""
        return _COMPARE[self.compare](value, self.limit)


EXACT = MeasureBound("max_abs")
"""Equal logits, bit by bit."""


@dataclass(frozen=True, slots=True)
class DecodeTokens:
    """Tokens for sequences, as one batch or, with one_by_one, each in a batch of its own."""

    context: str
    batch: tuple[tuple[int, Tokens], ...]
    one_by_one: bool = False


@dataclass(frozen=True, slots=True)
class SequenceOperation:
    """seq_rm, seq_cp, seq_keep, seq_add or clear with its numbers, negative = none; or save, load,
    checkpoint or restore of the sequence numbers[0] under a label."""

    context: str
    name: str
    numbers: tuple[int, ...]
    accepted: bool = True
    label: str = ""


@dataclass(frozen=True, slots=True)
class CompareRanges:
    """Compare the left place with the right one: logits, or with for_states states and cells."""

    left: PositionRange
    right: PositionRange
    bound: MeasureBound
    for_states: bool


@dataclass(frozen=True, slots=True)
class ExpectFacts:
    """Facts of a sequence: name, comparison, value."""

    context: str
    seq: int
    facts: tuple[tuple[str, str, int], ...]

    def misses(self, fact: Callable[[str], int | None]) -> Iterator[str]:
        """The facts that deviate, in words; unknown ones (None) are not judged."""
        for name, compare, wanted in self.facts:
            found = fact(name)
            if found is not None and not _COMPARE[compare](found, wanted):
                yield f"{name} is {found}, not {compare if compare != '=' else ''}{wanted}"


Action = ContextSpec | DecodeTokens | SequenceOperation | CompareRanges | ExpectFacts


MODELS = frozenset(("states", "rings"))
"""Models whose states depend on all previous tokens, and those with rings by position only, where
more can be undone and positions cannot be shifted."""


@dataclass(frozen=True, slots=True)
class Statement:
    """One line of a script. policies: rollback policies it applies to. models: kinds of models it
    applies to, of MODELS."""

    line: int
    text: str
    policies: frozenset[str]
    action: Action
    models: frozenset[str] = MODELS


@dataclass(frozen=True, slots=True)
class MemoryScript:
    """A script as read. name: of its file."""

    name: str
    title: str
    about: str
    policies: tuple[str, ...]
    statements: tuple[Statement, ...]

    def for_models(self, kind: str) -> MemoryScript:
        """The script restricted to statements for one kind of model."""
        played = tuple(one for one in self.statements if kind in one.models)
        return replace(self, statements=played)

    def for_policy(self, policy: str) -> list[Statement]:
        """The statements for a policy, in order."""
        return [statement for statement in self.statements if policy in statement.policies]
